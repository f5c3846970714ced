"""Sums over the uses of one weight in calibration batches, and the sensitivity that follows from them."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from birdie.compress.calibration.shrinkage import shrink_rows
from birdie.compress.scheme import BlockDiagonal, Sensitivity
from birdie.system.distributed import World

# A batch's gradient of a weight, of a loss without random signs, is a sum that hardly tells how much a weight counts.
_UNSIGNED_GRADIENTS = 1e-6
_SQUARED = 30  # most octaves from 1 of values that are squared as they are: sums of a trillion fit float32
_TENSORS = ("inputs", "outputs", "looked_up", "draws")


@dataclass(slots=True)
class Sums:
    """Sums over the uses of one weight: Σ x xᵀ, Σ g gᵀ or its diagonal, number of uses.

    Of look-ups they are Σ g² of each element, and how often each row was drawn.

    Inputs are (blocks, size, size), with the channels of a block fastest and the taps of its kernel slowest.
    `samples` counts independent inputs, `examples` independent gradients: rows of inputs, images of a convolution.

    Of gradients D of the weight itself they are Σ Dᵀ D and Σ D Dᵀ, columns in their order, with no uses; `examples`
    counts batches and `samples` their gradients.

    Of a weight whose rows are inputs (`turned`), x and g have changed roles.

    Values far from 1 are divided by a power of two before they are squared: `exponents` has it for each sum.
    """

    inputs: Tensor | None = None
    outputs: Tensor | None = None
    looked_up: Tensor | None = None
    draws: Tensor | None = None
    uses: int = 0
    samples: float = 0.0
    examples: float = 0.0
    turned: bool = False
    exponents: dict[str, int] = field(default_factory=dict)

    def divided(self, part: str, values: Tensor) -> Tensor:
        """Return values to square for a sum, divided by its power of two, which grows with them."""
        largest = float(values.abs().amax()) if values.numel() else 0.0
        if 0 < largest < math.inf:
            exponent = math.frexp(largest)[1]
            exponent = exponent if abs(exponent) > _SQUARED else 0
            if exponent > self.exponents.get(part, exponent) + _SQUARED or part not in self.exponents:
                self.rescale({part: exponent})
        power = self.exponents.get(part, 0)
        return values * 2.0**-power if power else values

    def rescale(self, exponents: Mapping[str, int]) -> None:
        """Divide by other powers of two, as sums of other ranks are."""
        for part, exponent in exponents.items():
            total, change = getattr(self, part), self.exponents.get(part, exponent) - exponent
            if total is not None and change:
                total.mul_(4.0 ** max(change, -_SQUARED)).mul_(4.0 ** min(change + _SQUARED, 0))
            self.exponents[part] = exponent

    @property
    def is_empty(self) -> bool:
        """Return whether there was no use: batches without examples, experts without tokens."""
        return not (self.examples or (self.draws is not None and bool(self.draws.any())))

    def named_tensors(self) -> dict[str, Tensor]:
        """Return those of the sums that are tensors and that there are."""
        return {part: tensor for part in _TENSORS if (tensor := getattr(self, part)) is not None}


def over_ranks(sums: Sums, owner: int, device: torch.device, world: World) -> Sums:
    """Return the sums over all ranks, on the rank `owner`; every rank calls this with its own."""
    shapes: dict[str, list[int]] = {}  # a reduction needs the same tensors on every rank
    exponents: dict[str, int] = {}
    local = [{part: list(tensor.shape) for part, tensor in sums.named_tensors().items()}, sums.exponents, sums.turned]
    turned = False
    for text in world.all_gather_strings(json.dumps(local)):
        known, powers, is_turned = json.loads(text)
        turned |= is_turned
        shapes |= known
        exponents |= {part: max(power, exponents.get(part, power)) for part, power in powers.items()}
    for part, shape in shapes.items():
        if getattr(sums, part) is None:
            setattr(sums, part, torch.zeros(shape, device=device))
    sums.rescale(exponents)
    for part in _TENSORS:
        if part in shapes:
            world.reduce_(getattr(sums, part), owner)
    counts = torch.tensor([sums.uses, sums.samples, sums.examples], dtype=torch.float64, device="cpu")
    uses, samples, examples = world.reduce_(counts.to(device), owner).tolist()
    return replace(sums, uses=int(uses), samples=samples, examples=examples, turned=turned)


def sensitivity_of(sums: Sums, taps: int, units: float, *, signed: bool = True) -> Sensitivity:
    """Return the sensitivity of one weight from its sums; a tied embedding combines both of its uses.

    A look-up reads one row, so its Fisher information is diagonal: Σ g² of every element. Rows that were seldom drawn
    are shrunk towards the others. The combination keeps the sum over columns and the sum over rows of the elements of
    both.

    Args:
        sums: over all batches.
        taps: weights of a kernel; 1 if it is no convolution.
        units: targets, or batches.
        signed: whether gradients have random signs, so that those of targets add up like independent numbers.
    """
    uses, samples, examples = sums.uses, sums.samples, sums.examples
    inputs, outputs, looked_up = (
        None if part is None else part.cpu() for part in (sums.inputs, sums.outputs, sums.looked_up)
    )
    drawn = 0.0 if sums.draws is None else float(sums.draws.sum())
    power = {part: 4.0**exponent for part, exponent in sums.exponents.items() if exponent}
    if not uses and inputs is not None and outputs is not None:
        known = _of_gradients(inputs, outputs, samples, units * samples / examples, signed=signed)
        return _times(known, power.get("outputs", 1.0))
    inputs = None if inputs is None else _by_channel(inputs, taps) / uses
    outputs = None if outputs is None else outputs / units
    if looked_up is not None and sums.draws is not None:
        # each row of a head is seen in every prediction, whether it was drawn or not
        looked_up = shrink_rows(looked_up / units, sums.draws.cpu() + (0 if outputs is None else examples))
    fisher = outputs if outputs is None or outputs.ndim == 1 else outputs.diagonal().clone()
    if looked_up is None or (fisher is None and inputs is not None):
        output = outputs if outputs is not None and outputs.ndim == 2 else None
        known = Sensitivity(
            row_fisher=fisher, output=output, samples=samples, gradients=examples, rows_are_inputs=sums.turned
        )
        known = known if inputs is None else _with_inputs(known, inputs)
        return _times(known, power.get("inputs", 1.0) * power.get("outputs", 1.0))
    if inputs is None or fisher is None:
        rows = looked_up.sum(1) / looked_up.mean(0).sum().clamp_min(1e-30)
        known = Sensitivity(torch.diag(looked_up.mean(0)), rows, samples=drawn, gradients=drawn)
        return _times(known, power.get("looked_up", 1.0))
    if power:  # one unit for both uses
        fisher = fisher.double() * power.get("outputs", 1.0) * power.get("inputs", 1.0)
        looked_up = looked_up.double() * power.get("looked_up", 1.0)
    diagonal = inputs.diagonal(dim1=1, dim2=2)
    total = fisher.sum() * diagonal.sum() + looked_up.sum()
    rows = (fisher * diagonal.sum() + looked_up.sum(1)) / total.clamp_min(torch.finfo(total.dtype).tiny)
    combined = fisher.sum() * inputs + torch.diag_embed(looked_up.sum(0).view(diagonal.shape))
    if power:
        mean = combined.diagonal(dim1=1, dim2=2).mean()
        rows, combined = rows * mean, combined / mean
    return _with_inputs(Sensitivity(row_fisher=rows, samples=samples, gradients=examples), combined)


def _times(known: Sensitivity, power: float) -> Sensitivity:
    """Return the sensitivity of a loss `power` times as large, which float32 may not hold."""
    if power == 1 or known.row_fisher is None:
        return known
    output = None if known.output is None else known.output.double() * power
    return replace(known, row_fisher=known.row_fisher.double() * power, output=output)


def _of_gradients(inputs: Tensor, outputs: Tensor, draws: float, units: float, *, signed: bool) -> Sensitivity:
    """Return the sensitivity of a weight from Σ Dᵀ D (blocks, size, size) and Σ D Dᵀ of its gradients D.

    Rows are samples of the columns' covariance and columns those of the rows', as far as they are of one size.
    """
    power = inputs.diagonal(dim1=1, dim2=2)
    mean = power.mean().clamp_min(torch.finfo(power.dtype).tiny)
    fisher = outputs if outputs.ndim == 1 else outputs.diagonal().clone()
    scale = 1 / (units * power.numel())
    most = units if signed else math.inf
    known = Sensitivity(
        row_fisher=fisher * scale,
        output=outputs * scale if outputs.ndim == 2 else None,
        samples=min(draws * _effective(fisher), most),
        gradients=min(draws * _effective(power.reshape(-1)), most) if signed else _UNSIGNED_GRADIENTS,
        rows_have_inputs=True,
    )
    return _with_inputs(known, inputs / mean)


def _effective(sizes: Tensor) -> float:
    """Return how many numbers of equal size have the sum and the sum of squares of `sizes`."""
    total, squares = float(sizes.double().sum()), float(sizes.double().square().sum())
    return total**2 / squares if squares else 0.0


def _by_channel(inputs: Tensor, taps: int) -> Tensor:
    """Return moments (blocks, size, size) of columns with the taps of a channel next to each other."""
    if taps == 1:
        return inputs
    blocks, size, _ = inputs.shape
    return inputs.view(blocks, taps, size // taps, taps, size // taps).permute(0, 2, 1, 4, 3).reshape(inputs.shape)


def _with_inputs(known: Sensitivity, inputs: Tensor) -> Sensitivity:
    if len(inputs) == 1:
        return replace(known, hessian=inputs[0])
    return replace(
        known, blocks=BlockDiagonal(torch.arange(len(inputs) * inputs.shape[1]).view(len(inputs), -1), inputs)
    )
