"""Search for the cheapest way to code an array with static tables: the encoder's half of coders "static" and "tiles".

    values ─ scan ─ alphabet ─► symbols ─ prediction ─► residuals ─ classes, tables ─► Plan

Ways are compared by their cost in bits. On the paths of a trellis each class has a second table, for odd states.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from birdie.entropy import alphabet as alphabets
from birdie.entropy import frequency_tables, prediction, row_classes
from birdie.entropy import trellis_states as trellis
from birdie.entropy.alphabet import Alphabet, Symbols
from birdie.entropy.prediction import Prediction
from birdie.entropy.side_information import SideWriter

MIN_COLUMNS = 8  # of rows that have classes: shorter ones would cost more to describe than they save
CLASS_COUNTS = (4, 16)  # tried
FEW_CLASSES = (4, 8)  # tried where decoding must be fast: their tables lie in a nearer cache, for 0.1 % of the bits
_PRECISIONS = (12, 14, 15)  # tried where a single pair of tables serves a trellis
_LEAST, _MOST_COUNTS = 2048, 1 << 26  # symbols, and entries of the histograms of rows, for which classes are tried
_SMALL, _MANY = 1 << 15, 1 << 18
_SAMPLE = 1 << 14  # symbols that tell which ways are worth trying
_PREDICTION_SHARE = 0.995  # prediction must save so much of the bits: it decodes at a third of the speed


@dataclass(frozen=True)
class Way:
    """One way to code the symbols. Ways are compared again and again, so what they cost is counted once."""

    symbols: Symbols  # (rows, columns) in scan order, residuals if there is a prediction
    columns_first: bool  # the array was transposed
    predictor: Prediction | None  # the prediction that was subtracted, or None
    classes: NDArray[np.uint8]  # class of each row
    # (tables, size) histogram of each class; if `odd`, two for each: for even and for odd states
    counts: NDArray[np.int64]
    odd: NDArray[np.uint8] | None  # None, or (rows, columns) 1 for a symbol in an odd state of the trellis

    @cached_property
    def bits(self) -> float:
        """About the bits that it takes, without tables."""
        return _entropy(self.counts) + self.side_bits

    @cached_property
    def side_bits(self) -> float:
        """Bits of classes and prediction."""
        if self.predictor is None:
            return _class_bits(self.classes)
        writer = SideWriter()
        prediction.put(writer, self.predictor)
        return _class_bits(self.classes) + 16 * writer.finish().size

    @cached_property
    def rough_bits(self) -> float:
        """About the bits that it takes."""
        described = 24 + 6 * np.minimum(_occurring(self.counts), 16)
        return self.bits + float(described.sum())


@dataclass(frozen=True, slots=True)
class CodingPlan:
    """A way with its tables."""

    alphabet: Alphabet  # of the symbols
    zero: int  # the symbol that predictions count from
    way: Way
    tables: tuple[frequency_tables.Description, ...]  # in the order of the way's histograms
    precision: int  # log2 of the number of slots of a table
    bits: float  # that everything takes


def estimate(values: NDArray[np.integer], states: int = 1) -> tuple[float, float]:
    """Return about the bits of data and of tables that `encode` takes without prediction.

    A larger array of the same kind takes more bits of data in proportion, but no more tables.
    """
    alphabet, symbols = alphabets.choose(values)
    low = 8 * len(alphabets.low_bits(values, alphabet)) if alphabet.kind == alphabets.SPLIT else 0
    if abs(states) > 1 and alphabet.kind != alphabets.SPLIT:
        ways = _class_ways(symbols, False, None, alphabet.size, trellis.odd_states(values, states))
    else:
        ways = _plain_ways(symbols, alphabet, 0, [], columns=True)
    best = min(ways, key=lambda way: way.rough_bits)
    return best.bits + low, best.rough_bits - best.bits


def search(
    values: NDArray[np.integer], kernel: tuple[int, int], states: int, classes: tuple[int, ...] = CLASS_COUNTS
) -> CodingPlan:
    """Return the cheapest way with the best tables for it; in a small array tables decide which way is cheapest."""
    alphabet, symbols = alphabets.choose(values)
    zero = _zero(alphabet, symbols)
    ways = _ways(values, symbols, alphabet, zero, kernel, states, classes)
    if symbols.size > _SMALL:
        ways = [min(ways, key=lambda way: way.rough_bits)]
    best: tuple[float, int, CodingPlan] | None = None
    for index in sorted(range(len(ways)), key=lambda index: ways[index].rough_bits):  # the others are soon too long
        for plan in _plans(ways[index], alphabet, zero, math.inf if best is None else best[0]):
            if best is None or (plan.bits, index) < best[:2]:
                best = plan.bits, index, plan
    assert best is not None
    return best[2]


def _plans(way: Way, alphabet: Alphabet, zero: int, most: float) -> Iterator[CodingPlan]:
    """Yield the way with the best tables of each precision that may be best, unless it takes more than `most` bits."""
    least = 12 if alphabet.size <= 256 else 14 if alphabet.size <= 1024 else 15
    several = way.odd is not None and len(way.counts) == 2
    side = way.side_bits
    rest = side + np.cumsum(frequency_tables.least_bits(way.counts)[::-1])[::-1]  # from each table on, at least
    for precision in (one for one in _PRECISIONS if one == least or (several and one > least)):
        tables, bits = [], 0.0
        for counts, missing in zip(way.counts, rest, strict=True):
            if bits + missing > most:
                break
            table, cost = frequency_tables.fit(counts, precision, newton=way.odd is not None)
            tables.append(table)
            bits += cost
        else:
            yield CodingPlan(alphabet, zero, way, tuple(tables), precision, bits + side)


def _zero(alphabet: Alphabet, symbols: Symbols) -> int:
    return 0 if alphabet.kind == alphabets.SPLIT else alphabets.zero_symbol(alphabet, symbols)


def _ways(
    values: NDArray[np.integer],
    symbols: Symbols,
    alphabet: Alphabet,
    zero: int,
    kernel: tuple[int, int],
    states: int,
    classes: tuple[int, ...],
) -> list[Way]:
    """Return ways worth comparing: with and without classes, rows or columns first, with and without prediction.

    For the paths of a trellis tables for even and odd states are nearly always best, and rows are usually more unequal
    than columns: in a large array some rows and a trial of the prediction tell whether anything else is worth trying.
    """
    predictors: list[Prediction] = []
    if alphabet.kind == alphabets.AFFINE and symbols.size >= _LEAST:
        predictors = prediction.candidates(symbols, zero, kernel)
    every = symbols.size // _SAMPLE
    some = slice(min(every // 2, len(symbols) - 1), None, max(every, 1))
    columns = every < 2 or _columns_pay(symbols[some], alphabet.size)
    if abs(states) == 1 or alphabet.kind == alphabets.SPLIT:
        return _plain_ways(symbols, alphabet, zero, predictors, columns, classes)
    ways = _class_ways(symbols, False, None, alphabet.size, trellis.odd_states(values, states), classes)
    if every > 1 and not columns and not predictors:
        return ways
    return ways + _plain_ways(symbols, alphabet, zero, predictors, columns, classes)


def _columns_pay(symbols: Symbols, size: int) -> bool:
    """Return whether classes of columns take fewer bits than classes of rows."""
    by_row = min(way.bits for way in _class_ways(symbols, False, None, size))
    by_column = _class_ways(np.ascontiguousarray(symbols.T), True, None, size)
    return min(way.bits for way in by_column) < by_row


def _plain_ways(
    symbols: Symbols,
    alphabet: Alphabet,
    zero: int,
    predictors: list[Prediction],
    columns: bool,
    counts: tuple[int, ...] = CLASS_COUNTS,
) -> list[Way]:
    """Return the ways with one table a class; one with prediction only if it saves enough."""
    ways = _class_ways(symbols, False, None, alphabet.size, None, counts)
    if columns:
        ways += _class_ways(np.ascontiguousarray(symbols.T), True, None, alphabet.size, None, counts)[1:]
    predicted = []
    for predictor in predictors:
        residuals = predictor.subtract(symbols, zero, alphabet.size)
        predicted += _class_ways(residuals, False, predictor, alphabet.size, None, counts)
    least = min(way.rough_bits for way in ways)
    return ways + [way for way in predicted if way.rough_bits < _PREDICTION_SHARE * least]


def _class_ways(
    symbols: Symbols,
    columns_first: bool,
    predictor: Prediction | None,
    size: int,
    odd: NDArray[np.uint8] | None = None,
    tried: tuple[int, ...] = CLASS_COUNTS,
) -> list[Way]:
    """Return the way of one class first, then one for each number of classes that the rows can fill."""
    rows, columns = symbols.shape
    joint, parities = (symbols, 1) if odd is None else (symbols + np.uint16(size) * odd, 2)
    labelings = [np.zeros(rows, np.uint8)]
    if rows >= 8 and columns >= MIN_COLUMNS and symbols.size >= _LEAST and rows * size <= _MOST_COUNTS:
        counts = row_classes.histograms(joint, parities * size)
        plain = counts if odd is None else counts[:, :size] + counts[:, size:]
        possible = [count for count in tried if count <= rows // 2]
        many = symbols.size >= _MANY  # so many that the tables of more classes take next to nothing
        labelings += [row_classes.cluster(plain, count) for count in (possible[-1:] if many else possible)]
    else:
        counts = row_classes.histograms(joint.reshape(1, -1), parities * size)
    ways = []
    for classes in labelings:
        labels = classes if len(counts) == rows else np.zeros(1, np.uint8)
        sums = row_classes.sums(counts, labels, int(classes.max()) + 1).reshape(-1, size)
        for index in np.flatnonzero(~sums.any(1)):  # a table must have something to describe: that of the other half
            sums[index] = sums[index ^ 1]
        ways.append(Way(symbols, columns_first, predictor, classes, sums, odd))
    return ways


def _entropy(counts: NDArray[np.int64]) -> float:
    """Bits of symbols with these counts under their own frequencies, row by row.

    That is too little by half a nat for each frequency that is fitted (Miller 1955), which is added.
    """
    totals, occurring = counts.sum(1, keepdims=True), np.maximum(counts, 1)
    bits = counts * (np.log2(np.maximum(totals, 1)) - np.log2(occurring))
    return float(bits.sum()) + 0.7213 * float(np.maximum(_occurring(counts) - 1, 0).sum())


def _occurring(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many symbols of each row occur; `np.count_nonzero` along an axis takes thrice as long."""
    occurring: NDArray[np.int64] = (counts != 0).sum(1)
    return occurring


def _class_bits(classes: NDArray[np.uint8]) -> float:
    """Order-0 entropy of the classes, in bits."""
    counts = np.bincount(classes)
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / classes.size)).sum())
