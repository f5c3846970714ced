"""Small arrays whole, by the adaptive models of `numbers`: no table to describe, so a hundred values cost little.

Values are written in scan order as the difference from a centre, or from the value before where they run smoothly (the
log2 indices of row scales do), each in the context of the magnitude of the number before it.
"""

import numpy as np
from numpy.typing import NDArray

from birdie.entropy.numbers import Reader, Writer, unzigzag, zigzag
from birdie.entropy.raw import Bytes, check_range
from birdie.errors import ArtifactError

MAX_VALUES = 1 << 20
_FORM, _CENTRE, _VALUE, _MOST = 0, 1, 2, 31
_PLAIN, _RUNNING = 0, 1


def encode(values: NDArray[np.integer]) -> bytes:
    """Code `values` (rows, columns), not empty, all within int32, in the better of the two forms."""
    flat = values.astype(np.int64).ravel()
    centre = int(np.sort(flat)[flat.size // 2])
    coded = []
    for form, numbers in (_PLAIN, flat - centre), (_RUNNING, np.diff(flat, prepend=centre)):
        writer = Writer()
        writer.put(_FORM, form)
        writer.put_signed(_CENTRE, centre)
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
    """Undo `encode`: (rows, columns) of `dtype`.

    Raises:
        ArtifactError: the payload is not that of such an array.
    """
    if len(payload) % 2 or rows * columns > MAX_VALUES:
        raise ArtifactError(f"{len(payload):,} bytes are no stream of {rows} × {columns} numbers; the file is damaged")
    reader = Reader(np.frombuffer(payload, "<u2").astype(np.uint16))
    form = reader.take(_FORM, _RUNNING, "the form")
    centre = reader.take_signed(_CENTRE)
    numbers = unzigzag(reader.take_chain(_VALUE, rows * columns, _MOST))
    reader.finish()
    values = centre + (np.cumsum(numbers) if form == _RUNNING else numbers)
    check_range(int(values.min()), int(values.max()), dtype)
    return values.astype(dtype).reshape(rows, columns)
