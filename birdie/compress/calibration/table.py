"""Sensitivity of the loss to each matrix as a table: how much the loss increases if it alone is quantized.

    module, batches, loss ──calibration──► sensitivities ──► each matrix quantized alone, at each number of bits
                                      └──► held-out batches ──► difference of the predictions ──► table

The increase is in the unit of `quality` (`birdie.compress.calibration.kl`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from birdie.compress.calibration.held_out import HeldOut
from birdie.compress.calibration.result import CalibrationResult, require_triple
from birdie.compress.calibration.sensitivity import Batch, Loss
from birdie.compress.rate.target import Target
from birdie.compress.registry import decode
from birdie.compress.row_blocks import with_rows
from birdie.compress.schemes.trellis import Trellis
from birdie.compress.small_tensors import is_worth_coarsening
from birdie.compress.state import ModelState
from birdie.compress.tensors import finite_rows, planes, rows_columns
from birdie.compress.trellis.feedback import Feedback, feedback
from birdie.compress.wrappers import unwrapped
from birdie.errors import ConfigError
from birdie.system.callbacks import Progress, reporting
from birdie.system.figures import image_path, new_figure, write_figure
from birdie.system.outputs import Source
from birdie.system.text_table import as_text

BITS = (2.0, 3.0, 4.0, 8.0)
_SAMPLE = 1 << 16  # weights that tell at which scale a matrix takes so many bits
_FEW = 3.0  # bits of a weight beyond which half the scale takes one bit more
_HEIGHT, _TALLEST = 0.22, 60.0  # inches of a row of the figure, and of the figure


@dataclass(frozen=True, slots=True)
class MatrixSensitivity:
    """Sensitivity of the loss to one matrix.

    Attributes:
        name: in the state dict; of tied names the first in the alphabet.
        shape: of the tensor.
        weights: number of its elements.
        loss: bits per weight → measured increase of the loss if this matrix alone is quantized to them.
    """

    name: str
    shape: tuple[int, ...]
    weights: int
    loss: Mapping[float, float]


@dataclass(frozen=True, slots=True)
class SensitivityTable:
    """Sensitivity of the loss to each matrix: print it, or take `rows`.

    Attributes:
        rows: the most sensitive matrix first: by the increase at the fewest bits.
        unit: of the increase: nats of KL per target, a relative squared error, or a relative change of the loss.
        unmeasured: names of matrices that the loss does not depend on, as far as calibration sees.
    """

    rows: tuple[MatrixSensitivity, ...]
    unit: str
    unmeasured: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain values for JSON; bits are text where they are keys."""
        rows = [
            asdict(row) | {"loss": {f"{bits:g}": increase for bits, increase in row.loss.items()}} for row in self.rows
        ]
        return {"unit": self.unit, "rows": rows, "unmeasured": list(self.unmeasured)}

    def __str__(self) -> str:
        columns = list(self.rows[0].loss) if self.rows else []
        lines = [("tensor", "shape", "weights", *(f"{bits:g} bits" for bits in columns))]
        for row in self.rows:
            increases = (f"{row.loss[bits]:.2e}" for bits in columns)
            lines.append((row.name, "×".join(map(str, row.shape)), f"{row.weights:,}", *increases))
        title = f"increase of the loss if one matrix alone is quantized, {self.unit}"
        unmeasured = [f"not measured: {', '.join(self.unmeasured)}"] if self.unmeasured else []
        return "\n".join([title, as_text(lines), *unmeasured])

    def plot(self, path: Source, *, overwrite: bool = False) -> None:
        """Draw the increases, one row for each matrix, into an image: .png, .svg, .pdf.

        Args:
            path: the file to write, also in place of another image.
            overwrite: replace a file of another kind, too.

        Raises:
            ConfigError: matplotlib is not installed, or does not know the kind of image.
            OutputError: the file cannot be written.
        """
        image = image_path(path, overwrite=overwrite)
        figure = new_figure(8, min(1.5 + _HEIGHT * len(self.rows), _TALLEST))
        axes, positions = figure.add_subplot(), range(len(self.rows))
        for bits in self.rows[0].loss if self.rows else ():
            axes.plot([row.loss[bits] for row in self.rows], positions, "o", markersize=4, label=f"{bits:g} bits")
        axes.set_yticks(positions, [row.name for row in self.rows], fontsize=7)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xlabel(f"increase of the loss if this matrix alone is quantized, {self.unit}")
        axes.grid(alpha=0.2)
        axes.legend()
        write_figure(figure, image)


def sensitivity(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Loss,
    *,
    at: Sequence[float] = BITS,
    progress: Progress | bool | None = None,
) -> SensitivityTable:
    """Return how sensitive the loss is to each matrix: the measured increase if it alone is quantized.

    Every matrix is quantized by itself as `birdie.save` does it with calibration, and all others stay exact. That takes
    a pass over the held-out batches for each matrix and number of bits.

    Args:
        model: neither trained nor changed.
        batches: tens of thousands of tokens or thousands of images; a fifth is held out to measure on.
        loss: (module, batch) → any differentiable number; at `F.cross_entropy` labels are not used.
        at: bits per weight to measure the increase at: the entropy of what is coded.
        progress: called with (done, total) in matrices; True: a progress bar.

    Raises:
        ConfigError: the loss does not depend on the weights, or bits are not positive.
        DataError: there are no batches, or activations are not finite.
        WeightsError: a weight is not finite.
    """
    if not isinstance(at, Collection) or str in map(type, at):
        raise ConfigError(f"at={at!r} is no list of bits per weight; give for example (2, 4)")
    for number in at:
        Target(bits=number)  # checks it
    require_triple((model, batches, loss))
    state = ModelState.of(unwrapped(model))
    with reporting(progress, "sensitivity", "quantized matrices") as report:
        result = CalibrationResult.of(state.by_name, (model, batches, loss), symmetries=False)
        held_out = result.held_out
        assert isinstance(held_out, HeldOut)
        compared = held_out.predictions(0, held_out.batches[0])
        known = {name: item for name, item in result.sensitivities.items() if name in state.tensors}
        rows, exact = list[MatrixSensitivity](), dict[str, Tensor]()
        for name, item in known.items():
            weight, increases = state.tensors[name], dict[float, float]()
            matrix = with_rows(weight, item)
            factors = feedback(item, *rows_columns(tuple(matrix.shape)))
            for bits in sorted(at):
                encoded = Trellis().encode_with(name, matrix, factors, _scale(finite_rows(name, matrix), factors, bits))
                increases[bits] = held_out({**exact, name: decode(encoded).reshape(weight.shape)})
                exact = {}
            exact = {name: weight.detach()}  # the matrix that was quantized is exact again in the next measurement
            rows.append(MatrixSensitivity(name, tuple(weight.shape), weight.numel(), increases))
            if report is not None:
                report(len(rows), len(known))
    rows.sort(key=lambda row: -next(iter(row.loss.values()), 0.0))
    units = {
        "nats of KL per target": compared.log_probabilities,
        "relative squared error": compared.values,
        "relative change of the loss": compared.loss is not None,
    }
    unmeasured = [
        name for name, weight in state.tensors.items() if name not in known and is_worth_coarsening(planes(weight))
    ]
    return SensitivityTable(tuple(rows), " plus ".join(unit for unit, has in units.items() if has), tuple(unmeasured))


def _scale(rows: NDArray[np.float32], factors: Feedback, bits: float) -> float:
    """Return the scale at which the weights take so many bits of entropy.

    Beyond a few bits half the scale takes one bit more of each weight that is not zero; the entropy of a small matrix
    would not show it.
    """
    weighted = rows * np.sqrt(factors.row_weight)[:, None] * np.sqrt(factors.column_weight)
    sample = weighted.reshape(-1)[:: max(1, weighted.size // _SAMPLE)]
    power = float(np.square(sample).mean()) ** 0.5
    if not power:
        return 1.0  # zeros are stored as they are
    few, low, high = min(bits, _FEW), -16.0, 8.0
    for _ in range(24):
        middle = (low + high) / 2
        _, counts = np.unique(np.rint(sample / (power * 2.0**middle)), return_counts=True)
        shares = counts / len(sample)
        low, high = (middle, high) if -(shares * np.log2(shares)).sum() > few else (low, middle)
    return float(power * 2.0 ** (high - (bits - few) * len(sample) / np.count_nonzero(sample)))
