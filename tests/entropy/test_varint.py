"""Numbers of a header come back, in the fewest bytes, and no count is believed beyond its limit or the bytes left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from birdie.entropy.varint import Cursor, varint
from birdie.errors import ArtifactError


def cursor(data: bytes, fields_left: int = 10) -> Cursor:
    return Cursor(data, "a test", fields_left)


@given(st.integers(0, 2**63 - 1))
def test_any_number_comes_back(value: int) -> None:
    data = varint(value)
    reader = cursor(data)
    assert reader.varint(value, "number") == value
    assert reader.position == len(data) == max(1, -(-value.bit_length() // 7))


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x80\x00", b"\xff" * 10, b"\x81\x80\x00"])
def test_truncated_and_needlessly_long_numbers_are_refused(data: bytes) -> None:
    with pytest.raises(ArtifactError, match="a test"):
        cursor(data).varint(2**64, "number")


def test_limits_are_checked() -> None:
    with pytest.raises(ArtifactError, match="size 300 is above 299"):
        cursor(varint(300)).varint(299, "size")
    with pytest.raises(ArtifactError, match="count 5"):
        cursor(varint(5) + bytes(4)).count(100, "count")
    with pytest.raises(ArtifactError):
        cursor(varint(5) + bytes(5), fields_left=4).part(100, "count")
