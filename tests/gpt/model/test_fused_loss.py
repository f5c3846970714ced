"""The fused loss computes what the eager one does, in chunks and by kernels."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from birdie.gpt.model import fused_loss
from birdie.gpt.model.fused_loss import capped_loss, choose_backend
from birdie.gpt.model.gpt import GPT
from tests.interpreted_kernels import run_interpreted
from tests.tiny_run import TinyBatches, tiny_model, tiny_settings, tiny_training

CPU = torch.device("cpu")


def eager(logits: Tensor, targets: Tensor, cap: float) -> Tensor:
    return torch.nn.functional.cross_entropy(cap * torch.tanh(logits.float() / cap), targets)


@given(
    count=st.integers(1, 90),
    width=st.integers(2, 90),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    cap=st.floats(0.5, 50),
    size=st.floats(0.01, 200),
    chunks=st.sampled_from([1, 2, 8]),
    cached=st.sampled_from([64, 1000, 65_536]),
)
@settings(max_examples=30, deadline=None)
def test_chunks_compute_loss_and_gradient_bit_for_bit(
    count: int, width: int, dtype: torch.dtype, cap: float, size: float, chunks: int, cached: int
) -> None:
    generator = torch.Generator().manual_seed(count * width)
    source = (torch.randn(count, width, generator=generator) * size).to(dtype)
    targets = torch.randint(width, (count,), generator=generator)
    plain, chunked = source.clone().requires_grad_(), source.clone().requires_grad_()
    expected = eager(plain, targets, cap)
    (expected / chunks).backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_loss, "CACHED", cached)
        loss = capped_loss(chunked + 0, targets, cap, "chunks")
    (loss / chunks).backward()
    assert torch.equal(loss, expected)
    assert chunked.grad is not None
    assert plain.grad is not None
    assert chunked.grad.dtype is dtype
    if chunks == 1:
        assert torch.equal(chunked.grad, plain.grad)
    else:  # half of a subnormal number may need rounding
        torch.testing.assert_close(chunked.grad, plain.grad, rtol=0, atol=2e-38)


def test_any_factor_on_the_loss_reaches_the_gradient() -> None:
    source, targets = torch.randn(10, 30), torch.randint(30, (10,))
    plain, chunked = source.clone().requires_grad_(), source.clone().requires_grad_()
    (eager(plain, targets, 3.0) * 0.3).backward()
    (capped_loss(chunked + 0, targets, 3.0, "chunks") * 0.3).backward()
    torch.testing.assert_close(chunked.grad, plain.grad)


def test_a_second_backward_pass_is_refused() -> None:
    logits = torch.randn(4, 8, requires_grad=True)
    loss = capped_loss(logits + 0, torch.randint(8, (4,)), 3.0, "chunks")
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"GPT\.fuse_loss\(False\)"):
        loss.backward()


def curve(**changes: Any) -> tuple[list[float], GPT]:
    model = tiny_model()
    return [step.loss for step in tiny_training(model, TinyBatches(), tiny_settings(**changes))], model


@pytest.mark.nightly
def test_a_run_is_the_same_with_fused_and_with_eager_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    original = fused_loss._ChunkedLoss.apply

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*arguments)

    monkeypatch.setattr(fused_loss._ChunkedLoss, "apply", counted)
    without, plain = curve(fused=False)
    assert calls == 0
    assert not any("fused" in line for line in plain.diagnostics())
    with_it, model = curve(fused=True)
    assert calls == 12 * 4
    assert model.diagnostics() == ["fused loss: softcap and cross-entropy by chunks of rows"]
    assert with_it == without
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_only_the_mean_loss_of_training_is_fused() -> None:
    model = tiny_model()
    assert model.fuse_loss() == "chunks"
    ids, targets = TinyBatches().next()
    losses = {
        "training": model.loss(ids, targets),
        "per token": model.loss(ids, targets, "none"),
        "scoring": model.eval().loss(ids, targets),
    }
    fused = {name for name, loss in losses.items() if "ChunkedLoss" in type(loss.grad_fn).__name__}
    assert fused == {"training"}
    assert torch.equal(losses["training"], losses["scoring"])
    with torch.no_grad():
        assert model.train().loss(ids, targets) == losses["training"]


def test_the_backend_depends_on_device_compiler_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert choose_backend(CPU, compiled=False) == "chunks"
    assert choose_backend(CPU, compiled=True) == "eager"
    assert choose_backend(torch.device("meta"), compiled=False) == "eager"
    monkeypatch.setattr(fused_loss, "find_spec", lambda _: object())
    monkeypatch.setattr(fused_loss, "_triton_works", lambda _: True)
    assert choose_backend(cuda, compiled=True) == choose_backend(cuda, compiled=False) == "triton"
    monkeypatch.setattr(fused_loss, "_triton_works", lambda _: False)
    assert choose_backend(cuda, compiled=True) == "eager"
    monkeypatch.setattr(fused_loss, "find_spec", lambda _: None)
    assert choose_backend(cuda, compiled=True) == "eager"


def test_a_gradient_of_the_gradient_is_refused() -> None:
    """Chunks keep no graph of their backward pass: a Hessian through them would lack the curvature of the loss."""
    logits = torch.randn(4, 9, requires_grad=True)
    (first,) = torch.autograd.grad(capped_loss(logits * 1, torch.arange(4), 5.0, "chunks"), logits, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        torch.autograd.grad(first.square().sum(), logits)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, Any]]:
    """Return the results of the loss kernel."""
    return run_interpreted("model/loss_kernels_interpreted.py")


@pytest.mark.parametrize("case", ["one block", "several blocks", "beyond a float's exponential", "bfloat16"])
def test_the_kernel_is_as_accurate_as_eager_float32(case: str, interpreted: dict[str, dict[str, Any]]) -> None:
    errors = interpreted[case]
    assert errors["dtype"] == "torch.float32"
    assert errors["value"] <= 4 * errors["eager value"] + 1e-6
    assert errors["gradient"] <= (2**-7 if case == "bfloat16" else 2 * errors["eager gradient"] + 1e-6)


def test_a_model_with_the_kernel_equals_the_eager_one_and_compiles(interpreted: dict[str, dict[str, Any]]) -> None:
    errors = interpreted["model"]
    assert errors["value"] < 2e-6
    assert errors["gradient"] < 1e-5
    assert errors["compiled value"] < 1e-6
    assert errors["compiled gradient"] < 1e-5


def test_the_operation_passes_torchs_checks(interpreted: dict[str, dict[str, Any]]) -> None:
    assert set(interpreted["registered"].values()) == {"SUCCESS"}
