"""Ternary and binary scales are the best there are, symbols stay in {−1, 0, 1}, and zeros stay zero."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.compress.log_scales import scales_of
from birdie.compress.registry import decode
from birdie.compress.scheme import Sensitivity
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.ternary import Ternary
from birdie.errors import ConfigError
from tests.compress.matrices import DTYPES, random_weight, squared_error


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
