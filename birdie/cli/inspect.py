"""`birdie inspect`: show the tensors of a .birdie file, with shape, scheme and bytes, or the checkpoints of a chain."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from birdie.artifact import Summary, SummaryTable, by_scheme, by_tensor
from birdie.cli.chains import show_chain
from birdie.cli.console import Json, plain, print_json, print_line, print_table, seconds, size
from birdie.errors import ConfigError

GROUP = "Compress"
_MOST_ROWS = 4096  # a row takes about a millisecond, and nobody reads more


def command(
    file: Path,
    /,
    *,
    metadata: Annotated[
        bool, Parameter(negative=(), help="Also show the metadata of the artifact: its recipe, tokenizer and versions.")
    ] = False,
    json: Json = False,
) -> None:
    """Show the tensors of a .birdie file, with shape, scheme and bytes. Only the header is read.

    Of an ONNX model the graph is read as well, and a line has its versions, its program, and its inputs and outputs.

    Of more than 4,096 tensors a row has all that are stored in the same way; --json lists each.

    Of the folder of a chain of checkpoints every link is read: a table has the bytes of each, and says whether its
    checksums are right and which others need it. The exit code is 1 if one is not intact. `birdie verify` decodes.
    """
    if file.is_dir():
        if metadata:
            raise ConfigError(f"--metadata is for one file, and {file} is a folder; give a .birdie file in it")
        show_chain(file, verified=False, json=json)
        return
    from birdie.artifact import inspect

    summary = inspect(file)
    graph = _graph(file) if summary.is_onnx else ""
    if json:
        answer = summary.to_json() | ({"onnx": graph} if graph else {})
        print_json({**answer, "metadata": dict(summary.metadata)} if metadata else answer)
        return
    is_long = len(summary.tensors) > _MOST_ROWS
    print_table(grouped_table(summary) if is_long else summary_table(summary))
    if is_long:
        print_line(f"each of the {len(summary.tensors):,} tensors: birdie inspect {file} --json")
    if graph:
        print_line(graph)
    print_line(f"effort {summary.effort}: loads in about {seconds(summary.load_seconds)} on one core")
    if metadata:
        from rich.pretty import pretty_repr

        print_line(pretty_repr(dict(summary.metadata)))


def _graph(file: Path) -> str:
    """Return the facts of the graph of an ONNX model in one line."""
    from birdie.artifact import graph_of
    from birdie.checkpoints import shown

    return shown(graph_of(file))


def summary_table(summary: Summary) -> Table:
    """Return the table of bytes per tensor, one row per tensor."""
    return _drawn(summary, by_tensor(summary))


def grouped_table(summary: Summary) -> Table:
    """Return the table of bytes per scheme, one row for all tensors that are stored in the same way, largest first."""
    return _drawn(summary, by_scheme(summary))


def _drawn(summary: Summary, cells: SummaryTable) -> Table:
    table = Table(title=plain(f"{summary.path}: {size(summary.bytes)}, {summary.bits_per_weight:.3f} bits per weight"))
    for index, name in enumerate(cells.header):
        table.add_column(name, justify="left" if index < cells.left else "right", overflow="fold")
    for row in cells.rows:
        table.add_row(*map(Text, row))
    table.add_section()
    for row in cells.totals:
        table.add_row(*map(Text, row))
    return table
