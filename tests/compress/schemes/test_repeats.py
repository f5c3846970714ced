"""Structured tensors are never larger than by zstd -19, and matches that no encoder writes are refused."""

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.registry import decode
from birdie.compress.repeats import parse, steps
from birdie.compress.scheme import Encoded
from birdie.compress.schemes.lossless import MATCHES, Lossless, layout
from birdie.compress.tensors import from_bits, to_bits
from birdie.errors import ArtifactError
from tests.artifact.states import same_bits
from tests.compress.matrices import assert_matches_layout, coded_bytes, gaussian
from tests.nightly import mostly_nightly

SIDE = 128
MARGIN = 100  # bytes above zstd's
ROW, COLUMN = torch.arange(SIDE)[:, None], torch.arange(SIDE)
HADAMARD = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(SIDE)] for i in range(SIDE)])
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def structured() -> dict[str, Tensor]:
    """Return matrices whose words repeat, or are few."""
    values = gaussian(4, SIDE, seed=1)
    rank_one = torch.outer(gaussian(SIDE, seed=2), gaussian(SIDE, seed=3))
    shared = torch.where(gaussian(512, 1, seed=4) > 1, gaussian(512, 64, seed=5), gaussian(1, 64, seed=6))
    return {
        "circulant": values[0][(ROW - COLUMN) % SIDE],
        "Hadamard": HADAMARD / 11.3,
        "tiled rows": values.repeat(SIDE // 4, 1),
        "block diagonal": torch.block_diag(*[gaussian(16, 16, seed=seed) for seed in range(8)]),
        "symmetric": gaussian(SIDE, SIDE) + gaussian(SIDE, SIDE).T,
        "embedding with equal unused rows": shared,
        "rank one": rank_one,
        "rank one of powers of two": torch.outer(torch.exp2(gaussian(SIDE).round()), gaussian(SIDE, seed=2)),
        "blocks at any offset": torch.cat([values[0, :99], values[1], values[0, 7:91], values[0], values[1, 3:]] * 9),
        "few values": (gaussian(SIDE, SIDE) * 2).round().clamp(-3, 3) * 0.37,
        "sorted integers": (gaussian(SIDE * SIDE) * 900).round().sort().values.view(SIDE, SIDE),
        "strided repeats": torch.stack([values[0].repeat(8), gaussian(8 * SIDE)], 1).reshape(16, SIDE),
    }


def in_dtype(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    return (
        (matrix * (1 if matrix.abs().max() > 99 else 5000)).round().to(dtype)
        if dtype is torch.int64
        else matrix.to(dtype)
    )


@pytest.mark.parametrize("dtype", mostly_nightly(DTYPES, DTYPES[:1]), ids=str)
def test_structured_matrices_are_no_larger_than_by_zstd(dtype: torch.dtype) -> None:
    failed = {}
    for name, matrix in structured().items():
        weight = in_dtype(matrix, dtype).contiguous()
        raw = weight.view(torch.uint8).numpy().tobytes()
        encoded = Lossless().encode("w", weight)
        assert_matches_layout(encoded)
        assert same_bits(decode(encoded), weight), name
        ours, theirs = coded_bytes(encoded, "max"), len(zstandard.ZstdCompressor(level=19).compress(raw))
        if ours > theirs + MARGIN:
            failed[name] = ours, theirs, encoded.params
    assert not failed


def test_repeats_of_rows_cost_next_to_nothing() -> None:
    """One row, and a few bytes for all the others, however they are shifted."""
    for weight, distinct in ((structured()[name], rows) for name, rows in (("circulant", 1), ("tiled rows", 4))):
        encoded = Lossless().encode("w", weight)
        assert encoded.params[0] == MATCHES
        assert coded_bytes(encoded) < coded_bytes(Lossless().encode("w", weight[:distinct])) + 30


@settings(max_examples=30, deadline=None)
@given(
    itemsize=st.sampled_from([1, 2, 4, 8]),
    alphabet=st.integers(1, 40),
    size=st.integers(2, 600),
    bits=st.floats(0.1, 30),
    seed=st.integers(0, 99),
)
def test_any_words_come_back(itemsize: int, alphabet: int, size: int, bits: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, alphabet, size)
    for _ in range(rng.integers(0, 5)):  # copies of parts
        length, source, target = rng.integers(0, size, 3)
        part = values[source : source + length].copy()
        values[target : target + len(part)] = part[: size - target]
    words: NDArray[np.unsignedinteger] = values.astype(f"u{itemsize}")
    parsed = parse(words, bits)
    matches = [steps(numbers, 1)[None] for numbers in (parsed.counts, parsed.lengths, parsed.distances)]
    if not parsed.counts.size:
        return
    dtype = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[itemsize]
    literals = Lossless().encode("", from_bits(words[parsed.literals], parsed.literals.shape, dtype))
    if literals.params[:1] == (MATCHES,):
        return
    params = (MATCHES, parsed.counts.size, parsed.literals.size, 1 + 3 + 9, *literals.params)
    encoded = Encoded("lossless", (size,), dtype, params, (*literals.streams, *matches))
    assert np.array_equal(to_bits(decode(encoded))[0], words)


@pytest.mark.parametrize(
    ("counts", "lengths", "distances"),
    [
        ([4, 0], [20, 36], [4, 65]),  # before the first
        ([0, 4], [20, 36], [1, 1]),
        ([4, 0], [20, 35], [4, 4]),  # one word is missing
        ([4, 0], [20, 37], [4, 4]),
        ([4, 1], [20, 36], [4, 4]),  # more literals than there are
        ([5, -1], [20, 36], [4, 4]),
        ([4, 0], [56, 0], [4, 4]),
        ([4, 0], [60, -4], [4, 4]),
        ([4, 0], [20, 36], [4, 0]),
        ([4, 0], [20, 36], [4, -(1 << 31)]),
        ([4, (1 << 31) - 1], [20, 36], [4, 4]),
    ],
)
def test_matches_that_do_not_add_up_are_a_corrupt_file(
    counts: list[int], lengths: list[int], distances: list[int]
) -> None:
    literals = Lossless().encode("w", torch.arange(4, dtype=torch.int16)).streams
    streams = (*literals, *(np.array([numbers], np.int64) for numbers in (counts, lengths, distances)))
    sound = Encoded("lossless", (60,), torch.int16, (MATCHES, 2, 4, 0), streams)
    with pytest.raises(ArtifactError, match="matches"):
        decode(sound)


@pytest.mark.parametrize(
    "params",
    [
        (MATCHES,),
        (MATCHES, 2, 4),
        (MATCHES, 0, 4, 0),
        (MATCHES, 2, 0, 0),
        (MATCHES, 2, 60, 0),
        (MATCHES, 57, 4, 0),
        (MATCHES, 2, 4, 27),
        (MATCHES, 2, 4, -1),
        (MATCHES, 2, 4, 0, MATCHES, 1, 2, 0),
        (MATCHES, 2, 4, 0, 99),
    ],
)
def test_parameters_of_matches_that_are_impossible_are_refused(params: tuple[int, ...]) -> None:
    with pytest.raises(ArtifactError, match="corrupt"):
        layout((60,), torch.int16, params)
