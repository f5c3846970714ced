"""Coding of words given those of a base: `birdie.entropy.deltas`."""

from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from birdie.compress.tensors import FORMATS, to_bits
from birdie.entropy import coder, deltas, planes
from birdie.entropy import trellis_states as trellis
from birdie.entropy.planes import plane_hints, split
from birdie.errors import ArtifactError
from tests.reference.deltas import decode_deltas

FORMS = tuple(planes.FORMATS)
Words = NDArray[np.unsignedinteger]


def near(seed: int, rows: int, columns: int, fmt: str, reach: int, share: float) -> tuple[Words, Words]:
    """Return words, a share of them changed by at most `reach`, and their base, any bit patterns."""
    rng, dtype = np.random.default_rng(seed), planes.word_dtype(fmt)
    base = rng.integers(0, 1 << 8 * dtype.itemsize, (rows, columns), np.uint64).astype(dtype)
    moved = base + rng.integers(0, reach, base.shape, np.uint64, endpoint=True).astype(dtype)
    return np.where(rng.random(base.shape) < share, moved, base), base


@given(
    st.integers(0, 99),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(FORMS),
    st.integers(0, 63),
    st.floats(0, 1),
)
@settings(max_examples=120, deadline=None)
def test_words_come_back_given_their_base(
    seed: int, rows: int, columns: int, fmt: str, reach: int, share: float
) -> None:
    words, base = near(seed, rows, columns, fmt, (1 << reach) - 1, share)
    payload = deltas.encode(words, base, fmt)
    decoded = deltas.decode(payload, base, fmt)
    assert decoded.dtype == words.dtype
    assert np.array_equal(decoded, words)
    assert deltas.encode(words, base, fmt) == payload


def test_the_reference_agrees_where_older_differences_count_less() -> None:
    words, base = near(0, 270, 2, "bfloat16", 30, 0.5)  # columns forget after 256 rows
    payload = deltas.encode(words, base, "bfloat16")
    assert decode_deltas(payload, base.tolist(), 16, "bfloat16") == words.tolist()
    words, base = near(0, 1, 4120, "bfloat16", 30, 0.5)  # rows after 4,096 columns
    payload = deltas.encode(words, base, "bfloat16")
    assert decode_deltas(payload, base.tolist(), 16, "bfloat16") == words.tolist()


def test_chunks_decode_alike_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trellis, "CHUNK", 64)
    words, base = near(1, 50, 16, "float32", 1 << 20, 0.9)
    payload = deltas.encode(words, base, "float32")
    for threads in (1, 3):
        assert np.array_equal(deltas.decode(payload, base, "float32", threads), words)


def stepped(dtype: torch.dtype, rate: float = 1e-4) -> tuple[Words, Words]:
    """Return the words of weights after a step of an optimizer, which moves all by about as much, and before."""
    generator = torch.Generator().manual_seed(0)
    weight = 0.05 * torch.randn(96, 160, generator=generator)
    step = rate * torch.randn(96, 160, generator=generator)
    return to_bits((weight + step).to(dtype)), to_bits(weight.to(dtype))


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.bfloat16, 0.7), (torch.float16, 0.8), (torch.float32, 0.95)], ids=str
)
def test_a_step_of_an_optimizer_takes_fewer_bytes_than_xor(dtype: torch.dtype, share: float) -> None:
    words, base = stepped(dtype)
    fmt = FORMATS[dtype][0]
    xor = zip(split(words ^ base, fmt), plane_hints(fmt), strict=True)
    alone = sum(coder.encode(plane, hints).length for plane, hints in xor)
    assert len(deltas.encode(words, base, fmt)) < share * alone


def test_smaller_steps_take_fewer_bytes() -> None:
    sizes = [len(deltas.encode(*stepped(torch.bfloat16, rate), "bfloat16")) for rate in (1e-5, 1e-4, 1e-3)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("position", [0, 3, 20, -1])
def test_damaged_bytes_are_an_error_or_other_words(position: int) -> None:
    words, base = near(3, 20, 20, "float32", 1000, 0.5)
    payload = deltas.encode(words, base, "float32")
    decode = partial(deltas.decode, base=base, fmt="float32")
    for damaged in (payload[:position], payload + b"\0\0\0\0", payload[:-4], b""):
        with pytest.raises(ArtifactError):
            decode(damaged)
    flipped = bytearray(payload)
    flipped[position] ^= 0x5A
    with suppress(ArtifactError):
        assert decode(bytes(flipped)).shape == words.shape


@pytest.mark.parametrize("fmt", FORMS)
def test_the_reference_decodes_the_same_words(fmt: str) -> None:
    for seed, (rows, columns, reach, share) in enumerate([(9, 11, 7, 0.6), (5, 7, 60, 1.0), (1, 30, 3, 0.2)]):
        words, base = near(seed, rows, columns, fmt, (1 << reach) - 1, share)
        payload = deltas.encode(words, base, fmt)
        assert decode_deltas(payload, base.tolist(), 8 * base.itemsize, fmt) == words.tolist()
