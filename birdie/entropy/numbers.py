"""Coder "numbers": small arrays, by the adaptive models of `side_information` alone.

There is no table to describe, so a hundred values cost little. In scan order each value becomes its difference from the
center, or from the previous value where values run smoothly (as the log2 indices of row scales do). The context of a
difference is the magnitude of the previous one.
"""

import numpy as np
from numpy.typing import NDArray

from birdie.entropy.raw import Bytes, check_range, narrowest
from birdie.entropy.side_information import SideReader, SideWriter, unzigzag, zigzag
from birdie.errors import ArtifactError

MAX_VALUES = 1 << 20
_FORM, _CENTER, _VALUE, _MOST = 0, 1, 2, 31  # contexts, and the largest magnitude with a context of its own
_PLAIN, _RUNNING = 0, 1  # forms: differences from the center, from the previous value


def encode(values: NDArray[np.integer]) -> bytes:
    """Code `values` (rows, columns), not empty, all within int32, in the better of the two forms."""
    flat = values.astype(np.int64).ravel()
    center = int(np.sort(flat)[flat.size // 2])
    coded = []
    for form, numbers in (_PLAIN, flat - center), (_RUNNING, np.diff(flat, prepend=center)):
        writer = SideWriter()
        writer.put(_FORM, form)
        writer.put_signed(_CENTER, center)
        writer.put_chain(_VALUE, zigzag(numbers), _MOST)
        coded.append(writer.finish().astype("<u2").tobytes())
    return min(coded, key=len)


def decode(
    payload: Bytes,
    rows: int,
    columns: int,
    dtype: np.dtype[np.integer],
    threads: int,  # noqa: ARG001 (one of the interchangeable decoders)
) -> NDArray[np.integer]:
    """Undo `encode`: (rows, columns) of `dtype`."""
    if len(payload) % 2 or rows * columns > MAX_VALUES:
        raise ArtifactError(f"{rows} × {columns} numbers cannot have {len(payload):,} bytes; the file is damaged")
    reader = SideReader(np.frombuffer(payload, "<u2").astype(np.uint16))
    form = reader.take(_FORM, _RUNNING, "the form")
    center = reader.take_signed(_CENTER)
    numbers = unzigzag(reader.take_chain(_VALUE, rows * columns, _MOST))
    reader.finish()
    values = center + (np.cumsum(numbers) if form == _RUNNING else numbers)
    lowest, highest = int(values.min()), int(values.max())
    check_range(lowest, highest, dtype)
    return values.astype(narrowest(lowest, highest, dtype)).reshape(rows, columns)
