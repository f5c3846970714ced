"""Rows coded as differences from an earlier row.

Embedding rows of tokens that training hardly ever saw all drift alike and end as near copies of each other; their
difference costs a third of the row. A row may name any earlier row. Differences are taken modulo the alphabet, so they
need no symbols of their own.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from birdie.entropy.alphabet import Symbols
from birdie.entropy.numbers import Reader, Writer
from birdie.errors import ArtifactError

Distances = NDArray[np.int64]  # (rows,): how many rows back the reference lies; 0: none

_CONTEXT = 20
_WORTH = 0.75  # a difference must be narrower than this fraction of the row to be taken
_WORK = 3 * 10**10  # multiplications the search may spend
_BLOCK = 512


def choose(symbols: Symbols) -> Distances:
    """For each row of `symbols` (rows, columns) the nearest earlier row, where its difference is much narrower.

    The search is exact integer arithmetic in float64 (sums stay below 2**53), so its outcome is the same everywhere.
    Where rows are too many to compare all, every n-th row is a candidate.
    """
    rows, columns = symbols.shape
    found = np.zeros(rows, np.int64)
    if rows < 2 or columns < 8:
        return found
    every = max(1, -(-rows * rows * columns // _WORK))
    candidates = np.arange(0, rows, every)
    values = symbols.astype(np.float64)
    norms = np.einsum("ij,ij->i", values, values)
    spread = norms - values.sum(1) ** 2 / columns
    chosen = values[candidates]
    for start in range(0, rows, _BLOCK):
        block = slice(start, min(start + _BLOCK, rows))
        distances = norms[candidates][None] - 2 * (values[block] @ chosen.T)
        distances[candidates[None] >= np.arange(rows)[block, None]] = np.inf
        nearest = distances.argmin(1)
        squares = distances[np.arange(nearest.size), nearest] + norms[block]
        good = squares < _WORTH**2 * spread[block]
        found[block] = np.where(good, np.arange(rows)[block] - candidates[nearest], 0)
    return found


def subtract(symbols: Symbols, distances: Distances, size: int) -> Symbols:
    """Rows with a reference replaced by their difference from it, modulo `size`, zero lying at size // 2."""
    rows = np.flatnonzero(distances)
    out = symbols.copy()
    difference = symbols[rows].astype(np.int64) - symbols[rows - distances[rows]]
    out[rows] = ((difference + size // 2) % size).astype(np.uint16)
    return out


def add(symbols: Symbols, distances: Distances, size: int) -> None:
    """Undo `subtract` in place."""
    _add(symbols, distances, size)


def put(writer: Writer, distances: Distances) -> None:
    """Describe the references to `writer`."""
    writer.put_chain(_CONTEXT, distances, 1)


def take(reader: Reader, rows: int) -> Distances:
    """Undo `put`.

    Raises:
        ArtifactError: a row refers to a row before the first.
    """
    distances = reader.take_chain(_CONTEXT, rows, 1)
    if (distances > np.arange(rows)).any():
        raise ArtifactError("a row of a stream refers to a row that does not exist; the file is damaged")
    return distances


@njit(nogil=True, cache=True)
def _add(symbols, distances, size):  # type: ignore[no-untyped-def]
    for row in range(symbols.shape[0]):
        if distances[row]:
            above = row - distances[row]
            for column in range(symbols.shape[1]):
                total = np.int64(symbols[row, column]) + np.int64(symbols[above, column]) - size // 2
                total += size if total < 0 else (-size if total >= size else 0)  # both are below `size`
                symbols[row, column] = total
