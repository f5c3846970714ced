"""Triton kernels of the MLP: down(leaky_relu(up(x))²) with the activation fused into the products. Needs Triton.

    forward    u = x · Wuᵀ  and  h = leaky(u)²       one kernel writes both, tile by tile
               y = h · Wdᵀ                            PyTorch's product
    backward   du = (g · Wd) ⊙ 2 leaky(u) leaky'(u)   the same kernel with another epilogue
               dWd = gᵀ · h,  dWu = duᵀ · x,  dx = du · Wu

Saves one pass over h and two over its gradient. A PyTorch operation with a backward pass, as in `loss_kernels`, and
tested in the same way. *Experimental*, off by default: it was not tuned on a GPU. The kernel of openai/parameter-golf
#1530, its source, has larger tiles and Hopper's tensor copies; this one has plain loads.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, DEPTH = 128, 128, 64
WARPS, STAGES = 8, 3


@triton.jit
def _leaky(u, slope):  # type: ignore[no-untyped-def]
    return tl.where(u > 0, u, u * slope)


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    a,
    b,
    u,
    out,
    m,
    n,
    k,
    slope,
    b_stride_n,
    b_stride_k,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute a tile of a · b, (m, k) and (k, n), given the strides of b.

    Forward: store the product in u and its activation in out. Backward: store the product times the activation's
    derivative at u in out.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for begin in range(0, k, DEPTH):
        inner = begin + tl.arange(0, DEPTH)
        left = tl.load(a + row[:, None] * k + inner[None], mask=(row[:, None] < m) & (inner[None] < k), other=0.0)
        right = tl.load(
            b + inner[:, None] * b_stride_k + column[None] * b_stride_n,
            mask=(inner[:, None] < k) & (column[None] < n),
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    offset = row[:, None] * n + column[None]
    inside = (row[:, None] < m) & (column[None] < n)
    if BACKWARD:
        preactivation = tl.load(u + offset, mask=inside, other=0.0).to(tl.float32)
        total = total * 2.0 * _leaky(preactivation, slope) * tl.where(preactivation > 0, 1.0, slope)
    else:
        rounded = total.to(u.dtype.element_ty)
        tl.store(u + offset, rounded, mask=inside)
        activated = _leaky(rounded.to(tl.float32), slope)  # of the rounded product, as in eager code
        total = activated * activated
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=inside)


def _tiles(m: int, n: int) -> tuple[int, int]:
    return triton.cdiv(m, ROWS), triton.cdiv(n, COLUMNS)


@torch.library.custom_op("birdie::leaky_square_mlp", mutates_args=())
def leaky_square_mlp(x: Tensor, up: Tensor, down: Tensor, slope: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return down · leaky(up · x)², and the tensors that its backward pass needs.

    Args:
        x: (N, D), float32 or bfloat16, as the weights are.
        up: (hidden, D).
        down: (D, hidden).
        slope: of the leaky ReLU below zero.

    Returns:
        y (N, D); u = x · upᵀ and h = leaky(u)², (N, hidden).
    """
    x, up = x.contiguous(), up.contiguous()
    (m, k), n = x.shape, len(up)
    u, h = (torch.empty((m, n), dtype=x.dtype, device=x.device) for _ in range(2))
    _product[_tiles(m, n)](
        *(x, up, u, h, m, n, k, slope, k, 1, False, ROWS, COLUMNS, DEPTH), num_warps=WARPS, num_stages=STAGES
    )
    return h @ down.mT, u, h


@leaky_square_mlp.register_fake
def _(x: Tensor, up: Tensor, down: Tensor, slope: float) -> tuple[Tensor, Tensor, Tensor]:
    del down, slope
    u, h = (x.new_empty((len(x), len(up))) for _ in range(2))
    return x.new_empty(x.shape), u, h


@torch.library.custom_op("birdie::leaky_square_gradient", mutates_args=())
def leaky_square_gradient(outer: Tensor, down: Tensor, u: Tensor, slope: float) -> Tensor:
    """Return the gradient of u, (N, hidden), from that of y, (N, D)."""
    outer, down = outer.contiguous(), down.contiguous()
    (m, k), n = outer.shape, u.shape[1]
    out = torch.empty_like(u)
    _product[_tiles(m, n)](
        *(outer, down, u, out, m, n, k, slope, 1, n, True, ROWS, COLUMNS, DEPTH), num_warps=WARPS, num_stages=STAGES
    )
    return out


@leaky_square_gradient.register_fake
def _(outer: Tensor, down: Tensor, u: Tensor, slope: float) -> Tensor:
    del outer, down, slope
    return u.new_empty(u.shape)


def _setup_context(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    x, up, down, ctx.slope = inputs
    ctx.set_materialize_grads(False)  # else zeros as large as u and h are written for their gradients
    ctx.save_for_backward(x, up, down, *output[1:])


def _gradient(ctx: Any, outer: Tensor, _u: Tensor, _h: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    x, up, down, u, h = ctx.saved_tensors
    du = leaky_square_gradient(outer, down, u, ctx.slope)
    return du @ up, du.mT @ x, outer.mT @ h, None


leaky_square_mlp.register_autograd(_gradient, setup_context=_setup_context)
