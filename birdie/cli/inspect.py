"""`birdie inspect`: show the tensors of a .birdie file, with shape, scheme and bytes, or the checkpoints of a chain."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from birdie.artifact import Summary, TensorSummary
from birdie.cli.chains import show_chain
from birdie.cli.console import Json, plain, print_json, print_line, print_table, seconds, size
from birdie.errors import ConfigError

GROUP = "Compress"
_MOST_NAMES = 6  # of files that the table names
_MOST_ROWS = 4096  # a row takes about a millisecond, and nobody reads more


def command(
    file: Path,
    /,
    *,
    metadata: Annotated[
        bool, Parameter(negative=(), help="Also show the metadata of the artifact: its recipe, tokenizer and versions.")
    ] = False,
    verify: Annotated[
        bool, Parameter(negative=(), help="Of a chain: decode every link, and compare with the digests in it.")
    ] = False,
    json: Json = False,
) -> None:
    """Show the tensors of a .birdie file, with shape, scheme and bytes. Only the header is read.

    Of an ONNX model the graph is read as well, and a line has its versions, its program, and its inputs and outputs.

    Of more than 4,096 tensors a row has all that are stored in the same way; --json lists each.

    Of the folder of a chain of checkpoints every link is read: a table has the bytes of each, and says whether it is
    intact, by its checksums or with --verify by decoding it, and which others need it. The exit code is 1 if one is
    not intact.
    """
    if file.is_dir():
        if metadata:
            raise ConfigError(f"--metadata is for one file, and {file} is a folder; give a .birdie file in it")
        show_chain(file, verified=verify, json=json)
        return
    if verify:
        raise ConfigError(f"--verify is for the folder of a chain, and {file} is a file; drop it, or give the folder")
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
    table = Table(title=_title(summary))
    table.add_column("tensor", overflow="fold")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("stored as")
    table.add_column("bytes", justify="right")
    table.add_column("bits/weight", justify="right")
    table.add_column("share", justify="right")
    for tensor in summary.tensors:
        table.add_row(
            plain(tensor.name),
            "×".join(map(str, tensor.shape)) or "scalar",
            tensor.dtype,
            tensor.scheme,
            *_cells(tensor.bytes, _weights([tensor]), summary),
        )
    table.add_section()
    if summary.files:
        names = sorted(summary.files, key=lambda name: (-summary.files[name], name))
        text = ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" * (len(names) > _MOST_NAMES))
        table.add_row(plain(text), f"{len(names)} files", "", "lzma", *_cells(summary.file_bytes, 0, summary))
    table.add_row(
        "total", f"{summary.weights:,} weights", "", "", f"{summary.bytes:,}", f"{summary.bits_per_weight:.2f}", ""
    )
    return table


def grouped_table(summary: Summary) -> Table:
    """Return the table of bytes per scheme, one row for all tensors that are stored in the same way, largest first."""
    table = Table(title=_title(summary))
    table.add_column("stored as")
    for name in ("tensors", "weights", "bytes", "bits/weight", "share"):
        table.add_column(name, justify="right")
    groups: dict[str, list[TensorSummary]] = {}
    for tensor in summary.tensors:
        groups.setdefault(tensor.scheme, []).append(tensor)
    for scheme, tensors in sorted(groups.items(), key=lambda item: -_bytes(item[1])):
        # an alias is a second name: its weights are counted under the first
        weights = 0 if scheme == "alias" else _weights(tensors)
        cells = _cells(_bytes(tensors), weights, summary)
        table.add_row(scheme, f"{len(tensors):,}", f"{weights:,}" if weights else "", *cells)
    table.add_section()
    if summary.files:
        table.add_row(f"{len(summary.files):,} kept files", "", "", *_cells(summary.file_bytes, 0, summary))
    total = f"{summary.bytes:,}", f"{summary.bits_per_weight:.2f}"
    table.add_row("total", f"{len(summary.tensors):,}", f"{summary.weights:,}", *total, "")
    return table


def _title(summary: Summary) -> Text:
    return plain(f"{summary.path}: {size(summary.bytes)}, {summary.bits_per_weight:.3f} bits per weight")


def _weights(tensors: Iterable[TensorSummary]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


def _bytes(tensors: Iterable[TensorSummary]) -> int:
    return sum(tensor.bytes for tensor in tensors)


def _cells(stored: int, weights: int, summary: Summary) -> tuple[str, str, str]:
    """Return bytes, bits per weight (empty without weights) and share of the file."""
    return f"{stored:,}", f"{stored * 8 / weights:.2f}" if weights else "", f"{stored / summary.bytes:.1%}"
