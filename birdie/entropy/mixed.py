"""Context mixing of a whole array: alphabet, scan and prediction chosen, described, and applied.

    values ─ scan ─ alphabet ─► symbols ─ prediction ─► differences ─ mixing ─► words, in chunks

A payload is: length of the side information in words (a varint), its 16-bit words, the 32-bit words of each chunk, and
the low bits of symbols too many for the mixing's tree. Chunks hold whole rows, about a million symbols, and decode
independently on as many threads.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from birdie.entropy import alphabet as alphabets
from birdie.entropy import logistic, mixing, prediction, raw
from birdie.entropy.alphabet import Alphabet, Symbols
from birdie.entropy.mixing import Model
from birdie.entropy.numbers import Reader, Writer
from birdie.entropy.prediction import Prediction
from birdie.entropy.raw import Bytes, check_range
from birdie.entropy.static import decode_chunks, side_words
from birdie.entropy.trellis import chunk_rows
from birdie.entropy.varint import varint
from birdie.errors import ArtifactError

_SCAN, _WORDS, _ZERO, _SCALE, _PRIOR, _LOW, _STEADINESS = 5, 21, 23, 6, 7, 8, 9


@dataclass(frozen=True, slots=True)
class _Plan:
    """One way to code the symbols.

    Attributes:
        columns_first: the array was transposed before it was scanned.
        predicted: None, or what was subtracted.
        zero: the symbol of zero before the prediction.
        model: of what is left.
        chunks: the coded words.
    """

    columns_first: bool
    predicted: Prediction | None
    zero: int
    model: Model
    chunks: tuple[mixing.Words, ...]

    @property
    def bytes(self) -> int:
        """Of the words and, about, of the prediction's description."""
        writer = Writer()
        prediction.put(writer, self.predicted)
        return 4 * sum(chunk.size for chunk in self.chunks) + 2 * writer.finish().size


def encode(values: NDArray[np.integer], kernel: tuple[int, int], states: int = 1) -> bytes | None:
    """Code `values` (rows, columns), at least two different ones, all within int32; None if they are too far apart.

    `kernel` is the height and width of the convolution whose weights they are, (1, 1) for a matrix; `states` those of
    the trellis on whose paths they lie (negative along rows), which forbids to transpose or to predict them.
    """
    alphabet, symbols = alphabets.choose(values)
    if alphabet.kind == alphabets.SPLIT:
        return None
    low = max(0, (alphabet.size - 1).bit_length() - (mixing.MAX_SIZE - 1).bit_length())
    zero = alphabets.zero(alphabet, symbols)
    tried: list[Prediction | None] = [None]
    if abs(states) > 1:
        return _written(_planned(symbols, False, None, zero, alphabet, low, states), alphabet, symbols, low)
    if alphabet.kind == alphabets.AFFINE:
        tried += prediction.candidates(symbols, zero, kernel)
    plans = [_planned(symbols, False, predicted, zero, alphabet, low) for predicted in tried]
    best = min(plans, key=lambda plan: plan.bytes)
    if best.predicted is None and min(symbols.shape) > 1:
        best = min(best, _planned(symbols.T, True, None, zero, alphabet, low), key=lambda plan: plan.bytes)
    return _written(best, alphabet, symbols, low)


def _planned(
    symbols: Symbols,
    columns_first: bool,
    predicted: Prediction | None,
    zero: int,
    alphabet: Alphabet,
    low: int,
    states: int = 1,
) -> _Plan:
    left, size = np.ascontiguousarray(symbols), alphabet.size
    middle = zero
    if predicted is not None:
        left, middle = predicted.subtract(left, zero, size), size // 2
    coarse = left >> np.uint16(low)
    model = _following(_model(coarse, ((size - 1) >> low) + 1, middle >> low), alphabet, low, states)
    return _Plan(columns_first, predicted, zero, model, tuple(mixing.encode(part, model) for part in _chunks(coarse)))


def _following(model: Model, alphabet: Alphabet, low: int, states: int) -> Model:
    """`model` with the paths of a trellis, but where symbols lack low bits and so parities."""
    if states == 1 or low:
        return model
    return replace(model, states=states, parity=(alphabet.values & 1).astype(np.uint8).tobytes())


def _model(symbols: Symbols, size: int, zero: int) -> Model:
    """The mean magnitude, and the prior that fits the histogram best."""
    counts = np.bincount(symbols.ravel(), minlength=size)
    mean = float(counts @ np.abs(np.arange(size) - zero)) / symbols.size
    scale = min(max(round(16 * float(np.log2(max(64 * mean, 1)))), 0), logistic.SCALES - 1)
    costs = [float(counts @ -np.log2(mixing.masses(Model(size, zero, scale, kind, 0, 0)))) for kind in range(3)]
    rows, columns = (_steadiness(symbols, zero, axis) for axis in (1, 0))
    return Model(size, zero, scale, int(np.argmin(costs)), rows, columns)


def _steadiness(symbols: Symbols, zero: int, axis: int) -> int:
    """log2 of how many symbols of a row (axis 1) or column (0) tell as much about its scale as the others do."""
    squares = (symbols.astype(np.float32) - zero) ** 2
    mean = float(squares.mean()) + 1e-6
    noise = float((squares**2).mean()) / mean**2 - 1
    spread = float(np.log(squares.mean(axis) / mean + 0.01).var()) - noise / symbols.shape[axis]
    return int(np.clip(np.rint(np.log2(noise / max(spread, 1e-4))), 0, mixing.MAX_STEADINESS))


def _chunks(symbols: Symbols) -> list[Symbols]:
    rows = chunk_rows(symbols.shape[1])
    return [symbols[start : start + rows] for start in range(0, symbols.shape[0], rows)]


def _written(plan: _Plan, alphabet: Alphabet, symbols: Symbols, low: int) -> bytes:
    writer = Writer()
    alphabet.put(writer)
    writer.put(_SCAN, int(plan.columns_first))
    writer.put(_ZERO, plan.zero)
    writer.put(_LOW, low)
    writer.put(_SCALE, plan.model.scale)
    writer.put(_PRIOR, plan.model.kind)
    writer.put_all(_STEADINESS, [plan.model.rows, plan.model.columns])
    prediction.put(writer, plan.predicted)
    writer.put_all(_WORDS, [chunk.size for chunk in plan.chunks])
    side = writer.finish()
    parts = [varint(side.size), side.astype("<u2").tobytes(), *(chunk.astype("<u4").tobytes() for chunk in plan.chunks)]
    if low:
        scanned = symbols.T if plan.columns_first else symbols
        left = scanned if plan.predicted is None else plan.predicted.subtract(scanned, plan.zero, alphabet.size)
        parts.append(raw.encode_packed(left & np.uint16((1 << low) - 1), 0, (1 << low) - 1))
    return b"".join(parts)


def decode(
    payload: Bytes, rows: int, columns: int, dtype: np.dtype[np.integer], threads: int, states: int = 1
) -> NDArray[np.integer]:
    """Undo `encode`: (rows, columns) of `dtype`, or of int8 or int16 if that was int32 and they hold all values.

    Raises:
        ArtifactError: the payload is not that of such an array.
    """
    side, rest = side_words(payload)
    reader = Reader(side)
    alphabet = Alphabet.take(reader)
    if alphabet.kind == alphabets.SPLIT or alphabet.size < 2:
        raise ArtifactError("the alphabet of a mixed stream is not one it can have; the file is damaged")
    check_range(int(alphabet.values[0]), int(alphabet.values[-1]), dtype)
    columns_first = reader.take(_SCAN, 1, "the scan")
    zero = reader.take(_ZERO, alphabet.size - 1, "the zero")
    low = reader.take(_LOW, 3, "the number of low bits")
    scale = reader.take(_SCALE, logistic.SCALES - 1, "the scale")
    kind = reader.take(_PRIOR, logistic.LAPLACE, "the prior")
    steadiness = [reader.take(_STEADINESS, mixing.MAX_STEADINESS, "the steadiness") for _ in range(2)]
    size = ((alphabet.size - 1) >> low) + 1
    if not 2 <= size <= mixing.MAX_SIZE:
        raise ArtifactError(f"a mixed stream has {size} symbols; the file is damaged")
    if columns_first:
        rows, columns = columns, rows
    predicted = prediction.take(reader, rows, columns)
    middle = zero if predicted is None else alphabet.size // 2
    symbols = np.empty((rows, columns), np.uint16)
    parts = _chunks(symbols)
    lengths = reader.take_all(_WORDS, len(parts))
    reader.finish()
    model = Model(size, middle >> low, scale, kind, steadiness[0], steadiness[1])
    if predicted is None and not columns_first:
        model = _following(model, alphabet, low, states)

    def work(index: int, words: memoryview) -> None:
        mixing.decode(np.frombuffer(words, "<u4").astype(np.uint32), model, parts[index])

    tail = decode_chunks(rest, lengths, 4, work, threads)
    if low:
        symbols <<= np.uint16(low)
        symbols |= raw.decode_packed(tail, rows, columns, np.dtype(np.uint16), 1).astype(np.uint16)
        if int(symbols.max()) >= alphabet.size:
            raise ArtifactError("a mixed stream holds a symbol beyond its alphabet; the file is damaged")
    elif len(tail):
        raise ArtifactError("bytes follow the last chunk of a stream; the file is damaged")
    if predicted is not None:
        symbols = predicted.add(symbols, zero, alphabet.size)
    values = np.empty(symbols.shape, alphabets.narrowest(alphabet, dtype))
    alphabets.look_up(symbols, alphabet, values)
    return values.T if columns_first else values
