"""Fields of a message in the wire format of Protocol Buffers, and where their bytes lie: no schema, no copies.

    message ──► (number, varint), (number, start, end), …      bytes and nested messages are a range of positions

What encloses a range is not read into memory, and whatever is unknown keeps its bytes.
"""

from collections.abc import Iterator
from typing import NamedTuple

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # the last three bits of a field's first number
_LONGEST = 10  # bytes of a varint
_SIGN = 1 << 63


class Field(NamedTuple):
    """A field of a message.

    Attributes:
        number: of the field.
        value: of a varint, as unsigned 64 bits; None: the field has bytes.
        start, end: of these bytes.
    """

    number: int
    value: int | None
    start: int
    end: int


def fields(data: memoryview, start: int, end: int) -> Iterator[Field]:
    """Yield the fields of the message that lies between two positions.

    Raises:
        ValueError: what lies there is no message.
    """
    while start < end:
        key, start = varint(data, start, end)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, after = varint(data, start, end)
            yield Field(number, value, start, after)
        elif kind in (_BYTES, _FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
            if kind == _BYTES:
                size, start = varint(data, start, end)
            after = start + size
            if after > end:
                raise ValueError(f"a field at byte {start:,} ends {after - end:,} bytes after its message")
            yield Field(number, None, start, after)
        else:
            raise ValueError(f"no field begins at byte {start:,}")
        start = after


def varint(data: memoryview, start: int, end: int) -> tuple[int, int]:
    """Return a varint, as unsigned 64 bits, and the position after it."""
    value = 0
    for index in range(start, min(end, start + _LONGEST)):
        byte = data[index]
        value |= (byte & 127) << 7 * (index - start)
        if byte < 128:
            return value & (2 * _SIGN - 1), index + 1
    raise ValueError(f"a number at byte {start:,} does not end")


def signed(value: int) -> int:
    """Return unsigned 64 bits as a signed number."""
    return value - 2 * _SIGN if value >= _SIGN else value


def integers(data: memoryview, field: Field) -> Iterator[int]:
    """Yield the numbers of a repeated integer field, whether it is one of them or all of them packed."""
    if field.value is not None:
        yield signed(field.value)
        return
    start = field.start
    while start < field.end:
        value, start = varint(data, start, field.end)
        yield signed(value)


def text(data: memoryview, field: Field) -> str:
    """Return the text of a field; bytes that are no UTF-8 are escaped."""
    return bytes(data[field.start : field.end]).decode("utf-8", "backslashreplace")
