"""Weights that are written at once from tiles have the bits of those that the integers lead to."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.registry import decode, decoder
from birdie.compress.scheme import Encoded
from birdie.compress.tiled import KINDS, Product
from birdie.entropy import coder, rans_tiles, tiles
from birdie.entropy import coding_plan as plan
from birdie.entropy import trellis_states as trellis
from birdie.errors import ArtifactError
from tests.artifact.states import same_bits
from tests.reference.streams import gaussian, on_paths, some_zeros

Integers = NDArray[np.integer]
DTYPES = tuple(KINDS)


def product(encoded: Encoded) -> Product | None:
    """Return the tensor as a file has it, its numbers in tiles; None where the integers must be decoded first."""
    layout = decoder(encoded.scheme).layout(encoded.shape, encoded.dtype, encoded.params)
    states = layout[0].hints.states
    payload = tiles.encode(plan.search(np.ascontiguousarray(encoded.streams[0]), (1, 1), states), states)
    assert payload is not None
    scales = [coder.encode(stream) for stream in encoded.streams[1:]]
    payloads = [(coder.TILES, payload), *((one.coder, one.payload) for one in scales)]
    return Product.of(decoder(encoded.scheme), encoded.shape, encoded.dtype, encoded.params, layout, payloads)


def at_once(encoded: Encoded, threads: int = 1) -> Tensor:
    """Return the weights."""
    coded, out = product(encoded), torch.empty(encoded.shape, dtype=encoded.dtype)
    assert coded is not None
    coded.decode(out, threads)
    return out


# Exponents of steps, in sixteenths of an octave: where most weights lie, subnormal numbers of each dtype, the largest.
RANGES = st.sampled_from([(-200, 40), (-2016, -1900), (-460, -330), (180, 260), (1900, 2047), (-16, -15)])

FAR = np.array([0, 1, -3, 255, 257, -259, 511, 1025, -2049, 2051, 4099, -8197, 131_071])
DEVIATIONS = st.sampled_from([0.4, 9.0, float("inf")])


def normal(rng: np.random.Generator, shape: tuple[int, int], deviation: float) -> NDArray[np.int32]:
    """Return numbers of this deviation; if it is infinite, of `FAR`."""
    values = rng.choice(FAR, shape) if deviation == np.inf else np.rint(rng.normal(0, deviation, shape))
    return values.astype(np.int32)


@st.composite
def grids(draw: st.DrawFn) -> Encoded:
    rows, columns = draw(st.integers(1, 30)), draw(st.integers(32, 70))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype, (low, high) = draw(st.sampled_from(DTYPES)), draw(RANGES)
    group_size = draw(st.sampled_from([0, 1, 7, 32, columns]))
    ternary = draw(st.booleans())
    values = normal(rng, (rows, columns), 0.7 if ternary else draw(DEVIATIONS))
    if ternary:
        values, group_size = values.clip(-1, 1), group_size or columns
    values[0, :2] = 0, 1
    steps = rng.integers(low, high + 1, (rows, -(-columns // group_size) if group_size else 1))
    if draw(st.booleans()):
        steps = steps // 16 * 16  # powers of two: products of `FAR` lie halfway between two numbers
    streams = values.astype(np.int8) if ternary else values, steps.astype(np.int32)
    return Encoded("ternary" if ternary else "grid", values.shape, dtype, (group_size,) if group_size else (), streams)


@settings(max_examples=60, deadline=None)
@given(grids(), st.sampled_from([1, 3]))
def test_grids_and_ternary_weights(encoded: Encoded, threads: int) -> None:
    assert same_bits(at_once(encoded, threads), decode(encoded))


@settings(max_examples=40, deadline=None)
@given(
    states=st.sampled_from(trellis.STATES),
    rows=st.integers(1, 30),
    columns=st.integers(32, 70),
    resolutions=st.tuples(st.sampled_from([1, 4, 16]), st.sampled_from([0, 1, 16])),
    base=st.sampled_from([-1990, -400, -60, 220, 2000]),
    dtype=st.sampled_from(DTYPES),
    deviation=DEVIATIONS,
    chunk=st.sampled_from([1 << 20, 400]),
    seed=st.integers(0, 1 << 30),
)
def test_weights_of_a_trellis(
    states: int,
    rows: int,
    columns: int,
    resolutions: tuple[int, int],
    base: int,
    dtype: torch.dtype,
    deviation: float,
    chunk: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    numbers = normal(rng, (rows, columns), deviation)
    numbers[rng.integers(0, 3, rows) == 0] = 0
    numbers[0, :2] = 0, 1
    scales = [rng.integers(-1, 2, (size, 1)) for size in numbers.shape]
    streams: tuple[Integers, ...] = (numbers, *scales[: 2 if resolutions[1] else 1])
    params = states, *resolutions, base, int(rng.integers(rows))
    encoded = Encoded("trellis", numbers.shape, dtype, params, streams)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trellis, "CHUNK", chunk)
        patch.setattr(rans_tiles, "_ROWS", 9)
        assert same_bits(at_once(encoded, 2), decode(encoded))


def of_columns(values: Integers, *columns: Integers) -> Encoded:
    """Return a tensor whose columns have classes, so that its numbers are coded column by column."""
    steps = np.arange(len(values))[:, None] - 100
    if columns:
        return Encoded("trellis", values.shape, torch.bfloat16, (1, 4, 16, -60, 0), (values, steps // 60, *columns))
    return Encoded("grid", values.shape, torch.bfloat16, (), (values, steps))


def test_tensors_that_are_coded_column_by_column() -> None:
    values = some_zeros(gaussian(96, 48, 1, 40)).T.astype(np.int32)
    coded = product(of_columns(values))
    assert coded is not None
    assert coded.stream.columns_first
    assert same_bits(at_once(of_columns(values)), decode(of_columns(values)))


def test_column_by_column_two_factors_are_left_to_the_integers() -> None:
    """The factor of the row comes first, and the coder multiplies by that of the column of a tile last."""
    values = gaussian(96, 48, 1, 40).T.astype(np.int32)
    assert product(of_columns(values, np.arange(96)[:, None])) is None
    grouped = Encoded("grid", values.shape, torch.float32, (8,), (values, np.zeros((48, 12), np.int32)))
    assert product(grouped) is None


def test_many_threads_give_the_same_weights() -> None:
    """The array has several rows and columns of tiles."""
    values = on_paths(30, 3000, 8, 0.5, gaps=True)
    scales = np.arange(30)[:, None] % 5
    encoded = Encoded("trellis", values.shape, torch.float16, (8, 4, 0, -40, 0), (values, scales))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rans_tiles, "_ROWS", 7)
        patch.setattr(trellis, "CHUNK", 21_000)
        assert all(same_bits(at_once(encoded, threads), decode(encoded)) for threads in (1, 2, 9))


def test_numbers_beyond_those_of_a_scheme_are_refused() -> None:
    values = np.random.default_rng(0).integers(-1, 3, (64, 40)).astype(np.int8)
    encoded = Encoded("ternary", values.shape, torch.float32, (40,), (values, np.zeros((64, 1), np.int32)))
    with pytest.raises(ArtifactError, match="beyond 1"):
        at_once(encoded)
