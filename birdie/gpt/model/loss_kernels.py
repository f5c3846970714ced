"""Triton kernels of `fused_loss`: softcap and cross-entropy, one row per program. Importing this module needs Triton.

They are PyTorch operations with a backward pass (`torch.library.custom_op`), so that a compiled graph contains them as
one operation. With TRITON_INTERPRET=1 set before Triton is imported they run on a CPU, which is how they are tested.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4


@triton.jit
def _tanh_parts(x, cap):  # type: ignore[no-untyped-def]
    """Return cap · tanh(x / cap) and its derivative, from one exponential that cannot overflow."""
    e = tl.exp(-2.0 * tl.abs(x) / cap)
    size = cap * (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -size, size), 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit  # type: ignore[untyped-decorator]
def _forward(logits, targets, nats, lse, width, stride, cap, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    largest = float("-inf")
    total = 0.0  # of the exponentials, relative to the largest logit so far: one pass over the row is enough
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
        z, _ = _tanh_parts(x, cap)
        z = tl.where(column < width, z, float("-inf"))
        larger = tl.maximum(largest, tl.max(z, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(z - larger), 0)
        largest = larger
    row_lse = largest + tl.log(total)
    target = tl.load(targets + row)
    target_logit, _ = _tanh_parts(tl.load(logits + row * stride + target).to(tl.float32), cap)
    tl.store(lse + row, row_lse)
    tl.store(nats + row, row_lse - target_logit)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(outer, logits, targets, lse, out, width, stride, cap, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(outer + row)
    row_lse = tl.load(lse + row)
    target = tl.load(targets + row)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
        z, slope = _tanh_parts(x, cap)
        gradient = factor * (tl.exp(z - row_lse) - tl.where(column == target, 1.0, 0.0)) * slope
        tl.store(out + row * width + column, gradient.to(out.dtype.element_ty), mask=column < width)


@torch.library.custom_op("birdie::softcap_nats", mutates_args=())
def softcap_nats(logits: Tensor, targets: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Return the nats of each target under cap · tanh(logits / cap), and the log-sum-exp of each row.

    Args:
        logits: (N, V), rows contiguous, float32 or bfloat16.
        targets: (N,) int64.

    Returns:
        Both (N,) float32.
    """
    count, width = logits.shape
    nats, lse = (torch.empty(count, dtype=torch.float32, device=logits.device) for _ in range(2))
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    _forward[(count,)](
        *(logits, targets.contiguous(), nats, lse, width, logits.stride(0), cap),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return nats, lse


@softcap_nats.register_fake
def _(logits: Tensor, targets: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    del targets, cap
    nats, lse = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))
    return nats, lse


@torch.library.custom_op("birdie::softcap_nats_backward", mutates_args=())
def softcap_nats_backward(outer: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, cap: float) -> Tensor:
    """Return the gradient of the logits, (N, V) in their dtype, from that of the nats, (N,)."""
    count, width = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    out = torch.empty((count, width), dtype=logits.dtype, device=logits.device)
    _backward[(count,)](
        *(outer.contiguous(), logits, targets.contiguous(), lse, out, width, logits.stride(0), cap),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return out


@softcap_nats_backward.register_fake
def _(outer: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, cap: float) -> Tensor:
    del outer, targets, lse, cap
    return logits.new_empty(logits.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    logits, targets, ctx.cap = inputs
    ctx.save_for_backward(logits, targets, output[1])


def _gradient(ctx: Any, outer: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    return softcap_nats_backward(outer, *ctx.saved_tensors, ctx.cap), None, None


softcap_nats.register_autograd(_gradient, setup_context=_setup_context)
