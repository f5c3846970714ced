"""Schemes of few levels: codebooks, ternary weights, rotated weights."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.compress.log_scales import scales_of
from birdie.compress.registry import decode
from birdie.compress.scheme import Encoded, Scheme, Sensitivity
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.codebook import Codebook, kmeans
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.rotation import Rotation, lloyd_max, rotate, signs
from birdie.compress.schemes.ternary import Ternary
from birdie.entropy import coder
from birdie.errors import ConfigError
from tests.compress.matrices import DTYPES, random_weight, squared_error
from tests.compress.matrices import squared_error as error


@settings(max_examples=25)
@given(columns=st.integers(1, 300), seed=st.integers(0, 65_535))
def test_a_rotation_keeps_lengths_and_angles_and_is_undone(columns: int, seed: int) -> None:
    weight = np.random.default_rng(seed).standard_normal((columns, 3))
    turned = weight.copy()
    rotate(turned, seed, back=False)
    np.testing.assert_allclose(turned.T @ turned, weight.T @ weight, atol=1e-9 * columns)
    rotate(turned, seed)
    np.testing.assert_allclose(turned, weight, atol=1e-12)


NUMBERS = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=9, unique=True)


def cost(values: np.ndarray, weights: np.ndarray, centres: np.ndarray) -> float:
    return float((weights * ((values[:, None] - centres) ** 2).min(axis=1)).sum())


@settings(max_examples=25)
@given(numbers=NUMBERS, k=st.integers(1, 5), seed=st.integers(0, 100))
def test_no_other_split_of_the_line_is_better(numbers: list[float], k: int, seed: int) -> None:
    values = np.sort(np.array(numbers))
    weights = np.random.default_rng(seed).exponential(size=len(values)) + 0.01
    best = np.inf
    for cuts in itertools.combinations(range(1, len(values)), min(k, len(values)) - 1):
        parts = np.split(np.arange(len(values)), cuts)
        centres = np.array([np.average(values[part], weights=weights[part]) for part in parts])
        best = min(best, cost(values, weights, centres))
    levels = kmeans(values, weights, k)
    assert (np.diff(levels) > 0).all()
    assert cost(values, weights, levels) <= best + 1e-9 * float((weights * values**2).sum() + 1e-9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [2, 16, 256])
def test_every_weight_gets_its_nearest_level(k: int, dtype: torch.dtype) -> None:
    weight = random_weight(40, 33).to(dtype)
    encoded = Codebook(k).encode("w", weight)
    decoded = decode(encoded).double()
    assert int(encoded.streams[0].max()) < encoded.params[0] <= k
    nearest = (weight.double().reshape(-1, 1) - decoded.unique()).abs().amin(dim=1)
    largest = torch.maximum(weight.double().abs(), decoded.abs()).reshape(-1)
    error_of = (weight.double() - decoded).abs().reshape(-1)
    assert bool((error_of <= nearest + torch.finfo(dtype).eps * largest).all()), "but for the rounding of levels"


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_error_falls_as_levels_are_added(rows: bool, weighted: bool) -> None:
    weight = random_weight(24, 64)
    mass = torch.linspace(0.1, 4, 64).double()
    sensitivity = Sensitivity(hessian=torch.diag(mass)) if weighted else None
    errors = [
        error(weight, Codebook(k, rows).encode("w", weight, sensitivity=sensitivity), mass if weighted else None)
        for k in (2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256)
    ]
    assert all(more < fewer for fewer, more in itertools.pairwise(errors))
    assert errors[-1] < 0.001 * errors[0]


def test_few_values_are_kept_exactly_to_the_fineness_of_levels() -> None:
    values = torch.tensor([-0.5, -0.1, 0.0, 0.25, 3.0])
    weight = values[torch.randint(5, (50, 40), generator=torch.Generator().manual_seed(0))]
    encoded = Codebook(16).encode("w", weight)
    assert encoded.params[0] == 5
    gap = 0.1
    assert float((decode(encoded) - weight).abs().max()) <= gap / 32


def test_a_price_on_bits_buys_them() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    sizes, errors = [], []
    for rate in (0.0, 0.01, 0.05, 0.3):
        encoded = Codebook(32, rate=rate).encode("w", weight)
        sizes.append(len(coder.encode(encoded.streams[0], effort="fast").payload))
        errors.append(error(weight, encoded))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 1.2 * sizes[2]
    assert errors == sorted(errors)


@settings(max_examples=25)  # the first example compiles
@given(
    scheme=st.sampled_from([Ternary(), Ternary(5), Ternary(1), Ternary(binary=True), Ternary(7, binary=True)]),
    shape=st.sampled_from([(1, 1), (9,), (7, 5), (40, 33), (6, 4, 3, 3)]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_every_tensor_comes_back_in_its_shape_and_dtype_with_three_values_a_group(
    scheme: Ternary, shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    weight = random_weight(*shape, seed=seed).to(dtype)
    encoded = scheme.encode("w", weight)
    decoded = decode(encoded)
    assert (decoded.shape, decoded.dtype) == (weight.shape, dtype)
    symbols, indices = encoded.streams
    assert set(np.unique(symbols)) <= {-1, 0, 1}
    group = encoded.params[0]
    scale = torch.from_numpy(np.repeat(scales_of(indices), group, axis=1)[:, : symbols.shape[1]])
    expected = (torch.from_numpy(symbols).float() * scale).reshape(shape).to(dtype)
    assert torch.equal(decoded, expected)
    assert bool(((decoded == 0) | (decoded.sign() == weight.sign())).all())


@settings(max_examples=10)
@given(seed=st.integers(0, 10_000), weighted=st.booleans())
def test_no_other_symbols_and_scale_are_better(seed: int, weighted: bool) -> None:
    """Against all 3^6 choices of symbols with their least-squares scales; the scale's rounding costs a little."""
    rng = np.random.default_rng(seed)
    row = rng.standard_t(3, 6)
    mass = rng.exponential(size=6) + 0.1 if weighted else np.ones(6)
    best = float((mass * row**2).sum())
    for choice in itertools.product((-1, 0, 1), repeat=6):
        q = np.array(choice)
        if q.any():
            scale = (mass * row * q).sum() / (mass * q * q).sum()
            best = min(best, float((mass * (row - scale * q) ** 2).sum()))
    sensitivity = Sensitivity(hessian=torch.diag(torch.from_numpy(mass)))
    weight = torch.from_numpy(row)[None].float()
    achieved = squared_error(weight, Ternary().encode("w", weight, sensitivity=sensitivity), torch.from_numpy(mass))
    total = float((mass * row**2).sum())
    assert achieved <= best + 0.0225**2 * total + 1e-6 * total


def test_zeros_gain_over_binary_and_smaller_groups_over_larger() -> None:
    weight = random_weight(32, 256)
    errors = [
        squared_error(weight, scheme.encode("w", weight)) for scheme in (Ternary(binary=True), Ternary(), Ternary(32))
    ]
    assert errors[0] > errors[1] > errors[2]


def test_binary_weights_have_no_zeros_but_in_groups_of_zeros() -> None:
    weight = random_weight(4, 16)
    weight[1, 3] = 0
    weight[2, 8:] = 0
    encoded = Ternary(8, binary=True).encode("w", weight)
    zeros = torch.from_numpy(encoded.streams[0] == 0)
    assert bool(zeros[2, 8:].all())
    assert int(zeros.sum()) == 8
    assert not decode(encoded)[2, 8:].any()


def test_sensitivities_of_other_matrices_are_refused() -> None:
    with pytest.raises(ConfigError, match="calibrate again"):
        Ternary().encode("w", torch.ones(2, 3), sensitivity=Sensitivity(hessian=torch.eye(2)))
    with pytest.raises(ConfigError, match="negative or not finite"):
        Ternary().encode("w", torch.ones(2, 3), sensitivity=Sensitivity(hessian=-torch.eye(3)))
    with pytest.raises(ConfigError, match="of 3 rows, not 2"):
        Ternary().encode("w", torch.ones(2, 3), sensitivity=Sensitivity(row_fisher=torch.ones(3)))


@settings(max_examples=10)
@given(
    group=st.sampled_from([1, 3, 8, 33, 100]),
    scheme=st.sampled_from([{"bits": 4}, {"bits": 8, "level_stride": 4}, {"sigma": 0.3}]),
    dtype=st.sampled_from(DTYPES),
)
def test_a_grouped_grid_is_a_grid_for_each_group(group: int, scheme: dict[str, float], dtype: torch.dtype) -> None:
    weight = random_weight(6, 33).to(dtype)
    grouped = decode(Grid(**scheme, group_size=group).encode("w", weight))  # type: ignore[arg-type]
    for start in range(0, 33, group):
        part = weight[:, start : start + group]
        assert torch.equal(grouped[:, start : start + group], decode(Grid(**scheme).encode("w", part)))  # type: ignore[arg-type]


def test_the_first_signs_are_pinned() -> None:
    """Files are decoded with these signs: 1 for minus, the first columns of two seeds."""
    bits = ["".join("01"[int(sign < 0)] for sign in signs(24, seed)) for seed in (0, 131_071)]
    assert bits == ["101101010011010001101100", "111110110110001010000111"]


def test_lloyd_max_levels_are_those_of_the_tables() -> None:
    """Max 1960, as every textbook has them; errors 0.1175, 0.03454, 0.009497."""
    np.testing.assert_allclose(lloyd_max(1), [-0.7979, 0.7979], atol=2e-3)
    np.testing.assert_allclose(lloyd_max(2)[2:], [0.4528, 1.510], atol=2e-3)
    np.testing.assert_allclose(lloyd_max(3)[4:], [0.2451, 0.7560, 1.344, 2.152], atol=2e-3)
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    for bits, wanted in ((2, 0.1175), (3, 0.03454), (4, 0.009497)):
        distortion = error(weight, Rotation(bits).encode("w", weight)) / weight.numel()
        assert abs(distortion / wanted - 1) < 0.03


@settings(max_examples=25)
@given(
    scheme=st.sampled_from([Rotation(4), Rotation(base=Grid(sigma=0.2)), Rotation(1)]),
    shape=st.sampled_from([(1, 1), (9,), (7, 5), (40, 33), (6, 4, 3, 3)]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_no_row_is_farther_from_the_weight_than_zeros(
    scheme: Rotation, shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    weight = random_weight(*shape, seed=seed).to(dtype)
    encoded = scheme.encode("w", weight)
    rows = weight.double().reshape(encoded.streams[0].shape)
    errors = (decode(encoded).double().reshape(rows.shape) - rows).square().sum(dim=1)
    assert bool((errors <= rows.square().sum(dim=1) + 1e-9).all())


def test_the_hessian_is_rotated_with_the_rows() -> None:
    """A base scheme gets the sensitivity of what it encodes: weighted errors do not change."""

    class Recording(Scheme):
        decoder = Grid.decoder

        def encode(self, name: str, weight: torch.Tensor, *, sensitivity: Sensitivity | None = None) -> Encoded:
            assert sensitivity is not None
            assert sensitivity.hessian is not None
            self.weighted_error = torch.einsum("ri,ij,rj->", weight, sensitivity.hessian, weight)
            return Grid().encode(name, weight, sensitivity=sensitivity)

    weight, inputs = random_weight(8, 24), random_weight(100, 24, seed=1)
    recording, hessian = Recording(), inputs.T @ inputs
    Rotation(base=recording, seed=5).encode("w", weight, sensitivity=Sensitivity(hessian=hessian))
    torch.testing.assert_close(
        recording.weighted_error, torch.einsum("ri,ij,rj->", weight, hessian, weight), rtol=1e-4, atol=0
    )


def test_bases_that_cannot_be_rotated_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot hold cast"):
        Rotation(base=Cast()).encode("w", random_weight(4, 8))
    with pytest.raises(ConfigError, match="cannot hold rotation"):
        Rotation(base=Rotation()).encode("w", random_weight(4, 8))
