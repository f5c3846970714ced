"""Checkpoints of a run in one folder: each a file of its own, most of them as deltas to an earlier one."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from birdie.chain.chain_folder import FULL_EVERY as FULL_EVERY
    from birdie.chain.chain_folder import Chain as Chain
    from birdie.chain.chain_rows import Row as Row
    from birdie.chain.chain_rows import find_link as find_link
    from birdie.chain.chain_rows import survey as survey
    from birdie.chain.chain_rows import verify as verify
    from birdie.chain.checkpoint_series import beside as beside
    from birdie.chain.checkpoint_series import is_series as is_series
    from birdie.chain.checkpoint_series import series as series
    from birdie.chain.checkpoint_series import unnumbered as unnumbered
    from birdie.chain.checkpoint_series import without_number as without_number
    from birdie.chain.link_content import restore as restore
    from birdie.chain.retention import retain as retain
    from birdie.chain.settled import unfinished as unfinished
else:
    from birdie.system.door import door

    __getattr__, __dir__, __all__ = door(__name__)
