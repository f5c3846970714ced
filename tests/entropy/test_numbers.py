"""Numbers, varints and side information come back from both decoders; what lies is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from birdie.entropy import numbers, payload
from birdie.entropy.side_information import CONTEXTS, MAX_NUMBER, SideReader, SideWriter
from birdie.entropy.varint import Cursor, varint
from birdie.errors import ArtifactError
from tests.reference import decoder as reference
from tests.reference.side_information import Bits

Integers = NDArray[np.integer]
INT32 = np.dtype(np.int32)
SHAPES = arrays.array_shapes(min_dims=2, max_dims=2, max_side=12)
FAR = arrays.arrays(np.int64, SHAPES, elements=st.integers(-(2**31), 2**31 - 1))
NEAR = arrays.arrays(np.int64, SHAPES, elements=st.integers(-40, 40))


@settings(max_examples=25, deadline=None)
@given(st.one_of(NEAR, FAR))
def test_any_int32_comes_back_from_both_decoders(values: Integers) -> None:
    payload = numbers.encode(values)
    rows, columns = values.shape
    assert (numbers.decode(payload, rows, columns, INT32, 1) == values).all()
    assert reference.decode_numbers(payload, rows, columns) == values.tolist()


def test_smooth_values_cost_their_differences_and_a_hundred_of_them_little() -> None:
    """The order decides: the same values, shuffled, cost twice as much."""
    rng = np.random.default_rng(0)
    smooth = np.cumsum(rng.integers(-2, 3, (100, 1)), axis=0) - 700
    shuffled = rng.permutation(smooth)
    assert len(numbers.encode(smooth)) < 0.75 * len(numbers.encode(shuffled))
    entropy = 100 * np.log2(5) / 8
    assert len(numbers.encode(smooth)) < entropy + 16


def test_impossible_lengths_are_refused() -> None:
    payload = numbers.encode(np.arange(6).reshape(2, 3))
    for damaged, rows in ((payload[:-1], 2), (payload + b"\0\0", 2), (payload, numbers.MAX_VALUES)):
        with pytest.raises(ArtifactError):
            numbers.decode(damaged, rows, 3, INT32, 1)


@pytest.mark.parametrize("value", [-129, 128])
def test_values_beyond_the_dtype_are_refused(value: int) -> None:
    payload = numbers.encode(np.array([[0, value]]))
    with pytest.raises(ArtifactError, match=rf"{value}\b.*int8"):
        numbers.decode(payload, 1, 2, np.dtype(np.int8), 1)


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


NUMBERS = st.lists(st.one_of(st.integers(0, 40), st.integers(0, MAX_NUMBER)), max_size=40)


@given(NUMBERS, st.integers(0, CONTEXTS - 32), st.integers(0, 31))
def test_a_chain_comes_back_from_both_decoders(numbers: list[int], context: int, most: int) -> None:
    writer = SideWriter()
    writer.put_chain(context, np.array(numbers, np.int64), most)
    writer.put_signed(context, -7)
    words = writer.finish()
    reader, reference = SideReader(words), Bits(words.tolist())
    assert reader.take_chain(context, len(numbers), most).tolist() == numbers
    assert reference.chain(context, len(numbers), most) == numbers
    assert reader.take_signed(context) == reference.signed(context) == -7
    reader.finish()


def test_numbers_end_at_the_limit_of_the_format() -> None:
    for number, valid in ((MAX_NUMBER, True), (MAX_NUMBER + 1, False)):
        writer = SideWriter()
        writer.put(0, number)
        reader = SideReader(writer.finish())
        if valid:
            assert reader.take_all(0, 1).tolist() == [number]
        else:
            with pytest.raises(ArtifactError, match=f"{MAX_NUMBER:,}"):
                reader.take_all(0, 1)


def test_a_number_above_its_limit_is_an_error_that_names_it() -> None:
    writer = SideWriter()
    writer.put(3, 12)
    with pytest.raises(ArtifactError, match="the scale of a stream is 12"):
        SideReader(writer.finish()).take(3, 11, "the scale")


def test_words_that_are_left_are_an_error() -> None:
    writer = SideWriter()
    writer.put(3, 12)
    reader = SideReader(np.append(writer.finish(), np.uint16(0)))
    reader.take(3, 12, "the scale")
    with pytest.raises(ArtifactError):
        reader.finish()


SIDE = np.arange(300, dtype=np.uint16)
CHUNKS = [np.arange(5, dtype=np.uint32), np.zeros(0, np.uint32), np.arange(7, 9, dtype=np.uint32)]
LENGTHS = np.array([chunk.size for chunk in CHUNKS])


def test_chunks_longer_than_the_payload_are_refused() -> None:
    with pytest.raises(ArtifactError):
        payload.decode_chunks(memoryview(bytes(27)), LENGTHS, 4, lambda *_: None, 1)
    with pytest.raises(ArtifactError):
        payload.decode_chunks(memoryview(bytes(27)), np.array([1 << 62, 1 << 62]), 4, lambda *_: None, 1)
