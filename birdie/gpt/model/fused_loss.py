"""Softcap and cross-entropy in one piece: the same loss without a copy of the logits for every intermediate step.

    eager     x ─► x / c ─► tanh ─► · c ─► log-softmax ─► loss: five tensors of N × V, and as many in the backward pass
    chunks    some rows at a time, which stay in the cache, down to dL/dx, which overwrites x (CPU)
    triton    one row per program; only the log-sum-exp of each row is kept, backward recomputes the rest (CUDA)

Chunks use PyTorch's own operations in their order, so their gradients are bit for bit those of eager code (where the
factor on the loss is a power of two; otherwise, and below 1e-37, to rounding). The Triton kernel equals eager code to
float32 rounding, in bfloat16 to bfloat16 rounding.

Used only in training and with the tanh cap. Other caps, `reduction="none"` and compiled graphs on a CPU, where the
compiler fuses by itself, use eager operations. The form of the kernel is that of openai/parameter-golf #1787.
"""

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from birdie.gpt.model.technique import Technique

if TYPE_CHECKING:
    from birdie.gpt.model.gpt import GPT

LossBackend = Literal["eager", "chunks", "triton"]

CACHED = 65_536  # float32 values of a chunk for each thread: a quarter of a MiB, and some operations need four of them


def choose_backend(device: torch.device, *, compiled: bool) -> LossBackend:
    """Return the fastest backend for tensors on `device`.

    Args:
        compiled: whether the loss is compiled; the compiler would unroll the loop over chunks, and fuses by itself.
    """
    if device.type == "cuda":
        return "triton" if find_spec("triton") and _triton_works(device) else "eager"
    return "chunks" if device.type == "cpu" and not compiled else "eager"


@cache
def _triton_works(device: torch.device) -> bool:
    """Return whether the kernel runs: an installed Triton also needs a C compiler, a driver and a GPU that it knows."""
    try:
        from birdie.gpt.model.loss_kernels import softcap_nats

        softcap_nats(torch.zeros(1, 16, device=device), torch.zeros(1, dtype=torch.int64, device=device), 30.0)
    except Exception:
        return False
    return True


def capped_loss(logits: Tensor, targets: Tensor, cap: float, backend: LossBackend) -> Tensor:
    """Return the mean cross-entropy in nats (0-d, float32) of `targets` under cap · tanh(logits / cap).

    Args:
        logits: (N, V) in any floating dtype; their memory is overwritten, so do not use them afterwards.
        targets: (N,) int64.
        cap: c.
        backend: chunks or triton.
    """
    if backend == "triton":
        from birdie.gpt.model.loss_kernels import softcap_nats

        nats: Tensor = softcap_nats(logits, targets, cap)[0]
        return nats.mean()
    loss: Tensor = _ChunkedLoss.apply(logits, targets, cap)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradient together with the loss, while a chunk is in the cache."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, cap: float) -> Tensor:
        count, width = logits.shape
        rows = max(1, CACHED * torch.get_num_threads() // width)
        target_logp = torch.empty((count, 1), dtype=torch.float32)
        buffer = torch.zeros((min(rows, count), width))
        for begin in range(0, count, rows):
            chunk, target = logits[begin : begin + rows], targets[begin : begin + rows, None]
            tanh = torch.div(chunk.float(), cap).tanh_()
            logp = torch.log_softmax(tanh * cap, 1)
            target_logp[begin : begin + rows] = logp.gather(1, target)
            gradient = buffer[: len(chunk)].scatter_(1, target, -1 / count)
            inner = torch._log_softmax_backward_data(gradient, logp, 1, torch.float32).mul_(cap)
            chunk.copy_(torch.ops.aten.tanh_backward(inner, tanh).div_(cap))
            gradient.scatter_(1, target, 0.0)
        ctx.gradient = logits.detach()
        return F.nll_loss(target_logp, torch.zeros_like(targets))

    @staticmethod
    @once_differentiable  # the gradient was computed without a graph
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        gradient: Tensor | None = ctx.gradient
        if gradient is None:
            raise RuntimeError(
                "the fused loss supports one backward pass, as it overwrites the logits; use GPT.fuse_loss(False)"
            )
        ctx.gradient = None
        factor = outer[0].item()
        return (gradient if factor == 1 else gradient.mul_(factor)), None, None


def _diagnostics(model: "GPT") -> Iterator[str]:
    if model.loss_backend != "eager":
        backend = "a Triton kernel" if model.loss_backend == "triton" else "chunks of rows"
        yield f"fused loss: softcap and cross-entropy by {backend}"


FUSED_LOSS = Technique(diagnostics=_diagnostics)
