"""What a loss is told, and how far another model's predictions are from it: mean KL(float ‖ decoded).

    loss(float module, batch) ───► log-probabilities ─┐
         │ watched at F.cross_entropy                 ├─► KL of each prediction ──► sum, mean
    loss(decoded module, batch) ─► log-probabilities ─┘

Of the targets it is only looked at which of them count, and no cross-entropy is computed. A small KL is a difference of
nearly equal numbers, so it is summed as Σ p · (e^d − 1 − d) with d = log q − log p. That is the same number, as p and q
both sum to one; but every term is non-negative and errors of rounding in the normalisers cancel to first order, so
float32 logarithms keep a KL of 1e-9 that the plain sum would drown in 1e-7. Sums are float64.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from birdie.compress.calibration.modes import in_mode
from birdie.compress.calibration.sensitivity import Batch, Loss
from birdie.errors import ConfigError, DataError

_CACHED = 1 << 28  # bytes of reference predictions kept between judgements


def predictions(module: nn.Module, batch: Batch, loss: Loss) -> list[Tensor]:
    """Log-probabilities by every cross-entropy that `loss` asks for, (predictions, classes) float32 each.

    Ignored targets are left out. What the loss makes of its cross-entropies is not seen: it is given zeros.

    Raises:
        ConfigError: it asks for none.
    """
    watch = _Watch()
    with watch:
        loss(module, batch)
    if not watch.seen:
        raise ConfigError(
            "the loss hands no logits to torch.nn.functional.cross_entropy, so no KL can be told; "
            "let it, or ask for a budget without refit"
        )
    return [logits.float().log_softmax(-1) for logits in watch.seen]


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) of log-probabilities (…, classes) → nats (…) float64, never negative, differentiable.

    Classes that p rules out cost nothing; what q alone rules out makes it infinite.
    """
    possible = log_p > -math.inf
    p, d = log_p.exp(), torch.where(possible, log_q - log_p, 0)
    # e^d − 1 − d loses nothing for small d, and overflows for large, where q − p − p d is as good
    small = d.clamp(-1, 1)
    terms = torch.where(possible & (d.abs() < 1), p * (torch.expm1(small) - small), log_q.exp() - p - p * d)
    return terms.sum(-1, dtype=torch.float64).clamp_min(0)


def summed_kl(reference: Sequence[Tensor], candidate: Sequence[Tensor]) -> tuple[Tensor, int]:
    """(summed KL in nats, 0-d float64; how many predictions) of what two models predict for one batch.

    Raises:
        ConfigError: they predict different things.
    """
    ours, theirs = ([tuple(each.shape) for each in side] for side in (reference, candidate))
    if ours != theirs:
        raise ConfigError(
            f"float and decoded module predict {ours} and {theirs} (predictions, classes) for one batch, which do not "
            "compare; use a loss that gives both the same targets"
        )
    parts = [kl(p, q).sum() for p, q in zip(reference, candidate, strict=True)]
    return torch.stack(parts).sum(), sum(len(each) for each in reference)


@dataclass(slots=True)
class HeldOutKL:
    """Mean KL of other weights in the same module, on the same batches."""

    module: nn.Module
    batches: Sequence[Batch]
    loss: Loss
    _candidate: nn.Module = field(init=False)
    _reference: dict[int, list[Tensor]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """A copy of the module takes the candidates' weights."""
        self._candidate = copy.deepcopy(self.module).eval()

    def __call__(self, state: Mapping[str, Tensor]) -> float:
        """Nats per target; weights that `state` leaves out are those of the call before.

        Raises:
            ConfigError: the loss calls no `F.cross_entropy`.
            DataError: no target counts, or the module itself predicts NaN.
        """
        own = self._candidate.state_dict()
        total, count = 0.0, 0
        with torch.no_grad():
            for name, weight in state.items():
                own[name].copy_(weight)
            for index, batch in enumerate(self.batches):
                nats, targets = summed_kl(self._expected(index, batch), predictions(self._candidate, batch, self.loss))
                total, count = total + float(nats), count + targets
        if not count:
            raise DataError("the calibration batches have no targets to held_out by; give others")
        return total / count

    def _expected(self, index: int, batch: Batch) -> list[Tensor]:
        known = self._reference.get(index)
        if known is not None:
            return known
        with in_mode(self.module.modules(), training=False):
            found = predictions(self.module, batch, self.loss)
        if any(bool(p.isnan().any()) for p in found):
            raise DataError(
                "the model predicts NaN on batches held back to held_out by; check the weights and the batches"
            )
        held = sum(p.nbytes for kept in self._reference.values() for p in kept)
        if held + sum(p.nbytes for p in found) <= _CACHED:
            self._reference[index] = found
        return found


class _Watch(TorchFunctionMode):
    """Keeps the logits of every cross-entropy, (predictions, classes), and spares its computation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.cross_entropy:
            return self._take(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _take(
        self,
        input: Tensor,  # as F.cross_entropy calls it
        target: Tensor,
        weight: Tensor | None = None,  # noqa: ARG002  of classes: what the KL does not know of, like the rest
        size_average: bool | None = None,  # noqa: ARG002
        ignore_index: int = -100,
        reduce: bool | None = None,  # noqa: ARG002
        reduction: str = "mean",
        label_smoothing: float = 0.0,  # noqa: ARG002
    ) -> Tensor:
        logits = input.movedim(1, -1) if input.ndim > 1 else input[None]
        each = logits.shape[:-1] if input.ndim > 1 else torch.Size(())
        flat = logits.flatten(0, -2)
        if target.shape == each:
            flat = flat[target.reshape(-1) != ignore_index]
        self.seen.append(flat)
        return logits.new_zeros(each if reduction == "none" else ())
