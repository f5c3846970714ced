"""Coding of an array of words, given another that is nearly equal: a checkpoint given the one before.

    words, base ─► difference in value order ─► bit length │ sign │ the two bits below the first │ the rest, plain
                        contexts: the exponent of the base ┤
                        changes of the row, the column,    ├─► counters ─► mixer ─► arithmetic coder
                        the neighbors, in absolute size    ┘

Floats are ordered as integers: the words of positive ones by their bits, those of negative ones below, in reverse. An
optimizer changes weights of all sizes by about as much, so the expected difference is the usual change divided by the
distance between neighboring floats, which the exponent of the base tells. What is usual in a row or column follows from
the differences before. Signs follow those around them, because gradients have a low rank. XOR of the words, the usual
way (ZipNN, arXiv 2411.05239), knows none of that.

Counters, mixers and the arithmetic coder are those of `birdie.entropy.binary`. All arithmetic is integer.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from birdie.entropy import binary, payload
from birdie.entropy.binary import INPUTS, Words
from birdie.entropy.mixing_tables import CDF_BUCKETS, LAPLACE, prior_cdf, tables
from birdie.entropy.raw import Bytes
from birdie.entropy.side_information import SideReader, SideWriter
from birdie.entropy.trellis_states import chunk_rows
from birdie.errors import ArtifactError
from birdie.system.kernels import njit

Bits = NDArray[np.unsignedinteger]
Integers = NDArray[np.int64]

# Exponent bits and mantissa bits of the floats that have a sign bit; other words are integers of the same scale.
FLOATS: dict[str, tuple[int, int]] = {
    "float64": (11, 52),
    "float32": (8, 23),
    "float16": (5, 10),
    "bfloat16": (8, 7),
    "float8_e4m3fn": (4, 3),
    "float8_e4m3fnuz": (4, 3),
    "float8_e5m2": (5, 2),
    "float8_e5m2fnuz": (5, 2),
}

# Nodes of the binary decisions about one difference. Its bit length is asked for from the expected one upwards or
# downwards: "longer than t?" has node 2t, or 2t + 1 on the way down.
_LENGTHS = 64
_FIRST, _SECOND = 2 * _LENGTHS, 3 * _LENGTHS + 1  # bits below the leading one; the second has two nodes
_NODES = _SECOND + 2 * (_LENGTHS + 1)

# Contexts of these decisions, and how many of each: the exponent; the expected difference by the row, by the column,
# by both, by the neighbors, by all; by both and the length to the left; by both and the exponent.
_SIZES = (64, 192, 192, 288, 96, 288, 96 * 8, 48 * 8)
_STARTS = tuple(sum(_SIZES[:k]) for k in range(INPUTS + 1))
_ZERO = 160  # log2 · 16 of the expected difference in bucket 0 is minus that
# Contexts of signs: the sign of the base; the row; the column; both; the three neighbors; agreement with the row above;
# agreement of the row with its columns; the length.
_SIGN_SIZES = (2, 64, 64, 4096, 54, 192, 4096, 32)
_SIGN_STARTS = tuple(sum(_SIGN_SIZES[:k]) for k in range(INPUTS + 1))

_FIRST_RATE, _LAST_RATE, _COOLING = 24, 6, 8000  # of the mixers, as in `context_mixing`
_FIRST_WEIGHT = 12000  # in 1/65,536
_DEPTH = 16  # octaves below the usual exponent in which changes still count
_MOST_SHIFT, _MOST = 40, 1 << 40  # of changes, so that sums fit
_ROW_MEMORY, _COLUMN_MEMORY = 4096, 256  # differences after which older ones count less
_PRIOR_WORTH = 8  # differences
_MOST_SCALE = 16 * 40
_CACHED = 8  # scales whose first counters, 3 MB each, are kept: a file chooses them
_CHUNKS, _MIDDLE, _MEAN = 21, 6, 7  # contexts of the side information


def encode(words: Bits, base: Bits, fmt: str) -> bytes:
    """Code `words` (rows, columns), not empty, of dtype `fmt`, given `base` of the same shape and dtype."""
    parts = _parts(*words.shape)
    first = _Given.of(base[parts[0]], fmt)
    middle = int(np.median(first.levels))
    changes = np.abs(_changes(words[parts[0]], base[parts[0]], fmt).astype(np.float64))
    mean = float((changes * np.exp2(np.clip(first.levels - float(middle) + _DEPTH, 0, _MOST_SHIFT))).mean())
    scale = int(np.clip(np.rint(16 * np.log2(max(mean, 1.0))), 0, _MOST_SCALE))
    chunks = []
    for part in parts:
        chunks.append(_encode(_changes(words[part], base[part], fmt), _Given.of(base[part], fmt), middle, scale))
    writer = SideWriter()
    writer.put(_MIDDLE, middle)
    writer.put(_MEAN, scale)
    writer.put_all(_CHUNKS, [chunk.size for chunk in chunks])
    return payload.join(writer.finish(), chunks)


def decode(data: Bytes, base: Bits, fmt: str, threads: int = 1) -> Bits:
    """Undo `encode`: return the words, given the same base.

    Raises:
        ArtifactError: the bytes are not those of such an array.
    """
    side, coded = payload.split(data)
    reader = SideReader(side)
    middle = reader.take(_MIDDLE, 2047, "the exponent of a difference")
    scale = reader.take(_MEAN, _MOST_SCALE, "the mean of differences")
    parts = _parts(*base.shape)
    lengths = reader.take_all(_CHUNKS, len(parts))
    reader.finish()
    out = np.empty(base.shape, base.dtype)

    def decode_part(index: int, part_words: memoryview) -> None:
        part = parts[index]
        words = np.frombuffer(part_words, "<u4").astype(np.uint32)
        known, changes = _Given.of(base[part], fmt), np.empty(base[part].shape, np.int64)
        length = _code(changes, *known, _DeltaState.at(middle, scale, base.shape[1]), *_inputs(), words, True)
        if words.size > length or (words.size and words[-1] == 0):
            raise ArtifactError("a chunk of differences ends too late or with a zero word; the file is damaged")
        out[part] = _from_ordered(_ordered(base[part], fmt) + changes, fmt, base.dtype)

    if len(payload.decode_chunks(coded, lengths, 4, decode_part, threads)):
        raise ArtifactError("bytes follow the last chunk of differences; the file is damaged")
    return out


def _parts(rows: int, columns: int) -> list[slice]:
    height = chunk_rows(columns)
    return [slice(first, first + height) for first in range(0, rows, height)]


def _encode(changes: Integers, known: "_Given", middle: int, scale: int) -> Words:
    def code(words: Words) -> int:
        return int(_code(changes, *known, _DeltaState.at(middle, scale, changes.shape[1]), *_inputs(), words, False))

    return binary.coded(code, changes.size * known.width // 32 + 64)


class _Given(NamedTuple):
    """Facts that the words of a base tell."""

    # (rows, columns) the exponent of each float, 1 for those below the normal ones, which lie as close
    levels: NDArray[np.uint16]
    negative: NDArray[np.uint8]  # (rows, columns) 1 for a sign bit
    width: int  # bits of a word

    @classmethod
    def of(cls, words: Bits, fmt: str) -> "_Given":
        kind, width = words.dtype.type, 8 * words.itemsize
        if fmt not in FLOATS:
            return cls(np.ones(words.shape, np.uint16), np.zeros(words.shape, np.uint8), width)
        exponent, mantissa = FLOATS[fmt]
        levels = words >> kind(mantissa) & kind((1 << exponent) - 1)
        return cls(np.maximum(levels, kind(1)).astype(np.uint16), (words >> kind(width - 1)).astype(np.uint8), width)


def _changes(words: Bits, base: Bits, fmt: str) -> Integers:
    """Return the differences in value order, the shorter way around the circle of all words."""
    changes = _ordered(words, fmt) - _ordered(base, fmt)
    return changes.astype(f"i{words.itemsize}").astype(np.int64)


def _ordered(words: Bits, fmt: str) -> Integers:
    """Return integers in the order of the numbers; those of 64 bits wrap."""
    if fmt not in FLOATS:
        return words.astype(np.int64)
    kind, top = words.dtype.type, 8 * words.itemsize - 1
    magnitudes = (words & kind((1 << top) - 1)).astype(np.int64)
    return np.where(words >> kind(top), ~magnitudes, magnitudes)


def _from_ordered(values: Integers, fmt: str, dtype: np.dtype[np.unsignedinteger]) -> Bits:
    """Undo `_ordered`, for integers modulo the number of words."""
    words = values.astype(dtype)
    if fmt not in FLOATS:
        return words
    top = dtype.type(1 << (8 * dtype.itemsize - 1))
    return np.where(words & top, ~words | top, words)


class _DeltaState(NamedTuple):
    """State that a chunk starts from, and tables."""

    # counters, signs: (contexts,) of `context_mixing`, of decisions about lengths and about signs
    counters: NDArray[np.uint32]
    signs: NDArray[np.uint32]
    # weights, sign_weights: of the mixers
    weights: NDArray[np.int32]
    sign_weights: NDArray[np.int32]
    columns: NDArray[np.int64]  # (4, columns) sum of the changes, last change, bias of the signs, last sign
    middle: int  # the usual exponent
    mean: int  # the mean change
    # squash, stretch, adaptation, log2: those of `mixing_tables.Tables`
    squash: NDArray[np.int32]
    stretch: NDArray[np.int32]
    adaptation: NDArray[np.int64]
    log2: NDArray[np.int64]

    @classmethod
    def at(cls, middle: int, scale: int, columns: int) -> "_DeltaState":
        """Return the state before the first word."""
        table = tables()
        return cls(
            _initial_counters(scale).copy(),
            np.full(_SIGN_STARTS[-1], (1 << 21) << binary.COUNT_BITS, np.uint32),
            np.full(_NODES * INPUTS, _FIRST_WEIGHT, np.int32),
            np.full(INPUTS, _FIRST_WEIGHT, np.int32),
            np.zeros((4, columns), np.int64),
            middle,
            max(int(table.power[320 + scale % 16]) << (scale // 16) >> 20, 1),
            *(table.squash, table.stretch, table.adaptation, table.log2),
        )


def _inputs() -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.int32]]:
    """Return memory for the contexts and the logits of a word."""
    return np.zeros(INPUTS, np.uint64), np.zeros(INPUTS, np.uint64), np.zeros(INPUTS, np.int32)


@lru_cache(_CACHED)
def _initial_counters(scale: int) -> NDArray[np.uint32]:
    """Return counters that start at what a Laplace distribution of the expected difference gives."""
    fine, half = 8 * np.arange(288) // 3, 8 * np.arange(96)
    levels = scale - 16 * (np.arange(64) - 32 + _DEPTH) + _ZERO  # of exponents around the usual one
    quarter, octaves = 4 * np.arange(192), 16 * np.arange(48)
    expected = (levels, quarter, quarter, fine, half, fine, np.repeat(half, 8), np.repeat(octaves, 8))
    mean = (np.concatenate(expected) - _ZERO)[:, None]
    edges = 16 * np.arange(-1, _LENGTHS + 1)[None]  # 2^t, and half of a difference for no difference at all
    longer = _survival(edges[:, 1:] - mean)  # a bit length above t = 0 … _LENGTHS
    longer[:, 0] = _survival(-16 - mean)[:, 0]
    everything = _survival(np.full((len(mean), 1), -999))
    shorter = np.concatenate([everything, longer[:, :-1]], axis=1)  # above t - 1
    one, top = 1 << 22, _LENGTHS
    up = (longer[:, :top] << 22) // shorter[:, :top]
    down = ((longer[:, :top] - longer[:, 1:]) << 22) // np.maximum(everything - longer[:, 1:], 1)
    table = np.full((_STARTS[-1], _NODES), one >> 1, np.int64)
    table[:, 0 : 2 * top : 2], table[:, 1 : 2 * top : 2] = up, down
    counters = np.clip(table, one >> 10, one - (one >> 10)) << binary.COUNT_BITS | binary.COUNTER_CONFIDENCE
    return counters.astype(np.uint32).reshape(-1)


def _survival(ratio: Integers) -> Integers:
    """Return the mass of the prior above 2^(ratio / 16) mean magnitudes, at least 1."""
    buckets = tables().power[np.clip(ratio + 128, 0, 255)]  # of 1/256
    cdf, middle = prior_cdf(LAPLACE), CDF_BUCKETS // 2
    edges = np.where(ratio < -128, middle, np.minimum(middle + buckets, CDF_BUCKETS))
    return np.asarray(np.maximum(cdf[-1] - cdf[edges], 1))


@njit(inline="always")
def _predict(counters, index, weights, weight_set, logits, squash, stretch):  # type: ignore[no-untyped-def]
    """Return the probability of a 1 in 1/65,536, and its logit; fill `logits` (INPUTS,)."""
    for k in range(INPUTS):
        logits[k] = stretch[counters[index[k]] >> np.uint32(20)]
    logit = binary.mix(weights, weight_set, logits)
    return np.uint64(binary.clip(squash[np.uint64(logit + 2048)], 8, 65528)), logit


@njit(nogil=True, cache=True, error_model="numpy", _nrt=False)
def _code(  # type: ignore[no-untyped-def]
    changes, levels, negative, width, state, start, index, logits, words, decoding
):
    """Code `changes` (rows, columns) to `words`, or decode them: one kernel, to halve what there is to compile.

    Returns:
        how many words the encoder needs, which may be more than there are, or that it may have written at most.
    """
    rows, columns = changes.shape
    counters, weights, squash, stretch = state.counters, state.weights, state.squash, state.stretch
    sums, lasts, biases, last_signs = state.columns[0], state.columns[1], state.columns[2], state.columns[3]
    log2, adaptation = state.log2, state.adaptation
    low, span, position = np.uint64(0), ~np.uint64(0), 0
    if decoding:
        low, position = binary.word(words, 0) << np.uint64(32) | binary.word(words, 1), 2
    total, count, column_count = np.int64(state.mean) * _PRIOR_WORTH, np.int64(_PRIOR_WORTH), np.int64(0)
    for i in range(rows):
        usual = total // count + 1
        usual_log = binary.log2(usual, log2)
        row_sum, row_count = usual * _PRIOR_WORTH, np.int64(_PRIOR_WORTH)
        left, left2, left_length = usual, usual, 0
        sign1 = sign2 = row_bias = agreement = rank = np.int64(0)
        column_log = binary.log2(column_count + _PRIOR_WORTH, log2)
        for j in range(columns):
            level = np.int64(levels[i, j])
            shift = binary.clip(level - state.middle + _DEPTH, 0, _MOST_SHIFT)
            # expected differences, 16 · log2
            unit = 16 * shift
            by_row = binary.log2(row_sum, log2) - binary.log2(row_count, log2)
            by_column = binary.log2(sums[j] + usual * _PRIOR_WORTH, log2) - column_log
            both = by_row + by_column - usual_log - unit
            near = binary.log2(((2 * left + left2 + 2 * lasts[j]) * 13 >> 6) + (usual >> 3) + 1, log2) - unit
            every = (3 * both + 2 * near) // 5
            by_row -= unit
            by_column -= unit
            deep = binary.clip(level - state.middle + 32, 0, 63)
            half = binary.clip((both + _ZERO) >> 3, 0, 95)
            start[0] = np.uint64(deep)
            start[1] = np.uint64(_STARTS[1] + binary.clip((by_row + _ZERO) >> 2, 0, 191))
            start[2] = np.uint64(_STARTS[2] + binary.clip((by_column + _ZERO) >> 2, 0, 191))
            start[3] = np.uint64(_STARTS[3] + binary.clip(3 * (both + _ZERO) >> 3, 0, 287))
            start[4] = np.uint64(_STARTS[4] + binary.clip((near + _ZERO) >> 3, 0, 95))
            start[5] = np.uint64(_STARTS[5] + binary.clip(3 * (every + _ZERO) >> 3, 0, 287))
            start[6] = np.uint64(_STARTS[6] + half * 8 + min(left_length, 7))
            start[7] = np.uint64(_STARTS[7] + (half >> 1) * 8 + binary.clip((deep - 8) >> 2, 0, 7))
            for k in range(INPUTS):
                start[k] *= np.uint64(_NODES)
            rate = np.int32(max(_LAST_RATE, _FIRST_RATE - (i * columns + j) // _COOLING))
            change = np.int64(0) if decoding else changes[i, j]
            magnitude = np.uint64(-change) if change < 0 else np.uint64(change)
            length = 0
            while not decoding and length < 64 and magnitude >> np.uint64(length):
                length += 1
            # bit length: from the expected one up or down
            t, going, stage, leading = binary.clip((both + 8) >> 4, 0, width - 1), 0, 0, np.uint64(1)
            while stage < 4:
                if stage == 0:
                    node = 2 * t + (going < 0)
                    bit = length > t
                elif stage == 1:
                    node = _FIRST + length
                    bit = (magnitude >> np.uint64(length - 2)) & np.uint64(1) != np.uint64(0)
                elif stage == 2:
                    node = _SECOND + 2 * length + np.int64(leading & np.uint64(1))
                    bit = (magnitude >> np.uint64(length - 3)) & np.uint64(1) != np.uint64(0)
                else:
                    bit = change < 0
                if stage < 3:
                    for k in range(INPUTS):
                        index[k] = start[k] + np.uint64(node)
                    probability, logit = _predict(counters, index, weights, np.uint64(node), logits, squash, stretch)
                else:
                    sign = np.int64(negative[i, j])
                    row_part, column_part = (row_bias + 4096) >> 7, (biases[j] + 4096) >> 7
                    index[0] = np.uint64(sign)
                    index[1] = np.uint64(_SIGN_STARTS[1] + row_part)
                    index[2] = np.uint64(_SIGN_STARTS[2] + column_part)
                    index[3] = np.uint64(_SIGN_STARTS[3] + row_part * 64 + column_part)
                    index[4] = np.uint64(
                        _SIGN_STARTS[4] + (last_signs[j] + 1) * 18 + (sign1 + 1) * 6 + (sign2 + 1) * 2 + sign
                    )
                    index[5] = np.uint64(_SIGN_STARTS[5] + ((agreement + 4096) >> 7) * 3 + last_signs[j] + 1)
                    index[6] = np.uint64(_SIGN_STARTS[6] + ((rank + 4096) >> 7) * 64 + column_part)
                    index[7] = np.uint64(_SIGN_STARTS[7] + min(length, 15) * 2 + sign)
                    probability, logit = _predict(
                        state.signs, index, state.sign_weights, np.uint64(0), logits, squash, stretch
                    )
                if decoding:
                    bit, low, span = binary.decode_bit(low, span, probability)
                else:
                    low_before = low
                    low, span = binary.encode_bit(low, span, bit, probability)
                    if low < low_before and position <= words.size:
                        binary.carry(words, position)
                if span < np.uint64(binary.RENORMALIZE):
                    low, span = binary.shift(low, words, position, decoding), span << np.uint64(32)
                    position += 1
                target = np.int32(65536 if bit else 0)
                error = (target - squash[np.uint64(logit + 2048)]) * rate >> np.int32(4)
                if stage < 3:
                    binary.train(weights, np.uint64(node), logits, error)
                    for k in range(INPUTS):
                        binary.update_counter(counters, index[k], bit, adaptation)
                else:
                    binary.train(state.sign_weights, np.uint64(0), logits, error)
                    for k in range(INPUTS):
                        binary.update_counter(state.signs, index[k], bit, adaptation)
                if stage == 0:
                    if bit and going >= 0 and t < width - 1:
                        t, going = t + 1, 1
                    elif not bit and going <= 0 and t > 0:
                        t, going = t - 1, -1
                    else:
                        length = t + 1 if bit else t
                        stage = 1 if length > 1 else 3 if length else 4
                elif stage == 1:
                    leading = leading << np.uint64(1) | np.uint64(bit)
                    stage = 2 if length > 2 else 3
                elif stage == 2:
                    leading = leading << np.uint64(1) | np.uint64(bit)
                    stage = 3
                else:
                    stage = 5
                    if decoding and bit:
                        change = np.int64(-1)
            # the rest of the bits, plain, up to 16 at a time
            rest = max(length - 3, 0)
            while rest > 0:
                some = min(rest, 16)
                rest -= some
                span >>= np.uint64(some)
                if decoding:
                    part = low // span
                    if part >> np.uint64(some):
                        part = (np.uint64(1) << np.uint64(some)) - np.uint64(1)
                    low -= part * span
                    leading = leading << np.uint64(some) | part
                else:
                    part = magnitude >> np.uint64(rest) & ((np.uint64(1) << np.uint64(some)) - np.uint64(1))
                    low_before = low
                    low += part * span
                    if low < low_before and position <= words.size:
                        binary.carry(words, position)
                if span < np.uint64(binary.RENORMALIZE):
                    low, span = binary.shift(low, words, position, decoding), span << np.uint64(32)
                    position += 1
            if decoding:
                magnitude = leading if length else np.uint64(0)
                change = -np.int64(magnitude) if change < 0 else np.int64(magnitude)
                changes[i, j] = change
            size = min(np.int64(min(magnitude, np.uint64(_MOST >> shift))) << shift, _MOST)
            row_sum += size
            row_count += 1
            if row_count >= _ROW_MEMORY:
                row_sum, row_count = (row_sum >> 1) + 1, row_count >> 1
            total += size
            count += 1
            if count >= 1 << 18:
                total, count = (total >> 1) + 1, count >> 1
            sums[j] += size
            lasts[j], left2, left, left_length = size, left, size, length
            if length:
                sign = np.int64(-1) if change < 0 else np.int64(1)
                row_bias += (sign * 4095 - row_bias) >> 5
                agreement += (sign * last_signs[j] * 4095 - agreement) >> 5
                rank += ((sign if biases[j] >= 0 else -sign) * 4095 - rank) >> 5
                biases[j] += (sign * 4095 - biases[j]) >> 4
                sign2, sign1, last_signs[j] = sign1, sign, sign
        column_count += 1
        if column_count >= _COLUMN_MEMORY:
            column_count >>= 1
            for j in range(columns):
                sums[j] >>= 1
    return position - 1 if decoding else binary.finish(low, words, position)
