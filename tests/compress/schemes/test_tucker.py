"""Tucker in the file: core and factors come back from bytes alone, in sums of one order, and pay for few components."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birdie.compress.registry import decode
from birdie.compress.scheme import Encoded
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.lowrank import LowRank
from birdie.compress.schemes.rotation import Rotation
from birdie.compress.schemes.tucker import (
    Tucker,
    decompose,
)
from birdie.errors import ConfigError
from tests.compress.matrices import coded_bytes, few_components, relative_error

GRID = (2, 0)  # an inner tensor on a grid


def test_it_is_taken_and_pays_where_components_are_few() -> None:
    for shape in ((48, 60), (16, 20, 3, 3)):
        weight = few_components(*shape)
        encoded = Tucker(0.999, base=Grid(sigma=0.05)).encode("w", weight)
        plain = Grid(sigma=0.1).encode("w", weight)
        assert encoded.scheme == "tucker"
        assert relative_error(weight, encoded) < relative_error(weight, plain)
        assert coded_bytes(encoded) < 0.5 * coded_bytes(plain)


def test_the_core_makes_up_for_what_factors_lost() -> None:
    """Fitted to the quantized factors it leaves less than the core of the exact ones."""
    weight = few_components(32, 40, rank=4)
    encoded = Tucker(0.999, base=Grid(sigma=0.3)).encode("w", weight)
    ranks = encoded.params[:2]
    assert ranks != (32, 40)
    projected = relative_error(weight, encoded)
    left, _, right = torch.linalg.svd(weight, full_matrices=False)
    spoiled = left[:, : ranks[0]] + 0.3 * weight.std() * 12**-0.5 * torch.randn(32, ranks[0])
    core = left[:, : ranks[0]].T @ weight @ right[: ranks[1]].T
    plain = float((spoiled @ core @ right[: ranks[1]] - weight).square().sum() / weight.square().sum())
    assert projected < plain


def test_what_is_not_cut_is_as_the_base_alone() -> None:
    noise = torch.randn(20, 20, generator=torch.Generator().manual_seed(0))
    for weight in (noise, few_components(30), few_components(1, 1)):
        encoded, base = Tucker().encode("w", weight), Grid(sigma=0.3).encode("w", weight)
        assert encoded.scheme == "grid"
        assert torch.equal(decode(encoded), decode(base))
    nine = torch.ones(2, 2, 2, 2, 2, 2, 2, 2, 2)
    assert Tucker().encode("w", nine).scheme == "grid"
    assert Tucker(ranks=(19, 19)).encode("w", noise).scheme == "grid"  # more numbers than there were


def test_the_sum_is_the_one_that_the_format_describes() -> None:
    """Axes from the last to the first, k rising, in plain Python's float64."""
    core, first = np.array([[5, -3]]), np.array([[7, 2, -4, 1]])
    last = np.array([[1, -6, 2, 9], [3, 8, -5, 1]])
    scales = [np.array([[index]], np.int32) for index in (-33, -7, 5)]
    params = (1, 2, *GRID, *GRID, *GRID)
    inner = (
        (first, scales[1], np.array([[3]], np.int32)),
        (last, np.array([[-1], [9]], np.int32), np.array([[2], [-30]])),
    )
    streams = (core, scales[0], *inner[0], *inner[1])
    decoded = decode(Encoded("tucker", (4, 4), torch.float64, params, streams)).tolist()

    def scale(index: int) -> float:
        table = {0: 8388608, 2: 9147842, 3: 9552851, 5: 10417458, 9: 12388516, 15: 16065917}
        return float(table[index % 16] * 2.0 ** (index // 16 - 23))

    a = [float(x) * scale(-33) for x in (5, -3)]
    u = [float(np.float32(x * scale(-7))) * scale(3) for x in (7, 2, -4, 1)]
    kept = zip(last.tolist(), (-1, 9), (2, -30), strict=True)
    v = [[float(np.float32(x * scale(k))) * scale(s) for x in row] for row, k, s in kept]
    line = [v[0][j] * float(np.float32(a[0])) + v[1][j] * float(np.float32(a[1])) for j in range(4)]
    assert decoded == [[float(np.float32(u[i] * line[j])) for j in range(4)] for i in range(4)]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lost(weight: torch.Tensor, core: torch.Tensor, factors: dict[int, torch.Tensor]) -> float:
    """Return the squared error of a core and its factors."""
    for axis, factor in factors.items():
        core = torch.tensordot(factor, core, dims=([1], [axis])).movedim(0, axis)
    return float((core - weight).square().sum())


@settings(max_examples=25)
@given(
    shape=st.lists(st.integers(1, 7), min_size=2, max_size=4).map(tuple),
    seed=st.integers(0, 99),
    energy=st.floats(0.05, 1),
)
def test_a_decomposition_loses_the_energy_that_was_cut(shape: tuple[int, ...], seed: int, energy: float) -> None:
    weight = noise(*shape, seed=seed)
    core, factors = decompose(weight, energy, None)
    total = float(weight.square().sum())
    assert lost(weight, core, factors) <= (1 - energy) * total + 1e-9 * total
    rest = total - float(core.square().sum())
    assert lost(weight, core, factors) == pytest.approx(rest, abs=1e-9 * total + 1e-12)
    assert core.numel() + sum(factor.numel() for factor in factors.values()) <= weight.numel()
    for factor in factors.values():
        torch.testing.assert_close(factor.mT @ factor, torch.eye(factor.shape[1], dtype=factor.dtype))


def test_ranks_and_bases_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks"):
        Tucker(ranks=(2, 2, 2)).encode("w", few_components(12, 10))
    for base in (LowRank(), Rotation()):
        with pytest.raises(ConfigError, match="tucker cannot hold"):
            Tucker(base=base).encode("w", few_components(24, 20))
