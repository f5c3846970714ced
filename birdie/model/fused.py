"""Soft cap and cross-entropy as one piece: the same numbers, without a copy of the logits for every step of them.

    eager     x ─► x / c ─► tanh ─► · c ─► log-softmax ─► loss: five tensors of N × V, and as many in the backward pass
    chunks    some rows at a time, which stay in the cache, all the way to dL/dx, which takes the place of x (CPU)
    triton    a row a program, nothing kept but one number a row; the backward pass computes the rest again (CUDA)

Chunks use PyTorch's own operations in their own order, so that gradients are bit for bit those of eager code (where the
factor on the loss is a power of two; else, and below 1e-37, to rounding). Kernels equal it to float32 rounding, in
bfloat16 to its own.

Only for training, and for the tanh cap: the others, and `reduction="none"`, take the eager way, as compiled graphs on a
CPU do, where the compiler fuses by itself. Source of the kernel's form: openai/parameter-golf #1787.
"""

from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Way = Literal["eager", "chunks", "triton"]

CACHED = 65_536  # float32 values of a chunk for each thread: a quarter of a MiB, and some operations need four of them


def way_for(device: torch.device, *, compiled: bool) -> Way:
    """What there is for tensors on `device`; the compiler would unroll the loop over chunks, and fuses by itself."""
    if device.type == "cuda":
        return "triton" if find_spec("triton") else "eager"
    return "chunks" if device.type == "cpu" and not compiled else "eager"


def capped_loss(logits: Tensor, targets: Tensor, cap: float, way: Way) -> Tensor:
    """Mean cross-entropy in nats (0-d, float32) of `targets` under cap · tanh(logits / cap).

    Args:
        logits: (N, V) in any floating dtype; not to be used again, for its memory is.
        targets: (N,) int64.
    """
    if way == "triton":
        from birdie.model.loss_kernels import softcap_nats

        nats: Tensor = softcap_nats(logits, targets, cap)[0]
        return nats.mean()
    loss: Tensor = _InChunks.apply(logits, targets, cap)  # type: ignore[no-untyped-call]
    return loss


class _InChunks(torch.autograd.Function):
    """The gradient is made with the loss, while a chunk is in the cache."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, cap: float) -> Tensor:
        count, width = logits.shape
        rows = max(1, CACHED * torch.get_num_threads() // width)
        own = torch.empty((count, 1), dtype=torch.float32)
        buffer = torch.zeros((min(rows, count), width))
        for begin in range(0, count, rows):
            chunk, chosen = logits[begin : begin + rows], targets[begin : begin + rows, None]
            tanh = torch.div(chunk.float(), cap).tanh_()
            nats = torch.log_softmax(tanh * cap, 1)
            own[begin : begin + rows] = nats.gather(1, chosen)
            gradient = buffer[: len(chunk)].scatter_(1, chosen, -1 / count)
            inner = torch._log_softmax_backward_data(gradient, nats, 1, torch.float32).mul_(cap)
            chunk.copy_(torch.ops.aten.tanh_backward(inner, tanh).div_(cap))
            gradient.scatter_(1, chosen, 0.0)
        ctx.gradient = logits.detach()
        return F.nll_loss(own, torch.zeros_like(targets))

    @staticmethod
    @once_differentiable  # the gradient was made without a graph of its own
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        gradient: Tensor | None = ctx.gradient
        if gradient is None:
            raise RuntimeError("the gradient of a fused loss can be taken once; turn it off with GPT.fuse(False)")
        ctx.gradient = None
        factor = outer[0].item()
        return (gradient if factor == 1 else gradient.mul_(factor)), None, None
