"""The fused loss is the eager one: chunks to the bit, the kernel to float32 rounding; each is on when it says so."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from birdie.model import fused
from birdie.model.evidence import evidence
from birdie.model.fused import capped_loss, way_for
from birdie.model.gpt import GPT, GPTConfig
from birdie.run.recipe import load_recipe
from birdie.train.loop import fit
from tests.tiny_run import OPTIMIZERS, TinyBatches, tiny_model, tiny_settings

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def eager(logits: Tensor, targets: Tensor, cap: float) -> Tensor:
    return torch.nn.functional.cross_entropy(cap * torch.tanh(logits.float() / cap), targets)


@given(
    count=st.integers(1, 90),
    width=st.integers(2, 90),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    cap=st.floats(0.5, 50),
    size=st.floats(0.01, 200),
    spans=st.sampled_from([1, 2, 8]),
    cached=st.sampled_from([64, 1000, 65_536]),
)
@settings(max_examples=30, deadline=None)
def test_chunks_give_loss_and_gradient_to_the_bit(
    count: int, width: int, dtype: torch.dtype, cap: float, size: float, spans: int, cached: int
) -> None:
    generator = torch.Generator().manual_seed(count * width)
    source = (torch.randn(count, width, generator=generator) * size).to(dtype)
    targets = torch.randint(width, (count,), generator=generator)
    plain, own = source.clone().requires_grad_(), source.clone().requires_grad_()
    expected = eager(plain, targets, cap)
    (expected / spans).backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "CACHED", cached)
        found = capped_loss(own + 0, targets, cap, "chunks")
    (found / spans).backward()
    assert torch.equal(found, expected)
    assert own.grad is not None
    assert plain.grad is not None
    assert own.grad.dtype is dtype
    if spans == 1:
        assert torch.equal(own.grad, plain.grad)
    else:  # half of a subnormal number may have to be rounded
        torch.testing.assert_close(own.grad, plain.grad, rtol=0, atol=2e-38)


def test_any_factor_on_the_loss_reaches_the_gradient() -> None:
    source, targets = torch.randn(10, 30), torch.randint(30, (10,))
    plain, own = source.clone().requires_grad_(), source.clone().requires_grad_()
    (eager(plain, targets, 3.0) * 0.3).backward()
    (capped_loss(own + 0, targets, 3.0, "chunks") * 0.3).backward()
    torch.testing.assert_close(own.grad, plain.grad)


def test_a_second_backward_pass_is_refused_and_not_wrong() -> None:
    logits = torch.randn(4, 8, requires_grad=True)
    loss = capped_loss(logits + 0, torch.randint(8, (4,)), 3.0, "chunks")
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"once; turn it off with GPT.fuse\(False\)"):
        loss.backward()


def curve(**changes: Any) -> tuple[list[float], GPT]:
    model = tiny_model()
    return [step.loss for step in fit(model, TinyBatches(), tiny_settings(**changes), OPTIMIZERS)], model


def test_a_run_is_the_same_with_it_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    through = fused._InChunks.apply

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return through(*arguments)

    monkeypatch.setattr(fused._InChunks, "apply", counted)
    without, plain = curve(fused=False)
    assert calls == 0
    assert not any("fused" in line for line in evidence(plain))
    with_it, model = curve(fused=True)
    assert calls == 12 * 4
    assert any(line == "fused loss: softcap and cross-entropy by chunks of rows" for line in evidence(model))
    assert with_it == without
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_only_training_takes_it() -> None:
    model = tiny_model()
    assert model.fuse() == "chunks"
    ids, targets = TinyBatches().next()
    kinds = {
        "training": model.loss(ids, targets),
        "each": model.loss(ids, targets, "none"),
        "scoring": model.eval().loss(ids, targets),
    }
    fused_ones = {name for name, loss in kinds.items() if "InChunks" in type(loss.grad_fn).__name__}
    assert fused_ones == {"training"}
    assert torch.equal(kinds["training"], kinds["scoring"])
    with torch.no_grad():
        assert model.train().loss(ids, targets) == kinds["training"]


@pytest.mark.parametrize("softcap", ["poly", "asymmetric"])
def test_other_caps_take_the_eager_way(softcap: Any) -> None:
    model = GPT(GPTConfig(vocab_size=16, num_layers=1, model_dim=8, num_heads=1, num_kv_heads=1, softcap=softcap))
    assert model.fuse() == "eager"


def test_the_way_goes_by_device_compiler_and_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert way_for(CPU, compiled=False) == "chunks"
    assert way_for(CPU, compiled=True) == "eager"
    assert way_for(torch.device("meta"), compiled=False) == "eager"
    monkeypatch.setattr(fused, "find_spec", lambda _: object())
    assert way_for(cuda, compiled=True) == way_for(cuda, compiled=False) == "triton"
    monkeypatch.setattr(fused, "find_spec", lambda _: None)
    assert way_for(cuda, compiled=True) == "eager"


def test_the_variable_of_the_challenge_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_recipe().train.fused
    monkeypatch.setenv("FUSED_CE_ENABLED", "0")
    assert not load_recipe().train.fused


def under_the_interpreter(script: str) -> dict[str, dict[str, Any]]:
    """What kernels give in a process of their own, for Triton must know before it is imported."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests" / "model" / script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, Any]]:
    """Of the loss."""
    return under_the_interpreter("loss_kernels_interpreted.py")


@pytest.fixture(scope="module")
def interpreted_mlp() -> dict[str, dict[str, Any]]:
    """Of the MLP."""
    return under_the_interpreter("mlp_kernels_interpreted.py")


@pytest.mark.parametrize("case", ["one tile", "several tiles"])
def test_the_fused_mlp_is_as_near_to_the_truth_as_eager_float32(
    case: str, interpreted_mlp: dict[str, dict[str, Any]]
) -> None:
    found = interpreted_mlp[case]
    assert found["kernel"] <= 2 * found["eager"] + 1e-7


def test_a_model_with_fused_mlps_is_the_eager_one_and_compiles_whole(
    interpreted_mlp: dict[str, dict[str, Any]],
) -> None:
    found = interpreted_mlp["model"]
    assert found["calls"] == 2
    assert max(found["value"], found["compiled value"]) < 2e-6
    assert max(found["gradient"], found["compiled gradient"]) < 1e-5
    assert set(interpreted_mlp["registered"].values()) == {"SUCCESS"}


def test_fused_mlps_that_cannot_be_are_told_and_done_without() -> None:
    lines: list[str] = []
    settings = tiny_settings(iterations=2, fused_mlp=True)
    asked = [step.loss for step in fit(tiny_model(), TinyBatches(), settings, OPTIMIZERS, notify=lines.append)]
    plain = [step.loss for step in fit(tiny_model(), TinyBatches(), tiny_settings(iterations=2), OPTIMIZERS)]
    assert asked == plain
    assert any("fused MLPs need CUDA" in line for line in lines)


@pytest.mark.parametrize("case", ["one block", "several blocks", "beyond a float's exponential", "bfloat16"])
def test_the_kernel_is_as_near_to_the_truth_as_eager_float32(case: str, interpreted: dict[str, dict[str, Any]]) -> None:
    found = interpreted[case]
    assert found["dtype"] == "torch.float32"
    assert found["value"] <= 4 * found["eager value"] + 1e-6
    assert found["gradient"] <= (2**-7 if case == "bfloat16" else 2 * found["eager gradient"] + 1e-6)


def test_a_model_through_the_kernel_is_the_eager_one_and_compiles_whole(interpreted: dict[str, dict[str, Any]]) -> None:
    found = interpreted["model"]
    assert found["value"] < 2e-6
    assert found["gradient"] < 1e-5
    assert found["compiled value"] < 1e-6
    assert found["compiled gradient"] < 1e-5


def test_the_operation_is_registered_as_it_should_be(interpreted: dict[str, dict[str, Any]]) -> None:
    assert set(interpreted["registered"].values()) == {"SUCCESS"}


def test_a_gradient_of_the_gradient_is_refused() -> None:
    """Chunks keep no graph of their backward pass: a Hessian through them would lack the loss's own curvature."""
    logits = torch.randn(4, 9, requires_grad=True)
    (first,) = torch.autograd.grad(capped_loss(logits * 1, torch.arange(4), 5.0, "chunks"), logits, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        torch.autograd.grad(first.square().sum(), logits)
