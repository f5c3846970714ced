"""Mean KL(float ‖ decoded) of the predictions that a loss passes to cross-entropy.

    loss(float module, batch) ───► log-probabilities ─┐
         │ recorded at F.cross_entropy                ├─► KL of each prediction ──► sum, mean
    loss(decoded module, batch) ─► log-probabilities ─┘

Targets only select the predictions (ignored ones do not count), and no cross-entropy is computed. A small KL is a
difference of nearly equal numbers, so it is summed as Σ p · (e^d − 1 − d) with d = log q − log p. That is the same
number, because p and q both sum to one; but every term is non-negative and rounding errors of the normalizers cancel to
first order. Float32 logarithms then resolve a KL of 1e-9, which in the plain sum is lost in errors of 1e-7. Sums are
float64.
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

_CACHED = 1 << 28  # bytes of reference predictions kept between measurements


def predictions(module: nn.Module, batch: Batch, loss: Loss) -> list[Tensor]:
    """Return the log-probabilities of every cross-entropy that `loss` calls, (predictions, classes) float32 each.

    Predictions with ignored targets are left out. Every cross-entropy returns zeros to the loss.

    Raises:
        ConfigError: the loss calls no cross-entropy.
    """
    recorder = _LogitRecorder()
    with recorder:
        loss(module, batch)
    if not recorder.logits:
        raise ConfigError(
            "the loss hands no logits to torch.nn.functional.cross_entropy, so no KL can be computed; "
            "call it, or use a budget without refit"
        )
    return [logits.float().log_softmax(-1) for logits in recorder.logits]


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p ‖ q) of log-probabilities (…, classes) in nats, (…) float64, never negative, differentiable.

    Classes of probability zero in p cost nothing; a class of probability zero in q alone makes the KL infinite.
    """
    possible = log_p > -math.inf
    p, d = log_p.exp(), torch.where(possible, log_q - log_p, 0)
    # e^d − 1 − d is exact for small d (by expm1) and overflows for large d, where q − p − p d has no cancellation.
    small = d.clamp(-1, 1)
    terms = torch.where(possible & (d.abs() < 1), p * (torch.expm1(small) - small), log_q.exp() - p - p * d)
    return terms.sum(-1, dtype=torch.float64).clamp_min(0)


def summed_kl(reference: Sequence[Tensor], candidate: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Return (summed KL in nats, 0-d float64; number of predictions) of two models' predictions for one batch.

    Raises:
        ConfigError: the shapes of the predictions differ.
    """
    ours, theirs = ([tuple(log_probabilities.shape) for log_probabilities in side] for side in (reference, candidate))
    if ours != theirs:
        raise ConfigError(
            f"float and decoded module predict {ours} and {theirs} (predictions, classes) for one batch, which do not "
            "compare; use a loss that gives both the same targets"
        )
    parts = [kl(p, q).sum() for p, q in zip(reference, candidate, strict=True)]
    return torch.stack(parts).sum(), sum(len(log_probabilities) for log_probabilities in reference)


@dataclass(slots=True)
class HeldOutKL:
    """Mean KL of a module with other weights from the module itself, on held-out batches."""

    module: nn.Module
    batches: Sequence[Batch]
    loss: Loss
    _candidate: nn.Module = field(init=False)
    _reference: dict[int, list[Tensor]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._candidate = copy.deepcopy(self.module).eval()  # receives the weights to be measured

    def __call__(self, state: Mapping[str, Tensor]) -> float:
        """Return the KL in nats per target; weights that `state` leaves out keep the values of the previous call.

        Raises:
            ConfigError: the loss calls no `F.cross_entropy`.
            DataError: all targets are ignored, or the module itself predicts NaN.
        """
        weights = self._candidate.state_dict()
        total, count = 0.0, 0
        with torch.no_grad():
            for name, weight in state.items():
                weights[name].copy_(weight)
            for index, batch in enumerate(self.batches):
                nats, targets = summed_kl(self._expected(index, batch), predictions(self._candidate, batch, self.loss))
                total, count = total + float(nats), count + targets
        if not count:
            raise DataError("the held-out calibration batches have no targets to measure the KL on; give others")
        return total / count

    def _expected(self, index: int, batch: Batch) -> list[Tensor]:
        """Return the float model's predictions for batch `index`, cached as far as memory allows."""
        cached = self._reference.get(index)
        if cached is not None:
            return cached
        with in_mode(self.module.modules(), training=False):
            expected = predictions(self.module, batch, self.loss)
        if any(bool(p.isnan().any()) for p in expected):
            raise DataError("the model predicts NaN on held-out batches; check the weights and the batches")
        size = sum(p.nbytes for kept in self._reference.values() for p in kept)
        if size + sum(p.nbytes for p in expected) <= _CACHED:
            self._reference[index] = expected
        return expected


class _LogitRecorder(TorchFunctionMode):
    """Records the logits of every cross-entropy, (predictions, classes), and skips its computation."""

    def __init__(self) -> None:
        super().__init__()
        self.logits: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.cross_entropy:
            return self._record(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _record(
        self,
        input: Tensor,  # as F.cross_entropy calls it
        target: Tensor,
        weight: Tensor | None = None,  # noqa: ARG002  class weights: the KL does not depend on them, nor on the rest
        size_average: bool | None = None,  # noqa: ARG002
        ignore_index: int = -100,
        reduce: bool | None = None,  # noqa: ARG002
        reduction: str = "mean",
        label_smoothing: float = 0.0,  # noqa: ARG002
    ) -> Tensor:
        logits = input.movedim(1, -1) if input.ndim > 1 else input[None]
        shape = logits.shape[:-1] if input.ndim > 1 else torch.Size(())
        flat = logits.flatten(0, -2)
        if target.shape == shape:
            flat = flat[target.reshape(-1) != ignore_index]
        self.logits.append(flat)
        return logits.new_zeros(shape if reduction == "none" else ())
