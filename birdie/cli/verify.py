"""`birdie verify`: decode all of a .birdie file, or of a chain, and say whether it is intact."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from birdie.cli.chains import show_chain
from birdie.cli.console import (
    ForeignSchemes,
    Json,
    MaxOperations,
    MaxSize,
    print_json,
    print_line,
    progress_bar,
    size,
)
from birdie.compress import parse_size
from birdie.errors import ConfigError

GROUP = "Compress"


def command(
    file: Path,
    /,
    *,
    base: Annotated[
        Path | None, Parameter(help="Checkpoint, folder or .birdie file that a file of deltas was made with.")
    ] = None,
    max_size: MaxSize = None,
    max_operations: MaxOperations = None,
    schemes: ForeignSchemes = (),
    json: Json = False,
) -> None:
    """Decode every tensor of a .birdie file and compare its checksum; nothing is written.

    Of the folder of a chain every link is decoded, and compared with the digests of its checkpoint. The exit code is 1
    if anything is damaged; each tensor, or checkpoint, that is damaged has a line.
    """
    if file.is_dir():
        if base is not None:
            raise ConfigError(f"{file} is a folder, and the links of a chain find their bases in it; drop --base")
        show_chain(file, verified=True, json=json)
        return
    from birdie.artifact import Limits, damaged_tensors, inspect

    limits = Limits(
        base=base,
        max_bytes=None if max_size is None else parse_size(max_size),
        max_operations=max_operations,
        schemes=schemes,
    )
    summary = inspect(file)
    with progress_bar(f"verifying {file.name}", "tensors") as update:
        damage = damaged_tensors(file, limits, update)
    if json:
        print_json(
            {
                "path": str(file),
                "bytes": summary.bytes,
                "tensors": len(summary.tensors),
                "files": len(summary.files),
                "damaged": damage,
            }
        )
    else:
        for sentence in dict.fromkeys(damage.values()):
            print_line(sentence)
        what = f"{len(summary.tensors):,} tensors" + (f" and {len(summary.files):,} files" if summary.files else "")
        state = f"{len(damage):,} of {what} are damaged" if damage else f"intact, {what}"
        print_line(f"{state}, {size(summary.bytes)}: {file}")
    if damage:
        raise SystemExit(1)
