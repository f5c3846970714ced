"""Mean difference of the decoded model's predictions from the float model's, of what a loss compares with its targets.

    loss(float module, batch) ───► predictions ─┐
         │ recorded at the loss functions       ├─► difference of each prediction ──► sum, mean
    loss(decoded module, batch) ─► predictions ─┘

- Probabilities: the KL(float ‖ decoded), in nats per target, of what goes to cross-entropy, NLL, binary cross-entropy
  (with or without logits; each element is a target of two classes), KL divergence and CTC.
- Values: the relative squared error, Σ ‖decoded − float‖² / Σ ‖float − mean of float‖², of what goes to the squared,
  absolute, smooth or Huber loss and to margin losses. Arguments that do not depend on the weights do not count, so
  their order does not matter.
- A loss by other means: the relative difference of the loss itself, Σ |decoded − float| / Σ |float| over the batches.

If a loss has probabilities and values, both differences are added. Targets only select the predictions (ignored ones do
not count), and no cross-entropy is computed. A small KL is a difference of nearly equal numbers, so it is summed as
Σ p · (e^d − 1 − d) with d = log q − log p. That is the same number, because p and q both sum to one; but every term is
non-negative and rounding errors of the normalizers cancel to first order. Float32 logarithms then resolve a KL of 1e-9,
which in the plain sum is lost in errors of 1e-7. Sums are float64.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from birdie.compress.calibration.sensitivity import Batch, Loss
from birdie.compress.calibration.transformed import is_transformed, outside
from birdie.errors import ConfigError


def _of_two_classes(logits: Tensor) -> Tensor:
    return torch.stack((F.logsigmoid(logits.float()), F.logsigmoid(-logits.float())), -1)


def _of_probabilities(p: Tensor) -> Tensor:
    # As in F.binary_cross_entropy, logarithms are limited, so that a probability of 0 costs much but is not infinite.
    return torch.stack((p.float(), 1 - p.float()), -1).log().clamp_min(_LEAST_LOGARITHM)


_LEAST_LOGARITHM = -100.0
_FIRST = ("input", "log_probs")
# function → its log-probabilities, (…, classes), from its first argument
_PROBABILITIES: dict[Callable[..., Any], Callable[[Tensor], Tensor]] = {
    F.binary_cross_entropy_with_logits: _of_two_classes,
    F.multilabel_soft_margin_loss: _of_two_classes,
    F.binary_cross_entropy: _of_probabilities,
    F.kl_div: lambda log_probabilities: log_probabilities,
    F.ctc_loss: lambda log_probabilities: log_probabilities,
}
# function → arguments that may depend on the weights
_COMPARED: dict[Callable[..., Any], tuple[str, ...]] = {
    **dict.fromkeys((F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss), ("input", "target")),
    **dict.fromkeys((F.poisson_nll_loss, F.soft_margin_loss, F.hinge_embedding_loss, F.multi_margin_loss), ("input",)),
    F.multilabel_margin_loss: ("input",),
    F.gaussian_nll_loss: ("input", "target", "var"),
    F.cosine_embedding_loss: ("input1", "input2"),
    F.margin_ranking_loss: ("input1", "input2"),
    F.triplet_margin_loss: ("anchor", "positive", "negative"),
    F.triplet_margin_with_distance_loss: ("anchor", "positive", "negative"),
}


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of a module for one batch."""

    # of every function of probabilities that the loss calls, (predictions, classes) float32 each
    log_probabilities: Sequence[Tensor]
    values: Sequence[Tensor] = ()  # float arguments of every function of values that the loss calls
    loss: Tensor | None = None  # the loss itself if it calls neither, else None

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        return [*self.log_probabilities, *self.values, *([] if self.loss is None else [self.loss])]

    def detached(self) -> "Predictions":
        """Return the same without history."""
        loss = None if self.loss is None else self.loss.detach()
        return Predictions(
            [one.detach() for one in self.log_probabilities], [one.detach() for one in self.values], loss
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """Sums of the differences of two models' predictions; sums of several batches can be added."""

    # nats, targets: summed KL, and number of predictions
    nats: Tensor
    targets: int
    # squares, variance: of values: squared differences, and squared deviations of the float model from its mean
    squares: Tensor
    variance: float
    # change, loss: of losses: absolute differences, and absolute values of the float model
    change: Tensor
    loss: float

    def __add__(self, other: "Difference") -> "Difference":
        """Return the sums over both."""
        return Difference(
            self.nats + other.nats,
            self.targets + other.targets,
            self.squares + other.squares,
            self.variance + other.variance,
            self.change + other.change,
            self.loss + other.loss,
        )

    def mean(self) -> Tensor | None:
        """Return the mean KL plus the relative differences, 0-d, differentiable; None without any prediction."""
        pairs = ((self.nats, self.targets), (self.squares, self.variance), (self.change, self.loss))
        parts = [total / count for total, count in pairs if count]
        return torch.stack(parts).sum() if parts else None


def predictions(module: nn.Module, batch: Batch, loss: Loss, *, exact: bool = True) -> Predictions:
    """Return what `loss` compares with the targets of a batch.

    Predictions with ignored targets are left out. A cross-entropy returns zeros to the loss, unless the loss may
    differentiate it.

    Args:
        module, batch: arguments of the loss.
        loss: (module, batch) → anything if it calls a loss function, else one number.
        exact: False if no loss differentiates cross-entropies, so that none is computed.
    """
    recorder = _PredictionRecorder(exact)
    with recorder:
        value = loss(module, batch)
    log_probabilities = [logits.float().log_softmax(-1) for logits in recorder.logits]
    if log_probabilities or recorder.values:
        return Predictions(log_probabilities, recorder.values)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ConfigError(
            "the loss calls no loss function of torch.nn.functional and returns no single number, so no quality can be "
            "measured; return one number, or give a budget without tuning"
        )
    return Predictions([], loss=value.reshape(()))


def difference(reference: Predictions, candidate: Predictions) -> Difference:
    """Return the differences of two models' predictions for one batch."""
    _require_same_shapes(reference.tensors, candidate.tensors)
    nats, targets = summed_kl(reference.log_probabilities, candidate.log_probabilities)
    zero = torch.zeros((), dtype=torch.float64, device=nats.device)
    squares, variance, unchanged, change, loss = zero, 0.0, 0.0, zero, 0.0
    for ours, theirs in zip(reference.values, candidate.values, strict=True):
        wide = ours.double()
        deviations = float((wide - wide.mean()).square().sum()) or float(wide.square().sum())
        if torch.equal(ours, theirs):
            unchanged += deviations  # a target, or a prediction that no weight changed
        else:
            squares = squares + (theirs.double() - wide).square().sum()
            variance += deviations
    if reference.loss is not None and candidate.loss is not None:
        change = (candidate.loss.double() - reference.loss.double()).abs()
        loss = float(reference.loss.double().abs())
    return Difference(nats, targets, squares, variance or unchanged, change, loss)


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
    """Return (summed KL in nats, 0-d float64; number of predictions) of two models' predictions for one batch."""
    _require_same_shapes(reference, candidate)
    parts = [kl(p, q).sum() for p, q in zip(reference, candidate, strict=True)]
    total = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device="cpu")
    return total, sum(len(log_probabilities) for log_probabilities in reference)


def _require_same_shapes(reference: Sequence[Tensor], candidate: Sequence[Tensor]) -> None:
    ours, theirs = ([tuple(tensor.shape) for tensor in side] for side in (reference, candidate))
    if ours != theirs:
        raise ConfigError(
            f"float and decoded module predict {ours} and {theirs} (predictions, classes) for one batch, which do not "
            "compare; use a loss that gives both the same targets"
        )


class _PredictionRecorder(TorchFunctionMode):
    """Records the arguments of loss functions: logits, (predictions, classes), and values.

    A cross-entropy is not computed, unless it is to be `exact` and has a history.
    """

    def __init__(self, exact: bool) -> None:
        super().__init__()
        self.exact = exact
        self.logits: list[Tensor] = []
        self.values: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.autograd.grad, Tensor.backward):  # what was recorded may have the same history
            return func(*args, **{**kwargs, "retain_graph": True})
        if func is F.cross_entropy:
            zeros = self._record(*args, **kwargs)
            has_history = self.exact and self.logits[-1].requires_grad
            return func(*args, **kwargs) if has_history or is_transformed(args, kwargs) else zeros
        if func is F.nll_loss:
            self._record(*args, **kwargs)
        elif func in _COMPARED:
            values = [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(_COMPARED[func])]
            self.values += [outside(one) for one in values if isinstance(one, Tensor) and one.is_floating_point()]
        elif func in _PROBABILITIES:
            input = args[0] if args else kwargs[next(name for name in _FIRST if name in kwargs)]
            logits = outside(_PROBABILITIES[func](input))
            self.logits.append(logits.reshape(-1, logits.shape[-1]))
        return func(*args, **kwargs)

    def _record(
        self,
        input: Tensor,  # as F.cross_entropy and F.nll_loss call it
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
        if is_transformed((input, target), {}):  # which targets are ignored, differs between mapped dimensions
            self.logits.append(outside(logits).flatten(0, -2))
        else:
            flat = logits.flatten(0, -2)
            self.logits.append(flat[target.reshape(-1) != ignore_index] if target.shape == shape else flat)
        return logits.new_zeros(shape if reduction == "none" else ())
