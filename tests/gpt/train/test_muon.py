"""Newton–Schulz yields nearly orthogonal matrices, and Muon is its published formula, however it batches."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from birdie.errors import ConfigError
from birdie.gpt.train.muon import Muon, newton_schulz, schedule
from birdie.gpt.train.settings import Coefficients

sides = st.integers(1, 24)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain_newton_schulz(G: torch.Tensor, steps: int = 5, coefficients: Coefficients = "classic") -> torch.Tensor:
    """Run the iteration on one matrix as in the source, without batching, one step at a time."""
    X = G.T if G.shape[0] > G.shape[1] else G
    X = X / (X.norm() + 1e-7)
    for a, b, c in schedule(coefficients, steps):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    result: torch.Tensor = X.T if G.shape[0] > G.shape[1] else X
    return result


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 64), columns=st.integers(1, 64), scale=st.sampled_from([1e-4, 1.0, 1e4]))
def test_singular_values_come_near_one(rows: int, columns: int, scale: float) -> None:
    G = gaussian(rows, columns, seed=rows * 100 + columns) * scale
    values = torch.linalg.svdvals(G)
    result = torch.linalg.svdvals(newton_schulz(G))
    # five steps raise values above a hundredth of the norm; smaller ones need more
    assert (result[values / values.norm() > 0.01] > 0.6).all()
    assert result.max() < 1.3


@settings(max_examples=30, deadline=None)
@given(rows=sides, columns=sides, count=st.integers(1, 4))
def test_a_batch_equals_its_matrices(rows: int, columns: int, count: int) -> None:
    G = gaussian(count, rows, columns)
    torch.testing.assert_close(newton_schulz(G), torch.stack([plain_newton_schulz(g) for g in G]), rtol=1e-4, atol=1e-4)


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
    initial = still.detach().clone()
    moving.grad = gaussian(4, 4, seed=1)
    Muon([still, moving], 0.1).step()
    assert torch.equal(still, initial)
    assert not torch.equal(moving, initial)


def test_step_returns_the_closures_loss() -> None:
    p = nn.Parameter(gaussian(3, 3))

    def closure() -> float:
        p.grad = None
        loss = p.square().sum()
        loss.backward()
        return loss.item()

    first = p.square().sum().item()
    muon = Muon([p], 0.1)
    assert muon.step(closure) == pytest.approx(first)
    assert muon.step(closure) < first


@settings(max_examples=30, deadline=None)
@given(rows=sides, columns=sides, steps=st.integers(0, 6), coefficients=st.sampled_from(["classic", "polar_express"]))
def test_two_steps_at_once_are_two_steps(rows: int, columns: int, steps: int, coefficients: Coefficients) -> None:
    """Wide and tall matrices take steps in pairs, and an odd one at the end."""
    G = gaussian(2, rows, columns)
    expected = torch.stack([plain_newton_schulz(g.double(), steps, coefficients) for g in G])
    torch.testing.assert_close(newton_schulz(G.double(), steps, torch.float64, coefficients), expected)


def one_step(gradient: torch.Tensor, **options: object) -> torch.Tensor:
    """Return the update of a first step with learning rate 1."""
    p = nn.Parameter(torch.zeros_like(gradient))
    p.grad = gradient
    Muon([p], 1.0, **options).step()  # type: ignore[arg-type]
    return -p.detach()


def test_with_row_normalization_the_norms_of_rows_do_not_matter() -> None:
    """MuonEq-R: scaled rows give the same update; without it they do not."""
    G, sizes = gaussian(8, 24), torch.logspace(-3, 3, 8)[:, None]
    torch.testing.assert_close(one_step(G, row_normalize=True), one_step(G * sizes, row_normalize=True))
    assert (one_step(G) - one_step(G * sizes)).norm() > 0.1


def test_normuon_evens_out_rows_and_keeps_the_norm() -> None:
    G = gaussian(12, 12) * torch.logspace(-2, 0, 12)[:, None]
    plain, even = one_step(G), one_step(G, beta2=0.95)
    rows = even.square().mean(1)
    torch.testing.assert_close(rows, rows.mean().expand(12), rtol=1e-3, atol=0)
    assert plain.square().mean(1).std() > 10 * rows.std()
    torch.testing.assert_close(even.norm(), plain.norm(), rtol=1e-3, atol=0)


def test_a_stack_of_matrices_is_trained_as_its_matrices() -> None:
    stack = nn.Parameter(gaussian(3, 4, 8))
    alone = [nn.Parameter(part.detach().clone()) for part in stack]
    together, apart = Muon([stack], 0.1, beta2=0.9), Muon(alone, 0.1, beta2=0.9)
    for step in range(2):
        stack.grad = gaussian(3, 4, 8, seed=step)
        for p, part in zip(alone, stack.grad, strict=True):
            p.grad = part.clone()
        together.step()
        apart.step()
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in alone]))


def test_the_state_dict_round_trips() -> None:
    def trained(steps: range, muon: Muon, p: nn.Parameter) -> None:
        for step in steps:
            p.grad = gaussian(4, 6, seed=step)
            muon.step()

    reference, p = nn.Parameter(gaussian(4, 6)), nn.Parameter(gaussian(4, 6))
    trained(range(4), Muon([reference], 0.1, beta2=0.9), reference)
    first = Muon([p], 0.1, beta2=0.9)
    trained(range(2), first, p)
    second = Muon([p], 0.1, beta2=0.9)
    second.load_state_dict(first.state_dict())
    trained(range(2, 4), second, p)
    assert torch.equal(p, reference)


@pytest.mark.parametrize(
    ("shape", "options", "values"),
    [
        ((4,), {}, r"shape \(4,\)"),
        ((4, 4), {"lr": -1.0}, "lr is -1.0"),
        ((4, 4), {"momentum": 1.0}, r"momentum is 1.0"),
        ((4, 4), {"beta2": 1.5}, "beta2 is 1.5"),
        ((4, 4), {"steps": -1}, "steps are -1"),
        ((4, 4), {"coefficients": "other"}, "coefficients are 'other'"),
    ],
)
def test_bad_settings_are_refused(shape: tuple[int, ...], options: dict[str, object], values: str) -> None:
    with pytest.raises(ConfigError, match=values):
        Muon([nn.Parameter(torch.zeros(shape))], **{"lr": 0.1, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_row_means_stay_float32_in_a_loaded_state(dtype: torch.dtype) -> None:
    """torch casts a loaded state to the dtype of the parameter."""

    def parameter_and_muon() -> tuple[nn.Parameter, Muon]:
        p = nn.Parameter(gaussian(4, 6).to(dtype))
        p.grad = gaussian(4, 6, seed=1).to(dtype)
        return p, Muon([p], lr=0.02, beta2=0.95)

    (one, saved), (two, loaded) = parameter_and_muon(), parameter_and_muon()
    saved.step()
    two.data.copy_(one.data)
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    for optimizer in (saved, loaded):
        optimizer.step()
    assert torch.equal(one, two)
