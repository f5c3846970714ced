"""Integers come back bit for bit in whatever form they were stored, and the form is the one that costs least."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.compress.registry import decode, decoder
from birdie.compress.scheme import Encoded
from birdie.compress.schemes.lossless import DIFFERENCES, DTYPES, HALVES, LISTED, RUNS, VALUES, WHOLE, Lossless
from birdie.entropy import coder
from birdie.errors import ArtifactError

WIDE = DTYPES[VALUES]


def stored(encoded: Encoded) -> int:
    """Bytes of all streams."""
    return sum(len(coder.encode(stream, effort="fast").payload) for stream in encoded.streams)


def packed(halves: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """(rows, words, n) half bytes as (rows, words) integers of `dtype`, the first lowest."""
    words = np.zeros(halves.shape[:2], np.uint64)
    for index in range(halves.shape[2]):
        words |= halves[:, :, index].astype(np.uint64) << np.uint64(4 * index)
    return torch.from_numpy(words.astype(f"u{dtype.itemsize}").view(np.uint8)).view(dtype).reshape(halves.shape[:2])


@settings(deadline=None)
@given(
    dtype=st.sampled_from(WIDE),
    low=st.integers(-(1 << 40), 1 << 40),
    span=st.sampled_from([1, 2, 300, 70_000, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40]),
    rising=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_range_comes_back(dtype: torch.dtype, low: int, span: int, rising: bool, seed: int) -> None:
    """Ranges at and over the 32 bits of a stream included; what a dtype cannot hold wraps on the way in."""
    values = np.random.default_rng(seed).integers(low, low + span, (6, 11))
    values = np.sort(values.ravel()).reshape(6, 11) if rising else values
    bits = values.astype(np.int64).view(np.uint64).astype(f"u{dtype.itemsize}")
    weight = torch.from_numpy(bits.view(np.uint8)).view(dtype).reshape(6, 11)
    encoded = Lossless().encode("w", weight)
    layout = decoder("lossless").layout(encoded.shape, encoded.dtype, encoded.params)
    assert [(stream_layout.rows, stream_layout.columns) for stream_layout in layout] == [
        stream.shape for stream in encoded.streams
    ]
    assert torch.equal(decode(encoded), weight)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_the_ends_of_a_dtype_come_back(dtype: torch.dtype) -> None:
    ends = torch.iinfo(dtype)
    for values in ([ends.min, ends.max], [ends.max, ends.min, ends.max - 1], [ends.max], [ends.min] * 3):
        weight = torch.tensor(values, dtype=dtype)
        assert torch.equal(decode(Lossless().encode("w", weight)), weight)


@pytest.mark.parametrize("dtype", DTYPES[HALVES], ids=str)
def test_packed_weights_are_parted(dtype: torch.dtype) -> None:
    """Rows of different ranges, packed: half bytes cost less than bytes, and come back."""
    generator = np.random.default_rng(0)
    ranges = generator.integers(1, 16, (32, 1, 2 * dtype.itemsize))
    halves = generator.integers(0, 1 << 20, (32, 160, 2 * dtype.itemsize)) % ranges
    weight = packed(halves, dtype)
    encoded = Lossless().encode("w", weight)
    assert encoded.params == (HALVES,)
    assert np.array_equal(encoded.streams[0].reshape(32, -1, 160), halves.transpose(0, 2, 1))
    assert torch.equal(decode(encoded).view(torch.uint8), weight.view(torch.uint8))


def test_int8_weights_stay_whole() -> None:
    weight = (torch.randn(128, 256, generator=torch.Generator().manual_seed(0)) * 20).to(torch.int8)
    assert Lossless().encode("w", weight).params == ()


def test_counters_and_indices_cost_what_they_hold() -> None:
    counter = Lossless().encode("n", torch.tensor(391_000))
    assert len(counter.streams) == 1
    positions = Lossless().encode("p", torch.arange(100_000))
    assert positions.params == (DIFFERENCES,)
    assert stored(positions) < 200
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 60, 20_000) * 1009)
    assert Lossless().encode("i", ids).params == (VALUES,)


@pytest.mark.parametrize(
    ("shape", "dtype", "params"),
    [
        ((2, 2), torch.int64, (4,)),
        ((2, 2), torch.int64, (0,)),
        ((2, 2), torch.int64, (-1,)),
        ((2, 2), torch.int64, (VALUES, VALUES)),
        ((2, 2), torch.int8, (VALUES,)),
        ((2, 2), torch.float32, (HALVES,)),
        ((2, 2), torch.bool, (HALVES,)),
        ((2, 0), torch.int64, (VALUES,)),
        ((0,), torch.uint8, (HALVES,)),
    ],
)
def test_impossible_forms_are_a_corrupt_file(
    shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]
) -> None:
    with pytest.raises(ArtifactError, match="lossless"):
        decoder("lossless").layout(shape, dtype, params)


@pytest.mark.parametrize(
    ("form", "dtype", "stream"),
    [
        (HALVES, torch.uint8, [[3], [16]]),
        (HALVES, torch.uint8, [[3], [-1]]),
        (VALUES, torch.uint32, [[-1]]),
        (VALUES, torch.uint64, [[-1]]),
        (DIFFERENCES, torch.uint64, [[5, -6]]),
        (DIFFERENCES, torch.int32, [[(1 << 31) - 1, 1]]),
        (DIFFERENCES, torch.uint32, [[(1 << 31) - 1, (1 << 31) - 1, 2]]),
    ],
)
def test_what_a_dtype_cannot_hold_is_a_corrupt_file(form: int, dtype: torch.dtype, stream: list[list[int]]) -> None:
    values = np.array(stream, np.int64)
    shape = (1, values.shape[1])
    with pytest.raises(ArtifactError, match="corrupt"):
        decode(Encoded("lossless", shape, dtype, (form,), (values,)))


@pytest.mark.parametrize("dtype", DTYPES[LISTED], ids=str)
def test_floats_of_few_magnitudes_cost_what_integers_do(dtype: torch.dtype) -> None:
    """Floats rounded to a grid, with a signed zero, a NaN and infinities among them."""
    integers = torch.round(torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 3) + 0.0  # no −0.0
    weight = (integers * 0.0123).to(dtype)
    weight[0, :4] = torch.tensor([-0.0, float("inf"), float("-inf"), float("nan")])
    encoded = Lossless().encode("w", weight)
    layout = decoder("lossless").layout(encoded.shape, encoded.dtype, encoded.params)
    assert encoded.params[0] == LISTED
    assert [(stream_layout.rows, stream_layout.columns) for stream_layout in layout] == [
        stream.shape for stream in encoded.streams
    ]
    assert torch.equal(decode(encoded).view(torch.uint8), weight.view(torch.uint8))
    alone = len(coder.encode(integers.int().numpy(), effort="fast").payload)
    assert stored(encoded) < alone + 200


def test_trained_floats_are_not_listed() -> None:
    for dtype in DTYPES[LISTED]:
        weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
        assert Lossless().encode("w", weight).params == ()


@pytest.mark.parametrize(
    ("numbers", "gaps"),
    [([2], [5, 1]), ([-3], [5, 1]), ([0], [5, 0]), ([0], [-1, 3]), ([0], [(1 << 15) - 1, 1]), ([0], [5, 1, -1])],
)
def test_a_list_that_does_not_rise_or_is_left_is_a_corrupt_file(numbers: list[int], gaps: list[int]) -> None:
    streams = np.array([numbers * 4], np.int32), np.array([gaps], np.int32)
    with pytest.raises(ArtifactError, match="list"):
        decode(Encoded("lossless", (4,), torch.bfloat16, (LISTED, len(gaps)), streams))


@pytest.mark.parametrize("params", [(LISTED,), (LISTED, 0), (LISTED, 5), (LISTED, 1, 1)])
def test_a_list_is_no_longer_than_the_tensor(params: tuple[int, ...]) -> None:
    with pytest.raises(ArtifactError, match="parameters"):
        decoder("lossless").layout((4,), torch.float32, params)


def tables(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return masks and tables of few values, as buffers of other people's modules hold them."""
    ones = torch.ones(96, 96)
    masks = {
        "triangle": ones.tril().reshape(1, 1, 96, 96),
        "band": ones.tril() * ones.triu(-12),
        "blocks": torch.block_diag(*[torch.ones(32, 32)] * 3),
        "segments": torch.arange(96).repeat_interleave(96).reshape(96, 96) % 7,
        "padding": (torch.arange(128) < torch.tensor([[100], [37], [128], [64]])),
    }
    return {name: mask.to(dtype) for name, mask in masks.items()}


@pytest.mark.parametrize("dtype", DTYPES[RUNS], ids=str)
def test_masks_cost_next_to_nothing_whatever_their_dtype(dtype: torch.dtype) -> None:
    if dtype.itemsize == 1 and dtype.is_floating_point:
        masks = {name: mask.view(dtype) for name, mask in tables(torch.uint8).items()}
    else:
        masks = tables(dtype)
    for name, mask in masks.items():
        encoded = Lossless().encode("w", mask)
        layout = decoder("lossless").layout(encoded.shape, encoded.dtype, encoded.params)
        assert [(stream.rows, stream.columns) for stream in layout] == [stream.shape for stream in encoded.streams]
        assert stored(encoded) <= 100, name
        assert torch.equal(decode(encoded).view(torch.uint8), mask.contiguous().view(torch.uint8))


def test_a_causal_mask_of_256_positions_takes_less_than_a_hundred_bytes() -> None:
    for mask in (torch.ones(256, 256).tril(), torch.full((1, 1, 256, 256), -torch.inf).triu(1)):
        assert stored(Lossless().encode("w", mask)) < 40


@pytest.mark.parametrize(
    ("steps", "changes"),
    [([0, 2], [40, 24]), ([0, -1], [40, 24]), ([0, 1], [40, 25]), ([0, 1], [64, 0]), ([0, 1], [65, -1])],
)
def test_runs_that_do_not_add_up_are_a_corrupt_file(steps: list[int], changes: list[int]) -> None:
    words = Lossless().encode("w", torch.tensor([1.5, 0.1], dtype=torch.bfloat16)).streams
    numbers = np.array([steps], np.int32), np.array([changes], np.int32)
    with pytest.raises(ArtifactError, match="runs"):
        decode(Encoded("lossless", (64,), torch.bfloat16, (RUNS, 2, 2), (*words, *numbers)))


@pytest.mark.parametrize("params", [(RUNS,), (RUNS, 2), (RUNS, 0, 0), (RUNS, 1, 2), (RUNS, 3, 1), (RUNS, 2, 0)])
def test_runs_are_long_and_have_words(params: tuple[int, ...]) -> None:
    with pytest.raises(ArtifactError, match="parameters"):
        decoder("lossless").layout((64,), torch.float32, params)


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_positions_in_floats_cost_next_to_nothing(dtype: torch.dtype) -> None:
    positions = torch.arange(-100, 156).to(dtype)
    encoded = Lossless().encode("w", positions)
    assert (encoded.params, stored(encoded) < 16) == ((DIFFERENCES,), True)
    assert torch.equal(decode(encoded), positions)
    for other in (0.5, -0.0, torch.nan, torch.inf, 2.0 * WHOLE[dtype]):
        positions[70] = other
        encoded = Lossless().encode("w", positions)
        assert encoded.params != (DIFFERENCES,)
        assert torch.equal(decode(encoded).view(torch.uint8), positions.view(torch.uint8))
    with pytest.raises(ArtifactError, match="corrupt"):
        decode(Encoded("lossless", (1, 2), dtype, (DIFFERENCES,), (np.array([[WHOLE[dtype], 1]]),)))
