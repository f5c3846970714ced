"""`birdie diff`: compare two checkpoints tensor by tensor."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.table import Table

from birdie.cli.console import Json, plain, print_json, print_line, print_table, progress_bar

if TYPE_CHECKING:
    from birdie.artifact import TensorComparison

GROUP = "Compress"


def command(
    a: Path,
    b: Path,
    /,
    *,
    complete: Annotated[
        bool, Parameter(name="--all", negative=(), help="Also a row for each tensor that is equal.")
    ] = False,
    json: Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor: equal to the bit, or how far apart in decibels, and their bytes.

    Each is a .birdie file, a checkpoint or a folder. Decibels are 10 log10(‖a‖² / ‖a − b‖²): 6 more for each bit of
    precision; weights in int8 by row have about 44. The exit code is 1 if anything differs.
    """
    from birdie.artifact import compare

    with progress_bar(f"comparing {a.name} with {b.name}", "tensors") as update:
        rows = compare(a, b, update)
    stored = _stored(a), _stored(b)
    equal = sum(row.relation == "equal" for row in rows)
    if json:
        listed = [asdict(row) | {"bytes": [sizes.get(row.name) for sizes in stored]} for row in rows]
        print_json({"a": str(a), "b": str(b), "equal": equal, "tensors": listed})
    else:
        shown = [row for row in rows if complete or row.relation != "equal"]
        if shown:
            print_table(_table(shown, stored))
        print_line(f"{equal:,} of {len(rows):,} tensors are equal to the bit: {a}, {b}")
    if equal < len(rows):
        raise SystemExit(1)


def _stored(path: Path) -> dict[str, int]:
    """Return the bytes of each tensor in a .birdie file; empty for another."""
    from birdie.artifact import MAGIC, inspect

    if path.is_dir():
        return {}
    with path.open("rb") as file:
        is_birdie = file.read(len(MAGIC)) == MAGIC
    return {row.name: row.bytes for row in inspect(path).tensors} if is_birdie else {}


def _table(rows: "list[TensorComparison]", stored: tuple[dict[str, int], dict[str, int]]) -> Table:
    table = Table()
    for name in ("tensor", "compared", "shape", "dtype"):
        table.add_column(name, overflow="fold")
    for name in ("dB", "bytes of a", "bytes of b"):
        table.add_column(name, justify="right")
    for row in rows:
        sizes = (f"{sizes[row.name]:,}" if row.name in sizes else "" for sizes in stored)
        table.add_row(
            plain(row.name),
            row.relation,
            _both(row, ["×".join(map(str, shape)) or "scalar" for shape in row.shapes]),
            _both(row, row.dtypes),
            "" if row.decibels is None or math.isinf(row.decibels) else f"{row.decibels:.1f}",
            *sizes,
        )
    return table


def _both(row: "TensorComparison", texts: Sequence[str]) -> str:
    """Return what the tensor has in the checkpoints that it is in."""
    a, b = texts
    if row.relation.startswith("only"):
        return a if row.relation == "only in a" else b
    return a if a == b else f"{a} → {b}"
