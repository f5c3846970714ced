"""Training a model down to a size: what `birdie.spectral` wrapped, until its file is small enough.

    batch ─► loss ─► + λ · bits ─► Adam ─► … ─► the file is weighed now and then ─► bits aimed at ─► λ

A file holds more than the rate says: biases, norms, names, steps. So the model is saved at the start, when the bits
have come down, and a few times after, and what the rest takes is kept free. If the file is still too large at the end,
steps are made a little coarser and training goes on.
"""

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from birdie.artifact.save import save
from birdie.compress.rate.target import whole_number
from birdie.compress.spectral.control import RateControl
from birdie.compress.spectral.network import QuantizationNetwork
from birdie.compress.spectral.wrap import Spectral, at_bits, distinct, quantization_loss, wrapped
from birdie.errors import BudgetError, ConfigError, DataError

Batch = TypeVar("Batch")
_FLOOR = 0.05  # of the learning rate, which falls by a cosine
# Share of the steps after which steps of quantization stay: weights gather at the edges between symbols, and a step
# that moves a little then moves many at once.
_STILL = 0.75
_REACH = 0.25  # octaves by which all are moved then, at each weighing, to where the bits are those aimed at
_PROBED = 8  # batches from which it is learned how much each tensor matters
_COARSER = 1 / 32  # octaves more, when the file is too large at the end
_WEIGHED = (0.62, 0.75, 0.87, 0.95)  # shares of the steps after which the file is weighed
_ANY = 1e-3  # bits, before the first weighing
_SPARE = 0.005  # of the budget: bits move a little from one weighing to the next
_EXTRA, _MOST = 0.03, 1.3  # of the steps: what is added while the file is too large, and what there may be in all


@dataclass(frozen=True, slots=True)
class Tuned:
    """A step that was taken.

    Attributes:
        number: which, from 1.
        steps: how many there will be.
        loss: of the task alone, as `loss` gave it.
        bits: per spectral weight, by estimate; None without a target.
        weight: λ, nats of loss that a bit a weight counts; None without a target.
        bytes: of the whole file when it was last weighed; None before, and without a budget.
    """

    number: int
    steps: int
    loss: float
    bits: float | None
    weight: float | None
    bytes: int | None


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
) -> Iterator[Tuned]:
    """Train in place, step by step, until the file `birdie.save` writes has its size.

        birdie.spectral(model)
        for step in birdie.fine_tune(model, batches, loss, steps=1000, budget=100_000):
            print(step.number, step.loss, step.bits)
        birdie.save(model, "small.birdie")

    Whether the model is in training mode stays the caller's: in evaluation mode, statistics of norms stay.

    Args:
        model: wrapped by `spectral`; any module without a target, which is the same training to compare with.
        batches: of anything; gone through again when they end.
        loss: (model, batch) → mean nats of the task, 0-d.
        steps: of the optimizer. A few more are taken if the file is too large after them.
        budget: bytes the file may have: it ends under, by a per cent or so.
        bits: or bits per spectral weight, as `quantization_loss` counts them.
        rate: of learning, falling by a cosine to a twentieth.
        network_rate: the same of the steps of quantization, which are few and have far to go.
        settled: share of the steps after which the size is reached; the rest is for the task.
        measured: learn from the gradients of eight batches how fine each tensor's steps should be, before the first
            step. False keeps them in deviations: where `loss` is at its least, as in distillation from the model
            itself, gradients say nothing.
        optimizer: groups of parameters with their `lr` → optimizer.

    Raises:
        ConfigError: settings contradict one another or are out of range, or the model is not wrapped.
        DataError: batches ended and do not start again, or the loss is not finite (when iterated over).
        BudgetError: the file does not come down to the budget (when iterated over).
    """
    budget = whole_number("budget", budget)
    if steps < 1 or not rate > 0 or not network_rate > 0:
        raise ConfigError(f"steps={steps}, rate={rate}, network_rate={network_rate}; all must be above zero")
    if budget is not None and bits is not None:
        raise ConfigError("a budget and bits are two targets; give one of them")
    network = next((each.weight.quantizer for each in wrapped(model)), None)
    if network is None and (budget is not None or bits is not None):
        raise ConfigError("nothing in the model is spectral; call spectral(model) before it is trained to a size")
    endless, aim = _again(batches), None
    if network is not None and measured and not network.trained:
        _measure(model, network, [next(endless) for _ in range(_PROBED)], loss)
    if bits is not None:
        aim = _Aim(model, RateControl(model, bits, steps, settled=settled))
    elif budget is not None:
        aim = _Aim(model, RateControl(model, _ANY, steps, settled=settled), budget)
        aim.weigh()
    groups = [{"params": parameters, "lr": lr} for parameters, lr in _groups(model, network, rate, network_rate)]
    return _steps(model, endless, loss, steps, aim, optimizer(groups))


def _measure(
    model: nn.Module, network: QuantizationNetwork, batches: list[Batch], loss: Callable[[nn.Module, Batch], Tensor]
) -> None:
    """Steps that were never trained go with what each tensor's weights matter, at the bits there are.

    An error costs the loss its square times the curvature, for which mean squared gradients stand (empirical Fisher);
    it costs all tensors alike where steps go with one over their root.
    """
    parts = distinct(model)
    start, squares = float(quantization_loss(model).detach()), torch.zeros(len(parts))
    for batch in batches:
        model.zero_grad(set_to_none=True)
        loss(model, batch).backward()  # type: ignore[no-untyped-call]
        for index, each in enumerate(parts):
            gradient = each.coefficients.grad
            squares[index] += 0.0 if gradient is None else float(gradient.square().mean())
    model.zero_grad(set_to_none=True)
    if bool(torch.isfinite(squares).all()) and bool(squares.any()):
        for each, square in zip(parts, squares.clamp_min(float(squares[squares > 0].min())), strict=True):
            each.weight.scale.fill_(-0.5 * math.log2(float(square)))
        at_bits(model, network, start)


def _groups(
    model: nn.Module, network: QuantizationNetwork | None, rate: float, network_rate: float
) -> Iterator[tuple[list[nn.Parameter], float]]:
    own = [] if network is None else list(network.parameters())
    ids = {id(parameter) for parameter in own}
    yield [parameter for parameter in model.parameters() if id(parameter) not in ids], rate
    if own:
        yield own, network_rate


def _again(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Batches without end."""
    while True:
        found = False
        for batch in batches:
            found = True
            yield batch
        if not found:
            raise DataError("there are no more batches; give a list or a loader that can be gone through again")


class _Aim:
    """The size as a target, and what the file weighed."""

    def __init__(self, model: nn.Module, control: RateControl, budget: int | None = None) -> None:
        self.model, self.control, self.budget = model, control, budget
        self.network = next(wrapped(model)).weight.quantizer
        self.names = {each.name for each in wrapped(model)}
        self.bytes: int | None = None

    def weigh(self) -> bool:
        """Save the model, see what it takes and aim anew; whether the size is kept, which bits are to a per cent."""
        if self.budget is None:
            return self.control.measure() <= 1.01 * self.control.target
        with tempfile.TemporaryDirectory() as folder:
            summary = save(self.model, Path(folder) / "weighed.birdie")
        self.bytes = summary.bytes
        coded = sum(tensor.bytes for tensor in summary.tensors if tensor.name in self.names)
        left = self.budget * (1 - _SPARE) - (summary.bytes - coded)
        if left <= 0:
            raise BudgetError(
                f"a budget of {self.budget:,} bytes leaves nothing for the spectral weights: all else takes "
                f"{summary.bytes - coded:,} bytes"
            )
        self.control.target = self.control.measure() * left / coded
        return self.bytes <= self.budget

    def found(self) -> str:
        """What there is and what there should be."""
        if self.budget is None:
            return f"{self.control.measure():.2f} bits a weight and not {self.control.target:.2f}"
        return f"{self.bytes:,} bytes and not {self.budget:,}"


def _steps(
    model: nn.Module,
    batches: Iterator[Batch],
    loss: Callable[[nn.Module, Batch], Tensor],
    steps: int,
    aim: _Aim | None,
    optimizer: torch.optim.Optimizer,
) -> Iterator[Tuned]:
    curves: list[Callable[[int], float]] = [partial(_cosine, steps, _FLOOR), partial(_cosine, _STILL * steps, 0.0)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, curves[: len(optimizer.param_groups)])
    weighings = {math.ceil(share * steps) for share in _WEIGHED}
    number, last = 0, steps
    try:
        while number < last:
            number += 1
            task = loss(model, next(batches))
            if not bool(torch.isfinite(task)):
                raise DataError(
                    f"the loss of step {number:,} is not finite and the step was not taken; look at that batch, or "
                    "lower rate or network_rate"
                )
            total = task if aim is None else task + aim.control.penalty()
            optimizer.zero_grad(set_to_none=True)
            total.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            if aim is not None and number == last:
                Spectral(model, aim.network).settle()
                if not aim.weigh():
                    last += _longer(aim, number, steps)
            elif aim is not None and number in weighings:
                aim.weigh()
                if number >= _STILL * steps:
                    aim.control.holding = True
                    at_bits(model, aim.network, aim.control.target, reach=_REACH)
            bits, weight, size = (
                (None, None, None) if aim is None else (aim.control.bits, aim.control.weight, aim.bytes)
            )
            yield Tuned(number, last, float(task.detach()), bits, weight, size)
    finally:
        if aim is not None:
            aim.control.release()


def _cosine(steps: float, floor: float, done: int) -> float:
    """From 1 to `floor`, and `floor` after."""
    return floor + (1 - floor) / 2 * (1 + math.cos(math.pi * min(1.0, done / steps)))


def _longer(aim: _Aim, number: int, steps: int) -> int:
    """Steps to add to those that were asked for: the file is still too large."""
    if number >= _MOST * steps:
        raise BudgetError(f"after {number:,} steps the file has {aim.found()}; give more steps or bytes")
    at_bits(aim.model, aim.network, aim.control.target)
    with torch.no_grad():
        aim.network.offset.add_(_COARSER)
    return max(1, round(_EXTRA * steps))
