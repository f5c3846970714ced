"""Tuning: weights that are not coded yet make up for the errors of those that are.

    batch ──► float module ───► logits ─┐
       │                                ├─► KL(float ‖ other) ──► Adam on what is not coded
       └────► other module ───► logits ─┘

Error feedback makes up for a matrix's errors within the matrix. What is left shifts what later layers get, and these
can make up for much of it. Labels are not used: logits are recorded where the loss passes them to `F.cross_entropy`,
and for losses that compare no probabilities the difference is that of `birdie.compress.calibration.kl`. What does not
lower the difference on held-out batches is undone.

Adam's first steps are as long as its rate, whatever the gradient, and shake a model that fits well. So the rate rises
over some steps, and is first lowered until a few of them help on the held-out batches.

Images and other real inputs are mixed in pairs: a network has memorized what it was trained on, so what it predicts
there says little about others.

Sources: distillation to the float model after quantization as in ZeroQuant (Yao et al. 2022, arXiv 2206.01861); layers
that are trained while others are quantized: QuIP# (Tseng et al. 2024, arXiv 2402.04396); mixed inputs: mixup (Zhang et
al. 2018, arXiv 1710.09412), for distillation Beyer et al. 2022, arXiv 2106.05237.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from birdie.compress.calibration.held_out import HeldOut
from birdie.compress.calibration.kl import Predictions, difference, predictions
from birdie.compress.calibration.modes import (
    differentiable_batch,
    fresh_casts,
    requiring,
    set_differentiable_evaluation,
    with_gradients,
)
from birdie.compress.calibration.sensitivity import Batch
from birdie.errors import BirdieError, DataError

Done = Callable[[], float]
RATE = 0.003  # of Adam, in root mean squares of a tensor; the first that is tried
TRIAL = 10  # steps with a rate
WARM_UP = 5  # steps
PARTS = 4  # of a batch, a step each
_BEARABLE = 0.2  # of the difference that steps of noise may add
_MOST_LOWER = 0.1  # factor on the rate after a trial
_TRIALS = 0.5  # share of the first training, after which no other rate is tried
LEAST = 1e-3  # smallest root mean square by which a tensor's learning rate is scaled: biases may start at zero
_CACHED = 1 << 28  # bytes of the float model's predictions that are kept


class Tuner:
    """Trains a copy of a module that a calibration measured.

    Args:
        held_out: the float module, the batches to measure on, and the loss.
        batches: to train on.

    Attributes:
        measure: difference on the held-out batches, and on their mixtures if inputs are mixed.
        steps: that were done.
    """

    def __init__(self, held_out: HeldOut, batches: Sequence[Batch]) -> None:
        if not batches:
            raise DataError("tuning needs batches to train on; give more calibration data")
        self._loss = held_out.loss
        complete = [differentiable_batch(batch) for batch in batches]
        self._batches = smaller(complete, held_out)
        # elements of a batch that can be cut do not depend on each other
        every = [*self._batches, *held_out.batches]
        self._mixes = self._batches is not complete and all(map(is_mixable, every))
        self._generator, self.measure = torch.Generator("cpu").manual_seed(0), held_out
        if self._mixes:
            self.measure = held_out.on([*held_out.batches, *(mixed(b, self._generator) for b in held_out.batches)])
        self._student = held_out.candidate
        set_differentiable_evaluation(self._student)
        for weight in self._student.parameters():
            weight.requires_grad_(False)
        self._parameters = dict(self._student.named_parameters(remove_duplicate=False))
        self._expected: dict[int, Predictions] = {}
        self._order: list[int] = []
        self._rate, self._is_tried = RATE, False
        self.steps = 0

    def tunable(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that are float parameters of the module."""
        return [name for name in names if name in self._parameters and self._parameters[name].is_floating_point()]

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Set some tensors of the copy."""
        self.measure.load(state)

    def value(self, name: str) -> Tensor:
        """Return a parameter of the copy, on the CPU."""
        return self._parameters[name].detach().cpu().clone()

    def train(self, names: Iterable[str], done: Done) -> tuple[float, float]:
        """Train parameters of the copy, unless that makes it worse on the held-out batches.

        Args:
            names: of the parameters. Zeros of matrices stay zeros.
            done: share of this training that is over, asked before each step; the rate falls to zero with it.

        Returns:
            The differences before and after.
        """
        error = self.measure({})
        parameters = list({id(self._parameters[name]): self._parameters[name] for name in self.tunable(names)}.values())
        if not parameters or not math.isfinite(error):
            return error, error
        best, kept = error, _copies(parameters)
        if not self._is_tried:
            best = self._try_rates(parameters, kept, error, done)
            kept = _copies(parameters)
        begin = done()
        self._descend(parameters, self._rate, lambda _: (done() - begin) / (1 - begin) if begin < 1 else 1.0)
        result = self.measure({})
        if not result < best:
            _restore(parameters, kept)
            result, self._rate = best, self._rate / 2
        return error, result

    def _try_rates(self, parameters: Sequence[Tensor], start: Sequence[Tensor], error: float, done: Done) -> float:
        """Lower the rate until a few steps help; return the difference after these. Without success they are undone.

        What steps of noise add grows with the square of the rate, which tells how much lower it has to be.
        """
        while done() < _TRIALS:
            if not self._descend(parameters, self._rate, lambda step: step / TRIAL):
                break
            result = self.measure({})
            if result < error:
                self._is_tried = True
                return result
            _restore(parameters, start)
            added = (result - error) / error if error > 0 else math.inf
            factor = math.sqrt(_BEARABLE / added) if math.isfinite(added) and added > 0 else 0.0
            self._rate *= min(max(factor, _MOST_LOWER), 0.5)
        return error

    def _descend(self, parameters: Sequence[Tensor], rate: float, done: Callable[[int], float]) -> int:
        """Do steps until `done`, of their number, is 1; return how many. Gradients that are not finite end it."""
        descent, step, idle = _Descent(parameters), 0, 0
        while (share := done(step)) < 1 and idle < len(self._batches):
            gradients = self._gradients(parameters)
            if gradients is None:
                idle += 1
                continue
            warm, decay = min((step + 1) / WARM_UP, 1.0), 0.5 * (1 + math.cos(math.pi * share))
            if not gradients or not descent.step(gradients, rate * warm * decay):
                break
            step += 1
        self.steps += step
        return step

    def _gradients(self, parameters: Sequence[Tensor]) -> list[Tensor | None] | None:
        """Return gradients of the difference on the next batch; None if it has no targets, empty if there are none."""
        self._order = (
            self._order or torch.randperm(len(self._batches), generator=self._generator, device="cpu").tolist()
        )
        index = self._order.pop()
        batch = self._batches[index]
        if self._mixes:
            batch = mixed(batch, self._generator)
            expected = self.measure.predictions(index, batch)
        else:
            expected = self._expected.get(index) or self._kept(index, self.measure.predictions(index, batch))
        try:
            return self._of_batch(parameters, index, batch, expected)
        except (BirdieError, MemoryError):
            raise
        except Exception:  # the code of the caller raises any
            if self.measure.copied.needs_weights:
                raise
            self.measure.copied.needs_weights = True  # some weights with gradients and some without do not do
            return self._of_batch(parameters, index, batch, expected)

    def _of_batch(
        self, parameters: Sequence[Tensor], index: int, batch: Batch, expected: Predictions
    ) -> list[Tensor | None] | None:
        runs = self.measure.copied
        with (
            requiring(parameters, True),
            with_gradients(self._student) if runs.needs_weights else nullcontext(),
            fresh_casts(),
            runs.session(),
            runs.run(index, batch),
        ):
            predicted = predictions(self._student, batch, self._loss, exact=runs.needs_graph or runs.needs_weights)
            mean = _objective(expected, predicted)
            if mean is None or not mean.requires_grad:
                return None if mean is None else []
            gradients = torch.autograd.grad(mean, parameters, allow_unused=True)
            return [one.to_dense() if one is not None and one.is_sparse else one for one in gradients]

    def _kept(self, index: int, expected: Predictions) -> Predictions:
        size = sum(part.nbytes for kept in (*self._expected.values(), expected) for part in kept.tensors)
        if size <= _CACHED:
            self._expected[index] = expected
        return expected


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


@torch.no_grad()
def _restore(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


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


def smaller(batches: Sequence[Batch], held_out: HeldOut) -> Sequence[Batch]:
    """Return batches in `PARTS` parts, for more steps in the same time, if that changes no prediction; else `batches`.

    Whether it does is tried with the first batch: elements may be normalized together, or not come first.
    """
    parts = [_cut(batch, PARTS) for batch in batches]
    if not all(parts):
        return batches
    complete = held_out.predictions(0, batches[0]).tensors
    try:
        cut = [held_out.predictions(0, part).tensors for part in parts[0]]
    except Exception:  # whatever the code of the caller raises: it takes batches of this size alone
        return batches
    joined = [torch.cat(some) if some[0].ndim else some[0] for some in zip(*cut, strict=True)]
    same = len(joined) == len(complete) and all(
        one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-3)
        for one, other in zip(joined, complete, strict=True)
    )
    return [part for some in parts for part in some] if same else batches


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


def is_mixable(batch: Batch) -> bool:
    """Return whether a batch has one tensor of real numbers: mixtures of its elements are inputs as well.

    Of several, one may be a mask or a time, mixtures of which mean nothing.
    """
    tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return len(tensors) == 1 and tensors[0].ndim > 1


def mixed(batch: Batch, generator: torch.Generator) -> Batch:
    """Return a batch that `is_mixable` with each element of its inputs mixed with another, by a random share."""

    def mix(inputs: Tensor) -> Tensor:
        if not inputs.is_floating_point():
            return inputs
        count = len(inputs)
        share = torch.rand(count, generator=generator, device="cpu").view(-1, *[1] * (inputs.ndim - 1)).to(inputs)
        other = torch.randperm(count, generator=generator, device="cpu").to(inputs.device)
        return share * inputs + (1 - share) * inputs[other]

    result: Batch = tree_map_only(Tensor, mix, batch)
    return result


class _Descent:
    """Adam on copies of parameters in float32; steps are shares of the root mean square of each."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._exact = [parameter.detach().float().clone() for parameter in parameters]
        # a pruned matrix stays pruned; norms and biases often start at zero
        self._kept = [parameter.detach() != 0 if parameter.ndim > 1 else None for parameter in parameters]
        self._scales = [max(LEAST, float(exact.double().square().mean().sqrt())) for exact in self._exact]
        self._adam = torch.optim.Adam([{"params": [exact]} for exact in self._exact], betas=(0.9, 0.98))

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], rate: float) -> bool:
        """Do a step; return False if a gradient is not finite."""
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None):
            return False
        for exact, gradient, kept in zip(self._exact, gradients, self._kept, strict=True):
            exact.grad = None if gradient is None else gradient.float() if kept is None else gradient.float() * kept
        for group, scale in zip(self._adam.param_groups, self._scales, strict=True):
            group["lr"] = rate * scale
        self._adam.step()
        _restore(self._parameters, self._exact)
        return True
