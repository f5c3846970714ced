"""Muon: momentum made orthogonal by a Newton–Schulz iteration, for weight matrices.

Each update is replaced by a matrix with the same singular vectors and singular values near one, so that every direction
of the matrix learns at the same pace. Matrices of one shape are orthogonalised together, as one batched product.

Source: Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024), with the coefficients and the
scale √max(1, rows / columns) of the challenge's baseline script.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from birdie.distributed import World

# chosen by Jordan for the steepest rise at zero: the result's singular values spread over about 0.7–1.2, not exactly 1
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(G: Tensor, steps: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """The nearest (semi-)orthogonal matrix to `G`, roughly; X ← aX + (bA + cA²)X with A = XXᵀ, `steps` times.

    Args:
        G: (…, rows, columns); leading dimensions are a batch.
        dtype: what the iteration runs in. bfloat16 is fast where the hardware multiplies it, and coarser.

    Returns:
        A tensor of G's shape in `dtype`. A zero matrix stays zero.
    """
    a, b, c = COEFFICIENTS
    rows, columns = G.shape[-2:]
    X = G.reshape(-1, rows, columns).to(dtype)
    if rows > columns:  # A is then the smaller of the two Gram matrices
        X = X.mT
    X = X / (torch.linalg.matrix_norm(X, keepdim=True) + 1e-7)
    for _ in range(steps):
        A = torch.bmm(X, X.mT)
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    if rows > columns:
        X = X.mT
    return X.reshape(G.shape)


class Muon(torch.optim.Optimizer):
    """W ← W − lr · √max(1, rows / columns) · newton_schulz(Nesterov momentum), for 2-D parameters only.

    On several ranks parameter i belongs to rank i mod size, which alone keeps its momentum and computes its update; one
    all-reduced buffer brings all updates to everybody. The gradients must already be the same on every rank.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.95,
        steps: int = 5,
        dtype: torch.dtype = torch.float32,
        world: World | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "steps": steps, "dtype": dtype})
        self.world = world or World()

    def owned(self, group: dict[str, Any]) -> list[nn.Parameter]:
        """The parameters of `group` that this rank updates."""
        params: list[nn.Parameter] = group["params"]
        return params[self.world.rank :: self.world.size]

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; which those are must agree over the ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            owned = [p for p in self.owned(group) if p.grad is not None]
            updates = self._updates(owned, group)
            if self.world.size > 1:
                params = [p for p in group["params"] if p.grad is not None]
                owned, updates = params, self._exchange(params, dict(zip(owned, updates, strict=True)), group["dtype"])
            for p, update in zip(owned, updates, strict=True):
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)
        return loss

    def _updates(self, params: Sequence[nn.Parameter], group: dict[str, Any]) -> list[Tensor]:
        """Orthogonalised updates of `params`, which advances their momentum."""
        if not params:
            return []
        gradients = [p.grad for p in params if p.grad is not None]
        buffers = [self._momentum_buffer(p) for p in params]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, gradients)
        lookahead = torch._foreach_add(gradients, buffers, alpha=group["momentum"])
        by_shape: defaultdict[torch.Size, list[int]] = defaultdict(list)
        for i, update in enumerate(lookahead):
            by_shape[update.shape].append(i)
        updates = list(lookahead)
        for indices in by_shape.values():
            stack = torch.stack([updates[i] for i in indices])
            for i, update in zip(indices, newton_schulz(stack, group["steps"], group["dtype"]), strict=True):
                updates[i] = update
        return updates

    def _momentum_buffer(self, p: nn.Parameter) -> Tensor:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer: Tensor = state["momentum_buffer"]
        return buffer

    def _exchange(
        self, params: Sequence[nn.Parameter], mine: dict[nn.Parameter, Tensor], dtype: torch.dtype
    ) -> list[Tensor]:
        """Everybody's updates of `params`: each rank writes its own into a buffer of zeros, and the sum is complete."""
        if not params:
            return []
        flat = torch.zeros(sum(p.numel() for p in params), dtype=dtype, device=params[0].device)
        views = [
            view.view_as(p) for view, p in zip(torch.split(flat, [p.numel() for p in params]), params, strict=True)
        ]
        for p, view in zip(params, views, strict=True):
            if p in mine:
                view.copy_(mine[p])
        self.world.sum_(flat)
        return views
