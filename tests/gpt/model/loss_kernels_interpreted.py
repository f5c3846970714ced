"""Errors of the loss kernel under Triton's interpreter, relative to eager float64: prints one JSON object.

TRITON_INTERPRET=1 python tests/gpt/model/loss_kernels_interpreted.py     # as test_loss_kernels does
"""

import json
import sys

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.model.loss_kernels import softcap_nats

Errors = dict[str, float | bool | str]


def nats_of(logits: Tensor, targets: Tensor, cap: float) -> Tensor:
    return cross_entropy(cap * torch.tanh(logits / cap), targets, reduction="none")


def loss(count: int, width: int, cap: float, dtype: torch.dtype, size: float) -> Errors:
    """Return errors of values and gradients against float64, of the kernel and of eager float32."""
    generator = torch.Generator().manual_seed(count)
    logits = (torch.randn(count, width + 3, generator=generator) * size).to(dtype)[:, :width].requires_grad_()
    targets = torch.randint(width, (count,), generator=generator)
    outer = torch.randn(count, generator=generator)
    exact = nats_of(logits.double(), targets, cap)
    eager = nats_of(logits.float(), targets, cap)
    kernel = softcap_nats(logits, targets, cap)[0]
    nats = (exact, eager, kernel)
    gradients = [torch.autograd.grad(y, logits, outer.to(y.dtype))[0].double() for y in nats]
    largest = gradients[0].abs().max()
    return {
        "value": float((kernel - exact).abs().max()),
        "eager value": float((eager - exact).abs().max()),
        "gradient": float((gradients[2] - gradients[0]).abs().max() / largest),
        "eager gradient": float((gradients[1] - gradients[0]).abs().max() / largest),
        "dtype": str(kernel.dtype),
    }


def model() -> Errors:
    """Return differences between a model with the kernel, eager and compiled to one graph, and the eager loss."""
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(vocab_size=40, num_layers=1, model_dim=16, num_heads=2, num_kv_heads=1, logit_softcap=3.0))
    with torch.no_grad():
        gpt.tok_emb.weight.normal_()
    ids = torch.randint(0, 40, (2, 8))

    def gradient(mode: str) -> tuple[float, Tensor]:
        gpt.loss_backend = "eager" if mode == "eager" else "triton"
        compute = torch.compile(gpt.loss, fullgraph=True, backend="aot_eager") if mode == "compiled" else gpt.loss
        value = compute(ids, ids.roll(-1, 1))
        (result,) = torch.autograd.grad(value, gpt.tok_emb.weight)
        return float(value.detach()), result

    modes = (gradient(mode) for mode in ("eager", "triton", "compiled"))
    (eager, eager_gradient), (triton, triton_gradient), (compiled, compiled_gradient) = modes
    return {
        "value": abs(triton - eager),
        "compiled value": abs(compiled - triton),
        "gradient": float((triton_gradient - eager_gradient).abs().max() / eager_gradient.abs().max()),
        "compiled gradient": float((compiled_gradient - triton_gradient).abs().max() / triton_gradient.abs().max()),
    }


def registered() -> Errors:
    """Return the results of PyTorch's checks of a custom operation."""
    logits, targets = torch.randn(3, 20, requires_grad=True), torch.randint(20, (3,))
    checks: dict[str, str] = torch.library.opcheck(softcap_nats, (logits, targets, 5.0))
    return dict(checks)


def main() -> None:
    results = {
        "one block": loss(5, 64, 30.0, torch.float32, 20.0),
        "several blocks": loss(4, 2500, 30.0, torch.float32, 40.0),
        "beyond a float's exponential": loss(3, 50, 500.0, torch.float32, 400.0),
        "bfloat16": loss(5, 1100, 15.0, torch.bfloat16, 10.0),
        "model": model(),
        "registered": registered(),
    }
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
