"""Trellis-coded quantization with error feedback, its steps set by what the loss minds.

One Lagrange multiplier λ, in nats of KL per bit, serves every tensor: the loss of a bit less is the same everywhere
when the squared step of weight (i, j) is λ / (ln 2 · c · F_ij), c the distortion of this trellis in squared steps, F_ij
the Fisher information left after feedback: what is left of row i times what is left of column j (`feedback`). That is
reverse water-filling over layers, rows and columns at once; nominal bit widths play no part.

Without any sensitivity the step of a row is `sigma` standard deviations, as in SDClip (parameter-golf PR 1394).
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.feedback import Feedback, feedback
from birdie.compress.log_steps import HIGHEST, LOWEST, PER_OCTAVE
from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.schemes.decode_trellis import EMPTY, MOST, both_steps
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.tensors import REAL_DTYPES, finite_rows
from birdie.compress.viterbi import cost, quantize
from birdie.entropy.trellis import STATES
from birdie.errors import ConfigError, WeightsError

# Bits by which each trellis misses the rate–distortion bound of a Gaussian at high rate (Marcellin & Fischer 1990).
_GAPS = {1: 0.2546, 4: 0.088, 8: 0.072, 16: 0.063, 32: 0.051, 64: 0.044}
_FINE, _COARSE = 16, 4  # steps to an octave: of rows alone, and of rows and columns that sensitivity sets
_SMALLEST = -100.0  # exponent of a step that is surely above the smallest there is
DEFAULT_SIGMA = 0.3
# Deviations of a row in steps: below the first it is left out, as the bound has it; below the second steps are held.
_EMPTY, _COARSEST = 0.25, 0.5
_ALIKE = 32 * PER_OCTAVE  # to an octave: steps that all rows share but for one in 32, two, …
_FED_RATE = 0.5  # of a bit's price that is right where errors are fed back: shrunken numbers push their bias onwards


@dataclass(frozen=True, slots=True)
class Trellis:
    """Dependent quantization with `states` states; one state is a plain grid.

    Attributes:
        states: 1, 4, 8, 16, 32 or 64. They cost the encoder time and the decoder nothing.
        sigma: step in standard deviations of the row; None takes it from sensitivity and λ, or a default.
        rate: how much bits count when numbers are chosen, of what is right; 0 rounds to the nearest.
        output: whether errors are fed back to rows, where calibration knows how these hang together.
        whole: where steps come from `sigma`, one for the whole tensor, of what its rows deviate by on average.
    """

    states: int = 32
    sigma: float | None = None
    rate: float = 1.0
    output: bool = True
    whole: bool = False

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
        return float(2.0 ** (2 * (_GAPS[self.states] - _GAPS[1])) / 12)

    def encode(self, name: str, weight: Tensor, *, sensitivity: Sensitivity | None = None, lam: float = 0.0) -> Encoded:
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
        by_loss = self.sigma is None and sensitivity is not None and lam > 0
        return self.coded(name, weight, known, math.sqrt(lam / (math.log(2) * self.distortion)) if by_loss else None)

    def coded(self, name: str, weight: Tensor, known: Feedback, scale: float | None, *, draft: bool = False) -> Encoded:
        """`encode` with the feedback made before.

        Args:
            scale: the step where row and column weigh 1; None takes steps from the spread of rows.
            draft: round to the nearest instead, without trellis or feedback: as many bytes, about, in little time.
        """
        matrix = finite_rows(name, weight)
        most = np.abs(matrix).max(axis=1).astype(np.float64)
        if not (most > 0).any():
            return Lossless().encode(name, weight)
        if scale is None:
            scale, resolution = DEFAULT_SIGMA if self.sigma is None else self.sigma, _FINE
            spread = matrix.std(axis=1, dtype=np.float64)
            rows, columns = np.where(spread > 0, spread, most), None
            if self.whole or _alike(matrix, spread):
                wanted = math.log2(scale) + math.log2(float(np.mean(rows[rows > 0] ** 2))) / 2
                rows = np.full(len(rows), 2.0 ** (round(wanted * _ALIKE) / _ALIKE) / scale)
        else:
            rows, resolution = known.row_weight**-0.5, _COARSE
            columns = known.column_weight**-0.5 if known.fed else None
        kept = np.ones(len(rows), np.bool_)
        if columns is not None and matrix.shape[1] >= EMPTY:
            rows, kept = _bounded(matrix, rows, known, scale)
        kept &= most > 0
        steps = _Steps.of(most, rows, columns, scale, resolution, kept if kept.any() else most > 0, matrix.shape[1])
        if steps is None:
            return Lossless().encode(name, weight)
        unfed = not known.fed and known.rows.size == 0
        shell = Encoded("trellis", tuple(weight.shape), weight.dtype, (1 if draft else self.states, *steps.params), ())
        streams = steps.streams
        row, column = both_steps(replace(shell, streams=(matrix, *streams)))  # type: ignore[arg-type]
        row = np.where(kept, row, np.float32(0))
        if draft:
            numbers = np.rint(matrix / np.where(row > 0, row, np.inf)[:, None] / column).astype(np.int32)
        else:
            right = 2 * math.log(2) * self.distortion
            price = self.rate * right * (1 if unfed else _FED_RATE)
            numbers = quantize(matrix, known, row, column, self.states, price)
            if unfed and self.states > 1:
                # One path along all rows starts but once; yet where columns are next to nothing their own stay at zero.
                along = quantize(matrix, known, row, column, -self.states, price)
                if cost(matrix, along, row, column, -self.states, right) < cost(
                    matrix, numbers, row, column, self.states, right
                ):
                    numbers, shell = along, replace(shell, params=(-self.states, *steps.params))
        return replace(shell, streams=(numbers, *streams))


def _alike(matrix: NDArray[np.float32], spread: NDArray[np.float64]) -> bool:
    """Whether steps of rows cost more bits than they save, what sampling makes rows differ by being no saving.

    A row whose step is off by a factor e^x loses x² / ln 2 bits a weight (½ log₂ of arithmetic over geometric mean).
    """
    if not (spread > 0).all():
        return False
    logs = np.log(spread)
    fourth = np.mean(((matrix - matrix.mean(1, keepdims=True, dtype=np.float64)) / spread[:, None]) ** 4)
    noise = max(float(fourth) - 1, 0.0) / (4 * matrix.shape[1])
    saved = matrix.shape[1] * max(float(logs.var()) - noise, 0.0) / math.log(2)
    sixteenths = float(logs.var()) * (_FINE / math.log(2)) ** 2
    return bool(saved < 0.5 * math.log2(1 + 2 * math.pi * math.e * sixteenths))


def _bounded(
    matrix: NDArray[np.float32], rows: NDArray[np.float64], known: Feedback, scale: float
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Steps of rows that do not dwarf their weights, and which rows are worth any bits at all.

    A path through the trellis leaves errors of half a step everywhere. Where that is more than there was, calibration
    may call it free; on other data it is not. A row left out costs w H wᵀ, for no later column makes up for it: inputs
    whose means are not zero make that a hundred times what feedback leaves.
    """
    spread = np.sqrt(np.mean((matrix * known.column_weight**0.5) ** 2, axis=1)) / (scale * rows)
    kept = spread >= _EMPTY
    whole = np.sqrt(known.energy(matrix[~kept]) / matrix.shape[1]) / (scale * rows[~kept])
    kept[~kept] = whole >= _EMPTY
    return np.where(spread < _COARSEST, rows * np.maximum(spread, 1e-30) / _COARSEST, rows), kept


@dataclass(frozen=True, slots=True)
class _Steps:
    """Exponents of rows and columns as the file has them; `params` are all of the scheme's but the states."""

    params: tuple[int, int, int, int]
    streams: tuple[NDArray[np.int32], ...]

    @classmethod
    def of(
        cls,
        most: NDArray[np.float64],
        rows: NDArray[np.float64],
        columns: NDArray[np.float64] | None,
        scale: float,
        resolution: int,
        used: NDArray[np.bool_],
        width: int,
    ) -> "_Steps | None":
        """The steps nearest to scale · rows · columns; None if a row (`most` its largest) has none in range."""
        along = None
        if columns is not None:
            exponents = np.log2(columns)
            scale *= 2.0 ** float(exponents.mean())
            along = np.rint((exponents - exponents.mean()) * resolution).astype(np.int32)
        wanted = np.log2(rows[used])
        centre = float(wanted.mean())
        exact = (math.log2(scale) + centre) * PER_OCTAVE
        base = math.floor(exact)
        finer = min(round((exact - base) * len(rows)), len(rows) - 1)
        down = np.zeros(len(rows))
        down[used] = np.rint((wanted - centre) * resolution)
        narrowest = 0.0 if along is None else float(along.min()) / resolution
        least = np.log2(most[used] / (MOST / 4)) - narrowest  # numbers stay within MOST
        if bool((np.log2(most[used]) < _SMALLEST + 24).any()) and bool(
            (down[used] / resolution + base / 16 < _SMALLEST).any()
        ):
            return None
        down[used] = np.maximum(down[used], np.ceil((least - base / PER_OCTAVE) * resolution))
        unit = PER_OCTAVE // resolution
        low, high = -((base - LOWEST) // unit), (HIGHEST - 1 - base) // unit
        if not LOWEST <= base < HIGHEST or float(down[used].min()) < low or float(down[used].max()) > high:
            return None
        source = np.maximum.accumulate(np.where(used, np.arange(len(rows)), -1))
        borrowed = down[np.where(source < 0, int(np.argmax(used)), source)].astype(np.int32)
        if width < EMPTY:
            borrowed[~used] = low + 16 * resolution  # half a step of about 2**-110 is nothing, yet no subnormal
        widest = HIGHEST // PER_OCTAVE // 2 * resolution
        streams = (borrowed[:, None],) if along is None else (borrowed[:, None], along.clip(-widest, widest)[:, None])
        return cls((resolution, 0 if along is None else resolution, base, finer), streams)
