"""The coder of source text: what it codes decodes to the same, everywhere, and it beats the library's compressors."""

import bz2
import hashlib
import lzma
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

import birdie
from birdie.golf.text_coder import decode, encode, logistic

SOURCE = b"".join(path.read_bytes() for path in sorted((Path(birdie.__file__).parent / "entropy").glob("*.py")))


@settings(max_examples=10, deadline=None)  # tables of 32 MB for each
@given(st.binary(max_size=300) | st.text(max_size=200).map(str.encode) | st.binary(max_size=3).map(lambda x: x * 99))
def test_it_decodes_to_what_was_coded(data: bytes) -> None:
    assert decode(encode(data), len(data)) == data


@settings(max_examples=10, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_anything_decodes_to_something(coded: bytes, size: int) -> None:
    assert len(decode(coded, size)) == size


def test_source_is_smaller_than_by_the_standard_library() -> None:
    coded = encode(SOURCE)
    assert decode(coded, len(SOURCE)) == SOURCE
    assert len(coded) < 0.85 * min(len(bz2.compress(SOURCE)), len(lzma.compress(SOURCE, preset=9)))


def test_the_bytes_are_pinned() -> None:
    """A script that was packed once decodes on every machine, with every numba."""
    data = bytes(range(256)) + b"def f(x):\n    return x + 1\n" * 20
    assert hashlib.sha256(encode(data)).hexdigest()[:16] == "41aaf0bf8b345f70"
    assert logistic()[[0, 2048, 4095]].tolist() == [1, 2048, 4094]
