"""Tables of a summary as rows of text, which `birdie inspect` draws, `print` aligns and notebooks show."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from birdie.system.names import shown

if TYPE_CHECKING:
    from birdie.artifact.summary import Summary, TensorSummary

_MOST_NAMES = 6  # of files that the table names


class SummaryTable(NamedTuple):
    """Cells of a table, without markup; `left` columns are of names, the others of numbers."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    totals: Sequence[tuple[str, ...]]
    left: int


def by_tensor(summary: "Summary") -> SummaryTable:
    """Return the bytes of each tensor."""
    rows = [
        (
            shown(tensor.name),
            "×".join(map(str, tensor.shape)) or "scalar",
            tensor.dtype,
            tensor.scheme,
            *_cells(tensor.bytes, _weights([tensor]), summary),
        )
        for tensor in summary.tensors
    ]
    totals: list[tuple[str, ...]] = []
    if summary.files:
        names = sorted(summary.files, key=lambda name: (-summary.files[name], name))
        text = ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" * (len(names) > _MOST_NAMES))
        same = f", {len(summary.base_files):,} in the base" if summary.base_files else ""
        totals.append((shown(text), f"{len(names)} files{same}", "", "lzma", *_cells(summary.file_bytes, 0, summary)))
    totals.append(("total", f"{summary.weights:,} weights", "", "", *_total(summary)))
    return SummaryTable(("tensor", "shape", "dtype", "stored as", "bytes", "bits/weight", "share"), rows, totals, 4)


def by_scheme(summary: "Summary") -> SummaryTable:
    """Return the bytes of all tensors that are stored in the same way, largest first."""
    groups: dict[str, list[TensorSummary]] = {}
    for tensor in summary.tensors:
        groups.setdefault(tensor.scheme, []).append(tensor)
    rows = []
    for scheme, tensors in sorted(groups.items(), key=lambda item: -_bytes(item[1])):
        # an alias is a second name: its weights are counted under the first
        weights = 0 if scheme == "alias" else _weights(tensors)
        cells = _cells(_bytes(tensors), weights, summary)
        rows.append((scheme, f"{len(tensors):,}", f"{weights:,}" if weights else "", *cells))
    totals: list[tuple[str, ...]] = []
    if summary.files:
        same = f", {len(summary.base_files):,} in the base" if summary.base_files else ""
        totals.append((f"{len(summary.files):,} kept files{same}", "", "", *_cells(summary.file_bytes, 0, summary)))
    totals.append(("total", f"{len(summary.tensors):,}", f"{summary.weights:,}", *_total(summary)))
    return SummaryTable(("stored as", "tensors", "weights", "bytes", "bits/weight", "share"), rows, totals, 1)


def _total(summary: "Summary") -> tuple[str, str, str]:
    return f"{summary.bytes:,}", f"{summary.bits_per_weight:.2f}", ""


def _weights(tensors: "Iterable[TensorSummary]") -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


def _bytes(tensors: "Iterable[TensorSummary]") -> int:
    return sum(tensor.bytes for tensor in tensors)


def _cells(stored: int, weights: int, summary: "Summary") -> tuple[str, str, str]:
    """Return bytes, bits per weight (empty without weights) and share of the file."""
    return f"{stored:,}", f"{stored * 8 / weights:.2f}" if weights else "", f"{stored / summary.bytes:.1%}"
