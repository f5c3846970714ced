"""Trellis scheme: trellis-coded quantization with error feedback, and scales from the sensitivity of the loss.

    trellis   params (states, row resolution, column resolution or 0, base index, finer rows)
    streams: symbols (rows, columns), row scale indices (rows, 1)[, column scale indices (columns, 1)]

    w = (symbol + odd/2) · scale(row) · scale(column); the state, and with it `odd`, follows from the
    parities of the symbols above in the column

A negative number of states means one path along the rows instead: the state follows from the previous symbol of the
row. With 16 columns or more, a row of nothing but zeros decodes to zeros: rows that are worth no bits are left out that
way. Row scales share a base exponent in sixteenths of an octave, and some of the first rows, as many as the parameter
says, have one sixteenth more: the size then changes smoothly with the base although the differences between rows are
coarse. A plain grid is the trellis of one state. Products are computed in float32 in this order, so that every machine
gets the same bits.

Scales from the sensitivity: at high rate a weight with scale s has the expected loss ½ F c s² in nats, c being the
distortion of this trellis in squared scales and F the weight's Fisher information, and its bits are −log2 s plus a
constant. Minimizing loss + λ · bits gives F c s² = λ / ln 2. So with one Lagrange multiplier λ, in nats of KL per bit,
for all tensors, one bit less costs the same loss everywhere if s² of weight (i, j) is λ / (ln 2 · c · F_ij), F_ij the
Fisher information that remains after feedback: that of row i times that of column j (`trellis/feedback.py`). This is
reverse water-filling over layers, rows and columns at once (Cover & Thomas, section 10.3.3); nominal bit widths play no
part. Columns have scales of their own only where these save bits (`trellis/column_scales.py`).

`Trellis.encode` takes `sigma` standard deviations of a row for its scale, as SDClip does (openai/parameter-golf PR
1394); `encode_with`, which a search for a size or a quality calls, takes the scales from the sensitivity.
Trellis-coded quantization: Marcellin & Fischer 1990; for language models: QTIP (arXiv 2406.11235).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.log_scales import HIGHEST, LOWEST, PER_OCTAVE, fill_unused, scales_of
from birdie.compress.prior import equalized, prior
from birdie.compress.scheme import INT16, SCALES, Cost, Decoder, Encoded, Scheme, Sensitivity, Spec, StreamLayout
from birdie.compress.schemes.grid import CLIP_SIGMAS, MAX_SYMBOL, Grid, encode_with_one_scale
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.tensors import empty, real_matrix, real_rows, rows_columns
from birdie.compress.trellis.column_scales import WIDEST, Columns
from birdie.compress.trellis.feedback import BlockFeedback, Feedback, feedback
from birdie.compress.trellis.trellis_search import search
from birdie.entropy.factors import Factors
from birdie.entropy.hints import Hints
from birdie.entropy.trellis_states import STATES, chunk_rows, machine
from birdie.errors import ArtifactError, ConfigError
from birdie.system.kernels import njit

ZERO_ROW_COLUMNS = 16  # columns from which on a row of zero symbols is a row of zeros
RESOLUTIONS = (1, 2, 4, 8, 16)  # indices per octave that a stream of scales may have
DEFAULT_SIGMA = 0.3

# Bits by which each trellis misses the rate–distortion bound of a Gaussian at high rate (Marcellin & Fischer 1990; from
# 128 states on as measured on 12 million weights. The same measurement gives 0.054 for 32 states and 0.047 for 64.)
_GAPS = {1: 0.2546, 4: 0.088, 8: 0.072, 16: 0.063, 32: 0.051, 64: 0.044, 128: 0.0383, 256: 0.0329}
_RANGE = 1.8  # of a row, in maxima: less than two, so that stored scales, which are rounded, leave no larger errors
_FINE, _COARSE = 16, 4  # scales per octave: of rows by deviation; of rows and columns by sensitivity
_SAFE_EXPONENT = -125.0  # log2 of the smallest scale whose half is a normal float32
# Root mean square of a row in scales. Below the first the row is left out, as in reverse water-filling; below the
# second its scale stops growing, because half a scale of error everywhere would exceed the weights.
_LEFT_OUT, _HELD = 0.25, 0.5
_MOST_POWER = 1e30  # of weights in squared scales: more than symbols can have, so that nothing overflows
_SHARED_RESOLUTION = 32 * PER_OCTAVE  # steps per octave of a scale that all rows share: 1 in 32 rows, 2, … are finer
# Share of the right price of a bit with feedback: symbols that shrink towards zero push their bias onto later columns.
_FEEDBACK_RATE = 0.5
# Share of zeros from which a matrix is pruned, if so many weights of a row are zero or distinct; and in any case.
# Weights that were quantized once, by six bits for example, have as many zeros as other multiples of their scale.
_PRUNED, _CONTINUOUS, _SPARSE = 0.02, 0.75, 0.4
_SAMPLED_ROWS = 8
# A weight below an eighth of its row's scale is nothing beside it. Rows of which more than an eighth are such, and
# twice as many as of a Gaussian, take an eighth of the scale. If more than one row in 32 is, there is no trellis, and
# they take a fourth: few weights carry such a row, and integers up to its largest weight keep that one exact.
_NOTHING, _LEAST_NOTHING, _FINER, _FINER_PLAIN, _MOST_HEAVY = 8, 1 / 8, 8, 4, 32
_CHANCE = 3  # deviations by which that number has to be above its mean: of 16 weights some are small by chance
_DEAREST = 1e12  # price of a bit in a row, at most, in those of a row whose scale is not held
_MOST_GAIN = 1.0  # octaves by which outputs that came out too small are enlarged
_BLOCK = 1 << 16  # weights that are decoded at a time, about


def layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    """Return the layout of symbols and scale indices."""
    rows, columns = real_matrix(shape, dtype)
    if (
        len(params) != 5
        or abs(params[0]) not in STATES
        or params[1] not in RESOLUTIONS
        or params[2] not in (0, *RESOLUTIONS)
        or not LOWEST <= params[3] <= HIGHEST
        or not 0 <= params[4] < rows
    ):
        raise ArtifactError(f"scheme trellis has parameters {params} for {rows} rows; the file is corrupt or newer")
    symbols = StreamLayout(rows, columns, Hints("symbols", states=params[0]))
    by_row, by_column = StreamLayout(rows, 1, SCALES, INT16), StreamLayout(columns, 1, SCALES, INT16)
    return (symbols, by_row, by_column) if params[2] else (symbols, by_row)


def decode(encoded: Encoded) -> Tensor:
    """Return the tensor by the formula of the module's docstring."""
    symbols, paths, column = encoded.streams[0], machine(encoded.params[0]), column_scales(encoded)
    out = empty(symbols.shape, encoded.dtype)
    limit = min(torch.finfo(encoded.dtype).max, torch.finfo(torch.float32).max)
    rows, columns = symbols.shape
    height, step = chunk_rows(columns), max(1, _BLOCK // columns)
    state, start = np.empty(columns, np.uint8), 0
    while start < rows:  # in blocks that a processor's cache holds
        if start % height == 0:
            state[:] = 0  # paths restart with every chunk of rows, so that chunks decode independently
        block = slice(start, min(start + step, start - start % height + height, rows))
        part, row = np.ascontiguousarray(symbols[block]), row_scales(encoded, block)
        exact = out[block] if out.dtype is torch.float32 else torch.empty(part.shape, device="cpu")
        _dequantize(part, state, paths.next_state, paths.mask, row, column, exact.numpy())
        exact.clamp_(-limit, limit)
        if exact.dtype is not out.dtype:
            out[block] = exact
        start = block.stop
    return out.reshape(encoded.shape)


def row_scales(encoded: Encoded, rows: slice = slice(None)) -> NDArray[np.float32]:
    """Return the scales of `rows`: base and stream combined."""
    _, resolution, _, base, finer = encoded.params
    indices = encoded.streams[1][rows, 0].astype(np.int64) * (PER_OCTAVE // resolution) + base
    indices[: max(0, finer - (rows.start or 0))] += 1
    return scales_of(indices)


def column_scales(encoded: Encoded) -> NDArray[np.float32]:
    """Return the scales of columns; ones without a stream."""
    if not encoded.params[2]:
        return np.ones(encoded.streams[0].shape[1], np.float32)
    return scales_of(encoded.streams[2][:, 0].astype(np.int64) * (PER_OCTAVE // encoded.params[2]))


def _factors(encoded: Encoded) -> Factors:
    """Return half the scales of rows, because numbers count halves of a scale, and the scales of columns."""
    columns = column_scales(encoded) if encoded.params[2] else np.empty(0, np.float32)
    limit = min(torch.finfo(encoded.dtype).max, torch.finfo(torch.float32).max)
    return Factors(row_scales(encoded)[:, None] * np.float32(0.5), columns, encoded.streams[0].shape[1], True, limit)


def _cost(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> Cost:  # noqa: ARG001
    (rows, columns), count = rows_columns(shape), prod(shape)
    height = min(rows, chunk_rows(columns))
    return Cost(16 * count + 24 * rows, count * dtype.itemsize + 8 * height * columns + 32 * (height + columns))


@njit(nogil=True, cache=True, _nrt=False)
def _dequantize(symbols, state, next_state, mask, row, column, out):  # type: ignore[no-untyped-def]
    """Fill `out` and advance `state` (columns,); a machine's next state is s >> 1 ^ odd · shift ^ parity · flip."""
    rows, columns = symbols.shape
    shift, flip = next_state[-1, 0] ^ (next_state.shape[0] - 1) >> 1, next_state[0, 1]
    for i in range(rows):
        half = row[i] * np.float32(0.5)
        if columns >= ZERO_ROW_COLUMNS:
            j = 0
            while j < columns and symbols[i, j] == 0:
                j += 1
            half = half if j < columns else np.float32(0)
        if mask:
            for j in range(columns):
                s, m = np.int32(state[j]), np.int32(symbols[i, j])
                out[i, j] = np.float32(2 * m + (s & 1)) * half * column[j]
                state[j] = s >> 1 ^ (s & 1) * shift ^ (m & 1) * flip
        else:
            s = np.int32(state[0])
            for j in range(columns):
                m = np.int32(symbols[i, j])
                out[i, j] = np.float32(2 * m + (s & 1)) * half * column[j]
                s = s >> 1 ^ (s & 1) * shift ^ (m & 1) * flip
            state[0] = s


DECODER = Decoder("trellis", 4, layout, decode, _cost, _factors, inner="tensor")


def _gptq(*, bits: int = 6, clip_sigmas: float = CLIP_SIGMAS) -> "Trellis":
    return Trellis(1, clip_sigmas / Grid(bits).top, rate=0.0, output=False)


def _by_range(*, bits: int = 8) -> "Trellis":
    return Trellis(1, bits=bits, rate=0.0)


def _spec(*, states: int = 32, sigma: float | None = None, per_tensor: bool = False) -> "Trellis":
    return Trellis(states, sigma, per_tensor=per_tensor)


@dataclass(frozen=True, slots=True)
class Trellis(Scheme):
    """Dependent quantization with `states` states; one state is a plain grid.

    Attributes:
        states: 1, 4, 8, 16, 32, 64, 128 or 256. More states cost time in the encoder, none in the decoder.
        sigma: scale in standard deviations of the row; None: 0.3.
        rate: price of bits when symbols are chosen, as a share of the right one; 0 minimizes the error alone.
        output: whether errors are fed back to rows too, if the sensitivity has the output covariance.
        bits: nominal bits over the range of each row, in place of a scale in deviations.
        along: whether one path may run along the rows where that saves bits; it decodes at half the speed.
        per_tensor: with `sigma`, one scale for the tensor, from the root mean square of its rows' deviations.
    """

    decoder = DECODER
    specs = (
        Spec(
            "trellis",
            "two grids half a scale apart on a trellis of 4 to 256 states",
            _spec,
            "trellis:sigma=0.3",
        ),
        Spec("feedback", "a grid of nominal bits over the range of each row, errors fed back", _by_range),
        Spec("gptq", "a grid clipped at so many deviations, errors fed back by the input Hessian (GPTQ)", _gptq),
    )

    states: int = 32
    sigma: float | None = None
    rate: float = 1.0
    output: bool = True
    per_tensor: bool = False
    bits: int | None = None
    along: bool = True

    def __post_init__(self) -> None:
        if self.states not in STATES:
            raise ConfigError(f"a trellis of {self.states} states is unknown; choose {', '.join(map(str, STATES))}")
        if self.sigma is not None and not 2.0**-16 <= self.sigma <= 2.0**16:
            raise ConfigError(f"trellis sigma {self.sigma} is out of range; choose a scale of 2^-16 to 2^16 deviations")
        if self.bits is not None and not 2 <= self.bits <= 16:
            raise ConfigError(f"feedback bits={self.bits} is out of range; choose 2 to 16")
        if not 0 <= self.rate <= 16:
            raise ConfigError(f"trellis rate {self.rate} is out of range; choose 0 to 16")

    @property
    def distortion(self) -> float:
        """Mean squared error at high rate, in squared scales."""
        return float(2.0 ** (2 * (_GAPS[self.states] - _GAPS[1])) / 12)

    @property
    def by_rows(self) -> bool:
        """Return whether each row has scales of its own."""
        return not self.per_tensor

    def at_scale(self, sigma: float) -> "Trellis":
        """Return the same trellis with a scale of `sigma` standard deviations."""
        return replace(self, sigma=sigma, bits=None)

    def encode(self, name: str, weight: Tensor, *, sensitivity: Sensitivity | None = None) -> Encoded:
        """Quantize with error feedback; losslessly if float32 has no such scales.

        Args:
            name: for error messages.
            weight: any shape.
            sensitivity: of this weight, for the feedback; by default what its kind lets expect.

        Raises:
            WeightsError: the tensor is not float16, bfloat16, float32 or float64, is empty, or is not finite.
        """
        rows, columns = real_rows(name, weight).shape
        known = prior({name: weight})[name] if sensitivity is None else sensitivity
        return self.encode_with(name, weight, feedback(known, rows, columns, output=self.output), None)

    def encode_part(self, name: str, part: Tensor, deviation: float) -> Encoded | None:
        """Encode a part with the scale of the complete tensor: see `Scheme.encode_part`."""
        # The scale at which the trellis has the error of a plain grid, whose distortion is 1/12 of its squared scale.
        wider = deviation / math.sqrt(12 * self.distortion)
        scale = (DEFAULT_SIGMA if self.sigma is None else self.sigma) * wider
        encoded = self.encode_with(name, part, feedback(None, *rows_columns(tuple(part.shape))), scale)
        if encoded.scheme == "lossless" and not bool(part.any()):
            return encode_with_one_scale(part, deviation)
        return encoded

    def encode_with(
        self, name: str, weight: Tensor, factors: Feedback, scale: float | None, *, draft: bool = False
    ) -> Encoded:
        """Encode with precomputed feedback factors: a budget search encodes the same weight many times.

        Args:
            name: for error messages.
            weight: any shape.
            factors: of this weight.
            scale: scale of a weight whose row and column have Fisher information 1; None takes the scales from the
                deviations of rows.
            draft: round to the nearest where errors would be fed back: about the same size, in little time.
        """
        matrix = real_rows(name, weight)
        most = np.maximum(matrix.max(axis=1), -matrix.min(axis=1)).astype(np.float64)
        if not (most > 0).any():
            return Lossless().encode(name, weight)
        pruned = is_pruned(matrix)
        if pruned and self.states != 1:  # half of the states have no zero, and a plain grid is as good for such weights
            return replace(self, states=1).encode_with(name, weight, factors, scale, draft=draft)
        uneven = factors.columns is not None or bool((factors.column_weight != factors.column_weight[0]).any())
        by_sensitivity, nominal = scale is not None and uneven, scale
        columns = factors.equal if scale is None else None
        equal = equalized(matrix, columns)
        if scale is None and self.bits is not None:
            scale, resolution = _RANGE / 2**self.bits, _FINE
            rows = np.maximum(equal.max(axis=1), -equal.min(axis=1)).astype(np.float64)
        elif scale is None:
            scale, resolution = DEFAULT_SIGMA if self.sigma is None else self.sigma, _FINE
            spread = equal.std(axis=1, dtype=np.float64)
            rows = np.where(spread > 0, spread, most)
            if self.per_tensor or _rows_are_alike(equal, spread):
                exponent = math.log2(scale) + math.log2(float(np.mean(rows[rows > 0] ** 2))) / 2
                rows = np.full(len(rows), 2.0 ** (round(exponent * _SHARED_RESOLUTION) / _SHARED_RESOLUTION) / scale)
        else:
            rows, resolution = factors.row_weight**-0.5, _COARSE
        kept = np.ones(len(rows), np.bool_)
        prices = None
        if by_sensitivity and factors.along:
            rows, columns, scale, kept = self._scales_of_inputs(matrix, factors, scale, resolution)
        elif by_sensitivity and matrix.shape[1] >= ZERO_ROW_COLUMNS:
            ideal = rows
            rows, kept = _hold_small_rows(matrix, rows, factors.column_weight, factors.energy, scale)
            if factors.at_large:  # a bit of a row whose scale is held goes on to cost more
                prices = np.minimum((ideal / rows) ** 2, _DEAREST).astype(np.float32)
        kept &= most > 0
        used = kept if kept.any() else most > 0
        if by_sensitivity and not factors.along:
            power = _column_power(matrix, factors.column_weight, rows * scale, used)
            columns, gain = Columns(power, factors.column_weight, int(used.sum()), self.distortion, resolution).scales()
            scale *= gain
        levelled = _over_columns(matrix, columns)
        nothing, heavy = np.zeros(matrix.shape, np.bool_), np.zeros(len(rows), np.bool_)
        if not isinstance(factors.columns, BlockFeedback):  # else data tell what an error of a small weight costs
            nothing = np.abs(levelled) < (rows * scale / _NOTHING).astype(np.float32)[:, None]
            heavy = kept & _is_heavy_tailed(nothing, levelled, rows * scale)
        needs_long_path = factors.along and not self.along
        if self.states != 1 and (needs_long_path or np.count_nonzero(heavy) * _MOST_HEAVY > len(rows)):
            plain = replace(self, states=1)
            finer = None if nominal is None else nominal * math.sqrt(self.distortion / plain.distortion)
            return plain.encode_with(name, weight, factors, finer, draft=draft)
        rows = np.where(heavy, rows / (_FINER if self.states != 1 else _FINER_PLAIN), rows)
        zeros = None
        if self.states == 1 and (pruned or heavy.any()):
            zeros = (matrix == 0) & pruned | nothing & heavy[:, None]
        largest = np.maximum(levelled.max(axis=1), -levelled.min(axis=1)).astype(np.float64)
        scales = _scale_indices(largest, rows, columns, scale, resolution, used, matrix.shape[1])
        if scales is None:
            return Lossless().encode(name, weight)
        params, indices = scales
        draft = draft if factors.feeds else self.states == 1 and self.rate == 0
        encoded = Encoded("trellis", tuple(weight.shape), weight.dtype, (1, *params), ())
        scaled = replace(encoded, streams=(matrix, *indices))  # type: ignore[arg-type]
        row, column = np.where(kept, row_scales(scaled), np.float32(0)), column_scales(scaled)
        if draft:
            rounded = np.rint(matrix / np.where(row > 0, row, np.inf)[:, None] / column)
            symbols: NDArray[np.integer] = rounded.astype(np.int32)
        else:
            # λ in squared scales: s² c F = λ / ln 2 from the module's docstring, with the loss ½ F e² of an error e.
            right_price = 2 * math.log(2) * self.distortion
            price = self.rate * right_price * (_FEEDBACK_RATE if factors.feeds else 1)
            states, symbols = search(
                *(weight, matrix, most, factors, row, column, self.states, price),
                along=self.along,
                zeros=zeros,
                row_prices=prices,
            )
            encoded = replace(encoded, params=(states, *params))
        encoded = replace(encoded, streams=(symbols, *indices))
        return _unshrunk(encoded, matrix, factors) if factors.at_large and not (factors.along or draft) else encoded

    def _scales_of_inputs(
        self, matrix: NDArray[np.float32], factors: Feedback, scale: float, resolution: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], float, NDArray[np.bool_]]:
        """Return scales of rows that are inputs and of columns that are outputs, that of all, and the rows to keep.

        They are chosen as those of the transpose. A row that would be zeros is left out: a path leaves errors there.
        """
        turned = np.ascontiguousarray(matrix.T)
        ideal, used = factors.column_weight**-0.5, np.asarray(turned.any(axis=1))
        outputs, _ = _hold_small_rows(turned, ideal, factors.row_weight, factors.energy, scale)
        power = _column_power(turned, factors.row_weight, outputs * scale, used)
        inputs, gain = Columns(power, factors.row_weight, int(used.sum()), self.distortion, resolution).scales()
        inputs = np.ones(len(matrix)) if inputs is None else inputs
        scale *= gain
        size = np.sqrt(np.mean((matrix / outputs) ** 2, axis=1)) / (inputs * scale)
        return inputs, outputs, scale, np.asarray(size >= _LEFT_OUT)


def _unshrunk(encoded: Encoded, matrix: NDArray[np.float32], factors: Feedback) -> Encoded:
    """Return the encoding with all scales as much larger as its outputs are smaller than those of the matrix.

    The least squared error is that of shrunk weights. But shrunk outputs of layer after layer multiply, as other errors
    do not: a network of four layers at a bit a weight had 0.39 nats of KL in place of 0.21.
    """
    decoded = decode(encoded).float().reshape(matrix.shape).numpy()
    energy, double, error = (
        float(factors.row_weight @ factors.energy(values)) for values in (matrix, matrix + decoded, matrix - decoded)
    )
    common = (double - error) / 4  # w H dᵀ
    if not 0 < common < energy:
        return encoded
    states, resolution, by_column, base, finer = encoded.params
    room = HIGHEST - 1 - base - int(encoded.streams[1].max()) * (PER_OCTAVE // resolution)
    base += max(0, min(round(PER_OCTAVE * min(math.log2(energy / common), _MOST_GAIN)), room))
    return replace(encoded, params=(states, resolution, by_column, base, finer))


def _is_heavy_tailed(
    nothing: NDArray[np.bool_], matrix: NDArray[np.float32], scales: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Return which rows have far more weights that are nothing beside their scale than a Gaussian has.

    Half of the states have no zero, so a path leaves half a scale of error at such a weight, and feedback moves errors
    there, where integers leave the weight itself; and a weight is small where its input is large. Such rows take a
    finer scale. If they are many, there is no trellis, and what is nothing is zero.
    """
    width = nothing.shape[1]
    share = np.count_nonzero(nothing, axis=1) / width
    size = np.sqrt(np.einsum("ij,ij->i", matrix, matrix, dtype=np.float64) / width)
    gaussian = math.sqrt(2 / math.pi) * scales / _NOTHING  # of a row of deviation 1
    usual = np.divide(gaussian, size, out=np.ones_like(size), where=size > gaussian)
    noise = np.sqrt(usual * (1 - usual) / width)  # of the share in a narrow row
    return np.asarray((share > _LEAST_NOTHING) & (share - usual > np.maximum(usual, _CHANCE * noise)))


def is_pruned(matrix: NDArray[np.float32]) -> bool:
    """Return whether zeros of a matrix are meant: a few per cent among weights off any grid, or two in five.

    Rows of zeros do not count where they decode to zeros in any case.
    """
    if matrix.size - np.count_nonzero(matrix) <= _PRUNED * matrix.size or not matrix.any():
        return False
    used = matrix[matrix.any(axis=1)]
    counted = used if matrix.shape[1] >= ZERO_ROW_COLUMNS else matrix
    share = 1 - np.count_nonzero(counted) / max(counted.size, 1)
    distinct = [np.unique(row).size / row.size for row in used[:: -(-len(used) // _SAMPLED_ROWS)]]
    return bool(share > _SPARSE or (share > _PRUNED and share + float(np.mean(distinct)) > _CONTINUOUS))


def _rows_are_alike(matrix: NDArray[np.float32], spread: NDArray[np.float64]) -> bool:
    """Return whether separate scales of rows would cost more bits than they save.

    A row whose scale is off by a factor e^x loses x² / ln 2 bits per weight (½ log₂ of arithmetic over geometric mean).
    Differences between estimated deviations that are only sampling noise (from the fourth moment) save nothing.
    """
    if not (spread > 0).all():
        return False
    logs = np.log(spread)
    fourth = np.mean(((matrix - matrix.mean(1, keepdims=True, dtype=np.float64)) / spread[:, None]) ** 4)
    noise = max(float(fourth) - 1, 0.0) / (4 * matrix.shape[1])
    saved = matrix.shape[1] * max(float(logs.var()) - noise, 0.0) / math.log(2)
    sixteenths = float(logs.var()) * (_FINE / math.log(2)) ** 2
    return bool(saved < 0.5 * math.log2(1 + 2 * math.pi * math.e * sixteenths))


def _hold_small_rows(
    matrix: NDArray[np.float32],
    rows: NDArray[np.float64],
    weight: NDArray[np.float64],
    energy_of: Callable[[NDArray[np.float32]], NDArray[np.float64]],
    scale: float,
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return row scales that are not much larger than the weights, and which rows are worth any bits at all.

    A path through the trellis leaves errors of half a scale everywhere. If that exceeds the weights, the calibration
    data may show no cost; other data will. Leaving a row out costs w H wᵀ, because no later column compensates it: with
    inputs whose means are not zero this is a hundred times the cost that remains after feedback.
    """
    spread = np.sqrt(np.mean((matrix * weight**0.5) ** 2, axis=1)) / (scale * rows)
    kept = spread >= _LEFT_OUT
    if not kept.all():
        energy = np.sqrt(energy_of(matrix[~kept]) / matrix.shape[1]) / (scale * rows[~kept])
        kept[~kept] = energy >= _LEFT_OUT
    return np.where(spread < _HELD, rows * np.maximum(spread, 1e-30) / _HELD, rows), kept


def _over_columns(matrix: NDArray[np.float32], columns: NDArray[np.float64] | None) -> NDArray[np.float32]:
    """Return a matrix divided by the scales of its columns."""
    return matrix if columns is None else np.divide(matrix, columns, dtype=np.float32)


def _column_power(
    matrix: NDArray[np.float32], fisher: NDArray[np.float64], scales: NDArray[np.float64], used: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return the mean square of each column, (columns,), of the used rows divided by their scales.

    Columns are multiplied by the root of their Fisher information before, so that those of another scale do not exceed
    the limit.
    """
    inverse = np.where(used, np.minimum(1 / scales, np.finfo(np.float32).max), 0).astype(np.float32)
    with np.errstate(over="ignore"):
        scaled = matrix * (fisher**0.5).astype(np.float32) * inverse[:, None]
        power = np.einsum("ij,ij->j", scaled, scaled, dtype=np.float64) / used.sum()
    return np.asarray(np.minimum(power, _MOST_POWER) / fisher)


def _scale_indices(
    most: NDArray[np.float64],
    rows: NDArray[np.float64],
    columns: NDArray[np.float64] | None,
    scale: float,
    resolution: int,
    used: NDArray[np.bool_],
    width: int,
) -> tuple[tuple[int, int, int, int], tuple[NDArray[np.int32], ...]] | None:
    """Return all parameters but the states, and the streams of the scale indices nearest to scale · rows · columns.

    None if a row (maximum `most`, of weights over scales of columns) has none in range.
    """
    column_indices, mean = None, 0.0
    if columns is not None:
        exponents = np.log2(columns)
        mean = float(exponents.mean())
        scale *= 2.0**mean
        column_indices = np.rint((exponents - exponents.mean()) * resolution).astype(np.int32)
    exponents = np.log2(rows[used])
    center = float(exponents.mean())
    exact = (math.log2(scale) + center) * PER_OCTAVE
    base = math.floor(exact)
    finer = min(round((exact - base) * len(rows)), len(rows) - 1)
    row_indices = np.zeros(len(rows))
    row_indices[used] = np.rint((exponents - center) * resolution)
    narrowest = 0.0 if column_indices is None else float(column_indices.min()) / resolution
    least = np.log2(most[used] / (MAX_SYMBOL / 4)) + mean  # symbols stay within MAX_SYMBOL: twice that is exact
    row_indices[used] = np.maximum(row_indices[used], np.ceil((least - base / PER_OCTAVE) * resolution))
    if float(row_indices[used].min()) / resolution + base / PER_OCTAVE + narrowest < _SAFE_EXPONENT:
        return None
    unit = PER_OCTAVE // resolution
    low, high = -((base - LOWEST) // unit), (HIGHEST - 1 - base) // unit
    if not LOWEST <= base < HIGHEST or float(row_indices[used].min()) < low or float(row_indices[used].max()) > high:
        return None
    filled = fill_unused(row_indices.astype(np.int32), used)
    if width < ZERO_ROW_COLUMNS:
        filled[~used] = low + 16 * resolution  # half a scale of about 2**-110 is nothing, yet no subnormal
    widest = WIDEST * resolution
    streams = (
        (filled[:, None],)
        if column_indices is None
        else (filled[:, None], column_indices.clip(-widest, widest)[:, None])
    )
    return (resolution, 0 if column_indices is None else resolution, base, finer), streams
