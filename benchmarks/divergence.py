"""Divergence of a decoded model from the float model: mean KL(float ‖ decoded) and agreement of the predictions.

    KL(p ‖ q) = Σ_v p_v (log p_v − log q_v), averaged over predictions (target tokens, images)

The measure of equal quality: at the precisions of interest the difference of two losses is noise, the KL is not, summed
as `birdie.compress.calibration.kl` does it.
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
    """Divergence of two models over held-out predictions.

    Attributes:
        kl: mean nats per prediction.
        stderr: of `kl`; sequences (or images) are the independent units, not the tokens in them. NaN with fewer than 2.
        agreement: share of predictions with the same most likely class.
        count: number of predictions compared.
    """

    kl: float
    stderr: float
    agreement: float
    count: int


def divergence(reference: Callable[[B], Tensor], candidate: Callable[[B], Tensor], batches: Iterable[B]) -> Divergence:
    """Compare two models on held-out batches; memory holds the logits of at most one batch of each.

    Args:
        reference: batch → logits (sequences, …, classes) of any float dtype.
        candidate: the same of the other model, of the same shape.
        batches: inputs of both.
    """
    sums: list[Tensor] = []
    sizes: list[int] = []
    agreed = 0
    with torch.inference_mode():
        for batch in batches:
            p, q = reference(batch), candidate(batch)
            if p.shape != q.shape or p.ndim < 2:
                raise DataError(
                    f"logits of shapes {tuple(p.shape)} and {tuple(q.shape)} cannot be compared; "
                    "both models must return (sequences, …, classes)"
                )
            if not p.numel():
                continue
            agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
            nats = kl_divergence(p, q).flatten(1) if p.ndim > 2 else kl_divergence(p, q)[:, None]
            sums.append(nats.sum(1))
            sizes += [nats.shape[1]] * nats.shape[0]
    if not sums:
        raise DataError("there are no predictions to compare; give at least one batch")
    total = torch.cat(sums).cpu()
    mean = float(total.sum()) / sum(sizes)
    if math.isnan(mean):
        raise DataError("a model's logits are not finite: its weights or its arithmetic have broken down")
    stderr = _stderr(total, torch.tensor(sizes, dtype=torch.float64, device="cpu"), mean)
    return Divergence(mean, stderr, agreed / sum(sizes), sum(sizes))


def kl_divergence(reference: Tensor, candidate: Tensor) -> Tensor:
    """Return KL(softmax(reference) ‖ softmax(candidate)) along the last axis, nats (…) float64, never negative.

    Infinite where the candidate gives probability 0 to what the reference does not.
    """
    return kl(reference.float().log_softmax(-1), candidate.float().log_softmax(-1))


def _stderr(sums: Tensor, sizes: Tensor, mean: float) -> float:
    """Return the standard error of Σ sums / Σ sizes over independent units (delta method of a ratio)."""
    units = len(sums)
    if units < 2:
        return math.nan
    residual = sums - mean * sizes
    return math.sqrt(float(residual @ residual) * units / (units - 1)) / float(sizes.sum())
