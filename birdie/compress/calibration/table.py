"""Sensitivity of the loss to each matrix as a table: how much the loss increases if it alone is quantized.

    module, batches, loss ──calibration──► sensitivities ──► rate–distortion curve of each matrix ──┐
                                                                                                   ├──► table
    noise of known size in all matrices ──► measured difference of the predictions ──► its unit ──┘

A calibration gives the increase up to a factor that depends on the loss function. One measurement with noise in all
weights gives the factor, so that the table is in the unit of `quality` (`birdie.compress.calibration.kl`).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from birdie.compress.calibration.kl import predictions
from birdie.compress.calibration.modes import in_mode
from birdie.compress.calibration.result import CalibrationResult, HeldOut
from birdie.compress.calibration.sensitivity import Batch, Loss
from birdie.compress.rate.curve import Curve, scale_of_bits
from birdie.compress.scheme import Sensitivity
from birdie.compress.small_tensors import is_worth_coarsening
from birdie.compress.stacks import with_rows
from birdie.compress.state import ModelState
from birdie.compress.tensors import planes, rows_columns
from birdie.compress.trellis.feedback import feedback
from birdie.compress.wrappers import unwrapped
from birdie.errors import ConfigError
from birdie.runtime.callbacks import Progress
from birdie.runtime.files import write_bytes
from birdie.runtime.outputs import Kind, Source, require_output

if TYPE_CHECKING:
    from rich.table import Table

BITS = (2.0, 3.0, 4.0, 8.0)
_NOISE, _LEAST_NOISE = 2.0**-5, 2.0**-12  # deviations of the noise, in root mean squares of each matrix
_SMALL = 0.02  # difference up to which it grows with the square of the noise
_WIDTH = 240  # letters of a line: names are not cut
_IMAGE = Kind("an image", rb"\x89PNG|%PDF|<\?xml|<svg|\xff\xd8|%!PS")
_HEIGHT, _TALLEST = 0.22, 60.0  # inches of a row of the figure, and of the figure


@dataclass(frozen=True, slots=True)
class MatrixSensitivity:
    """Sensitivity of the loss to one matrix.

    Attributes:
        name: in the state dict; of tied names the first in the alphabet.
        shape: of the tensor.
        weights: number of its elements.
        loss: bits per weight → predicted increase of the loss if this matrix alone is quantized to them.
        bits: per weight, if all matrices share the mean bits of the table so that the total increase is smallest.
    """

    name: str
    shape: tuple[int, ...]
    weights: int
    loss: Mapping[float, float]
    bits: float


@dataclass(frozen=True, slots=True)
class SensitivityTable:
    """Sensitivity of the loss to each matrix: print it, or take `rows`.

    Attributes:
        rows: the most sensitive matrix first: by the increase at the fewest bits.
        unit: of the increase: nats of KL per target, a relative squared error, or a number that only compares rows.
        bits: mean bits per weight of the column `bits` of the rows.
        unmeasured: names of matrices that no layer of the loss multiplies in a known way (`@` instead of `F.linear`).
    """

    rows: tuple[MatrixSensitivity, ...]
    unit: str
    bits: float
    unmeasured: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain values for JSON; bits are text where they are keys."""
        rows = [
            {
                "name": row.name,
                "shape": list(row.shape),
                "weights": row.weights,
                "loss": {f"{bits:g}": increase for bits, increase in row.loss.items()},
                "bits": row.bits,
            }
            for row in self.rows
        ]
        return {"unit": self.unit, "bits": self.bits, "rows": rows, "unmeasured": list(self.unmeasured)}

    def __rich__(self) -> "Table":
        """Return the table that rich prints."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"increase of the loss if one matrix alone is quantized, {self.unit}")
        table.add_column("tensor", overflow="fold")
        table.add_column("shape")
        table.add_column("weights", justify="right")
        for bits in self._columns:
            table.add_column(f"{bits:g} bits", justify="right")
        table.add_column(f"bits of {self.bits:g}", justify="right")
        for row in self.rows:
            increases = (f"{row.loss[bits]:.2e}" for bits in self._columns)
            shape = "×".join(map(str, row.shape))
            table.add_row(Text(row.name), shape, f"{row.weights:,}", *increases, f"{row.bits:.2f}")
        if self.unmeasured:
            table.caption = Text(f"not measured: {', '.join(self.unmeasured)}")
        return table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=StringIO(), width=_WIDTH, color_system=None)
        console.print(self)
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in lines)

    def plot(self, path: Source, *, overwrite: bool = False) -> None:
        """Draw the increases, one row for each matrix, into an image: .png, .svg, .pdf.

        Args:
            path: the file to write, also in place of another image.
            overwrite: replace a file of another kind, too.

        Raises:
            ConfigError: matplotlib is not installed, or does not know the kind of image.
            OutputError: the file cannot be written.
        """
        suffix = Path(path).suffix[1:]
        path = require_output(path, kind=_IMAGE, overwrite=overwrite)
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise ConfigError(
                "a plot needs matplotlib, which is not installed; pip install 'birdie-compress[lab]'"
            ) from error
        figure = Figure((8, min(1.5 + _HEIGHT * len(self.rows), _TALLEST)), layout="constrained")
        axes, positions = figure.add_subplot(), range(len(self.rows))
        for bits in self._columns:
            axes.plot([row.loss[bits] for row in self.rows], positions, "o", markersize=4, label=f"{bits:g} bits")
        axes.set_yticks(positions, [f"{row.name} ({row.bits:.1f} bits)" for row in self.rows], fontsize=7)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlabel(f"increase of the loss if this matrix alone is quantized, {self.unit}")
        axes.grid(alpha=0.2)
        axes.legend()
        image = BytesIO()
        try:
            figure.savefig(image, format=suffix or "png")
        except ValueError as error:
            raise ConfigError(f"matplotlib writes no images that end in .{suffix}; use .png, .svg or .pdf") from error
        write_bytes(path, image.getvalue())

    @property
    def _columns(self) -> Sequence[float]:
        return list(self.rows[0].loss) if self.rows else ()


def sensitivity(
    model: nn.Module,
    batches: Sequence[Batch],
    loss: Loss,
    *,
    at: Sequence[float] = BITS,
    bits: float = 4.0,
    progress: Progress | None = None,
) -> SensitivityTable:
    """Return how sensitive the loss is to each matrix: the predicted increase if it alone is quantized.

    The prediction is ½ Σ F e²: F is the Fisher information that remains after error feedback, e the error of the
    trellis at so many bits per weight, coded by their entropy. It holds as long as the increase is small (below about
    0.1 nats): on two small networks it was 0.58 to 1.67 times what quantizing each matrix alone costs. Gradients of a
    squared error only stand for its curvature: 0.5 to 2 times.

    Args:
        model: neither trained nor changed.
        batches: tens of thousands of tokens or thousands of images; a fifth is held out to measure the unit on.
        loss: (module, batch) → any differentiable number; at `F.cross_entropy` labels are not used.
        at: bits per weight to predict the increase at.
        bits: mean bits per weight to share out among all matrices.
        progress: called with (batches done, batches).

    Raises:
        ConfigError: the loss does not depend on the weights, or bits are not positive.
        DataError: there are no batches, or activations are not finite.
        WeightsError: a weight is not finite.
    """
    for number in (*at, bits):
        if not 0 < number <= 64:
            raise ConfigError(f"{number} bits per weight are out of range; give more than 0 and at most 64")
    state = ModelState.of(unwrapped(model))
    batches = list(batches)
    report = None if progress is None else partial(_report, progress, len(batches))
    result = CalibrationResult.of(state.by_name, (model, batches, loss), symmetries=False, progress=report)
    known = {name: item for name, item in result.sensitivities.items() if name in state.tensors}
    assert result.held_out is not None
    unit, factor = _unit(result.held_out, known, state.tensors)
    curves = {}
    for name, item in known.items():
        weight = with_rows(state.tensors[name], item)
        curves[name] = Curve.of(name, weight, feedback(item, *rows_columns(tuple(weight.shape))))
    common = scale_of_bits(list(curves.values()), bits)
    rows = [
        MatrixSensitivity(
            name,
            tuple(state.tensors[name].shape),
            curve.weights,
            {number: factor * curve.loss(curve.log_scale(number)) for number in sorted(at)},
            curve.bits(common),
        )
        for name, curve in curves.items()
    ]
    rows.sort(key=lambda row: -next(iter(row.loss.values()), 0.0))
    unmeasured = [
        name for name, weight in state.tensors.items() if name not in known and is_worth_coarsening(planes(weight))
    ]
    return SensitivityTable(tuple(rows), unit, bits, tuple(unmeasured))


def _report(progress: Progress, total: int, done: int) -> None:
    progress(done, total)


def _unit(held_out: HeldOut, known: Mapping[str, Sensitivity], weights: Mapping[str, Tensor]) -> tuple[str, float]:
    """Return the unit of the table, and the factor to it from the unit of the sensitivities."""
    with in_mode(held_out.module.modules(), training=False), torch.no_grad():
        compared = predictions(held_out.module, held_out.batches[0], held_out.loss)
    if compared.loss is not None:  # a difference of first order, which no curvature predicts
        return "in a unit that only compares rows", 1.0
    kinds = [
        *(["nats of KL per target"] if compared.log_probabilities else []),
        *(["relative squared error"] if compared.values else []),
    ]
    unit = " plus ".join(kinds)
    size = _NOISE
    while True:
        expected = sum(_cost_of_noise(known[name], weights[name]) for name in known) * size**2
        measured = held_out(_noisy(known, weights, size))
        if measured <= _SMALL or size <= _LEAST_NOISE:
            break
        size /= 2
    if not expected > 0 or not measured > 0:
        return unit, 1.0
    logging.getLogger("birdie").info(
        "noise of %.2g of each matrix costs %.3g, predicted %.3g", size, measured, expected
    )
    return unit, measured / expected


def _cost_of_noise(known: Sensitivity, weight: Tensor) -> float:
    """Return ½ Σ F e² of noise as large as the weights, e² being their mean square."""
    power = known.input_power()
    columns = float(rows_columns(tuple(weight.shape))[1]) if power is None else float(power.double().sum())
    rows = float(len(weight)) if known.row_fisher is None else float(known.row_fisher.double().sum())
    return rows * columns * float(weight.detach().double().square().mean()) / 2


def _noisy(known: Mapping[str, Sensitivity], weights: Mapping[str, Tensor], size: float) -> dict[str, Tensor]:
    """Return the weights with Gaussian noise, whose deviation is `size` root mean squares of each matrix."""
    generator = torch.Generator().manual_seed(0)
    noisy = {}
    for name in known:
        weight = weights[name].detach()
        noise = (
            torch.randn(weight.shape, generator=generator)
            * (weight.double().square().mean().sqrt() * size).float().cpu()
        )
        noisy[name] = (weight.cpu().float() + noise).to(weight.dtype)
    return noisy
