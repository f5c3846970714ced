"""Newton–Schulz yields nearly orthogonal matrices, and Muon is its published formula, whatever it batches."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from birdie.train.muon import Muon, newton_schulz

sides = st.integers(1, 24)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain_newton_schulz(G: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The iteration on one matrix as it is written in the source, without any batching."""
    X = G.T if G.shape[0] > G.shape[1] else G
    X = X / (X.norm() + 1e-7)
    for _ in range(steps):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X.T if G.shape[0] > G.shape[1] else X


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 64), columns=st.integers(1, 64), scale=st.sampled_from([1e-4, 1.0, 1e4]))
def test_singular_values_come_near_one(rows: int, columns: int, scale: float) -> None:
    G = gaussian(rows, columns, seed=rows * 100 + columns) * scale
    before = torch.linalg.svdvals(G)
    after = torch.linalg.svdvals(newton_schulz(G))
    # five steps lift what is above a hundredth of the norm; the rest is on its way
    assert (after[before / before.norm() > 0.01] > 0.6).all()
    assert after.max() < 1.3


@settings(max_examples=30, deadline=None)
@given(rows=sides, columns=sides, count=st.integers(1, 4))
def test_a_batch_equals_its_matrices(rows: int, columns: int, count: int) -> None:
    G = gaussian(count, rows, columns)
    torch.testing.assert_close(newton_schulz(G), torch.stack([plain_newton_schulz(g) for g in G]), rtol=1e-4, atol=1e-4)


def test_zero_stays_zero() -> None:
    assert not newton_schulz(torch.zeros(3, 4)).any()


def test_bfloat16_stays_close_to_float32() -> None:
    """Coarser, by a few hundredths in relative norm, which is why the dtype is a recorded setting."""
    G = gaussian(64, 128)
    exact, coarse = newton_schulz(G), newton_schulz(G, dtype=torch.bfloat16)
    assert coarse.dtype == torch.bfloat16
    assert (coarse.float() - exact).norm() / exact.norm() < 0.05


@settings(max_examples=20, deadline=None)
@given(shapes=st.lists(st.sampled_from([(4, 8), (8, 4), (6, 6)]), min_size=1, max_size=6))
def test_muon_equals_the_formula_matrix_by_matrix(shapes: list[tuple[int, int]]) -> None:
    lr, momentum = 0.1, 0.9
    params = [nn.Parameter(gaussian(*shape, seed=i)) for i, shape in enumerate(shapes)]
    expected = [p.detach().clone() for p in params]
    buffers = [torch.zeros_like(p) for p in params]
    muon = Muon(params, lr, momentum=momentum)
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = gaussian(*p.shape, seed=100 * step + i)
            buffers[i] = momentum * buffers[i] + p.grad
            update = plain_newton_schulz(p.grad + momentum * buffers[i])
            expected[i] -= lr * math.sqrt(max(1, p.shape[0] / p.shape[1])) * update
        muon.step()
    for p, value in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach(), value, rtol=1e-4, atol=1e-4)


def test_a_parameter_without_gradient_is_left_alone() -> None:
    still, moving = nn.Parameter(gaussian(4, 4)), nn.Parameter(gaussian(4, 4))
    before = still.detach().clone()
    moving.grad = gaussian(4, 4, seed=1)
    Muon([still, moving], 0.1).step()
    assert torch.equal(still, before)
    assert not torch.equal(moving, before)


def test_step_returns_the_closures_loss() -> None:
    p = nn.Parameter(gaussian(3, 3))

    def closure() -> torch.Tensor:
        p.grad = None
        loss = p.square().sum()
        loss.backward()
        return loss

    first = p.square().sum().item()
    muon = Muon([p], 0.1)
    assert muon.step(closure).item() == pytest.approx(first)
    assert muon.step(closure).item() < first
