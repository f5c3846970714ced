"""How far a decoded model's predictions are from the float model's: mean KL(float ‖ decoded) and agreement.

    KL(p ‖ q) = Σ_v p_v (log p_v − log q_v), averaged over predictions (target tokens, images)

The measure of equal quality: at the precisions of interest the difference of two losses is noise, the KL is not, summed
as `birdie.compress.calibration.kl` does.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from birdie.compress.calibration.kl import kl
from birdie.errors import DataError

B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class Divergence:
    """What `divergence` found.

    Attributes:
        kl: mean nats per prediction.
        stderr: of `kl`; sequences (or images) are the independent units, not the tokens in them. NaN with fewer than 2.
        agreement: share of predictions whose most likely class is the same.
        count: predictions compared.
    """

    kl: float
    stderr: float
    agreement: float
    count: int


def divergence(reference: Callable[[B], Tensor], candidate: Callable[[B], Tensor], batches: Iterable[B]) -> Divergence:
    """Compare two models on held-out batches; no more than one batch of logits of each is held at a time.

    Args:
        reference: batch → logits (sequences, …, classes) of any float dtype.
        candidate: the same of the model in question, of the same shape.
        batches: what both are given.

    Raises:
        DataError: there are no predictions, shapes differ, or a logit is NaN.
    """
    sums: list[Tensor] = []
    sizes: list[int] = []
    agreed = 0
    with torch.inference_mode():
        for batch in batches:
            ours, theirs = reference(batch), candidate(batch)
            if ours.shape != theirs.shape or ours.ndim < 2:
                raise DataError(
                    f"logits of shapes {tuple(ours.shape)} and {tuple(theirs.shape)} do not compare; "
                    "both models must give (sequences, …, classes)"
                )
            if not ours.numel():
                continue
            agreed += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            each = kl_divergence(ours, theirs).flatten(1) if ours.ndim > 2 else kl_divergence(ours, theirs)[:, None]
            sums.append(each.sum(1))
            sizes += [each.shape[1]] * each.shape[0]
    if not sums:
        raise DataError("there are no predictions to compare; give at least one batch")
    total = torch.cat(sums)
    mean = float(total.sum()) / sum(sizes)
    if math.isnan(mean):
        raise DataError("a model's logits are not finite: its weights or its arithmetic have broken down")
    return Divergence(
        mean, _stderr(total, torch.tensor(sizes, dtype=torch.float64), mean), agreed / sum(sizes), sum(sizes)
    )


def kl_divergence(reference: Tensor, candidate: Tensor) -> Tensor:
    """KL(softmax(reference) ‖ softmax(candidate)) along the last axis: (…, classes) → nats (…) float64, never negative.

    Infinite where the candidate gives no chance to what the reference does.
    """
    return kl(reference.float().log_softmax(-1), candidate.float().log_softmax(-1))


def _stderr(sums: Tensor, sizes: Tensor, mean: float) -> float:
    """Standard error of Σ sums / Σ sizes over independent units (delta method of a ratio)."""
    units = len(sums)
    if units < 2:
        return math.nan
    residual = sums - mean * sizes
    return math.sqrt(float(residual @ residual) * units / (units - 1)) / float(sizes.sum())
