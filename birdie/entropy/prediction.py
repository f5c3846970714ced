"""Symbols as differences from what symbols before them foretell; what is left is narrower, and cheaper to code.

rows    a row from up to two rows above it and the running mean of each column. Embedding rows of tokens that training
        hardly ever saw are near copies of each other, and all rows of an embedding share a direction.
taps    a symbol of a convolution from its neighbours: in its own kernel, in the kernels of the input channels before
        and of the output channels above. Trained kernels are smooth.

Both are linear with weights that the encoder fits by least squares and writes beside the symbols. Differences
are taken modulo the alphabet, so they need no symbols of their own. Only the search uses floats.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from birdie.entropy.alphabet import Symbols
from birdie.entropy.compiled import njit
from birdie.entropy.numbers import Reader, Writer, unzigzag, zigzag
from birdie.errors import ArtifactError

Integers = NDArray[np.int64]

SHARE, UNIT = 8, 32  # a row's weights are in 1/SHARE, the taps' in 1/UNIT
MOST_WEIGHT = 127
REFERENCES = 2
MAX_KERNEL = 64  # positions
MIN_COLUMNS = 8  # of rows that are worth a reference
ROWS, TAPS = 1, 2
_KIND, _KERNEL, _DISTANCE, _SHARE, _TAP = 22, 56, 58, 61, 64  # contexts of the side information
_WORK = 3 * 10**10  # multiplications the search for references may spend
_BLOCK = 512
_FIT = 1e-3  # ridge, in symbols squared


@dataclass(frozen=True, slots=True)
class Rows:
    """Attributes:
    distances: (rows, REFERENCES), how many rows back each reference lies; 0: none, and none after it.
    weights: (rows, 1 + REFERENCES), of the column means and of each reference, in 1/SHARE.
    """

    distances: Integers
    weights: Integers

    def put(self, writer: Writer) -> None:
        """Describe the prediction to `writer`."""
        for k in range(REFERENCES):
            writer.put_chain(_DISTANCE + k, self.distances[:, k], 0)
        for k in range(REFERENCES + 1):
            chosen = slice(None) if k == 0 else self.distances[:, k - 1] > 0
            writer.put_all(_SHARE + k, zigzag(self.weights[chosen, k]))

    @classmethod
    def take(cls, reader: Reader, rows: int) -> "Rows":
        """Undo `put`; a distance beyond the first row or a weight out of range is an ArtifactError."""
        distances = np.stack([reader.take_all(_DISTANCE + k, rows) for k in range(REFERENCES)], 1)
        if (distances > np.arange(rows)[:, None]).any():
            raise ArtifactError("a row refers to one before the first; the file is damaged")
        weights = np.zeros((rows, REFERENCES + 1), np.int64)
        for k in range(REFERENCES + 1):
            chosen = np.arange(rows) if k == 0 else np.flatnonzero(distances[:, k - 1])
            weights[chosen, k] = _weights(reader, _SHARE + k, chosen.size)
        return cls(distances, weights)

    def subtract(self, symbols: Symbols, zero: int, size: int) -> Symbols:
        """The differences of `symbols` (rows, columns), those of 0 … size - 1 with `zero` at size // 2."""
        out = np.empty_like(symbols)
        _rows(symbols.copy(), out, self.distances, self.weights, zero, size, False)
        return out

    def add(self, differences: Symbols, zero: int, size: int) -> Symbols:
        """Undo `subtract`."""
        out = np.empty_like(differences)
        _rows(out, differences, self.distances, self.weights, zero, size, True)
        return out


@dataclass(frozen=True, slots=True)
class Taps:
    """Attributes:
    kernel: height and width.
    weights: (positions in the kernel, taps), in 1/UNIT; the taps are `places(kernel)`.
    """

    kernel: tuple[int, int]
    weights: Integers

    def put(self, writer: Writer) -> None:
        """Describe the prediction to `writer`."""
        writer.put_all(_KERNEL, [side - 1 for side in self.kernel])
        for tap in range(self.weights.shape[1]):
            writer.put_all(_TAP + tap, zigzag(self.weights[:, tap]))

    @classmethod
    def take(cls, reader: Reader) -> "Taps":
        """Undo `put`; a kernel or a weight out of range is an ArtifactError."""
        height, width = (reader.take(_KERNEL, MAX_KERNEL - 1, "a side of a kernel") + 1 for _ in range(2))
        if height * width > MAX_KERNEL:
            raise ArtifactError(f"a kernel of {height} × {width} predicts nothing; the file is damaged")
        taps = len(places((height, width)))
        return cls((height, width), np.stack([_weights(reader, _TAP + tap, height * width) for tap in range(taps)], 1))

    def subtract(self, symbols: Symbols, zero: int, size: int) -> Symbols:
        """The differences of `symbols` (rows, columns), those of 0 … size - 1 with `zero` at size // 2."""
        out = np.empty_like(symbols)
        _taps(symbols.copy(), out, *self._active(), zero, size, False)
        return out

    def add(self, differences: Symbols, zero: int, size: int) -> Symbols:
        """Undo `subtract`."""
        out = np.empty_like(differences)
        _taps(out, differences, *self._active(), zero, size, True)
        return out

    def _active(self) -> tuple[Integers, Integers, Integers, Integers]:
        """First active tap of each position (positions + 1,), and rows back, columns back and weight of each."""
        position, tap = np.nonzero(self.weights)
        back = np.array(places(self.kernel), np.int64)
        first = np.searchsorted(position, np.arange(len(self.weights) + 1)).astype(np.int64)
        return first, back[tap, 0], back[tap, 1], self.weights[position, tap]


Prediction = Rows | Taps


def put(writer: Writer, predicted: Prediction | None) -> None:
    """Describe any prediction, or that there is none."""
    kinds: dict[type, int] = {type(None): 0, Rows: ROWS, Taps: TAPS}
    writer.put(_KIND, kinds[type(predicted)])
    if predicted is not None:
        predicted.put(writer)


def take(reader: Reader, rows: int, columns: int = MIN_COLUMNS) -> Prediction | None:
    """Undo `put`; anything out of range is an ArtifactError.

    Rows too short for references are refused before anything is allocated: their description would dwarf them.
    """
    kind = reader.take(_KIND, TAPS, "the kind of prediction")
    if kind == ROWS and columns < MIN_COLUMNS:
        raise ArtifactError(f"rows of {columns} in a stream are foretold from rows; the file is damaged")
    if kind == ROWS:
        return Rows.take(reader, rows)
    return Taps.take(reader) if kind == TAPS else None


def candidates(symbols: Symbols, zero: int, kernel: tuple[int, int]) -> list[Prediction]:
    """What may be worth trying on `symbols` (rows, columns), from the weights of a convolution with this kernel."""
    rows, columns = symbols.shape
    if 1 < kernel[0] * kernel[1] <= MAX_KERNEL:
        found: Prediction | None = choose_taps(symbols, zero, kernel)
    else:
        found = choose_rows(symbols, zero) if rows > 1 and columns >= MIN_COLUMNS else None
    return [found] if found is not None else []


def places(kernel: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """The taps of a kernel: (rows back, columns back), all before the symbol itself as scanned row by row."""
    width, size = kernel[1], kernel[0] * kernel[1]
    across = (
        1,
        2,
        width,
        width + 1,
        width - 1,
        2 * width,
        size,
        2 * size,
        size - 1,
        size + 1,
        size - width,
        size + width,
    )
    wanted = [(0, back) for back in across] + [(1, 0), (2, 0), (1, -1), (1, 1), (1, -width), (1, width)]
    return tuple(dict.fromkeys(place for place in wanted if place > (0, 0)))


def choose_rows(symbols: Symbols, zero: int) -> Rows | None:
    """The best references and weights for `symbols` (rows, columns), or None where nothing is foretold.

    Where rows are too many to compare all, every n-th row is a candidate. Products of integers are exact in float64, so
    the outcome does not depend on how many threads multiply.
    """
    rows, columns = symbols.shape
    values = symbols.astype(np.float64) - zero
    every = max(1, -(-rows * rows * columns // _WORK), -(-rows // 4096))
    candidates = np.arange(0, rows, every)
    found = Rows(np.zeros((rows, REFERENCES), np.int64), np.zeros((rows, REFERENCES + 1), np.int64))
    means = np.empty((rows, columns), np.int64)
    _means(symbols, zero, means)
    shared = np.rint(values.mean(0) * 16)
    held = values[candidates]
    along, norm = held @ shared, shared @ shared + 1
    widths = np.maximum(np.einsum("ij,ij->i", held, held) - along**2 / norm, 1.0)
    gram = held @ held.T
    for start in range(0, rows, _BLOCK):
        block = np.arange(start, min(start + _BLOCK, rows))
        later = candidates[None] >= block[:, None]
        products = values[block] @ held.T
        mine = values[block] @ shared
        rest = products - mine[:, None] * along[None] / norm
        first = _widest(rest, widths, later)
        between = gram[first] - along[first, None] * along[None] / norm
        share = rest[np.arange(block.size), first] / widths[first]
        later[np.arange(block.size), first] = True
        second = _widest(rest - share[:, None] * between, widths, later)
        _fit_rows(values, means, block, candidates[first], candidates[second], found)
    return found if found.weights.any() else None


def _widest(rest: NDArray[np.float64], widths: NDArray[np.float64], barred: NDArray[np.bool_]) -> NDArray[np.intp]:
    return np.asarray(np.where(barred, -1.0, rest**2 / widths).argmax(1))


def _fit_rows(
    values: NDArray[np.float64],
    means: Integers,
    block: NDArray[np.intp],
    first: NDArray[np.intp],
    second: NDArray[np.intp],
    found: Rows,
) -> None:
    """Fill `found` for the rows of `block`: none, the mean, one reference or two, whatever is shortest."""
    columns = values.shape[1]
    target = values[block]
    inputs = np.stack([means[block] / 256, values[first], values[second]], 1)
    best = _bits(np.einsum("ij,ij->i", target, target), columns) + 1
    for used in range(1, REFERENCES + 2):
        basis = inputs[:, :used]
        gram = np.einsum("ikj,ilj->ikl", basis, basis) + _FIT * columns * np.eye(used)
        solved = np.linalg.solve(gram, np.einsum("ikj,ij->ik", basis, target)[..., None])[..., 0]
        weights = np.rint(solved * SHARE).clip(-MOST_WEIGHT, MOST_WEIGHT)
        left = target - np.einsum("ik,ikj->ij", weights / SHARE, basis)
        # A weight takes some 3 bits, a reference the log of its row.
        price = 3 * used + 2 + (used - 1) * (np.log2(block + 1) + 1)
        bits = _bits(np.einsum("ij,ij->i", left, left), columns) + price
        possible = np.ones(block.size, bool)
        for reference in (first, second)[: used - 1]:
            possible &= reference < block
        better = possible & (bits < best)
        best = np.where(better, bits, best)
        rows = block[better]
        found.weights[rows] = 0
        found.weights[rows, :used] = weights[better]
        for k, reference in enumerate((first, second)[: used - 1]):
            found.distances[rows, k] = rows - reference[better]


def _bits(squares: NDArray[np.float64] | float, count: int) -> NDArray[np.float64]:
    """About the bits of `count` symbols with this sum of squares, up to a constant."""
    return np.asarray(0.5 * count * np.log2(np.maximum(squares, 0) / count + 1 / 12))


def choose_taps(symbols: Symbols, zero: int, kernel: tuple[int, int]) -> Taps | None:
    """The best weights for `symbols` (output channels, input channels · kernel), or None where nothing is foretold."""
    positions = kernel[0] * kernel[1]
    if not 1 < positions <= MAX_KERNEL or symbols.shape[1] % positions:
        return None
    values = symbols.astype(np.float64) - zero
    taps = places(kernel)
    inputs = np.stack([_shifted(values, *place) for place in taps], -1).reshape(-1, positions, len(taps))
    targets = values.reshape(-1, positions)
    weights = np.zeros((positions, len(taps)), np.int64)
    for position in range(positions):
        basis, target = inputs[:, position], targets[:, position]
        weights[position] = _fit_taps(basis.T @ basis, basis.T @ target, float(target @ target), target.size)
    return Taps(kernel, weights) if weights.any() else None


def _shifted(values: NDArray[np.float64], down: int, across: int) -> NDArray[np.float64]:
    """What lies `down` rows and `across` columns back of each place; 0 beyond the edge."""
    rows, columns = values.shape
    out = np.zeros_like(values)
    if down < rows and abs(across) < columns:
        out[down:, max(across, 0) : columns + min(across, 0)] = values[
            : rows - down, max(-across, 0) : columns - max(across, 0)
        ]
    return out


def _fit_taps(gram: NDArray[np.float64], along: NDArray[np.float64], norm: float, count: int) -> Integers:
    """Weights of one position, taken in one after another while each saves more than its 7 bits."""
    weights = np.zeros(along.size, np.int64)
    chosen: list[int] = []
    best = float(_bits(norm, count))
    while len(chosen) < 8:
        tried = []
        for tap in set(range(along.size)) - set(chosen):
            some = [*chosen, tap]
            inner = gram[np.ix_(some, some)]
            solved = np.linalg.solve(inner + _FIT * count * np.eye(len(some)), along[some])
            rounded = np.rint(solved * UNIT).clip(-MOST_WEIGHT, MOST_WEIGHT) / UNIT
            left = norm - 2 * rounded @ along[some] + rounded @ inner @ rounded
            tried.append((float(_bits(left, count)) + 7 * len(some), tap, rounded))
        bits, tap, rounded = min(tried, key=lambda trial: trial[:2])
        if bits >= best:
            break
        best = bits
        chosen.append(tap)
        weights[chosen] = np.rint(rounded * UNIT)
    return weights


def _weights(reader: Reader, context: int, count: int) -> Integers:
    weights = unzigzag(reader.take_all(context, count))
    if weights.size and int(np.abs(weights).max()) > MOST_WEIGHT:
        raise ArtifactError(f"a weight of a prediction is beyond ±{MOST_WEIGHT}; the file is damaged")
    return weights


@njit(nogil=True, cache=True)
def _wrapped(value, size):  # type: ignore[no-untyped-def]
    return value if 0 <= value < size else value % size  # a division is slow, and rarely needed


@njit(nogil=True, cache=True)
def _mean(mean, value, row):  # type: ignore[no-untyped-def]
    return mean + ((value * 256 - mean) * (65536 // (min(row, 1023) + 1)) >> 16)


@njit(nogil=True, cache=True)
def _means(symbols, zero, out):  # type: ignore[no-untyped-def]
    rows, columns = symbols.shape
    out[0] = 0
    for row in range(1, rows):
        for column in range(columns):
            out[row, column] = _mean(out[row - 1, column], np.int64(symbols[row - 1, column]) - zero, row - 1)


@njit(nogil=True, cache=True)
def _rows(symbols, differences, distances, weights, zero, size, adding):  # type: ignore[no-untyped-def]
    rows, columns = symbols.shape
    half = size // 2
    means = np.zeros(columns, np.int64)
    for row in range(rows):
        first, second = row - distances[row, 0], row - distances[row, 1]
        share, one, two = weights[row]
        one, two = one * 256 if first < row else 0, two * 256 if second < row else 0
        for column in range(columns):
            foretold = share * means[column]
            foretold += one * (np.int64(symbols[first, column]) - zero) if one else 0
            foretold += two * (np.int64(symbols[second, column]) - zero) if two else 0
            foretold = (foretold + 1024) >> 11
            if adding:
                symbols[row, column] = _wrapped(np.int64(differences[row, column]) - half + foretold + zero, size)
            else:
                differences[row, column] = _wrapped(np.int64(symbols[row, column]) - zero - foretold + half, size)
            means[column] = _mean(means[column], np.int64(symbols[row, column]) - zero, row)


@njit(nogil=True, cache=True)
def _taps(symbols, differences, first, down, across, weights, zero, size, adding):  # type: ignore[no-untyped-def]
    rows, columns = symbols.shape
    half, positions = size // 2, first.size - 1
    for row in range(rows):
        position = 0
        for column in range(columns):
            foretold = np.int64(0)
            for tap in range(first[position], first[position + 1]):
                r, c = row - down[tap], column - across[tap]
                if r >= 0 and 0 <= c < columns:
                    foretold += weights[tap] * (np.int64(symbols[r, c]) - zero)
            foretold = (foretold + 16) >> 5
            if adding:
                symbols[row, column] = _wrapped(np.int64(differences[row, column]) - half + foretold + zero, size)
            else:
                differences[row, column] = _wrapped(np.int64(symbols[row, column]) - zero - foretold + half, size)
            position = position + 1 if position + 1 < positions else 0
