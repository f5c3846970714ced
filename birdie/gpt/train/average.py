"""Averages of the weights along a run; validation, export and scores use the average instead of the last weights.

    weights after each step ──► EMA:  a ← d·a + (1 − d)·w      from the initial weights on
                            ──► SWA:  mean of the weights every N steps once the learning rates are low
                            ──► LAWA: mean of the last K snapshots, one every N steps

Averages are float32 (or better) over all parameters and floating-point buffers: an average in bfloat16 would lose every
change below 2⁻⁹ of a weight, which happened in some records. A step costs one pass over the weights in a few kernel
launches, no copy and no communication: all ranks have the same weights, so they have the same average.

The model's tensors are only ever read and written in place, so that views of one storage (`banks`) stay views.

Sources: SWA: Izmailov et al. 2018 (arXiv 1803.05407); LAWA: Kaddour 2022 (arXiv 2209.14981); EMA as in
openai/parameter-golf #287, which replaced the SWA of the records before it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from birdie.errors import WeightsError
from birdie.gpt.train.settings import AverageSettings

TERMS = "terms"
"""Key of the number of terms in a state, below the kind."""


class Average:
    """The average of one run's weights; of kind "none" it costs nothing and does nothing.

    Args:
        settings: kind of the average.
        tensors: parameters and buffers of the model by name; floating-point ones are averaged. Others keep their last
            value, and so do those that are not finite, such as causal masks: −inf has no mean.

    Attributes:
        settings: the argument.
        terms: number of weights in the average.
        applied: whether the model holds the average now.
    """

    def __init__(self, settings: AverageSettings, tensors: Mapping[str, Tensor]) -> None:
        self.settings, self.terms, self.applied = settings, 0, False
        averaged = {
            name: tensor.detach()
            for name, tensor in tensors.items()
            if tensor.is_floating_point() and bool(torch.isfinite(tensor).all())
        }
        self._names, self._weights = list(averaged), list(averaged.values())
        self._slots: list[list[Tensor]] = []  # one copy of the weights each, the oldest first
        self._clear()

    def _clear(self) -> None:
        """Start anew: an EMA with the weights as they are; the others have no value before their first term."""
        self.terms = 0
        self._slots = [self._copies()] if self.settings.kind in ("ema", "swa") else []

    @torch.no_grad()
    def update(self, step: int, multiplier: float) -> None:
        """Add the weights to the average if a term is due.

        Args:
            multiplier: factor on the learning rates of the last one.
        """
        settings = self.settings
        if settings.kind == "ema":
            self.terms += 1
            torch._foreach_lerp_(self._slots[0], self._wide_weights(), 1 - settings.ema_decay)
        elif settings.kind == "swa" and multiplier < settings.swa_below and step % settings.swa_every == 0:
            self.terms += 1
            torch._foreach_lerp_(self._slots[0], self._wide_weights(), 1 / self.terms)
        elif settings.kind == "lawa" and step % settings.lawa_every == 0:
            self.terms += 1
            oldest = self._slots.pop(0) if len(self._slots) == settings.lawa_k else self._copies()
            torch._foreach_copy_(oldest, self._weights)
            self._slots.append(oldest)

    def __str__(self) -> str:
        """Name the weights that are the result: the average, or "the last weights" before its first term."""
        if not self.terms:
            return "the last weights"
        if self.settings.kind == "ema":
            return f"EMA {self.settings.ema_decay:g} of {self.terms:,} steps"
        count = self.terms if self.settings.kind == "swa" else len(self._slots)
        return f"{self.settings.kind.upper()} of {count:,} snapshots"

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors of the average, to be broadcast to all ranks."""
        for slot in self._slots:
            yield from slot

    @torch.no_grad()
    def mean(self) -> dict[str, Tensor]:
        """Return the averaged weights by name, in float32; empty before the first term. Do not write to them."""
        if not self.terms:
            return {}
        if len(self._slots) == 1:
            return dict(zip(self._names, self._slots[0], strict=True))
        mean = [tensor.clone() for tensor in self._slots[0]]
        for number, slot in enumerate(self._slots[1:], 2):
            torch._foreach_lerp_(mean, slot, 1 / number)
        return dict(zip(self._names, mean, strict=True))

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Put the average, if it has a term, into the model until the end of the block; then the last weights again."""
        self.require_last("score its average")
        if not self.terms:
            yield
            return
        last = self._apply()
        try:
            yield
        finally:
            torch._foreach_copy_(self._weights, last)
            self.applied = False

    @torch.no_grad()
    def finish(self) -> str | None:
        """Put the average into the model for good; return a line about the difference, or None without a term."""
        if self.settings.kind == "none":
            return None
        self.require_last("finish with its average")
        if not self.terms:  # the run says so: `birdie.gpt.run.onset`
            return None
        last = self._apply()
        distance = _relative_distance(self._weights, last)  # measured on what the model holds now
        return f"average of weights: {self}, {distance:.2%} of their norm from the last weights, is the result"

    @torch.no_grad()
    def _apply(self) -> list[Tensor]:
        """Write the average into the model; return the last weights."""
        last = [tensor.clone() for tensor in self._weights]
        torch._foreach_copy_(self._weights, list(self.mean().values()))
        self.applied = True
        return last

    def require_last(self, action: str) -> None:
        """Check that the model holds its last weights."""
        if self.applied:
            raise WeightsError(f"cannot {action}: the model holds the average of its weights and not the last ones")

    def state(self) -> dict[str, Tensor]:
        """Return copies of all tensors as "kind/slot/name", the oldest slot first; empty for kind "none"."""
        self.require_last("save the run")
        kind = self.settings.kind
        if kind == "none":
            return {}
        slots = {
            f"{kind}/{number}/{name}": tensor.clone()
            for number, slot in enumerate(self._slots)
            for name, tensor in zip(self._names, slot, strict=True)
        }
        return {f"{kind}/{TERMS}": torch.tensor(self.terms), **slots}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore `state`; without an average of this kind in it, start anew with the weights as they are.

        Whoever reads it from a file has checked it (`birdie.gpt.train.resuming`).
        """
        kind = self.settings.kind
        if kind == "none":
            return
        self._clear()
        terms = state.get(f"{kind}/{TERMS}")
        if terms is None:
            return
        count = len({key.split("/", 2)[1] for key in state} - {TERMS})
        loaded: list[list[Tensor]] = []
        for number in range(count if kind == "lawa" else 1):
            slot = self._copies()
            for name, tensor in zip(self._names, slot, strict=True):
                tensor.copy_(state[f"{kind}/{number}/{name}"])
            loaded.append(slot)
        self.terms = int(terms)
        self._slots = loaded[-self.settings.copies :]

    def _wide_weights(self) -> list[Tensor]:
        """Return the weights in the dtype of the average, without a copy where they have it."""
        pairs = list(zip(self._slots[0], self._weights, strict=True))
        if all(average.dtype == weight.dtype for average, weight in pairs):
            return self._weights
        return [weight.to(average.dtype) for average, weight in pairs]

    def _copies(self) -> list[Tensor]:
        return [weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True) for weight in self._weights]


def _relative_distance(tensors: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """‖tensors − reference‖ / ‖reference‖ over all tensors together."""
    differences = torch._foreach_norm(torch._foreach_sub(list(tensors), list(reference)))
    norms = torch._foreach_norm(list(reference))
    distance, norm = (
        torch.stack([part.double() for part in parts]).square().sum().sqrt().item() for parts in (differences, norms)
    )
    return distance / norm if norm else 0.0
