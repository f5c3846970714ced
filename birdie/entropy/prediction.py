"""Linear prediction: symbols become residuals, what is left after symbols before them predict them.

rows    a row is predicted by up to two rows above it and the running mean of each column. Embedding rows of tokens that
        training hardly ever saw are near copies of each other, and all rows of an embedding share a direction.
taps    a symbol of a convolution is predicted by its neighbors: in its own kernel, in the kernels of the previous input
        channels and of the output channels above. Trained kernels are smooth.

The encoder fits the weights by least squares, rounds them and writes them to the side information. Residuals are taken
modulo the size of the alphabet, so they need no symbols of their own. Only the encoder's search uses floats.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from birdie.entropy.alphabet import Symbols
from birdie.entropy.side_information import SideReader, SideWriter, unzigzag, zigzag
from birdie.errors import ArtifactError
from birdie.system.kernels import inner, njit

Integers = NDArray[np.int64]

ROW_UNIT, TAP_UNIT = 8, 32  # weights of rows are in 1/ROW_UNIT, those of taps in 1/TAP_UNIT
MAX_WEIGHT = 127
REFERENCES = 2  # rows above that a row may refer to
MAX_KERNEL = 64  # positions
MIN_COLUMNS = 8  # of rows that are worth a reference
ROWS, TAPS = 1, 2
_KIND, _KERNEL, _DISTANCE, _ROW_WEIGHT, _TAP_WEIGHT = 22, 56, 58, 61, 64  # contexts of the side information
_MAX_PRODUCTS = 3 * 10**10  # multiplications that the search for references may spend
_BLOCK = 512  # rows searched at a time
_TRIED_RUNS, _RUN, _TRIED_COLUMNS = 8, 16, 1024  # runs of rows that are tried first, and their size
_WORTHWHILE = 0.004  # bits a symbol that the trial must save
_SHORT, _PREDICTED = 32, 1 / 8  # columns of short rows, and the share of them that must be predicted in the trial
_RIDGE = 1e-3  # in symbols squared, per symbol
_MAX_TAPS = 8  # with a weight other than 0, per position


@dataclass(frozen=True, slots=True)
class RowPrediction:
    """Prediction of rows from rows above and column means."""

    distances: Integers  # (rows, REFERENCES) how many rows above each reference lies; 0 for none, and none after it
    weights: Integers  # (rows, 1 + REFERENCES) of the column means and of each reference, in 1/ROW_UNIT

    def put(self, writer: SideWriter) -> None:
        """Write the prediction to the side information."""
        for k in range(REFERENCES):
            writer.put_chain(_DISTANCE + k, self.distances[:, k], 0)
        for k in range(REFERENCES + 1):
            present = slice(None) if k == 0 else self.distances[:, k - 1] > 0
            writer.put_all(_ROW_WEIGHT + k, zigzag(self.weights[present, k]))

    @classmethod
    def take(cls, reader: SideReader, rows: int) -> "RowPrediction":
        """Undo `put`; a distance beyond the first row or a weight out of range is an ArtifactError."""
        distances = np.stack([reader.take_all(_DISTANCE + k, rows) for k in range(REFERENCES)], 1)
        if (distances > np.arange(rows)[:, None]).any():
            raise ArtifactError("a row of a stream refers to one above the first; the file is damaged")
        weights = np.zeros((rows, REFERENCES + 1), np.int64)
        for k in range(REFERENCES + 1):
            present = np.arange(rows) if k == 0 else np.flatnonzero(distances[:, k - 1])
            weights[present, k] = _take_weights(reader, _ROW_WEIGHT + k, present.size)
        return cls(distances, weights)

    def subtract(self, symbols: Symbols, zero: int, size: int) -> Symbols:
        """Return the residuals of `symbols` (rows, columns), 0 … size - 1; size // 2 stands for no difference."""
        residuals = np.empty_like(symbols)
        means = np.zeros(symbols.shape[1], np.int64)
        _predict_rows(symbols.copy(), residuals, self.distances, self.weights, means, zero, size, False)
        return residuals

    def add(self, residuals: Symbols, zero: int, size: int) -> Symbols:
        """Return the symbols that have these residuals, in the memory of the residuals."""
        means = np.zeros(residuals.shape[1], np.int64)
        _predict_rows(residuals, residuals, self.distances, self.weights, means, zero, size, True)
        return residuals


@dataclass(frozen=True, slots=True)
class TapPrediction:
    """Prediction of the weights of a convolution from their neighbors."""

    kernel: tuple[int, int]  # height and width
    weights: Integers  # (positions in the kernel, taps), in 1/TAP_UNIT; the taps are `tap_offsets(kernel)`

    def put(self, writer: SideWriter) -> None:
        """Write the prediction to the side information."""
        writer.put_all(_KERNEL, [side - 1 for side in self.kernel])
        for tap in range(self.weights.shape[1]):
            writer.put_all(_TAP_WEIGHT + tap, zigzag(self.weights[:, tap]))

    @classmethod
    def take(cls, reader: SideReader) -> "TapPrediction":
        """Undo `put`; a kernel or a weight out of range is an ArtifactError."""
        height, width = (reader.take(_KERNEL, MAX_KERNEL - 1, "a side of a kernel") + 1 for _ in range(2))
        positions = height * width
        if positions > MAX_KERNEL:
            raise ArtifactError(f"a stream has a kernel of {height} × {width}, which is too large; the file is damaged")
        taps = range(len(tap_offsets((height, width))))
        return cls((height, width), np.stack([_take_weights(reader, _TAP_WEIGHT + tap, positions) for tap in taps], 1))

    def subtract(self, symbols: Symbols, zero: int, size: int) -> Symbols:
        """Return the residuals of `symbols` (rows, columns), 0 … size - 1; size // 2 stands for no difference."""
        residuals = np.empty_like(symbols)
        _predict_taps(symbols.copy(), residuals, *self._active(), zero, size, False)
        return residuals

    def add(self, residuals: Symbols, zero: int, size: int) -> Symbols:
        """Return the symbols that have these residuals, in the memory of the residuals."""
        _predict_taps(residuals, residuals, *self._active(), zero, size, True)
        return residuals

    def _active(self) -> tuple[Integers, Integers, Integers, Integers]:
        """Return the first active tap of each position (positions + 1,), then rows up, columns back, weight of each."""
        position, tap = np.nonzero(self.weights)
        offsets = np.array(tap_offsets(self.kernel), np.int64)
        first = np.searchsorted(position, np.arange(len(self.weights) + 1)).astype(np.int64)
        return first, offsets[tap, 0], offsets[tap, 1], self.weights[position, tap]


Prediction = RowPrediction | TapPrediction


def put(writer: SideWriter, predictor: Prediction | None) -> None:
    """Write any prediction, or that there is none, to the side information."""
    kinds: dict[type, int] = {type(None): 0, RowPrediction: ROWS, TapPrediction: TAPS}
    writer.put(_KIND, kinds[type(predictor)])
    if predictor is not None:
        predictor.put(writer)


def take(reader: SideReader, rows: int, columns: int = MIN_COLUMNS) -> Prediction | None:
    """Undo `put`; anything out of range is an ArtifactError.

    References in rows too short for them are refused before anything is allocated: a few bytes of a hostile file could
    describe references of billions of rows.
    """
    kind = reader.take(_KIND, TAPS, "the kind of prediction")
    if kind == ROWS and columns < MIN_COLUMNS:
        raise ArtifactError(f"rows of {columns} in a stream are predicted from rows; the file is damaged")
    if kind == ROWS:
        return RowPrediction.take(reader, rows)
    return TapPrediction.take(reader) if kind == TAPS else None


def candidates(symbols: Symbols, zero: int, kernel: tuple[int, int]) -> list[Prediction]:
    """Return the predictions worth trying on `symbols` (rows, columns), weights of a convolution with this kernel."""
    rows, columns = symbols.shape
    if 1 < kernel[0] * kernel[1] <= MAX_KERNEL:
        fitted: Prediction | None = fit_taps(symbols, zero, kernel)
    else:
        fitted = fit_rows(symbols, zero) if rows > 1 and columns >= MIN_COLUMNS else None
    return [fitted] if fitted is not None else []


def tap_offsets(kernel: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Return the taps of a kernel as (rows up, columns back): neighbors that come earlier in row-major order."""
    width, size = kernel[1], kernel[0] * kernel[1]
    offsets = [(0, back) for back in (1, 2, width, width + 1, width - 1, 2 * width)]  # mostly in the same kernel
    offsets += [
        (0, back) for back in (size, 2 * size, size - 1, size + 1, size - width, size + width)
    ]  # in earlier ones
    offsets += [(1, 0), (2, 0), (1, -1), (1, 1), (1, -width), (1, width)]  # in output channels above
    return tuple(dict.fromkeys(offset for offset in offsets if offset > (0, 0)))


def fit_rows(symbols: Symbols, zero: int) -> RowPrediction | None:
    """Return the best references and weights for `symbols` (rows, columns); None where nothing is predicted.

    Comparing every row with every other takes longer than all else, and pays for few matrices: a sample of runs of rows
    tells whether it does.
    """
    rows = len(symbols)
    if rows > _TRIED_RUNS * _RUN + _RUN:
        starts = np.linspace(0, rows - _RUN, _TRIED_RUNS).astype(np.int64)
        tried = np.ascontiguousarray(symbols[(starts[:, None] + np.arange(_RUN)).ravel(), :_TRIED_COLUMNS])
        if _saved_bits(tried, zero) < _WORTHWHILE * tried.size:
            return None
        # Some row resembles any short one by chance, so only a fit tells.
        if tried.shape[1] < _SHORT and _fit_rows(tried, zero).weights.any(1).mean() < _PREDICTED:
            return None
    predictor = _fit_rows(symbols, zero)
    return predictor if predictor.weights.any() else None


def _fit_rows(symbols: Symbols, zero: int) -> RowPrediction:
    """Return the best references and weights for `symbols`.

    Where there are too many rows to compare all, every n-th one is a candidate. Products of integers are exact in
    float64, so the result does not depend on how many threads multiply.
    """
    rows, columns = symbols.shape
    values = symbols.astype(np.float64) - zero
    every = max(1, -(-rows * rows * columns // _MAX_PRODUCTS), -(-rows // 4096))
    candidates = np.arange(0, rows, every)
    predictor = RowPrediction(np.zeros((rows, REFERENCES), np.int64), np.zeros((rows, REFERENCES + 1), np.int64))
    means = _running_means(symbols.astype(np.int64) - zero)
    # Greedy: what the shared direction (about the column means) explains is projected out of all rows; then the
    # reference that explains most of the rest, then the one that explains most of what that leaves.
    shared = np.rint(values.mean(0) * 16)
    references = values[candidates]
    along, norm = references @ shared, shared @ shared + 1
    energies = np.maximum(np.einsum("ij,ij->i", references, references) - along**2 / norm, 1.0)
    gram = references @ references.T
    for start in range(0, rows, _BLOCK):
        block = np.arange(start, min(start + _BLOCK, rows))
        excluded = candidates[None] >= block[:, None]
        products = values[block] @ references.T
        block_along = values[block] @ shared
        rest = products - block_along[:, None] * along[None] / norm
        first = _best_reference(rest, energies, excluded)
        between = gram[first] - along[first, None] * along[None] / norm
        weight = rest[np.arange(block.size), first] / energies[first]
        excluded[np.arange(block.size), first] = True
        second = _best_reference(rest - weight[:, None] * between, energies, excluded)
        _fit_row_weights(values, means, block, candidates[first], candidates[second], predictor)
    return predictor


def _saved_bits(symbols: Symbols, zero: int) -> float:
    """Return about the bits that predicting rows saves beside a table for each: references are taken for orthogonal."""
    rows, columns = symbols.shape
    values = symbols.astype(np.float64) - zero
    gram = values @ values.T
    energy, along = gram.diagonal(), gram.sum(1)
    others, norm = along - energy, gram.sum() + 1  # a row itself is no part of the mean that predicts it
    shared = others**2 / np.maximum(norm - along - others, 1.0)
    rest = gram - np.outer(along, along) / norm
    explained = np.tril(rest**2 / np.maximum(rest.diagonal(), 1.0), -1)
    explained.partition(rows - REFERENCES, axis=1)
    remaining = energy - shared - np.cumsum(np.pad(explained[:, : -REFERENCES - 1 : -1], ((0, 0), (1, 0))), axis=1).T
    prices = np.array([_price(used, np.arange(rows)) for used in range(1, REFERENCES + 2)])
    best = (_bits(remaining, columns) + prices).min(0)
    without = _bits(energy - values.sum(1) ** 2 / columns, columns) + 1  # a table of the row knows its mean
    return float(np.maximum(without - best, 0).sum())


def _price(used: int, row: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the bits of `used` weights, some 3 each, and of a reference for each but the first, the log of its row."""
    return 3 * used + 2 + (used - 1) * (np.log2(row + 1) + 1)


def _best_reference(
    rest: NDArray[np.float64], energies: NDArray[np.float64], excluded: NDArray[np.bool_]
) -> NDArray[np.intp]:
    """Return for each row the candidate that explains most of it: squared inner product over energy."""
    return np.asarray(np.where(excluded, -1.0, rest**2 / energies).argmax(1))


def _fit_row_weights(
    values: NDArray[np.float64],
    means: Integers,
    block: NDArray[np.intp],
    first: NDArray[np.intp],
    second: NDArray[np.intp],
    predictor: RowPrediction,
) -> None:
    """Fill `predictor` for the rows of `block`: nothing, the mean, one reference or two, whichever costs least."""
    columns = values.shape[1]
    target = values[block]
    inputs = np.stack([means[block] / 256, values[first], values[second]], 1)
    energy = np.einsum("ij,ij->i", target, target)
    best = _bits(energy, columns) + 1
    for used in range(1, REFERENCES + 2):
        basis = inputs[:, :used]
        gram = np.einsum("ikj,ilj->ikl", basis, basis) + _RIDGE * columns * np.eye(used)
        solved = np.linalg.solve(gram, np.einsum("ikj,ij->ik", basis, target)[..., None])[..., 0]
        weights = np.rint(solved * ROW_UNIT).clip(-MAX_WEIGHT, MAX_WEIGHT)
        residuals = target - np.einsum("ik,ikj->ij", weights / ROW_UNIT, basis)
        bits = _bits(np.einsum("ij,ij->i", residuals, residuals), columns) + _price(used, block)
        possible = np.ones(block.size, bool)
        for reference in (first, second)[: used - 1]:
            possible &= reference < block
        better = possible & (bits < best)
        best = np.where(better, bits, best)
        rows = block[better]
        predictor.weights[rows] = 0
        predictor.weights[rows, :used] = weights[better]
        for k, reference in enumerate((first, second)[: used - 1]):
            predictor.distances[rows, k] = rows - reference[better]


def _bits(squares: NDArray[np.float64] | float, count: int) -> NDArray[np.float64]:
    """Bits of `count` symbols with this sum of squares, if they are Gaussian, up to a constant; 1/12 is rounding's."""
    return np.asarray(0.5 * count * np.log2(np.maximum(squares, 0) / count + 1 / 12))


def fit_taps(symbols: Symbols, zero: int, kernel: tuple[int, int]) -> TapPrediction | None:
    """Return the best weights for `symbols` (output channels, input channels · kernel); None where all are 0."""
    positions = kernel[0] * kernel[1]
    if not 1 < positions <= MAX_KERNEL or symbols.shape[1] % positions:
        return None
    values = symbols.astype(np.float64) - zero
    offsets = tap_offsets(kernel)
    inputs = np.stack([_shifted(values, *offset) for offset in offsets], -1).reshape(-1, positions, len(offsets))
    targets = values.reshape(-1, positions)
    weights = np.zeros((positions, len(offsets)), np.int64)
    for position in range(positions):
        basis, target = inputs[:, position], targets[:, position]
        weights[position] = _fit_tap_weights(basis.T @ basis, basis.T @ target, float(target @ target), target.size)
    return TapPrediction(kernel, weights) if weights.any() else None


def _shifted(values: NDArray[np.float64], up: int, back: int) -> NDArray[np.float64]:
    """Return the values that lie `up` rows above and `back` columns back; 0 beyond the edge."""
    rows, columns = values.shape
    out = np.zeros_like(values)
    if up < rows and abs(back) < columns:
        out[up:, max(back, 0) : columns + min(back, 0)] = values[: rows - up, max(-back, 0) : columns - max(back, 0)]
    return out


def _fit_tap_weights(gram: NDArray[np.float64], along: NDArray[np.float64], norm: float, count: int) -> Integers:
    """Return the weights of a position: taps are added one after another while each saves more than its 7 bits."""
    weights = np.zeros(along.size, np.int64)
    chosen: list[int] = []
    best = float(_bits(norm, count))
    while len(chosen) < _MAX_TAPS:
        trials = []
        for tap in set(range(along.size)) - set(chosen):
            taps = [*chosen, tap]
            inner = gram[np.ix_(taps, taps)]
            solved = np.linalg.solve(inner + _RIDGE * count * np.eye(len(taps)), along[taps])
            rounded = np.rint(solved * TAP_UNIT).clip(-MAX_WEIGHT, MAX_WEIGHT) / TAP_UNIT
            squares = norm - 2 * rounded @ along[taps] + rounded @ inner @ rounded
            trials.append((float(_bits(squares, count)) + 7 * len(taps), tap, rounded))
        bits, tap, rounded = min(trials, key=lambda trial: trial[:2])
        if bits >= best:
            break
        best = bits
        chosen.append(tap)
        weights[chosen] = np.rint(rounded * TAP_UNIT)
    return weights


def _take_weights(reader: SideReader, context: int, count: int) -> Integers:
    weights = unzigzag(reader.take_all(context, count))
    if weights.size and int(np.abs(weights).max()) > MAX_WEIGHT:
        raise ArtifactError(f"a weight of a prediction is beyond ±{MAX_WEIGHT}; the file is damaged")
    return weights


@inner
def _wrap(value, size):  # type: ignore[no-untyped-def]
    return value if 0 <= value < size else value % size  # a division is slow, and rarely needed


def _running_means(values: Integers) -> Integers:
    """Return the mean of each column before each row, in 1/256; from 1,024 rows on it forgets slowly."""
    means = np.zeros_like(values)
    for row, value in enumerate(values[:-1]):
        means[row + 1] = means[row] + ((value * 256 - means[row]) * (65536 // (min(row, 1023) + 1)) >> 16)
    return means


@njit(nogil=True, cache=True, _nrt=False)
def _predict_rows(symbols, residuals, distances, weights, means, zero, size, adding):  # type: ignore[no-untyped-def]
    """Fill `symbols` from `residuals` if adding, else `residuals` from `symbols`; means (columns,) are zeros so far."""
    rows, columns = symbols.shape
    half = size // 2
    for row in range(rows):
        first, second = row - distances[row, 0], row - distances[row, 1]
        mean_weight = weights[row, 0]
        one = weights[row, 1] * 256 if first < row else 0
        two = weights[row, 2] * 256 if second < row else 0
        pace = 65536 // ((row if row < 1023 else 1023) + 1)  # of the means, as in `_running_means`
        for column in range(columns):
            predicted = mean_weight * means[column]
            predicted += one * (np.int64(symbols[first, column]) - zero) if one else 0
            predicted += two * (np.int64(symbols[second, column]) - zero) if two else 0
            predicted = (predicted + 1024) >> 11
            if adding:
                symbols[row, column] = _wrap(np.int64(residuals[row, column]) - half + predicted + zero, size)
            else:
                residuals[row, column] = _wrap(np.int64(symbols[row, column]) - zero - predicted + half, size)
            difference = (np.int64(symbols[row, column]) - zero) * 256 - means[column]
            means[column] += difference * pace >> 16


@njit(nogil=True, cache=True, _nrt=False)
def _predict_taps(symbols, residuals, first, up, back, weights, zero, size, adding):  # type: ignore[no-untyped-def]
    """Fill `symbols` from `residuals` if adding, else `residuals` from `symbols`."""
    rows, columns = symbols.shape
    half, positions = size // 2, first.size - 1
    for row in range(rows):
        position = 0
        for column in range(columns):
            predicted = np.int64(0)
            for tap in range(first[position], first[position + 1]):
                r, c = row - up[tap], column - back[tap]
                if r >= 0 and 0 <= c < columns:
                    predicted += weights[tap] * (np.int64(symbols[r, c]) - zero)
            predicted = (predicted + 16) >> 5
            if adding:
                symbols[row, column] = _wrap(np.int64(residuals[row, column]) - half + predicted + zero, size)
            else:
                residuals[row, column] = _wrap(np.int64(symbols[row, column]) - zero - predicted + half, size)
            position = position + 1 if position + 1 < positions else 0
