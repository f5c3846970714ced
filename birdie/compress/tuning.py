"""Tuning: a decoded model is trained towards the float model's predictions, through what a file stores.

    batch ──► float module ───► logits ─┐
       │                                ├─► KL(float ‖ decoded) ──► Adam on gains of rows, norms, biases
       └────► decoded module ─► logits ─┘                           and matrices that are not encoded yet

Quantization shifts what layers give out. A gain for each row of a matrix, norms and biases make up for much of that:
numbers that are coded stay as they are, so a step costs no more than one of training, and a gain takes a few bits.
Labels are not used: logits are recorded where the loss passes them to `F.cross_entropy`, and for losses that compare no
probabilities the difference is that of `birdie.compress.calibration.kl`. The difference on held-out batches is measured
with the values that a file will hold, rounded, then decoded; the best ones are kept. Where it rises, training goes back
to them with half the rate: at its first steps Adam shakes a model that fits well, so its rate begins low.

Sources: distillation to the float model after quantization as in ZeroQuant (Yao et al. 2022, arXiv 2206.01861); scales
that are trained after quantization: AQLM (arXiv 2401.06118).
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from birdie.compress.calibration.held_out import HeldOut
from birdie.compress.calibration.kl import Predictions, difference, predictions
from birdie.compress.calibration.modes import (
    differentiable_batch,
    fresh_casts,
    in_mode,
    set_differentiable_evaluation,
)
from birdie.compress.calibration.sensitivity import Batch
from birdie.compress.registry import decode
from birdie.compress.scheme import Blocks, Encoded
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.trellis import with_gains
from birdie.compress.small_tensors import small_scheme
from birdie.errors import DataError
from birdie.runtime.callbacks import Progress, no_progress

RATE = 0.002  # of Adam: in log of gains, and in root mean squares of other tensors
WARM_UP = 10  # steps
PARTS = 4  # of a batch, a step each
MEASUREMENTS = 8  # of the held-out difference
RETREATS = 3  # in a row, after which training ends
GAINS_PER_OCTAVE = 128
_LEAST = 1e-3  # smallest root mean square by which a tensor's learning rate is scaled: biases may start at zero
_CACHED = 1 << 28  # bytes of the float model's predictions that are kept


def as_stored(weight: Tensor, original: Tensor) -> Tensor:
    """Return a tensor as a file stores it by `small_scheme`: rounded to 16 bits if these suffice.

    Zeros below the range of float16 are flushed if `original` fit in it: a bias that passes through zero would
    otherwise be stored losslessly in 32 bits.
    """
    if small_scheme(original) == Cast() and original.dtype in (torch.float32, torch.float64):
        weight = torch.where(weight.to(torch.float16).abs() < torch.finfo(torch.float16).tiny, 0, weight)
    return decode(small_scheme(weight).encode("", weight))


@dataclass(slots=True)
class _Rows:
    """A matrix whose rows have gains.

    Attributes:
        parameter: of the module.
        decoded: (rows, columns), without gains.
        gains: (rows,) logarithms.
    """

    parameter: Tensor
    decoded: Tensor
    gains: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.gains = torch.zeros(len(self.decoded), device=self.decoded.device)

    def write(self) -> None:
        """Set the parameter."""
        self.parameter.copy_((self.decoded * self.gains.exp()[:, None]).view_as(self.parameter))

    def gradient(self, gradient: Tensor) -> Tensor:
        """Return that of the gains, of that of the parameter."""
        return (gradient.view_as(self.decoded).float() * self.decoded).sum(1) * self.gains.exp()


def has_gains(encoded: Encoded) -> bool:
    """Return whether rows of an encoded tensor may have gains."""
    parts = encoded.parts if isinstance(encoded, Blocks) else (encoded,)
    return (
        encoded.dtype.is_floating_point
        and all(part.scheme == "trellis" for part in parts)
        and len({part.streams[0].shape[1] for part in parts}) == 1
    )


def rows_of(encoded: Encoded) -> int:
    """Return the number of rows of an encoded tensor that `has_gains`."""
    parts = encoded.parts if isinstance(encoded, Blocks) else (encoded,)
    return sum(len(part.streams[0]) for part in parts)


def with_gains_of_rows(encoded: Encoded, gains: NDArray[np.floating], resolution: int = GAINS_PER_OCTAVE) -> Encoded:
    """Return an encoded tensor that `has_gains`, with gains (rows,)."""
    if not isinstance(encoded, Blocks):
        return with_gains(encoded, gains, resolution)
    ends = np.cumsum([len(part.streams[0]) for part in encoded.parts])[:-1]
    parts = [
        with_gains(part, some, resolution) for part, some in zip(encoded.parts, np.split(gains, ends), strict=True)
    ]
    return Blocks.of(encoded.shape, encoded.dtype, parts)


@dataclass(frozen=True, slots=True)
class Tuned:
    """Result of a tuning.

    Attributes:
        gains: name → gain of each row of a matrix.
        tensors: name → other tensor, on the CPU, rounded as a file stores it.
        divergence: on the held-out batches, with these.
        untuned: the same without tuning.
        steps: that were done.
    """

    gains: Mapping[str, NDArray[np.float32]]
    tensors: Mapping[str, Tensor]
    divergence: float
    untuned: float
    steps: int


class Tuner:
    """Trains copies of a module that a calibration measured; keeps the float model's predictions.

    Args:
        held_out: the float module, the batches to measure on, and the loss.
        batches: to train on.
    """

    def __init__(self, held_out: HeldOut, batches: Sequence[Batch]) -> None:
        if not batches:
            raise DataError("tuning needs batches to train on; give more calibration data")
        self._held_out = held_out
        self._batches = smaller([differentiable_batch(batch) for batch in batches], held_out)
        self._student = held_out.candidate.requires_grad_(False)
        set_differentiable_evaluation(self._student)
        self._parameters = dict(self._student.named_parameters(remove_duplicate=False))
        self._expected: dict[int, Predictions] = {}
        self._generator = torch.Generator("cpu").manual_seed(0)
        self._order: list[int] = []

    def tunable(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that are float parameters of the module."""
        return [name for name in names if name in self._parameters and self._parameters[name].is_floating_point()]

    def run(
        self,
        state: Mapping[str, Tensor],
        encoded: Mapping[str, Encoded],
        names: Iterable[str],
        seconds: float,
        *,
        progress: Progress = no_progress,
        clock: Callable[[], float] = time.monotonic,
    ) -> Tuned:
        """Tune for about so many seconds; return what is best on the held-out batches, nothing if that is no number.

        Args:
            state: every tensor of the module, decoded.
            encoded: name → matrix of `state` whose rows get gains.
            names: of other tensors to tune, which no file holds yet or which are not quantized.
            seconds: that it may take; the rate falls to zero over them.
            progress: called with (seconds done, seconds).
            clock: seconds, from any time on.
        """
        start = clock()
        untuned = self._held_out(state)
        rows = {
            name: _Rows(
                self._parameters[name],
                state[name].to(self._parameters[name].device, torch.float32).reshape(rows_of(encoded[name]), -1),
            )
            for name in self.tunable(encoded)
        }
        free = {name: self._parameters[name] for name in self.tunable(names)}
        originals = {name: parameter.detach().cpu().clone() for name, parameter in free.items()}
        training = _Training(rows, free)
        best = Tuned({}, {}, untuned, untuned, 0)
        kept, retreats, measured, steps, idle = training.copy(), 0, 0, 0, 0
        while training.leaves and retreats < RETREATS and idle < len(self._batches) and math.isfinite(untuned):
            done = (clock() - start) / seconds if seconds > 0 else 1.0
            if done >= 1 and steps:
                break
            gradients = self._gradients(training)
            if gradients is None:
                idle += 1
                continue
            if not gradients or not training.step(gradients, min(done, 1.0)):
                break
            steps += 1
            done = (clock() - start) / seconds if seconds > 0 else 1.0
            progress(min(done, 1.0) * seconds, seconds)
            if done < 1 and (steps < WARM_UP or done * MEASUREMENTS < measured + 1):
                continue
            measured = int(done * MEASUREMENTS)
            candidate, exact = training.stored(originals), training.copy()
            divergence = self._held_out(candidate.state(encoded))
            if divergence < best.divergence:
                best = Tuned(candidate.gains, candidate.tensors, divergence, untuned, steps)
                kept, retreats = exact, 0
                training.set(exact)
            else:
                retreats += 1
                training.retreat(kept)
            logging.getLogger("birdie").info(
                "tuning: %.0f of %.0f s, step %d, error %.4g (%.4g without)",
                *(clock() - start, seconds, steps, best.divergence, untuned),
            )
        return best

    def _gradients(self, training: "_Training") -> list[Tensor | None] | None:
        """Return gradients of the difference on the next batch; None if it has no targets, empty if there are none."""
        self._order = (
            self._order or torch.randperm(len(self._batches), generator=self._generator, device="cpu").tolist()
        )
        index = self._order.pop()
        batch, loss = self._batches[index], self._held_out.loss
        expected = self._predicted(index, batch)
        with torch.enable_grad(), fresh_casts():
            for leaf in training.leaves:
                leaf.requires_grad_(True)
            mean = _objective(expected, predictions(self._student, batch, loss))
            if mean is None:
                return None
            if not mean.requires_grad:
                return []
            return list(torch.autograd.grad(mean, training.leaves, allow_unused=True))

    def _predicted(self, index: int, batch: Batch) -> Predictions:
        if index in self._expected:
            return self._expected[index]
        with torch.no_grad(), in_mode(self._held_out.module.modules(), training=False):
            expected = predictions(self._held_out.module, batch, self._held_out.loss)
        size = sum(part.nbytes for kept in (*self._expected.values(), expected) for part in kept.tensors)
        if size <= _CACHED:
            self._expected[index] = expected
        return expected


def _objective(expected: Predictions, predicted: Predictions) -> Tensor | None:
    """Return a scalar with the gradient of the mean difference; None without any prediction.

    Where there are probabilities alone that is the cross-entropy, which takes less time than the exact KL.
    """
    if not expected.log_probabilities or expected.values:
        return difference(expected, predicted).mean()
    pairs = zip(expected.log_probabilities, predicted.log_probabilities, strict=True)
    count = sum(map(len, expected.log_probabilities))
    lowest = torch.finfo(torch.float32).min
    parts = [-(ours.exp() * theirs.clamp_min(lowest)).sum() for ours, theirs in pairs]
    return torch.stack(parts).sum() / count if count else None


def smaller(batches: Sequence[Batch], held_out: HeldOut) -> list[Batch]:
    """Return batches in `PARTS` parts, for more steps in the same time, if that changes no prediction.

    Whether it does is tried with the first batch: elements may be normalized together, or not come first.
    """
    parts = [_cut(batch, PARTS) for batch in batches]
    if not all(parts):
        return list(batches)
    with torch.no_grad(), in_mode(held_out.module.modules(), training=False):
        complete = predictions(held_out.module, batches[0], held_out.loss).tensors
        cut = [predictions(held_out.module, part, held_out.loss).tensors for part in parts[0]]
    joined = [torch.cat(some) if some[0].ndim else some[0] for some in zip(*cut, strict=True)]
    same = len(joined) == len(complete) and all(
        one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-3)
        for one, other in zip(joined, complete, strict=True)
    )
    return [part for some in parts for part in some] if same else list(batches)


def _cut(batch: Batch, parts: int) -> list[Batch]:
    """Return parts of a batch, whose tensors have the same first dimension; none if they have not."""
    leaves, spec = tree_flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or any(tensor.ndim == 0 or len(tensor) != len(tensors[0]) for tensor in tensors):
        return []
    size = max(1, -(-len(tensors[0]) // parts))
    return [
        tree_unflatten([leaf[first : first + size] if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        for first in range(0, len(tensors[0]), size)
    ]


@dataclass(frozen=True, slots=True)
class _Candidate:
    gains: dict[str, NDArray[np.float32]]
    tensors: dict[str, Tensor]

    def state(self, encoded: Mapping[str, Encoded]) -> dict[str, Tensor]:
        decoded = {name: decode(with_gains_of_rows(encoded[name], gains)) for name, gains in self.gains.items()}
        return decoded | self.tensors


class _Training:
    """Gains of rows, other tensors, and Adam."""

    def __init__(self, rows: Mapping[str, _Rows], free: Mapping[str, Tensor]) -> None:
        self.rows, self.free = rows, free
        matrices = {id(one.parameter): one.parameter for one in rows.values()}
        self._others = {id(weight): weight for weight in free.values() if id(weight) not in matrices}
        self.leaves = [one.parameter for one in rows.values()] + list(self._others.values())
        self._tuned = [one.gains for one in rows.values()] + list(self._others.values())
        self._rates = [RATE] * len(rows) + [RATE * _scale(weight) for weight in self._others.values()]
        self._factor, self._warm = 1.0, 0
        self._adam = self._new_adam()

    def step(self, gradients: Sequence[Tensor | None], done: float) -> bool:
        """Do a step; `done` is the share of the schedule. Return False if a gradient is not finite."""
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None):
            return False
        rows = list(self.rows.values())
        with torch.no_grad():
            for index, (tensor, gradient) in enumerate(zip(self._tuned, gradients, strict=True)):
                if gradient is None or index >= len(rows):
                    tensor.grad = gradient
                else:
                    tensor.grad = rows[index].gradient(gradient)
            self._warm += 1
            decay = min(self._warm / WARM_UP, 1.0) * 0.5 * (1 + math.cos(math.pi * done))
            for group, rate in zip(self._adam.param_groups, self._rates, strict=True):
                group["lr"] = rate * self._factor * decay
            self._adam.step()
            for one in rows:
                one.write()
        return True

    @torch.no_grad()
    def set(self, values: Sequence[Tensor]) -> None:
        """Set what is trained, and the parameters of the module."""
        for tensor, value in zip(self._tuned, values, strict=True):
            tensor.copy_(value)
        for one in self.rows.values():
            one.write()

    def copy(self) -> list[Tensor]:
        """Return copies of what is trained."""
        return [tensor.detach().clone() for tensor in self._tuned]

    def retreat(self, kept: Sequence[Tensor]) -> None:
        """Go back to `kept`, with half the rate and a new warm-up."""
        self.set(kept)
        self._factor, self._warm = self._factor / 2, 0
        self._adam = self._new_adam()

    def stored(self, originals: Mapping[str, Tensor]) -> _Candidate:
        """Return all as a file stores it."""
        tensors = {
            name: as_stored(weight.detach().cpu(), originals[name]).to(originals[name].dtype)
            for name, weight in self.free.items()
        }
        return _Candidate({name: one.gains.exp().cpu().numpy() for name, one in self.rows.items()}, tensors)

    def _new_adam(self) -> torch.optim.Adam:
        groups: list[dict[str, Any]] = [{"params": [tensor]} for tensor in self._tuned]
        return torch.optim.Adam(groups, betas=(0.9, 0.98)) if groups else torch.optim.Adam([torch.zeros(1)])


def _scale(weight: Tensor) -> float:
    """Return the root mean square of a tensor, the unit of its learning rate."""
    return max(_LEAST, float(weight.detach().double().square().mean().sqrt()))
