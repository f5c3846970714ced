"""Errors of the MLP kernels under Triton's interpreter, relative to eager float64: prints one JSON object.

In float32 only: the interpreter multiplies bfloat16 numbers as if they were integers.

TRITON_INTERPRET=1 python tests/gpt/model/mlp_kernels_interpreted.py     # as test_mlp_kernels does
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from birdie.gpt.model import mlp_kernels
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.model.mlp_kernels import leaky_square_mlp
from tests.gpt.model.technique_table import blocks_of

Errors = dict[str, float | str]


def eager(inputs: Sequence[Tensor], slope: float) -> Tensor:
    """Compute the MLP of x, up and down by plain operations."""
    x, up, down = inputs
    return leaky_relu(x @ up.mT, slope).square() @ down.mT


def mlp(rows: int, dim: int, hidden: int) -> Errors:
    """Return the largest relative errors of y and all gradients against float64, of the kernel and of eager code."""
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, dim), (hidden, dim), (dim, hidden))
    inputs = [(torch.randn(shape, generator=generator) / shape[1] ** 0.5).requires_grad_() for shape in shapes]
    outer = torch.randn((rows, dim), generator=generator)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = eager(exact_inputs, 0.5)
    expected = [exact, *torch.autograd.grad(exact, exact_inputs, outer.double())]
    result: Errors = {}
    for name, y in (("kernel", leaky_square_mlp(*inputs, 0.5)[0]), ("eager", eager(inputs, 0.5))):
        values = [y, *torch.autograd.grad(y, inputs, outer)]
        errors = [(v.double() - w).abs().max() / w.abs().max() for v, w in zip(values, expected, strict=True)]
        result[name] = float(torch.stack(errors).max().detach())
    return result


def model() -> Errors:
    """Return differences between a model with fused MLPs, eager and compiled to one graph, and the eager model."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 40, "num_layers": 2, "model_dim": 16, "num_heads": 2, "num_kv_heads": 1}
    gpt = GPT(GPTConfig(**shape, activation="leaky_relu2"))
    with torch.no_grad():
        for p in gpt.parameters():
            p.normal_(std=0.3)
    ids, weight = torch.randint(0, 40, (2, 8)), blocks_of(gpt)[0].mlp.fc.weight

    def gradient(fused: bool, compiled: bool = False) -> tuple[float, Tensor]:
        for block in blocks_of(gpt):
            block.mlp.fused = fused
        compute = torch.compile(gpt.loss, fullgraph=True, backend="aot_eager") if compiled else gpt.loss
        value = compute(ids, ids.roll(-1, 1))
        (result,) = torch.autograd.grad(value, weight)
        return float(value.detach()), result

    eager_value, eager_gradient = gradient(False)
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlp_kernels, "leaky_square_mlp", lambda *inputs: calls.append(1) or leaky_square_mlp(*inputs))
        fused_value, fused_gradient = gradient(True)
    compiled_value, compiled_gradient = gradient(True, compiled=True)
    return {
        "calls": len(calls),
        "value": abs(fused_value - eager_value),
        "gradient": float((fused_gradient - eager_gradient).abs().max() / eager_gradient.abs().max()),
        "compiled value": abs(compiled_value - fused_value),
        "compiled gradient": float((compiled_gradient - fused_gradient).abs().max() / fused_gradient.abs().max()),
    }


def registered() -> Errors:
    """Return the results of PyTorch's checks of a custom operation."""
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((3, 8), (20, 8), (8, 20))]
    return dict(torch.library.opcheck(leaky_square_mlp, (*inputs, 0.5)))


def main() -> None:
    results = {
        "one tile": mlp(5, 16, 24),
        "several tiles": mlp(140, 70, 150),
        "model": model(),
        "registered": registered(),
    }
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
