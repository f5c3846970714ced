"""Entropy coding of integer arrays: a probability model and a coder, kept apart, all arithmetic integer."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from birdie.entropy.coder import MIXED as MIXED
    from birdie.entropy.coder import NAMES as NAMES
    from birdie.entropy.coder import decode as decode
    from birdie.entropy.coder import encode as encode
    from birdie.entropy.hints import LARGE as LARGE
    from birdie.entropy.hints import Effort as Effort
    from birdie.entropy.hints import EffortOption as EffortOption
    from birdie.entropy.hints import effort_for as effort_for
    from birdie.entropy.mixed import starting_probabilities as starting_probabilities
else:
    from birdie.system.door import door

    __getattr__, __dir__, __all__ = door(__name__)
