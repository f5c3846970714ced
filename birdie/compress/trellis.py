"""Trellis-coded quantization with error feedback, its steps set by what the loss minds.

One Lagrange multiplier λ, in nats of KL per bit, serves every tensor: the loss of a bit less is the same everywhere when
the squared step of weight (i, j) is λ / (ln 2 · c · F_ij), c the distortion of this trellis in squared steps, and F_ij
the Fisher information left after feedback: what is left of row i times what is left of column j (`feedback`). That is
reverse water-filling over layers, rows and columns at once; nominal bit widths play no part.

Without any sensitivity the step of a row is `sigma` standard deviations, as in SDClip (parameter-golf PR 1394).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.decode_trellis import MOST, stepped
from birdie.compress.feedback import Feedback, feedback
from birdie.compress.lossless import Lossless
from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.steps import HIGHEST, LOWEST, PER_OCTAVE
from birdie.compress.tensors import REAL_DTYPES, finite_rows
from birdie.compress.viterbi import quantize
from birdie.entropy.trellis import STATES
from birdie.errors import ConfigError, WeightsError

# Bits by which each trellis misses the rate–distortion bound of a Gaussian at high rate (Marcellin & Fischer 1990).
_GAPS = {1: 0.2546, 4: 0.088, 8: 0.072, 16: 0.063, 32: 0.051, 64: 0.044}
_FINE, _COARSE = 16, 4  # steps to an octave: of rows alone, and of rows and columns that sensitivity sets
_SMALLEST = float(np.finfo(np.float32).tiny)
DEFAULT_SIGMA = 0.3


@dataclass(frozen=True, slots=True)
class Trellis:
    """Dependent quantization with `states` states; one state is a plain grid.

    Attributes:
        states: 1, 4, 8, 16, 32 or 64. They cost the encoder time and the decoder nothing.
        sigma: step in standard deviations of the row; None takes it from sensitivity and λ, or a default.
        rate: how much bits count when numbers are chosen, of what is right at high rate; 0 rounds to the nearest.
        output: whether errors are fed back to rows, where calibration knows how these hang together.
    """

    states: int = 32
    sigma: float | None = None
    rate: float = 1.0
    output: bool = True

    def __post_init__(self) -> None:
        """Refuse settings out of range."""
        if self.states not in STATES:
            raise ConfigError(f"a trellis of {self.states} states is unknown; choose {', '.join(map(str, STATES))}")
        if self.sigma is not None and not 2.0**-16 <= self.sigma <= 2.0**16:
            raise ConfigError(f"trellis sigma {self.sigma} is out of range; choose a step of 2^-16 to 2^16 deviations")
        if not 0 <= self.rate <= 16:
            raise ConfigError(f"trellis rate {self.rate} is out of range; choose 0 to 16")

    @property
    def distortion(self) -> float:
        """Mean squared error at high rate, in squared steps."""
        return 2.0 ** (2 * (_GAPS[self.states] - _GAPS[1])) / 12

    def encode(
        self, name: str, weight: Tensor, *, sensitivity: Sensitivity | None = None, lam: float = 0.0
    ) -> Encoded:
        """Quantize with feedback where `sensitivity` has a Hessian; losslessly what float32 has no steps for.

        Args:
            lam: nats of KL a bit is worth; sets the steps unless `sigma` does or sensitivity is missing.

        Raises:
            WeightsError: the tensor is not float16, bfloat16, float32 or float64, is empty, or is not finite.
        """
        if weight.dtype not in REAL_DTYPES or weight.numel() == 0:
            raise WeightsError(
                f"tensor {name!r} ({weight.dtype}, {weight.numel()} elements) takes no trellis; use lossless"
            )
        matrix = finite_rows(name, weight)
        known = feedback(sensitivity, *matrix.shape, output=self.output)
        by_sigma = self.sigma is not None or sensitivity is None or lam <= 0
        wanted = self._by_sigma(matrix) if by_sigma else self._by_loss(known, lam)
        found = _indices(matrix, *wanted, _FINE if by_sigma else _COARSE)
        if found is None:
            return Lossless().encode(name, weight)
        rows, columns, resolution = found
        row = stepped(rows, resolution)
        column = np.ones(matrix.shape[1], np.float32) if columns is None else stepped(columns, resolution)
        price = self.rate * 2 * math.log(2) * self.distortion
        numbers = quantize(matrix, known, row, column, self.states, price)
        streams = (numbers, rows[:, None], *([] if columns is None else [columns[:, None]]))
        params = (self.states, resolution, 0 if columns is None else resolution)
        return Encoded("trellis", tuple(weight.shape), weight.dtype, params, streams)

    def _by_sigma(self, matrix: NDArray[np.float32]) -> tuple[NDArray[np.float64], None]:
        spread = matrix.std(axis=1, dtype=np.float64)
        spread = np.where(spread > 0, spread, np.abs(matrix).max(axis=1))
        return spread * (DEFAULT_SIGMA if self.sigma is None else self.sigma), None

    def _by_loss(self, known: Feedback, lam: float) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        scale = math.sqrt(lam / (math.log(2) * self.distortion))
        columns = known.column_weight**-0.5 if known.fed else None
        return scale * known.row_weight**-0.5, columns


def _indices(
    matrix: NDArray[np.float32], rows: NDArray[np.float64], columns: NDArray[np.float64] | None, resolution: int
) -> tuple[NDArray[np.int32], NDArray[np.int32] | None, int] | None:
    """Step indices of rows and columns; None if some weight that is not zero has none."""
    most = np.abs(matrix).max(axis=1).astype(np.float64)
    used = most > 0
    if not used.any():
        return np.zeros(len(rows), np.int32), None, resolution
    if bool((most[used] < _SMALLEST * MOST).any()) and bool((rows[used] < _SMALLEST).any()):
        return None
    finest = most / MOST * 4
    if columns is not None:
        centre = 2.0 ** float(np.log2(columns).mean())
        columns, rows = columns / centre, rows * centre
        finest = finest / columns.min()
    low, high = LOWEST * resolution // PER_OCTAVE // 2, HIGHEST * resolution // PER_OCTAVE // 2
    chosen = np.rint(np.log2(np.maximum(np.maximum(rows, finest), _SMALLEST)) * resolution).clip(low, high)
    along = None if columns is None else np.rint(np.log2(columns) * resolution).clip(low, high).astype(np.int32)
    source = np.maximum.accumulate(np.where(used, np.arange(len(rows)), -1))
    borrowed = chosen[np.where(source < 0, int(np.argmax(used)), source)]
    return borrowed.astype(np.int32), along, resolution
