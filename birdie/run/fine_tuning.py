"""Fine-tuning of a model until its file has a target size, on the weights that the file will hold.

    batch ─► loss ─► + λ · bits ─► Adam ─► … ─► save the file at times, to measure it ─► target bits ─► λ    spectral
    batch ─► loss of the decoded weights ─► Adam on the latents ─► … ─► encode all matrices at times ─► exponent  others

Matrices of a model that `birdie.spectral` did not wrap are encoded by the trellis of the export up to ten times, and
the layers compute with what is decoded (`birdie.run.requantization`). What follows is about spectral weights.

A file holds more than the estimated bits of its weights: biases, norms, names, scales. So the model is saved at the
start, once its bits have come down, and a few times after that, and the bytes of all other tensors are subtracted from
the budget. If the file is still too large at the end, the scales are made slightly coarser and training continues.
"""

import math
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from birdie.artifact.save import save
from birdie.compress.qat.trained import plain
from birdie.compress.rate.target import Target
from birdie.compress.spectral.control import RateControl
from birdie.compress.spectral.network import QuantizationNetwork
from birdie.compress.spectral.wrap import Spectral, at_bits, distinct, quantization_loss, wrapped
from birdie.errors import BudgetError, ConfigError, DataError
from birdie.run.requantization import Requantization
from birdie.runtime.parsing import whole_number

Batch = TypeVar("Batch")
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
    bits: float | None
    weight: float | None
    bytes: int | None
    error: float | None = None
    changed: float | None = None


def fine_tune(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Callable[[nn.Module, Batch], Tensor],
    *,
    steps: int,
    budget: int | None = None,
    bits: float | None = None,
    rate: float = 1e-3,
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
        budget: maximum bytes of the file; it ends up to 1 % below.
        bits: target bits per spectral weight, as `quantization_loss` counts them, or, without spectral weights, bits
            per weight of the complete file; instead of a budget.
        rate: learning rate, which falls by a cosine to a twentieth.
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
    budget = whole_number("budget", budget)
    if steps < 1 or not rate > 0 or not network_rate > 0:
        raise ConfigError(f"steps={steps}, rate={rate}, network_rate={network_rate}; all must be above zero")
    if budget is not None and bits is not None:
        raise ConfigError("budget and bits are two targets; give one of them")
    network = next((module.weight.quantizer for module in wrapped(model)), None)
    endless, target = _endless(batches), None
    if network is None and (budget is not None or bits is not None):
        plain(model)
        size = Target(budget, bits).in_bytes(sum(weight.numel() for weight in model.parameters()))
        assert size is not None
        most = len(batches) if isinstance(batches, Sized) else _LAST
        quantization = Requantization(model, [next(endless) for _ in range(min(_FIRST, most))], loss, size)
        groups = [{"params": list(model.parameters()), "lr": rate}]
        return _quantized_steps(quantization, endless, loss, steps, optimizer(groups), min(_LAST, most))
    if network is not None and measured and not network.trained:
        _set_scales(model, network, [next(endless) for _ in range(_PROBED)], loss)
    if bits is not None:
        target = _SizeTarget(model, RateControl(model, bits, steps, settled=settled))
    elif budget is not None:
        target = _SizeTarget(model, RateControl(model, _ANY, steps, settled=settled), budget)
        target.measure()
    groups = [{"params": parameters, "lr": lr} for parameters, lr in _groups(model, network, rate, network_rate)]
    return _steps(model, endless, loss, steps, target, optimizer(groups))


def _set_scales(
    model: nn.Module, network: QuantizationNetwork, batches: list[Batch], loss: Callable[[nn.Module, Batch], Tensor]
) -> None:
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


def _groups(
    model: nn.Module, network: QuantizationNetwork | None, rate: float, network_rate: float
) -> Iterator[tuple[list[nn.Parameter], float]]:
    network_parameters = [] if network is None else list(network.parameters())
    ids = {id(parameter) for parameter in network_parameters}
    yield [parameter for parameter in model.parameters() if id(parameter) not in ids], rate
    if network_parameters:
        yield network_parameters, network_rate


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
    """Target size of the file or of the bits, and the size at the last measurement."""

    def __init__(self, model: nn.Module, control: RateControl, budget: int | None = None) -> None:
        self.model, self.control, self.budget = model, control, budget
        self.network = next(wrapped(model)).weight.quantizer
        self.names = {module.name for module in wrapped(model)}
        self.bytes: int | None = None

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

    def difference(self) -> str:
        """Return the measured size and the target, for an error message."""
        if self.budget is None:
            return f"{self.control.measure():.2f} bits per weight instead of {self.control.target:.2f}"
        return f"{self.bytes:,} bytes instead of {self.budget:,}"


def _steps(
    model: nn.Module,
    batches: Iterator[Batch],
    loss: Callable[[nn.Module, Batch], Tensor],
    steps: int,
    target: _SizeTarget | None,
    optimizer: torch.optim.Optimizer,
) -> Generator[FineTuneStep, None, None]:
    curves: list[Callable[[int], float]] = [
        partial(_cosine, steps, _FLOOR),
        partial(_cosine, _FIXED_AFTER * steps, 0.0),
    ]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, curves[: len(optimizer.param_groups)])
    measurements = {math.ceil(fraction * steps) for fraction in _MEASURED}
    number, last = 0, steps
    try:
        while number < last:
            number += 1
            task = _finite(loss(model, next(batches)), number)
            total = task if target is None else task + target.control.penalty()
            optimizer.zero_grad(set_to_none=True)
            total.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            if target is not None and number == last:
                Spectral(model, target.network).settle()
                if not target.measure():
                    last += _extra_steps(target, number, steps)
            elif target is not None and number in measurements:
                target.measure()
                if number >= _FIXED_AFTER * steps:
                    target.control.holding = True
                    at_bits(model, target.network, target.control.target, reach=_REACH)
            bits, weight, size = (
                (None, None, None) if target is None else (target.control.bits, target.control.weight, target.bytes)
            )
            yield FineTuneStep(number, last, float(task.detach()), bits, weight, size)
    finally:
        if target is not None:
            target.control.release()


def _quantized_steps(
    quantization: Requantization,
    batches: Iterator[Batch],
    loss: Callable[[nn.Module, Batch], Tensor],
    steps: int,
    optimizer: torch.optim.Optimizer,
    calibrated: int,
) -> Generator[FineTuneStep, None, None]:
    """Train a model whose matrices are encoded anew every few steps; `calibrated`: batches of the last calibration."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_cosine, steps, _FLOOR))
    apart = max(_APART, math.ceil(steps / _ENCODINGS))
    recent: list[
        Batch
    ] = []  # for the last calibration: batches that end with the training must not end it without a file
    for number in range(1, steps + 1):
        if (number - 1) % apart == 0:
            last = quantization()
        batch = next(batches)
        if steps - number < calibrated:
            recent.append(batch)
        task = _finite(loss(quantization.model, batch), number)
        optimizer.zero_grad(set_to_none=True)
        task.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if number == steps:
            last = quantization.finish([*recent, *(next(batches) for _ in range(calibrated - len(recent)))])
        yield FineTuneStep(number, steps, float(task.detach()), last.bits, None, last.bytes, last.error, last.changed)


def _finite(loss: Tensor, number: int) -> Tensor:
    """Return the loss of a step."""
    if not bool(torch.isfinite(loss)):
        raise DataError(
            f"the loss of step {number:,} is not finite, so the step was not taken; check that batch, or "
            "lower rate or network_rate"
        )
    return loss


def _cosine(steps: float, floor: float, done: int) -> float:
    """Return a multiplier that falls from 1 to `floor` by a cosine, and stays there."""
    return floor + (1 - floor) / 2 * (1 + math.cos(math.pi * min(1.0, done / steps)))


def _extra_steps(target: _SizeTarget, number: int, steps: int) -> int:
    """Make the scales coarser, because the file is still too large; return the number of steps to add."""
    if number >= _MOST * steps:
        raise BudgetError(f"after {number:,} steps the file has {target.difference()}; give more steps or bytes")
    at_bits(target.model, target.network, target.control.target)
    with torch.no_grad():
        target.network.offset.add_(_COARSER)
    return max(1, round(_EXTRA * steps))
