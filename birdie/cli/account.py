"""Account of a checkpoint: what `birdie compress` and a dry run of it take, and what they leave out."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.table import Table

from birdie.cli.console import plain, print_line, print_table, size

if TYPE_CHECKING:
    from birdie.checkpoints import Checkpoint

_MAX_LISTED = 20


def show_left_out(source: "Checkpoint") -> None:
    """Print what becomes of each file of a folder, or what a file holds beside the weights."""
    if source.path.is_dir():
        print_table(_table(source))
    elif source.dropped:
        print_line(f"dropped: {listed(source.dropped)}")


def show_taken(source: "Checkpoint") -> None:
    """Print the notes on a checkpoint, and the dicts of tensors that were taken and that could be."""
    for note in source.notes:
        print_line(plain(note).plain)
    if source.taken or source.others:
        names = ", ".join(plain(name).plain[:80] for name in source.taken) or "the tensors beside them"
        print_line(f"taken: {names}" + (f"; others, for --key: {listed(source.others)}" if source.others else ""))


def listed(dropped: Mapping[str, int]) -> str:
    """Return the names of what is dropped, largest first, with the bytes of the tensors there."""
    names = sorted(dropped, key=lambda name: -dropped[name])
    texts = [plain(name).plain[:80] + (f" {size(dropped[name])}" if dropped[name] else "") for name in names]
    return ", ".join(texts[:_MAX_LISTED]) + (f" and {len(texts) - _MAX_LISTED:,} more" * (len(texts) > _MAX_LISTED))


def _table(source: "Checkpoint") -> Table:
    """Return the table of what became of each file of a folder; small files that are kept share a row."""
    from birdie.checkpoints import SMALL

    table = Table(title=f"files of {plain(str(source.path)).plain}", title_justify="left")
    table.add_column("")
    table.add_column("bytes", justify="right")
    table.add_column("file", overflow="fold")
    rows = [("compressed", path.stat().st_size, path.relative_to(source.path).as_posix()) for path in source.sources]
    if source.files:
        total = sum(map(len, source.files.values()))
        rows.append(
            ("kept", total, f"{len(source.files):,} in all: any of up to {SMALL:,} bytes, configuration, --keep")
        )
    dropped = sorted(source.left_out.items(), key=lambda item: -item[1][0])
    rows += [("left out", count, f"{name}: {reason}") for name, (count, reason) in dropped[:_MAX_LISTED]]
    if rest := dropped[_MAX_LISTED:]:
        rows.append(("left out", sum(count for _, (count, _) in rest), f"{len(rest):,} more, which --json names"))
    for what, count, text in rows:
        table.add_row(what, f"{count:,}", plain(text))
    return table
