"""What the MLP's Triton kernels give under its interpreter, beside eager code in float64: one JSON object.

In float32 only: the interpreter multiplies bfloat16 as if it were integers.

TRITON_INTERPRET=1 python tests/mlp_kernels_interpreted.py     # as test_model_fused does
"""

import json
import sys

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from birdie.model import mlp_kernels
from birdie.model.gpt import GPT, GPTConfig
from birdie.model.mlp_kernels import leaky_square_mlp

Found = dict[str, float | str]


def eager(x: Tensor, up: Tensor, down: Tensor, slope: float) -> Tensor:
    return leaky_relu(x @ up.mT, slope).square() @ down.mT


def mlp(rows: int, dim: int, hidden: int) -> Found:
    """Largest errors against float64 over the largest value, of y and of all gradients: the kernel's and eager's."""
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, dim), (hidden, dim), (dim, hidden))
    inputs = [(torch.randn(shape, generator=generator) / shape[1] ** 0.5).requires_grad_() for shape in shapes]
    outer = torch.randn((rows, dim), generator=generator)
    exact_inputs = [each.detach().double().requires_grad_() for each in inputs]
    exact = eager(*exact_inputs, 0.5)
    wanted = [exact, *torch.autograd.grad(exact, exact_inputs, outer.double())]
    found: Found = {}
    for name, y in (("kernel", leaky_square_mlp(*inputs, 0.5)[0]), ("eager", eager(*inputs, 0.5))):
        values = [y, *torch.autograd.grad(y, inputs, outer)]
        errors = [(v.double() - w).abs().max() / w.abs().max() for v, w in zip(values, wanted, strict=True)]
        found[name] = float(torch.stack(errors).max().detach())
    return found


def model() -> Found:
    """A model whose MLPs are fused, compiled whole and not, beside the same that is not."""
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "num_layers": 2, "model_dim": 16, "num_heads": 2, "num_kv_heads": 1}
    gpt = GPT(GPTConfig(**shape, activation="leaky_relu2"))  # type: ignore[arg-type]
    with torch.no_grad():
        for p in gpt.parameters():
            p.normal_(std=0.3)
    ids, weight = torch.randint(0, 40, (2, 8)), gpt.blocks[0].mlp.fc.weight  # type: ignore[union-attr]

    def gradient(fused: bool, compiled: bool = False) -> tuple[float, Tensor]:
        for block in gpt.blocks:
            block.mlp.fused = fused  # type: ignore[union-attr, assignment]
        compute = torch.compile(gpt.loss, fullgraph=True, backend="aot_eager") if compiled else gpt.loss
        value = compute(ids, ids.roll(-1, 1))
        (found,) = torch.autograd.grad(value, weight)  # type: ignore[arg-type]
        return float(value.detach()), found

    plain, own = gradient(False)
    calls: list[int] = []
    mlp_kernels.leaky_square_mlp = lambda *given: calls.append(1) or leaky_square_mlp(*given)
    fused, theirs = gradient(True)
    mlp_kernels.leaky_square_mlp = leaky_square_mlp
    whole, compiled = gradient(True, compiled=True)
    return {
        "calls": len(calls),
        "value": abs(fused - plain),
        "gradient": float((theirs - own).abs().max() / own.abs().max()),
        "compiled value": abs(whole - fused),
        "compiled gradient": float((compiled - theirs).abs().max() / theirs.abs().max()),
    }


def registered() -> Found:
    """PyTorch's own checks of an operation."""
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((3, 8), (20, 8), (8, 20))]
    return dict(torch.library.opcheck(leaky_square_mlp, (*inputs, 0.5)))


def main() -> None:
    answer = {
        "one tile": mlp(5, 16, 24),
        "several tiles": mlp(140, 70, 150),
        "model": model(),
        "registered": registered(),
    }
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
