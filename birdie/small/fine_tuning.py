"""Fine-tuning of a model until its file has a target size, on the weights that the file will hold.

    batch ─► loss ─► + λ · bits ─► Adam ─► … ─► save the file at times, to measure it ─► target bits ─► λ    spectral
    batch ─► loss of the decoded weights ─► Adam on the latents ─► … ─► encode all matrices at times ─► exponent  others

Matrices of a model that `birdie.spectral` did not wrap are encoded by the trellis of the export up to ten times, and
the layers compute with what is decoded (`birdie.small.stored_training`). What follows is about spectral weights.

A file holds more than the estimated bits of its weights: biases, norms, names, scales. So the model is saved at the
start, once its bits have come down, and a few times after that, and the bytes of all other tensors are subtracted from
the budget. If the file is still too large at the end, the scales are made slightly coarser and training continues.
"""

import math
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from birdie.artifact.saving import save
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.rate.target import Target, size_of
from birdie.compress.tuning import LEAST, WARM_UP
from birdie.errors import BudgetError, ConfigError, DataError
from birdie.small.qat.stored_weights import plain
from birdie.small.spectral.network import QuantizationNetwork
from birdie.small.spectral.size_control import RateControl
from birdie.small.spectral.wrap import SpectralTraining, at_bits, distinct, quantization_loss, wrapped
from birdie.small.stored_training import BudgetFile, StoredTraining

Batch = TypeVar("Batch")
Loss = Callable[[nn.Module, Batch], Tensor]
_SHARE = 0.01  # learning rate, in root mean squares of a tensor
_SPECTRAL_RATE = 1e-3
_FLOOR = 0.05  # final learning rate, as a fraction of the first; it falls by a cosine
# Fraction of the steps after which quantization scales are fixed: weights gather at the boundaries between symbols, and
# a small change of a scale then changes many symbols at once.
_FIXED_AFTER = 0.75
_REACH = 0.25  # maximum octaves by which all scales then move at each measurement, to get to the target bits
_PROBED = 8  # batches from which the sensitivity of each tensor is measured
_COARSER = 1 / 32  # octaves to add to the scales if the file is too large at the end
_MEASURED = (0.62, 0.75, 0.87, 0.95)  # fractions of the steps after which the file is saved and measured
_ANY = 1e-3  # target bits before the first measurement, which sets the real target
_SPARE = 0.005  # fraction of the budget left free, because bits change a little between measurements
# Of matrices: batches of the first and the last calibration, how often they are encoded, the fewest steps in between.
_FIRST, _LAST, _ENCODINGS, _APART = 8, 64, 10, 12
_EXTRA, _MOST = 0.03, 1.3  # as fractions of the steps: how many to add while the file is too large, and the maximum


@dataclass(frozen=True, slots=True)
class FineTuneStep:
    """Result of one step of fine-tuning.

    Attributes:
        number: of the step, from 1.
        steps: number of steps that are planned now.
        loss: loss of the task alone.
        bits: estimated bits per spectral weight, or coded bits per weight of the matrices; None without a target.
        weight: λ, in nats of loss per bit per weight; None without a target and without spectral weights.
        bytes: size of the whole file at the last measurement; None without a budget.
        error: squared difference between latent weights and what the file holds, as a share of the squared weights;
            None unless matrices are encoded by a trellis.
        changed: share of the symbols that the last encoding changed; None as `error`.
    """

    number: int
    steps: int
    loss: float
    bits: float | None = None
    weight: float | None = None
    bytes: int | None = None
    error: float | None = None
    changed: float | None = None


def fine_tune(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Callable[[nn.Module, Batch], Tensor],
    *,
    steps: int,
    budget: int | str | None = None,
    bits: float | None = None,
    rate: float | None = None,
    network_rate: float = 5e-3,
    settled: float = 0.6,
    measured: bool = True,
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = torch.optim.Adam,
) -> Generator[FineTuneStep, None, None]:
    """Train `model` in place until the file that `birdie.save` writes has the target size; yield after each step.

        for step in birdie.fine_tune(model, batches, loss, steps=1000, budget=100_000):
            print(step.number, step.loss, step.bits)
        birdie.save(model, "small.birdie")

    Matrices are trained as the trellis of the export stores them, or, after `birdie.spectral(model)`, as quantized
    coefficients of a transform, which is for kernels that are smooth. `birdie.save` writes what was trained; to
    compress the weights in another way, or to train on, call `birdie.plain(model)` first. Units whose order is
    arbitrary are sorted in the model (the function is unchanged).

    Training or evaluation mode of the model is not changed: in evaluation mode, the statistics of norms stay fixed.

    Args:
        model: any module, wrapped by `spectral` or not; without a target it is trained plainly, as a baseline.
        batches: batches of any type; iterated over again when they end.
        loss: (model, batch) → mean loss of the task in nats, 0-d.
        steps: number of optimizer steps; for spectral weights a few are added if the file is too large at the end.
        budget: maximum bytes of the file, also "20kB"; it ends up to 1 % below.
        bits: target bits per spectral weight, as `quantization_loss` counts them, or, without spectral weights, bits
            per weight of the complete file; instead of a budget.
        rate: learning rate, which falls by a cosine to a twentieth. Default: 0.01 of the root mean square of each
            tensor, which suits weights of any size; of spectral weights 1e-3. Without these it rises over five steps.
        network_rate: of spectral weights: learning rate of the network of quantization scales, which has few parameters
            and far to go.
        settled: of spectral weights: fraction of the steps after which the size is reached; the rest improves the task.
        measured: of spectral weights: set the scale of each tensor from the gradients of eight batches before the first
            step. False keeps scales relative to the standard deviation; use it where `loss` is at its minimum, as in
            distillation from the model itself, because the gradients are then noise.
        optimizer: parameter groups with their `lr` → optimizer.

    Raises:
        ConfigError: settings contradict each other or are out of range, or the budget holds the model losslessly.
        DataError: the batches end and cannot be iterated over again, or the loss is not finite (during iteration).
        BudgetError: the file cannot be made as small as the budget (of spectral weights during iteration).
    """
    size = size_of("budget", budget)
    if steps < 1 or not (rate is None or rate > 0) or not network_rate > 0:
        raise ConfigError(f"steps={steps}, rate={rate}, network_rate={network_rate}; all must be above zero")
    if budget is not None and bits is not None:
        raise ConfigError("budget and bits are two targets; give one of them")
    network = next((module.weight.quantizer for module in wrapped(model)), None)
    endless, target = _endless(batches), _SizeTarget()
    most_bytes = Target(size, bits).in_bytes(sum(weight.numel() for weight in model.parameters()))
    if network is not None and measured and not network.trained:
        _set_scales(model, network, [next(endless) for _ in range(_PROBED)], loss)
    if network is None and most_bytes is not None:
        plain(model)
        most = len(batches) if isinstance(batches, Sized) else _LAST
        target = _StoredTarget(model, endless, most, loss, steps, most_bytes)
    elif bits is not None or budget is not None:
        control = RateControl(model, _ANY if bits is None else bits, steps, settled=settled)
        target = _SpectralTarget(model, control, steps, size)
    if network is None:
        stepper = optimizer(_groups(model, rate))
        curves = [partial(_warm_cosine, steps)] * len(stepper.param_groups)
    else:
        stepper = optimizer(_spectral_groups(model, network, rate or _SPECTRAL_RATE, network_rate))
        curves = [partial(_cosine, steps, _FLOOR), partial(_cosine, _FIXED_AFTER * steps, 0.0)]
    return _steps(model, endless, loss, steps, target, stepper, curves)


def _set_scales(model: nn.Module, network: QuantizationNetwork, batches: list[Batch], loss: Loss[Batch]) -> None:
    """Set the scales of an untrained network by the sensitivity of each tensor, at the present bits.

    A quantization error costs its square times the curvature of the loss, estimated by the mean squared gradient
    (empirical Fisher). The cost is equal for all tensors if scales are proportional to one over its square root.
    """
    parts = distinct(model)
    start, squares = float(quantization_loss(model).detach()), torch.zeros(len(parts))
    for batch in batches:
        model.zero_grad(set_to_none=True)
        loss(model, batch).backward()  # type: ignore[no-untyped-call]
        for index, part in enumerate(parts):
            gradient = part.original.grad
            squares[index] += 0.0 if gradient is None else float(gradient.square().mean())
    model.zero_grad(set_to_none=True)
    if bool(torch.isfinite(squares).all()) and bool(squares.any()):
        for part, square in zip(parts, squares.clamp_min(float(squares[squares > 0].min())), strict=True):
            part.weight.scale.fill_(-0.5 * math.log2(float(square)))
        at_bits(model, network, start)


def _groups(model: nn.Module, rate: float | None) -> list[dict[str, Any]]:
    """Return the parameters with their learning rate; None for a share of the root mean square of each."""
    parameters = list(model.parameters())
    if rate is not None:
        return [{"params": parameters, "lr": rate}]
    sizes = [max(LEAST, float(parameter.detach().double().square().mean().sqrt())) for parameter in parameters]
    return [{"params": [one], "lr": _SHARE * size} for one, size in zip(parameters, sizes, strict=True)]


def _spectral_groups(
    model: nn.Module, network: QuantizationNetwork, rate: float, network_rate: float
) -> list[dict[str, Any]]:
    parameters = list(network.parameters())
    ids = {id(parameter) for parameter in parameters}
    others = [parameter for parameter in model.parameters() if id(parameter) not in ids]
    return [{"params": others, "lr": rate}, {"params": parameters, "lr": network_rate}]


def _endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the batches again and again."""
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise DataError("there are no more batches; give a list, or a loader that can be iterated over again")


class _SizeTarget:
    """Target of the size of the file, and its part in each step; this one is no target."""

    def begin_step(self, number: int) -> None:
        """Prepare the model for step `number`."""

    def penalty(self) -> Tensor | float:
        """Return the term to add to the loss of the step."""
        return 0.0

    def end_step(self, number: int, steps: int, batch: Any) -> int:  # noqa: ARG002
        """Measure or settle the model after step `number` of `steps`, on `batch`; return how many steps to add."""
        return 0

    def figures(self) -> dict[str, Any]:
        """Return fields of the `FineTuneStep`."""
        return {}

    def release(self) -> None:
        """Leave the model to others, at the end or if training is stopped."""


class _SpectralTarget(_SizeTarget):
    """Target size of the file or of the bits of spectral weights, and the size at the last measurement."""

    def __init__(self, model: nn.Module, control: RateControl, steps: int, budget: int | None) -> None:
        self.model, self.control, self.steps, self.budget = model, control, steps, budget
        self.network = next(wrapped(model)).weight.quantizer
        self.names = {module.name for module in wrapped(model)}
        self.bytes: int | None = None
        self.measurements = {math.ceil(fraction * steps) for fraction in _MEASURED}
        if budget is not None:
            self.measure()

    def penalty(self) -> Tensor:
        return self.control.penalty()

    def end_step(self, number: int, steps: int, batch: Any) -> int:  # noqa: ARG002
        if number == steps:
            SpectralTraining(self.model, self.network).settle()
            return 0 if self.measure() else self._extra_steps(number)
        if number in self.measurements:
            self.measure()
            if number >= _FIXED_AFTER * self.steps:
                self.control.holding = True
                at_bits(self.model, self.network, self.control.target, reach=_REACH)
        return 0

    def figures(self) -> dict[str, Any]:
        return {"bits": self.control.bits, "weight": self.control.weight, "bytes": self.bytes}

    def release(self) -> None:
        self.control.release()

    def measure(self) -> bool:
        """Measure the size and correct the target bits; return True if the target is met (for bits, to 1 %)."""
        if self.budget is None:
            return self.control.measure() <= 1.01 * self.control.target
        with tempfile.TemporaryDirectory() as folder:
            summary = save(self.model, Path(folder) / "measured.birdie")
        self.bytes = summary.bytes
        coded = sum(tensor.bytes for tensor in summary.tensors if tensor.name in self.names)
        left = self.budget * (1 - _SPARE) - (summary.bytes - coded)
        if left <= 0:
            raise BudgetError(
                f"a budget of {self.budget:,} bytes leaves nothing for the spectral weights: all other data take "
                f"{summary.bytes - coded:,} bytes; give a larger budget"
            )
        self.control.target = self.control.measure() * left / coded
        return self.bytes <= self.budget

    def _extra_steps(self, number: int) -> int:
        """Make the scales coarser, because the file is still too large; return the number of steps to add."""
        if number >= _MOST * self.steps:
            size = (
                f"{self.control.measure():.2f} bits per weight instead of {self.control.target:.2f}"
                if self.budget is None
                else f"{self.bytes:,} bytes instead of {self.budget:,}"
            )
            raise BudgetError(f"after {number:,} steps the file has {size}; give more steps or bytes")
        at_bits(self.model, self.network, self.control.target)
        with torch.no_grad():
            self.network.offset.add_(_COARSER)
        return max(1, round(_EXTRA * self.steps))


class _StoredTarget(_SizeTarget, Generic[Batch]):
    """Byte budget of a file whose matrices are encoded anew every few steps."""

    def __init__(
        self, model: nn.Module, batches: Iterator[Batch], most: int, loss: Loss[Batch], steps: int, budget: int
    ) -> None:
        self.model, self.batches, self.loss = model, batches, loss
        self.apart, self.calibrated = max(_APART, math.ceil(steps / _ENCODINGS)), min(_LAST, most)
        # of the last steps: batches that end with the training must not end it without a file
        self.recent: deque[Batch] = deque(maxlen=self.calibrated)
        first = [next(batches) for _ in range(min(_FIRST, most))]
        self.training = StoredTraining(model, BudgetFile(budget), partial(self._calibration, first))
        self.last = self.training.encode()

    def begin_step(self, number: int) -> None:
        if number > 1 and (number - 1) % self.apart == 0:
            self.last = self.training.encode()

    def end_step(self, number: int, steps: int, batch: Batch) -> int:
        self.recent.append(batch)
        if number == steps:
            more = (next(self.batches) for _ in range(self.calibrated - len(self.recent)))
            self.last = self.training.finish(partial(self._calibration, [*self.recent, *more]))
        return 0

    def figures(self) -> dict[str, Any]:
        return asdict(self.last)

    def _calibration(self, batches: list[Batch], state: Mapping[str, Tensor]) -> CalibrationResult:
        return CalibrationResult.of(state, (self.model, batches, self.loss))


def _steps(
    model: nn.Module,
    batches: Iterator[Batch],
    loss: Loss[Batch],
    steps: int,
    target: _SizeTarget,
    optimizer: torch.optim.Optimizer,
    curves: Sequence[Callable[[int], float]],
) -> Generator[FineTuneStep, None, None]:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [*curves])
    number, last = 0, steps
    try:
        while number < last:
            number += 1
            target.begin_step(number)
            batch = next(batches)
            task = loss(model, batch)
            if not bool(torch.isfinite(task)):
                raise DataError(
                    f"the loss of step {number:,} is not finite, so the step was not taken; check that batch, or "
                    "lower rate or network_rate"
                )
            total = task + target.penalty()
            optimizer.zero_grad(set_to_none=True)
            total.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            last += target.end_step(number, last, batch)
            yield FineTuneStep(number, last, float(task.detach()), **target.figures())
    finally:
        target.release()


def _warm_cosine(steps: int, done: int) -> float:
    """Return a multiplier that rises over the first steps, which are as long as Adam's rate and shake the model."""
    return min((done + 1) / WARM_UP, 1.0) * _cosine(steps, _FLOOR, done)


def _cosine(steps: float, floor: float, done: int) -> float:
    """Return a multiplier that falls from 1 to `floor` by a cosine, and stays there."""
    return floor + (1 - floor) / 2 * (1 + math.cos(math.pi * min(1.0, done / steps)))
