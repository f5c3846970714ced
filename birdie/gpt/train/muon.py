"""Muon: an optimizer for weight matrices that orthogonalizes the momentum by a Newton–Schulz iteration.

    gradient ─► momentum, Nesterov ─► [rows ÷ their norm] ─► Newton–Schulz ─► [rows ÷ their running size] ─► update
                                        MuonEq-R                                NorMuon

The update is replaced by a matrix with the same singular vectors and singular values near one, so that every direction
of the matrix learns at the same pace. Matrices of one shape are orthogonalized together, as one batched product.

`Muon` works on any matrices of any model; `parallel_muon` distributes the work over ranks. Sources: Keller
Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024), with the coefficients and the scale
√max(1, rows / columns) of the challenge's baseline script; Polar Express, Amsel et al. 2025 (arXiv 2505.16932), as in
openai/parameter-golf #1344; MuonEq-R, #1217; NorMuon, Li et al. 2025 (arXiv 2510.05491), #230.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from birdie.errors import ConfigError
from birdie.system.ranges import named_range

if TYPE_CHECKING:
    from birdie.gpt.train.settings import Coefficients


CLASSIC = (3.4445, -4.7750, 2.0315)
"""Jordan's choice for the steepest slope at zero: singular values end between about 0.7 and 1.2, not at 1."""

POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""The optimal polynomial of each of five steps for singular values from 0.001 to 1; further steps repeat the last."""

STATE = ("momentum_buffer", "row_square")
"""Names of the tensors of a parameter's state: momentum, and mean squares of rows (NorMuon)."""

CACHED = 2**21  # weights whose gradients, momenta and updates fit into the caches of a CPU
_EPSILON = 1e-7  # keeps the norm of a zero matrix or row from dividing by zero
WIDE = 2
"""Ratio of the longer to the shorter side from which `newton_schulz` takes two steps at once."""


def schedule(coefficients: "Coefficients", steps: int) -> list[tuple[float, float, float]]:
    """Return (a, b, c) of each of `steps` iterations."""
    if coefficients == "classic":
        return [CLASSIC] * steps
    return [POLAR_EXPRESS[min(step, len(POLAR_EXPRESS) - 1)] for step in range(steps)]


def newton_schulz(
    G: Tensor, steps: int = 5, dtype: torch.dtype = torch.float32, coefficients: "Coefficients" = "classic"
) -> Tensor:
    """Return roughly the nearest (semi-)orthogonal matrix to `G`: X ← QX, Q = aI + bA + cA², A = XXᵀ, `steps` times.

    Wide matrices take two steps at once: after the first step A is QAQ, so the second Q needs no product as large as X.
    Three or more steps on one A would be cheaper still, but in bfloat16 they lose the small singular values: rounding
    of A makes some of its eigenvalues negative, and these grow twelvefold in each step.

    Args:
        G: (…, rows, columns); leading dimensions are a batch.
        steps: iterations.
        dtype: of the iteration. bfloat16 is coarser, and fast where the hardware multiplies it.
        coefficients: classic: one polynomial for all steps; polar_express: another in each step, which ends nearer to
            1.

    Returns:
        A tensor of G's shape in `dtype`. A zero matrix stays zero.
    """
    rows, columns = G.shape[-2:]
    X = G.reshape(-1, rows, columns).to(dtype)
    if rows > columns:  # so that A is the smaller of the two Gram matrices
        X = X.mT
    X = X / (torch.linalg.matrix_norm(X, keepdim=True) + _EPSILON)
    stride = 2 if max(rows, columns) >= WIDE * min(rows, columns) else 1
    plan = schedule(coefficients, steps)
    for i in range(0, steps, stride):
        A = torch.bmm(X, X.mT)
        if len(plan[i : i + stride]) == 2:
            first = _polynomial(A, plan[i])
            second = _polynomial(torch.bmm(torch.bmm(first, A), first), plan[i + 1])
            X = torch.bmm(torch.bmm(second, first), X)
        else:
            a, b, c = plan[i]
            X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    if rows > columns:
        X = X.mT
    return X.reshape(G.shape)


def _polynomial(A: Tensor, abc: tuple[float, float, float]) -> Tensor:
    """aI + bA + cA²."""
    a, b, c = abc
    Q = torch.baddbmm(A, A, A, beta=b, alpha=c)
    Q.diagonal(dim1=-2, dim2=-1).add_(a)
    return Q


class Muon(torch.optim.Optimizer):
    """W ← (1 − lr · decay) W − lr · √max(1, rows / columns) · newton_schulz(Nesterov momentum).

        optimizer = birdie.Muon(matrices, lr=0.02, momentum=0.95)

    Use it for the weight matrices of layers only; vectors, embeddings and output heads need Adam. Parameters are
    matrices, (rows, columns), or stacks of them, (count, rows, columns); those of one shape are updated together.
    With several processes, all must have the same gradients, as DistributedDataParallel leaves them.

    Args:
        params: parameters or parameter groups, as for every optimizer of torch.
        lr: learning rate.
        momentum: decay of the sum of gradients.
        nesterov: whether momentum is Nesterov's.
        weight_decay: decoupled; each step multiplies weights by 1 − lr · weight_decay.
        steps: Newton–Schulz iterations.
        dtype: of the iterations.
        coefficients: of their polynomials, as in `newton_schulz`.
        row_normalize: whether rows are normalized before the iterations (MuonEq-R).
        beta2: decay of the running mean square of each row of the result (NorMuon). Rows are divided by its root, and
            the matrix keeps its norm. 0: off.

    Raises:
        ConfigError: a parameter is neither a matrix nor a stack of matrices, or a setting is out of range.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        steps: int = 5,
        dtype: torch.dtype = torch.float32,
        coefficients: "Coefficients" = "classic",
        row_normalize: bool = False,
        beta2: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "steps": steps,
            "dtype": dtype,
            "coefficients": coefficients,
            "row_normalize": row_normalize,
            "beta2": beta2,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group.

        Raises:
            ConfigError: as the constructor.
        """
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except ConfigError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a `state_dict` of the same parameters."""
        super().load_state_dict(state_dict)
        for state in self.state.values():  # torch casts all state to the dtype of the parameter
            if STATE[1] in state:
                state[STATE[1]] = state[STATE[1]].float()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            updates = [torch.empty_like(p, dtype=group["dtype"]) for p in params]
            self._compute_updates_(updates, params, [p.grad for p in params], group)
            for p, update in zip(params, updates, strict=True):
                apply_(p, update, group)
        return loss

    def update_(self, update: Tensor, p: Tensor, gradient: Tensor) -> None:
        """Write the orthogonalized update of `p` into `update`; this advances the momentum of p.

        Args:
            update: like `gradient`, in the dtype of Newton–Schulz.
            p: a parameter of the first group.
            gradient: of p or of some of its matrices; the state of p has the same shape.
        """
        self._compute_updates_([update], [p], [gradient], self.param_groups[0])

    def _compute_updates_(
        self, updates: Sequence[Tensor], params: Sequence[Tensor], gradients: Sequence[Tensor], group: dict[str, Any]
    ) -> None:
        by_kind: defaultdict[tuple[torch.Size, torch.dtype, torch.device], list[_Slot]] = defaultdict(list)
        for update, p, gradient in zip(updates, params, gradients, strict=True):
            shape, buffer = gradient.shape[-2:], self._state(p, STATE[0], gradient)
            stacks = (tensor.view(-1, *shape) for tensor in (gradient.contiguous(), buffer, update))
            by_kind[shape, gradient.dtype, gradient.device] += zip(
                *(torch.split(stack, _batch_size(gradient)) for stack in stacks), strict=True
            )
        for slots in by_kind.values():
            for batch in _batches(slots, _batch_size(slots[0][0])):
                self._compute_batch_(batch, group)
        if group["beta2"]:
            for update, p in zip(updates, params, strict=True):
                update.copy_(self._row_scaled(p, update, group["beta2"]))

    def _compute_batch_(self, batch: list["_Slot"], group: dict[str, Any]) -> None:
        """Compute momentum and orthogonalized update of some stacks of one shape together."""
        gradients, buffers, updates = (list(tensors) for tensors in zip(*batch, strict=True))
        with named_range("optimizer/muon/momentum"):
            momentum = group["momentum"]
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, gradients)
            ahead = buffers
            if group["nesterov"]:
                ahead = list(torch._foreach_add(gradients, buffers, alpha=momentum))
        with named_range("optimizer/muon/orthogonalize"):
            stack = orthogonalize(ahead[0] if len(ahead) == 1 else torch.cat(ahead), group)
            torch._foreach_copy_(updates, list(torch.split(stack, [len(update) for update in updates])))

    def _row_scaled(self, p: Tensor, update: Tensor, beta2: float) -> Tensor:
        """Return the update with rows divided by the root of their running mean square, at the same norm (NorMuon)."""
        wide = update.float()
        square = wide.square().mean(-1, keepdim=True)
        mean = self._state(p, STATE[1], square)
        mean.lerp_(square, 1 - beta2)
        scaled = wide * (mean + _EPSILON**2).rsqrt()
        norm, scaled_norm = (torch.linalg.matrix_norm(matrix, keepdim=True) for matrix in (wide, scaled))
        result: Tensor = scaled * (norm / (scaled_norm + _EPSILON))
        return result.to(update.dtype)

    def _state(self, p: Tensor, name: str, like: Tensor) -> Tensor:
        state = self.state[p]
        if name not in state:
            state[name] = torch.zeros_like(like)
        tensor: Tensor = state[name]
        return tensor


def orthogonalize(stack: Tensor, group: dict[str, Any]) -> Tensor:
    """Normalize rows, if `row_normalize`, then apply Newton–Schulz: (count, rows, columns) → the same, in `dtype`."""
    if group["row_normalize"]:
        stack = stack / torch.linalg.vector_norm(stack, dim=-1, keepdim=True).clamp_min(_EPSILON)
    return newton_schulz(stack, group["steps"], group["dtype"], group["coefficients"])


def apply_(p: Tensor, update: Tensor, group: dict[str, Any]) -> None:
    """Apply weight decay, then the update, scaled for its shape, in place."""
    rows, columns = p.shape[-2:]
    rate, decay, scale = group["lr"], group["weight_decay"], max(1.0, rows / columns) ** 0.5
    weights, updates = (torch.split(tensor.view(-1, rows, columns), _batch_size(p)) for tensor in (p, update))
    for part, part_update in zip(weights, updates, strict=True):
        if decay:
            part.mul_(1 - rate * decay)
        part.add_(part_update, alpha=-rate * scale)


def load_into(state: dict[str, Any], key: str, value: Tensor, device: torch.device) -> None:
    """Set `state[key]` to a copy of `value` on `device`, in place where there is a tensor."""
    if key in state:
        state[key].copy_(value)
    else:
        state[key] = value.to(device, copy=True)


_Slot = tuple[Tensor, Tensor, Tensor]
"""Gradient, momentum and update of a stack of matrices, each (count, rows, columns)."""


def _batch_size(p: Tensor) -> int:
    """Return how many matrices of p's shape to update together: all of them, but on a CPU what its caches hold.

    Larger temporaries would cost more than their arithmetic: new pages from the system, read and written once.
    """
    return max(1, CACHED // p.shape[-2:].numel()) if p.device.type == "cpu" else max(1, p.shape[:-2].numel())


def _batches(slots: list[_Slot], size: int) -> Iterator[list[_Slot]]:
    """Yield `slots` in lists of about `size` matrices; all in one list where they are not on a CPU."""
    if slots[0][0].device.type != "cpu":
        yield slots
        return
    batch: list[_Slot] = []
    for slot in slots:
        if batch and sum(len(gradient) for gradient, _, _ in batch) + len(slot[0]) > size:
            yield batch
            batch = []
        batch.append(slot)
    yield batch


def _check(group: dict[str, Any]) -> None:
    for p in group["params"]:
        if p.ndim not in (2, 3):
            raise ConfigError(
                f"Muon was given a parameter of shape {tuple(p.shape)}; it updates matrices or stacks of matrices, "
                "use Adam for the rest"
            )
        if p.is_complex():
            raise ConfigError(f"Muon was given a parameter of {p.dtype}; it updates real matrices only")
    for name in ("lr", "weight_decay"):
        if not 0 <= group[name] < float("inf"):
            raise ConfigError(f"Muon's {name} is {group[name]}; it must be a finite number of at least 0")
    for name in ("momentum", "beta2"):
        if not 0 <= group[name] < 1:
            raise ConfigError(f"Muon's {name} is {group[name]}; it must be in [0, 1)")
    if group["steps"] < 0:
        raise ConfigError(f"Muon's steps are {group['steps']}; they must be at least 0")
    if group["coefficients"] not in ("classic", "polar_express"):
        raise ConfigError(f"Muon's coefficients are {group['coefficients']!r}; choose classic or polar_express")
