"""Grids: the error stays within half a step, steps come back exactly from their indices, inputs are never changed."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.compress.decoders import decode
from birdie.compress.grid import Grid, quantiles
from birdie.compress.steps import HIGHEST, LOWEST, PER_OCTAVE, TABLE, indices_above, indices_near, steps
from birdie.errors import ArtifactError, ConfigError, WeightsError


def random_weight(*shape: int, seed: int = 0) -> torch.Tensor:
    """Gaussian rows whose scales differ by a few octaves."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.exp2(4 * torch.rand(shape[0], *[1] * (len(shape) - 1), generator=generator) - 6)
    return torch.randn(shape, generator=generator) * scales


def test_step_table_is_pinned() -> None:
    assert len(TABLE) == PER_OCTAVE
    assert hashlib.sha256(repr(TABLE).encode()).hexdigest()[:16] == "4f1e4b8d7c637c80"
    np.testing.assert_array_equal(TABLE, np.rint(2.0 ** (23 + np.arange(PER_OCTAVE) / PER_OCTAVE)))


def test_steps_rise_over_the_whole_range_and_find_their_index_again() -> None:
    indices = np.arange(LOWEST, HIGHEST + 1)
    values = steps(indices)
    assert values.dtype == np.float32
    assert np.isfinite(values).all()
    assert (np.diff(values.astype(np.float64)) > 0).all()
    np.testing.assert_array_equal(indices_above(values), indices)
    np.testing.assert_array_equal(indices_near(values), indices)


def test_an_octave_doubles_a_step_exactly() -> None:
    indices = np.arange(-500, 500)
    np.testing.assert_array_equal(steps(indices + PER_OCTAVE), 2 * steps(indices))


@pytest.mark.parametrize("index", [LOWEST - 1, HIGHEST + 1])
def test_a_step_index_out_of_range_is_a_corrupt_file(index: int) -> None:
    with pytest.raises(ArtifactError, match="step index"):
        steps(np.array([index]))


@given(wanted=st.floats(min_value=2.0**-120, max_value=2.0**120))
def test_index_above_is_the_smallest_that_reaches(wanted: float) -> None:
    index = indices_above(np.array([wanted]))
    assert float(steps(index)[0]) >= wanted
    assert float(steps(index - 1)[0]) < wanted


@pytest.mark.parametrize("q", [0.9999984, 0.5, 0.37, 0.0, 1.0])
def test_quantiles_are_those_of_torch(q: float) -> None:
    rows = random_weight(50, 257).abs()
    expected = torch.quantile(rows, q, dim=1)
    torch.testing.assert_close(torch.from_numpy(quantiles(rows.numpy(), q)), expected, rtol=1e-6, atol=0)


@settings(deadline=None)  # the first example compiles
@given(
    bits=st.integers(2, 8),
    shape=st.sampled_from([(1, 1), (7, 5), (40, 33), (6, 4, 3, 3)]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_error_inside_the_clip_is_half_a_step(bits: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    weight = random_weight(*shape, seed=seed).to(dtype)
    encoded = Grid(bits=bits, clip=1.0).encode("w", weight)
    step = torch.from_numpy(steps(encoded.streams[1])).double()
    error = (decode(encoded).double() - weight.double()).reshape(shape[0], -1).abs()
    rounding = torch.finfo(dtype).eps * weight.double().abs().reshape(shape[0], -1).amax(1, keepdim=True)
    assert bool((error <= step / 2 * (1 + 1e-5) + rounding).all())
    assert int(np.abs(encoded.streams[0]).max()) <= 2 ** (bits - 1) - 1


def test_multiples_are_stored_divided() -> None:
    """int8 in steps of 4 spans ±32 symbols of four int8 steps each: six bits, and nothing to find for the coder."""
    weight = random_weight(64, 512)
    fine, coarse = (Grid(multiple=multiple, clip=1.0).encode("w", weight) for multiple in (1, 4))
    assert int(np.abs(coarse.streams[0]).max()) == 32
    np.testing.assert_array_equal(coarse.streams[1], fine.streams[1] + 2 * PER_OCTAVE)


@pytest.mark.parametrize("sigma", [0.05, 0.3, 1.0])
def test_sigma_steps_follow_the_deviation_of_the_row(sigma: float) -> None:
    weight = random_weight(64, 256)
    encoded = Grid(sigma=sigma).encode("w", weight)
    ratio = steps(encoded.streams[1])[:, 0] / (sigma * weight.double().numpy().std(axis=1))
    assert (np.abs(np.log2(ratio)) <= 0.5 / PER_OCTAVE + 1e-6).all()
    step = torch.from_numpy(steps(encoded.streams[1]))
    assert bool(((decode(encoded) - weight).abs() <= step / 2 * (1 + 1e-5)).all())


def test_zero_rows_decode_to_zero_and_borrow_their_neighbours_step() -> None:
    weight = random_weight(8, 16)
    weight[0], weight[3], weight[7] = 0, 0, 0
    encoded = Grid().encode("w", weight)
    scales = encoded.streams[1][:, 0]
    assert (scales[0], scales[3], scales[7]) == (scales[1], scales[2], scales[6])
    assert not decode(encoded)[[0, 3, 7]].any()
    assert not decode(Grid().encode("w", torch.zeros(4, 4))).any()


@pytest.mark.parametrize("scheme", [Grid(), Grid(bits=2), Grid(sigma=0.3)])
@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-20, 1e20, 3.4e38])
def test_extreme_magnitudes_stay_finite(scheme: Grid, magnitude: float) -> None:
    weight = torch.tensor([[magnitude, -magnitude, 0.0, magnitude / 2]])
    decoded = decode(scheme.encode("w", weight))
    assert bool(torch.isfinite(decoded).all())
    assert bool(((decoded - weight).abs() <= 1.1 * magnitude).all())


@pytest.mark.parametrize("scheme", [Grid(), Grid(sigma=0.3)])
def test_rows_below_the_smallest_step_are_kept_losslessly_not_made_zero(scheme: Grid) -> None:
    for weight in (random_weight(8, 16) * 1e-42, random_weight(8, 16).double() * 1e-60):
        assert torch.equal(decode(scheme.encode("w", weight)), weight)
    mixed = random_weight(8, 16)
    mixed[3] *= 1e-38
    assert torch.equal(decode(scheme.encode("w", mixed)), mixed)
    mixed[3] = 0
    assert scheme.encode("w", mixed).scheme == "grid"


def test_the_largest_half_does_not_become_infinite() -> None:
    weight = torch.full((2, 8), 65504.0, dtype=torch.float16)
    assert bool(torch.isfinite(decode(Grid().encode("w", weight))).all())


def test_large_tensors_are_worked_on_in_blocks_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(50, 40)
    whole = Grid().encode("w", weight)
    monkeypatch.setattr("birdie.compress.grid.BLOCK", 90)
    for one, other in zip(whole.streams, Grid().encode("w", weight).streams, strict=True):
        np.testing.assert_array_equal(one, other)


def test_views_are_read_right_and_never_changed() -> None:
    base = random_weight(32, 64)
    before = base.clone()
    for view in (base.T, base[::2, 3:], base[:, :1].expand(32, 9)):
        torch.testing.assert_close(
            decode(Grid().encode("w", view)), decode(Grid().encode("w", view.contiguous())), rtol=0, atol=0
        )
    assert torch.equal(base, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_named_and_counted(bad: float) -> None:
    weight = random_weight(8, 8)
    weight[1, 2] = weight[3, 4] = bad
    with pytest.raises(WeightsError, match=r"'blocks\.1\.w' holds 2 NaN or infinite"):
        Grid().encode("blocks.1.w", weight)


def test_doubles_beyond_float32_are_refused() -> None:
    with pytest.raises(WeightsError, match="beyond float32"):
        Grid().encode("w", torch.full((2, 2), 1e300, dtype=torch.float64))


@pytest.mark.parametrize(
    ("settings", "quoted"),
    [({"bits": 9}, "9"), ({"bits": 1}, "1"), ({"multiple": 0}, "0"), ({"sigma": 0.0}, "0.0"), ({"clip": 1.5}, "1.5")],
)
def test_settings_out_of_range_are_quoted(settings: dict[str, float], quoted: str) -> None:
    with pytest.raises(ConfigError, match=quoted):
        Grid(**settings)  # type: ignore[arg-type]
