"""Laws of the rate: it is what the coder takes, its slope is that of what it says, and chunks do not matter."""

import pytest
import torch
from torch import Tensor

from birdie.entropy import coder
from birdie.entropy.hints import Hints
from birdie.small.spectral import rate
from birdie.small.spectral.rate import bits_of


def source(kind: str, rows: int = 96, columns: int = 160) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator)
    if kind == "laplace":
        return x.sign() * -torch.log(torch.rand(rows, columns, generator=generator))
    if kind == "scaled":
        return x * torch.linspace(0, 2, rows).exp()[:, None] * torch.linspace(0, 1, columns).exp()
    if kind == "sparse":
        x[::3] = 0
    return x


def fitted(x: Tensor, step: float) -> Tensor:
    """The bits once the share of tails has been learned, as training does."""
    tails = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([tails], lr=0.2)
    for _ in range(15):
        bits = bits_of(x, torch.full((1, 1), step), tails)
        optimizer.zero_grad()
        bits.backward()
        optimizer.step()
    return bits.detach()


@pytest.mark.parametrize("kind", ["normal", "laplace", "scaled", "sparse"])
@pytest.mark.parametrize("step", [0.02, 0.5, 2.0])
def test_the_estimate_is_what_the_coder_takes(kind: str, step: float) -> None:
    x = source(kind)
    symbols = (x / step).round().to(torch.int32).numpy()
    coded = 8 * len(coder.encode(symbols, Hints(), "max").payload)
    assert float(fitted(x, step)) == pytest.approx(coded, rel=0.05)


def test_coarser_steps_cost_less() -> None:
    x, tails = source("laplace"), torch.zeros(1)
    sizes = [float(bits_of(x, torch.full((1, 1), step), tails)) for step in (0.05, 0.1, 0.3, 1.0, 3.0)]
    assert sizes == sorted(sizes, reverse=True)


def plain_bits(q: Tensor, moments: list[Tensor], tails: Tensor) -> Tensor:
    """The formula as the module says it, for autograd."""
    square, size = (
        (r[:, None] + rate.FLOOR) * (c + rate.FLOOR) / (m + rate.FLOOR)
        for r, c, m in zip(*[iter(moments)] * 3, strict=True)
    )
    deviation = torch.maximum(square - 1 / 12, square / 4).sqrt()
    normal = torch.special.ndtr((q.abs() + 0.5) / deviation) - torch.special.ndtr((q.abs() - 0.5) / deviation)
    ratio = ((1 + size**2).sqrt() - 1) / size
    geometric = (1 - ratio) / (1 + ratio) * ratio ** q.abs()
    share = torch.sigmoid(tails[0])
    return -torch.log2((1 - share) * normal + share * geometric + 2.0**-24).sum()


def means(q: Tensor) -> list[Tensor]:
    return [mean for part in (q**2, q.abs()) for mean in (part.mean(1), part.mean(0), part.mean())]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("step", [0.3, 1.5])
def test_slopes_are_those_of_the_formula(step: float, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(rate, "_compiled", rate._in_tensors)
    x = source("laplace", 12, 17).requires_grad_(True)
    steps, tails = torch.full((1, 1), step, requires_grad=True), torch.tensor([0.3], requires_grad=True)
    bits_of(x, steps, tails).backward()
    other, width = x.detach().double().requires_grad_(True), torch.tensor(step, dtype=torch.float64, requires_grad=True)
    q = other / width
    hard = q.detach().round()
    # Moments have the symbols' values and the coefficients' slopes.
    moments = [value + (moved - moved.detach()) for value, moved in zip(means(hard), means(q), strict=True)]
    plain_bits(q, moments, torch.tensor([0.3])).backward()
    torch.testing.assert_close(x.grad, other.grad, check_dtype=False, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(steps.grad.sum(), width.grad, check_dtype=False, rtol=1e-3, atol=1e-3)  # type: ignore[union-attr]
    free = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    plain_bits(hard, means(hard), free).backward()
    torch.testing.assert_close(tails.grad, free.grad, check_dtype=False, rtol=1e-3, atol=1e-3)


def worked(x: Tensor, steps: Tensor) -> list[Tensor]:
    """The value and all slopes."""
    x, steps, tails = (tensor.clone().requires_grad_(True) for tensor in (x, steps, torch.full((1,), -0.7)))
    value = bits_of(x, steps, tails)
    (2 * value).backward()
    gradients = [value.detach(), x.grad, steps.grad, tails.grad]
    assert all(tensor is not None for tensor in gradients)
    return gradients  # type: ignore[return-value]


def alike(first: Tensor, second: Tensor) -> None:
    assert first.shape == second.shape
    assert float((first - second).norm()) <= 3e-3 * float(second.norm()) + 0.01  # float32 differences at fine steps


@pytest.mark.parametrize("kind", ["normal", "laplace", "scaled", "sparse"])
@pytest.mark.parametrize("step", [0.01, 0.5, 4.0])
@pytest.mark.parametrize("many", [False, True])
def test_compiled_is_the_tensors(kind: str, step: float, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = source(kind, 37, 53)
    steps = (
        step * (0.5 + torch.rand(x.shape, generator=torch.Generator().manual_seed(1)))
        if many
        else torch.full((1, 1), step)
    )
    results = worked(x, steps)
    without = bits_of(x, steps, torch.full((1,), -0.7))
    monkeypatch.setattr(rate, "_compiled", rate._in_tensors)
    for first, second in zip(results, worked(x, steps), strict=True):
        alike(first, second)
    assert torch.equal(without, results[0])
