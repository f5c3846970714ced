"""Coder "mixed": context mixing of symbols, the smallest files and the slowest decoder.

    values ─ scan ─ alphabet ─► symbols ─ prediction ─► residuals ─ context mixing ─► words, in chunks

The encoder codes the array in each way that may pay and keeps the shortest. The low bits of symbols that are too many
for the tree of `context_mixing` follow the chunks.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from birdie.entropy import alphabet as alphabets
from birdie.entropy import context_mixing, mixing_tables, payload, prediction, raw
from birdie.entropy.alphabet import Alphabet, Symbols
from birdie.entropy.context_mixing import Model
from birdie.entropy.prediction import Prediction
from birdie.entropy.raw import Bytes, check_range, narrowest
from birdie.entropy.side_information import SideReader, SideWriter
from birdie.entropy.trellis_states import chunk_rows
from birdie.errors import ArtifactError

# Tall narrow arrays, of very many rows, are transposed only if that pays for the first symbols.
_NARROW, _TALL, _TRIED = 64, 32, 1 << 13
_SCAN, _WORDS, _ZERO, _SCALE, _PRIOR, _LOW, _PSEUDO_COUNT = 5, 21, 23, 6, 7, 8, 9  # contexts of the side information


@dataclass(frozen=True, slots=True)
class _MixedPlan:
    """One way to code the symbols."""

    columns_first: bool  # the array was transposed before it was scanned
    predictor: Prediction | None  # the prediction that was subtracted, or None
    zero: int  # the symbol of zero before the prediction
    model: Model  # of the residuals
    chunks: tuple[context_mixing.Words, ...]  # the coded words

    @property
    def bytes(self) -> int:
        """Bytes of the words and, nearly, of the description of the prediction."""
        writer = SideWriter()
        prediction.put(writer, self.predictor)
        return 4 * sum(chunk.size for chunk in self.chunks) + 2 * writer.finish().size


def encode(values: NDArray[np.integer], kernel: tuple[int, int], states: int = 1) -> bytes | None:
    """Code `values` (rows, columns), at least two different ones, all within int32; None if they are too far apart.

    Args:
        values: the array.
        kernel: height and width of the convolution whose weights they are, (1, 1) for a matrix.
        states: states of the trellis on whose paths they lie, negative along rows. Values on paths are neither
            transposed nor predicted, as their states follow from the values before them on the path.
    """
    alphabet, symbols = alphabets.choose(values)
    if alphabet.kind == alphabets.SPLIT:
        return None
    low = max(0, (alphabet.size - 1).bit_length() - (context_mixing.MAX_SIZE - 1).bit_length())
    zero = alphabets.zero_symbol(alphabet, symbols)
    if abs(states) > 1:
        return _payload(_plan(symbols, False, None, zero, alphabet, low, states), alphabet, symbols, low)
    predictors: list[Prediction | None] = [None]
    if alphabet.kind == alphabets.AFFINE:
        predictors += prediction.candidates(symbols, zero, kernel)
    plans = [_plan(symbols, False, predictor, zero, alphabet, low) for predictor in predictors]
    best = min(plans, key=lambda plan: plan.bytes)
    if best.predictor is None and min(symbols.shape) > 1:
        rows, columns = symbols.shape
        if columns <= _NARROW and rows * columns > 2 * _TRIED and rows > _TALL * columns:
            part = symbols[: _TRIED // columns]
            straight, turned = (_plan(turned, False, None, zero, alphabet, low).bytes for turned in (part, part.T))
            if turned >= straight:
                return _payload(best, alphabet, symbols, low)
        best = min(best, _plan(symbols.T, True, None, zero, alphabet, low), key=lambda plan: plan.bytes)
    return _payload(best, alphabet, symbols, low)


def _plan(
    symbols: Symbols,
    columns_first: bool,
    predictor: Prediction | None,
    zero: int,
    alphabet: Alphabet,
    low: int,
    states: int = 1,
) -> _MixedPlan:
    residuals, size = np.ascontiguousarray(symbols), alphabet.size
    middle = zero
    if predictor is not None:
        residuals, middle = predictor.subtract(residuals, zero, size), size // 2
    high = residuals >> np.uint16(low)
    model = _with_trellis(_fit_model(high, ((size - 1) >> low) + 1, middle >> low), alphabet, low, states)
    chunks = tuple(context_mixing.encode(part, model) for part in _chunks(high))
    return _MixedPlan(columns_first, predictor, zero, model, chunks)


def starting_probabilities(
    data: Bytes, rows: int, columns: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    """Return the values that the coded array can have and the probability of each that coding starts from, both (n,).

    None if those are probabilities of something else: of differences to a prediction, or of high bits.
    """
    alphabet, _, _, low, predictor, model = _take_header(SideReader(payload.split(data)[0]), rows, columns)
    if predictor is not None or low:
        return None
    masses = context_mixing.masses(model)
    return alphabet.values.astype(np.int64), masses / masses.sum()


def _with_trellis(model: Model, alphabet: Alphabet, low: int, states: int) -> Model:
    """Return `model` with the paths of a trellis; unchanged where low bits, and so parities, are not in the symbols."""
    if states == 1 or low:
        return model
    return replace(model, states=states, parity=(alphabet.values & 1).astype(np.uint8).tobytes())


def _fit_model(symbols: Symbols, size: int, zero: int) -> Model:
    """Return the model of `symbols`: their mean magnitude, the prior that fits their histogram best, pseudo-counts."""
    counts = np.bincount(symbols.ravel(), minlength=size)
    mean = float(counts @ np.abs(np.arange(size) - zero)) / symbols.size
    scale = min(max(round(16 * float(np.log2(max(64 * mean, 1)))), 0), mixing_tables.SCALES - 1)
    models = [Model(size, zero, scale, prior, 0, 0) for prior in range(3)]
    prior = int(np.argmin([float(counts @ -np.log2(context_mixing.masses(model))) for model in models]))
    rows, columns = (_log_pseudo_count(symbols, zero, axis) for axis in (1, 0))
    return Model(size, zero, scale, prior, rows, columns)


def _log_pseudo_count(symbols: Symbols, zero: int, axis: int) -> int:
    """Return log2 of how many symbols of a row (axis 1) or column (0) tell as much about its scale as all others do.

    That is the ratio of two relative variances: of the square of a symbol, and of the mean squares of rows. The second
    is measured over rows of finite length, which adds noise of the first to it; that part is taken off.
    """
    squares = (symbols.astype(np.float32) - zero) ** 2
    mean = float(squares.mean()) + 1e-6
    noise = max(float((squares**2).mean()) / mean**2 - 1, 1e-12)  # below zero if all symbols are equal
    spread = float(np.log(squares.mean(axis) / mean + 0.01).var()) - noise / symbols.shape[axis]
    return int(np.clip(np.rint(np.log2(noise / max(spread, 1e-4))), 0, context_mixing.MAX_LOG_PSEUDO_COUNT))


def _chunks(symbols: Symbols) -> list[Symbols]:
    rows = chunk_rows(symbols.shape[1])
    return [symbols[start : start + rows] for start in range(0, symbols.shape[0], rows)]


def _payload(plan: _MixedPlan, alphabet: Alphabet, symbols: Symbols, low: int) -> bytes:
    writer = SideWriter()
    alphabet.put(writer)
    writer.put(_SCAN, int(plan.columns_first))
    writer.put(_ZERO, plan.zero)
    writer.put(_LOW, low)
    writer.put(_SCALE, plan.model.scale)
    writer.put(_PRIOR, plan.model.prior)
    writer.put_all(_PSEUDO_COUNT, [plan.model.row_log_pseudo_count, plan.model.column_log_pseudo_count])
    prediction.put(writer, plan.predictor)
    writer.put_all(_WORDS, [chunk.size for chunk in plan.chunks])
    tail = b""
    if low:
        scanned = symbols.T if plan.columns_first else symbols
        residuals = scanned if plan.predictor is None else plan.predictor.subtract(scanned, plan.zero, alphabet.size)
        tail = raw.encode_packed(residuals & np.uint16((1 << low) - 1), 0, (1 << low) - 1)
    return payload.join(writer.finish(), plan.chunks, tail)


def _take_header(
    reader: SideReader, rows: int, columns: int
) -> tuple[Alphabet, int, int, int, Prediction | None, Model]:
    """Return alphabet, columns first, zero, low bits, prediction and model: the side information up to the lengths."""
    alphabet = Alphabet.take(reader)
    if alphabet.kind == alphabets.SPLIT or alphabet.size < 2:
        raise ArtifactError("the alphabet of a mixed stream is not one it can have; the file is damaged")
    columns_first = reader.take(_SCAN, 1, "the scan")
    zero = reader.take(_ZERO, alphabet.size - 1, "the zero")
    low = reader.take(_LOW, 3, "the number of low bits")
    scale = reader.take(_SCALE, mixing_tables.SCALES - 1, "the scale")
    prior = reader.take(_PRIOR, mixing_tables.LAPLACE, "the prior")
    most = context_mixing.MAX_LOG_PSEUDO_COUNT
    pseudo_counts = [reader.take(_PSEUDO_COUNT, most, "the log of a pseudo-count") for _ in range(2)]
    size = ((alphabet.size - 1) >> low) + 1
    if not 2 <= size <= context_mixing.MAX_SIZE:
        raise ArtifactError(f"a mixed stream has {size} symbols; the file is damaged")
    predictor = prediction.take(reader, *((columns, rows) if columns_first else (rows, columns)))
    middle = zero if predictor is None else alphabet.size // 2
    model = Model(size, middle >> low, scale, prior, pseudo_counts[0], pseudo_counts[1])
    return alphabet, columns_first, zero, low, predictor, model


def decode(
    data: Bytes, rows: int, columns: int, dtype: np.dtype[np.integer], threads: int, states: int = 1
) -> NDArray[np.integer]:
    """Undo `encode`: (rows, columns) of `dtype`, or of int8 or int16 if that was int32 and they hold all values."""
    side, words = payload.split(data)
    reader = SideReader(side)
    alphabet, columns_first, zero, low, predictor, model = _take_header(reader, rows, columns)
    lowest, highest = int(alphabet.values[0]), int(alphabet.values[-1])
    check_range(lowest, highest, dtype)
    if columns_first:
        rows, columns = columns, rows
    symbols = np.empty((rows, columns), np.uint16)
    parts = _chunks(symbols)
    lengths = reader.take_all(_WORDS, len(parts))
    reader.finish()
    if predictor is None and not columns_first:
        model = _with_trellis(model, alphabet, low, states)

    def decode_part(index: int, part_words: memoryview) -> None:
        context_mixing.decode(np.frombuffer(part_words, "<u4").astype(np.uint32), model, parts[index])

    tail = payload.decode_chunks(words, lengths, 4, decode_part, threads)
    if low:
        symbols <<= np.uint16(low)
        symbols |= raw.decode_packed(tail, rows, columns, np.dtype(np.uint16), 1).astype(np.uint16)
        if int(symbols.max()) >= alphabet.size:
            raise ArtifactError("a mixed stream holds a symbol beyond its alphabet; the file is damaged")
    elif len(tail):
        raise ArtifactError("bytes follow the last chunk of a stream; the file is damaged")
    if predictor is not None:
        symbols = predictor.add(symbols, zero, alphabet.size)
    values = np.empty(symbols.shape, narrowest(lowest, highest, dtype))
    alphabets.values_of(symbols, alphabet, b"", values)
    return values.T if columns_first else values
