"""`birdie chain`: remove checkpoints from a chain that birdie compress wrote; the others stay bit for bit."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from birdie.cli.chains import is_chain
from birdie.cli.console import Json, listed, log, print_json, print_line, size
from birdie.errors import ConfigError

GROUP = "Compress"


def command(
    chain: Path,
    /,
    *,
    drop: Annotated[
        list[str] | None,
        Parameter(negative=(), help="Step of a checkpoint to remove, or the name of one (last.ckpt); repeatable."),
    ] = None,
    keep_last: Annotated[int | None, Parameter(help="Remove all but the checkpoints of so many last steps.")] = None,
    keep_every: Annotated[
        int | None, Parameter(help="Remove all but the checkpoints whose step is a multiple of this.")
    ] = None,
    json: Json = False,
) -> None:
    """Remove checkpoints from a chain. Those that stay are restored bit for bit as before.

    --keep-last and --keep-every together keep what either of them keeps. A checkpoint that is known by its name
    (last.ckpt) is removed only by --drop. A link that is a delta to one that is removed is written anew before, so
    that a command that is killed leaves every checkpoint that was to stay. A folder of checkpoints that still has what
    was removed adds it again with the next birdie compress.
    """
    if not is_chain(chain):
        raise ConfigError(f"{chain} is no folder of a chain; give the folder that birdie compress CHECKPOINTS wrote")
    if drop is None and keep_last is None and keep_every is None:
        raise ConfigError(
            "there is nothing to do; add --drop STEP, --keep-last N or --keep-every N, or list the checkpoints with "
            f"birdie inspect {chain}"
        )
    from birdie.artifact import link_paths
    from birdie.chain import Chain, retain

    original = sum(path.stat().st_size for path in link_paths(chain))
    removed = retain(Chain(chain, notify=log), drop=drop or (), keep_last=keep_last, keep_every=keep_every)
    paths = link_paths(chain)
    after = sum(path.stat().st_size for path in paths)
    if json:
        facts = {"path": str(chain), "input_bytes": original, "bytes": after, "kept": len(paths)}
        print_json({**facts, "removed": [asdict(row) for row in removed]})
        return
    names = listed([f"{row.step} {row.checkpoint}".strip() for row in removed]) if removed else "nothing"
    print_line(f"removed {names}")
    print_line(f"{size(original)} → {size(after)}, {len(paths)} checkpoints: {chain}")
