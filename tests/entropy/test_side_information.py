"""Numbers of the side information come back in their contexts; the limit of the format and the end are checked."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from birdie.entropy.side_information import CONTEXTS, MAX_NUMBER, SideReader, SideWriter
from birdie.errors import ArtifactError
from tests.reference.side_information import Bits

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
