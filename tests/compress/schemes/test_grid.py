"""Grids and the scales that they are stored with."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.compress.log_scales import (
    HIGHEST,
    LOWEST,
    PER_OCTAVE,
    TABLE,
    covering_indices,
    nearest_indices,
    scales_of,
)
from birdie.compress.registry import decode
from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.trellis import Trellis
from birdie.errors import ArtifactError, ConfigError
from tests.compress.matrices import DTYPES, gaussian, random_weight


@settings(max_examples=25)  # the first example compiles
@given(
    bits=st.integers(2, 8),
    shape=st.sampled_from([(1, 1), (7, 5), (40, 33), (6, 4, 3, 3)]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_error_inside_the_clip_is_half_a_scale(
    bits: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    weight = random_weight(*shape, seed=seed).to(dtype)
    encoded = Grid(bits=bits, clip_quantile=1.0).encode("w", weight)
    scale = torch.from_numpy(scales_of(encoded.streams[1])).double()
    error = (decode(encoded).double() - weight.double()).reshape(shape[0], -1).abs()
    rounding = torch.finfo(dtype).eps * weight.double().abs().reshape(shape[0], -1).amax(1, keepdim=True)
    assert bool((error <= scale / 2 * (1 + 1e-5) + rounding).all())
    assert int(np.abs(encoded.streams[0]).max()) <= 2 ** (bits - 1) - 1


@pytest.mark.parametrize("sigma", [0.05, 0.3, 1.0])
def test_sigma_scales_follow_the_deviation_of_the_row(sigma: float) -> None:
    weight = random_weight(64, 256)
    encoded = Grid(sigma=sigma).encode("w", weight)
    ratio = scales_of(encoded.streams[1])[:, 0] / (sigma * weight.double().numpy().std(axis=1))
    assert (np.abs(np.log2(ratio)) <= 0.5 / PER_OCTAVE + 1e-6).all()
    scale = torch.from_numpy(scales_of(encoded.streams[1]))
    assert bool(((decode(encoded) - weight).abs() <= scale / 2 * (1 + 1e-5)).all())


@pytest.mark.parametrize(("bits", "k"), [(6, 12.85), (8, 20.0), (4, 2.5)])
def test_sdclip_is_its_formula(bits: int, k: float) -> None:
    """scale = k · deviation of the row / (2^(bits−1) − 1), to the nearest there is; what is outside is clipped."""
    weight = random_weight(64, 256)
    weight[0, 0] = 100  # an outlier
    symbols, indices = Grid(bits, clip_sigmas=k).encode("w", weight).streams
    top = 2 ** (bits - 1) - 1
    wanted = k * weight.double().numpy().std(axis=1) / top
    np.testing.assert_array_equal(indices[:, 0], nearest_indices(wanted))
    scale = scales_of(indices)
    np.testing.assert_array_equal(symbols, np.clip(np.rint(weight.numpy() / scale), -top, top))
    clipped = k < 15  # the outlier is some sixteen deviations away
    assert bool(abs(int(symbols[0, 0])) == top) == clipped


def test_sdclip_keeps_rows_that_do_not_vary() -> None:
    """A deviation of nothing is no scale: constant rows and rows of a large offset keep their size."""
    weight = random_weight(4, 64)
    weight[1] = 0.7
    weight[2] = 5 + 1e-3 * weight[2]
    weight[3] = 0
    decoded = decode(Grid(6, clip_sigmas=12.85).encode("w", weight))
    assert bool(((decoded - weight).abs()[1:] <= weight[1:].abs().amax(1, keepdim=True) / 31).all())


def squared(encoded: Encoded, weight: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Squared errors of each row, columns weighed."""
    return ((decode(encoded).double() - weight.double()) ** 2 * columns).reshape(len(weight), -1).sum(1)


@settings(max_examples=25)
@given(
    bits=st.integers(2, 8),
    columns=st.sampled_from([1, 5, 64, 257]),
    group=st.sampled_from([None, 32]),
    calibrated=st.booleans(),
    heavy=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_clip_search_never_leaves_more_error_than_the_maximum(
    bits: int, columns: int, group: int | None, calibrated: bool, heavy: bool, seed: int
) -> None:
    weight = random_weight(9, columns, seed=seed)
    weight = weight**3 if heavy else weight
    weight[4] = 0
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(columns, generator=generator) ** 4 + 1e-3
    sensitivity = Sensitivity(hessian=torch.diag(inputs)) if calibrated else None
    searched = Grid(bits, clip_quantile=None, group_size=group).encode("w", weight, sensitivity=sensitivity)
    widest = Grid(bits, clip_quantile=1.0, group_size=group).encode("w", weight)
    counts = inputs.double() if calibrated else torch.ones(columns, dtype=torch.float64)
    best, most = squared(searched, weight, counts), squared(widest, weight, counts)
    assert bool((best <= most * (1 + 1e-6)).all())


def test_zero_rows_decode_to_zero_and_borrow_their_neighbours_scale() -> None:
    weight = random_weight(8, 16)
    weight[0], weight[3], weight[7] = 0, 0, 0
    encoded = Grid().encode("w", weight)
    scales = encoded.streams[1][:, 0]
    assert (scales[0], scales[3], scales[7]) == (scales[1], scales[2], scales[6])
    assert not decode(encoded)[[0, 3, 7]].any()


@pytest.mark.parametrize("scheme", [Grid(sigma=0.3, per_tensor=True), Trellis(8, 0.3, per_tensor=True)])
def test_one_scale_for_the_whole_tensor_leaves_the_same_error_in_every_row(scheme: Grid | Trellis) -> None:
    weight = gaussian(48, 512) * torch.logspace(-1, 0, 48)[:, None]
    errors = (decode(scheme.encode("w", weight)) - weight).square().mean(1)
    assert float(errors.max()) < 1.3 * float(errors.min())
    by_rows = (decode(Grid(sigma=0.3).encode("w", weight)) - weight).square().mean(1)
    assert float(by_rows.max()) > 50 * float(by_rows.min())


@pytest.mark.parametrize(
    ("settings", "quoted"),
    [
        ({"level_stride": 0}, "0"),
        ({"clip_quantile": 1.5}, "1.5"),
        ({"clip_sigmas": 0.5}, "=0.5"),
        ({"clip_sigmas": 12.85, "sigma": 0.3}, "one of the two"),
        ({"sigma": 0.3, "group_size": 8, "per_tensor": True}, "one scale per tensor"),
        ({"bits": 6, "per_tensor": True}, "one scale per tensor"),
    ],
)
def test_grids_that_cannot_be_are_refused(settings: dict[str, float], quoted: str) -> None:
    with pytest.raises(ConfigError, match=quoted):
        Grid(**settings)  # type: ignore[arg-type]


def test_the_table_is_pinned() -> None:
    assert len(TABLE) == PER_OCTAVE
    assert hashlib.sha256(repr(TABLE).encode()).hexdigest()[:16] == "4f1e4b8d7c637c80"
    np.testing.assert_array_equal(TABLE, np.rint(2.0 ** (23 + np.arange(PER_OCTAVE) / PER_OCTAVE)))


def test_scales_rise_over_the_whole_range_double_by_octaves_and_find_their_index_again() -> None:
    indices = np.arange(LOWEST, HIGHEST + 1)
    values = scales_of(indices)
    assert values.dtype == np.float32
    assert np.isfinite(values).all()
    assert (np.diff(values.astype(np.float64)) > 0).all()
    np.testing.assert_array_equal(values[PER_OCTAVE:], 2 * values[:-PER_OCTAVE])
    np.testing.assert_array_equal(covering_indices(values), indices)
    np.testing.assert_array_equal(nearest_indices(values), indices)
    for index in (LOWEST - 1, HIGHEST + 1):
        with pytest.raises(ArtifactError, match="index"):
            scales_of(np.array([index]))
