"""Classes of rows that share a frequency table.

Weights are nearly independent of each other given their local scale, so what order-0 coding of the pooled symbols loses
is the scale of each row. Rows are clustered by what they would cost: Lloyd's algorithm with code length as the distance
(entropy-constrained vector quantization, Chou, Lookabaugh and Gray 1989), which charges a row its bits under the table
of a class and the bits of naming the class. Unlike k-means on Hellinger distances this minimizes the file itself.

Costs are integers and their sums stay below 2**53, so float64 products are exact and do not depend on the threads.
"""

import numpy as np
from numpy.typing import NDArray

from birdie.entropy.alphabet import Symbols
from birdie.entropy.side_information import SideReader, SideWriter
from birdie.errors import ArtifactError
from birdie.system.kernels import njit

Classes = NDArray[np.uint8]

MAX_CLASSES = 32
_CONTEXT = 24  # of the side information
_UNIT = 256  # costs count 1/256 bit
_BINS = 64
_ROUNDS, _SETTLED = 8, 256  # rounds at most; none follows one that moves fewer than 1 of so many rows


def histograms(symbols: Symbols, size: int) -> NDArray[np.int32]:
    """Return how often each row holds each symbol, (rows, size)."""
    out = np.zeros((symbols.shape[0], size), np.int32)
    _count(np.ascontiguousarray(symbols), out)  # one kernel for all layouts
    return out


def cluster(counts: NDArray[np.int32], classes: int) -> Classes:
    """Sort rows, given their histograms (rows, size), into at most `classes` classes, numbered from narrow to wide."""
    rows = counts.shape[0]
    merged = _merged(counts)
    bins = np.arange(merged.shape[1], dtype=np.float64)
    weight = np.maximum(merged.sum(1), 1)
    mean = (merged @ bins) / weight
    variance = (merged @ bins**2) / weight - mean**2
    # Start with classes of equal size in the order of the variance.
    order = np.argsort(variance, kind="stable")
    labels: Classes = np.empty(rows, np.uint8)
    labels[order] = (np.arange(rows) * classes // rows).astype(np.uint8)
    _improve(merged, labels, np.empty((classes, merged.shape[1])), np.empty(classes))
    return _renumbered(labels, variance)


def sums(counts: NDArray[np.int32], labels: Classes, classes: int) -> NDArray[np.int64]:
    """Return the histogram of each class, (classes, size), from those of its rows."""
    out = np.zeros((classes, counts.shape[1]), np.int64)
    _add_rows(counts, labels, out)
    return out


def _renumbered(labels: NDArray[np.integer], variance: NDArray[np.float64]) -> Classes:
    """Return the labels without gaps, in the order of the mean variance of their rows."""
    present, compact = np.unique(labels, return_inverse=True)
    means = np.bincount(compact, variance) / np.bincount(compact)
    rank = np.empty(present.size, np.uint8)
    rank[np.argsort(means, kind="stable")] = np.arange(present.size, dtype=np.uint8)
    return rank[compact]


def put(writer: SideWriter, classes: Classes) -> None:
    """Write the class of each row to the side information."""
    writer.put_chain(_CONTEXT, classes.astype(np.int64), MAX_CLASSES - 1)


def take(reader: SideReader, rows: int, count: int) -> Classes:
    """Read the class of each row from the side information."""
    classes = reader.take_chain(_CONTEXT, rows, MAX_CLASSES - 1)
    if rows and int(classes.max()) >= count:
        raise ArtifactError(f"a row of a stream has class {int(classes.max())} of {count}; the file is damaged")
    return classes.astype(np.uint8)


def _merged(counts: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return histograms with at most 64 bins: enough to tell scales apart, and fast."""
    width = -(-counts.shape[1] // _BINS)
    out = np.zeros((counts.shape[0], -(-counts.shape[1] // width)))
    _merge(counts, width, out)
    return out


@njit(nogil=True, cache=True, _nrt=False)
def _merge(counts, width, out):  # type: ignore[no-untyped-def]
    for row in range(counts.shape[0]):
        for k in range(out.shape[1]):
            total = np.int64(0)
            for symbol in range(k * width, min((k + 1) * width, counts.shape[1])):
                total += counts[row, symbol]
            out[row, k] = total


@njit(nogil=True, cache=True, _nrt=False, fastmath={"reassoc"})  # sums of integers below 2**53: exact in any order
def _improve(counts, labels, price, naming):  # type: ignore[no-untyped-def]
    """Move rows to the cheapest class until few move: its bits under the table of the class and those of naming it.

    Prices are integers, in 1/256 bit; half a count keeps a bin that a class has not seen from being infinitely
    expensive. They are left in price (classes, bins) and naming (classes,).
    """
    rows, bins = counts.shape
    classes = naming.size
    for _ in range(_ROUNDS):
        for label in range(classes):
            naming[label] = 0
            for k in range(bins):
                price[label, k] = 0.5
        for row in range(rows):
            naming[labels[row]] += 1
            into = price[labels[row]]
            for k in range(bins):
                into[k] += counts[row, k]
        for label in range(classes):
            total = 0.0
            for k in range(bins):
                total += price[label, k]
            for k in range(bins):
                price[label, k] = np.rint(-_UNIT * np.log2(price[label, k] / total))
            naming[label] = np.rint(_UNIT * np.log2(rows / max(naming[label], 0.5)))
        moved = 0
        for row in range(rows):
            values, least, best = counts[row], np.inf, np.uint8(0)
            for label in range(classes):
                bits, prices = naming[label], price[label]
                for k in range(bins):
                    bits += values[k] * prices[k]
                if bits < least:
                    least, best = bits, np.uint8(label)
            moved += best != labels[row]
            labels[row] = best
        if moved * _SETTLED < rows:
            break


@njit(nogil=True, cache=True, _nrt=False)
def _add_rows(counts, labels, out):  # type: ignore[no-untyped-def]
    for row in range(counts.shape[0]):
        into = out[labels[row]]
        for symbol in range(counts.shape[1]):
            into[symbol] += counts[row, symbol]


@njit(nogil=True, cache=True, _nrt=False)
def _count(symbols, out):  # type: ignore[no-untyped-def]
    for row in range(symbols.shape[0]):
        for column in range(symbols.shape[1]):
            out[row, symbols[row, column]] += 1
