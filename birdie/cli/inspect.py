"""`birdie inspect`: show the tensors of a .birdie file, with shape, scheme and bytes."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table

from birdie.artifact.inspect import inspect
from birdie.artifact.summary import Summary
from birdie.cli.console import Json, plain, print_json, print_line, print_table, size

GROUP = "Compress"
_MOST_NAMES = 6  # of files that the table names


def command(
    file: Path,
    /,
    *,
    metadata: Annotated[
        bool, Parameter(negative=(), help="Also show the metadata of the artifact: its recipe, tokenizer and versions.")
    ] = False,
    json: Json = False,
) -> None:
    """Show the tensors of a .birdie file, with shape, scheme and bytes. Only the header is read."""
    summary = inspect(file)
    if json:
        answer = summary.to_json()
        print_json({**answer, "metadata": dict(summary.metadata)} if metadata else answer)
        return
    print_table(summary_table(summary))
    if metadata:
        from rich.pretty import pretty_repr

        print_line(pretty_repr(dict(summary.metadata)))


def summary_table(summary: Summary) -> Table:
    """Return the table of bytes per tensor, one row per tensor."""
    table = Table(title=plain(f"{summary.path}: {size(summary.bytes)}, {summary.bits_per_weight:.3f} bits per weight"))
    table.add_column("tensor", overflow="fold")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("stored as")
    table.add_column("bytes", justify="right")
    table.add_column("bits/weight", justify="right")
    table.add_column("share", justify="right")
    for tensor in summary.tensors:
        weights = 1
        for extent in tensor.shape:
            weights *= extent
        table.add_row(
            plain(tensor.name),
            "×".join(map(str, tensor.shape)) or "scalar",
            tensor.dtype,
            tensor.scheme,
            f"{tensor.bytes:,}",
            f"{tensor.bytes * 8 / weights:.2f}" if weights else "",
            f"{tensor.bytes / summary.bytes:.1%}",
        )
    table.add_section()
    if summary.files:
        names = sorted(summary.files, key=lambda name: (-summary.files[name], name))
        text = ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" * (len(names) > _MOST_NAMES))
        share = f"{summary.file_bytes / summary.bytes:.1%}"
        table.add_row(plain(text), f"{len(names)} files", "", "lzma", f"{summary.file_bytes:,}", "", share)
    table.add_row(
        "total", f"{summary.weights:,} weights", "", "", f"{summary.bytes:,}", f"{summary.bits_per_weight:.2f}", ""
    )
    return table
