"""Lossless scheme: every bit of a tensor of any dtype, in the form that codes smallest.

    lossless   params ()            bit planes of the words (birdie.entropy.planes)
               params (1,)          HALVES: half bytes, for small integers packed in a word (GPTQ, AWQ, HQQ, fp4 pairs)
               params (2,)          VALUES: the integers themselves, if they fit in 32 bits
               params (3,)          DIFFERENCES: each minus its predecessor in row-major order, for rising indices,
                                    also for floats that are integers, such as positions
               params (4, length)   LISTED: floats with few magnitudes: the number n of each in their rising list,
                                    −1 − n with the sign bit, and the list as gaps; for values on a grid, sine tables
               params (5, runs, words)  RUNS: of equal words in row-major order; for masks: the planes of the words
                                    that occur, the number of each run's word minus that of the run before the last,
                                    and second such differences of the lengths, all zeros for a triangle or a band
               params (6, matches, literals, orders, form…)  MATCHES: words that repeat in row-major order
                                    (birdie.compress.repeats): the literals as a vector in one of the forms above,
                                    literals before each match, lengths and distances, each as such differences of an
                                    order 0 … 2 (orders: counts + 3 · lengths + 9 · distances)
               params (7, height, width, levels, kind)  SCALED: weights that are quantized already
                                    (birdie.compress.scaled): the number of each element's level, the levels, and the
                                    planes of a scale for each block; kind: dtype of the scales + 3 if levels are floats
               params (8, levels)   TABLES: the same without scales: each row has its levels, the planes of them all

Integers may be weights, several weights packed in a word, indices or counters, and the dtype does not say which: every
form is coded on a sample and the smallest is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.repeats import expand, may_repeat, parse, steps, summed
from birdie.compress.scaled import LARGEST, MAX_LEVELS, Scaled, multiply, search
from birdie.compress.scheme import (
    INT16,
    SCALES,
    SYMBOLS,
    Cost,
    Decoder,
    Encoded,
    Integers,
    Scheme,
    Sensitivity,
    Spec,
    StreamLayout,
    elementwise,
    in_blocks,
)
from birdie.compress.tensors import FORMATS, Bits, count_words, from_bits, parts, rows_columns, to_bits
from birdie.entropy import coder
from birdie.entropy.hints import Effort
from birdie.entropy.planes import blocks, join, plane_dtypes, plane_hints, split, word_dtype
from birdie.errors import ArtifactError, WeightsError

HALVES, VALUES, DIFFERENCES, LISTED, RUNS, MATCHES, SCALED, TABLES = 1, 2, 3, 4, 5, 6, 7, 8
_WIDE = (torch.int32, torch.uint32, torch.int64, torch.uint64)
WHOLE = {  # floats → how far integers are stored as differences: all of them are exact
    torch.float16: 1 << 11,
    torch.bfloat16: 1 << 8,
    torch.float32: 1 << 24,
    torch.float64: 1 << 30,
}
DTYPES: dict[int, tuple[torch.dtype, ...]] = {  # dtypes that each form can store
    HALVES: (torch.uint8, torch.int8, torch.uint16, torch.int16, *_WIDE, torch.float4_e2m1fn_x2),
    VALUES: _WIDE,
    DIFFERENCES: (*_WIDE, *WHOLE),
    LISTED: (torch.float16, torch.bfloat16, torch.float32),
    RUNS: tuple(dtype for dtype, (_, words) in FORMATS.items() if words == 1),
}
DTYPES[MATCHES] = DTYPES[RUNS]
DTYPES[SCALED] = DTYPES[TABLES] = DTYPES[LISTED]
SCALE_DTYPES = torch.float32, torch.float16, torch.bfloat16
SAMPLE_BYTES = 1 << 17  # bytes of an integer tensor on which its forms are compared
_STREAM_BYTES = 2  # approximate bytes in the header for each stream
_PACKED = 1.02  # entropy of separate half bytes over that of bytes, up to which a byte is taken for two integers
_REPEATED = 1 << 14  # floats, spread over the tensor, that are checked for repeated magnitudes
_DISTINCT = 0.75  # largest share of those that may be distinct
_LONG_RUNS = 32  # mean length of runs from which they are tried
_MOST_WORDS = 256  # different words of runs
_RUNS_GAIN = 0.5  # coded bytes of runs over those of another form, up to which runs are taken
_ORDERS = 3  # differences of the numbers of matches: none, first, second
_LEAST_BYTES = 200  # coded bytes of another form from which matches are searched for
_MOST_MIXED = 1 << 18  # elements up to which sizes with matches are compared by context mixing
_MATCHES_GAIN = 0.97  # coded bytes of matches over those of another form, up to which matches are taken
_ROW_OF_TABLE = 8  # words of a row for each word of its table, at least
_FEW = 64  # floats that are looked at before all are
_LISTED_GAIN = 0.98  # entropy of the list's numbers over that of the planes, up to which the list is taken


def layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    """Return the layout of the planes, or of the one stream of integers and, for LISTED, the list."""
    if not params:
        return plane_layout(shape, dtype)
    if params[0] == MATCHES:
        return _matches_layout(shape, dtype, params)
    if params[0] in (SCALED, TABLES):
        return _levels_layout(shape, dtype, params)
    rows, columns = rows_columns(shape)
    expected = {LISTED: 2, RUNS: 3}.get(params[0], 1)
    valid = dtype in DTYPES.get(params[0], ()) and len(params) == expected
    if valid and params[0] == RUNS:
        valid = 1 <= params[2] <= min(params[1], _MOST_WORDS) and params[1] * _LONG_RUNS <= rows * columns < 1 << 31
    if not valid or rows * columns == 0 or (params[0] == LISTED and not 1 <= params[1] <= rows * columns):
        raise ArtifactError(
            f"scheme lossless has parameters {params} for {dtype} of shape {shape}; the file is corrupt or newer"
        )
    if params[0] == LISTED and params[1] > 1 << (8 * dtype.itemsize - 1):
        raise ArtifactError(f"a list of {params[1]:,} magnitudes is longer than {dtype} has; the file is corrupt")
    if params[0] == RUNS:
        runs = StreamLayout(1, params[1], SYMBOLS)
        return (*plane_layout((params[2],), dtype), runs, runs)
    if params[0] == HALVES:
        return (StreamLayout(2 * dtype.itemsize * rows, columns, SYMBOLS, np.dtype(np.uint8)),)
    values = StreamLayout(rows, columns, SYMBOLS)
    return (values, StreamLayout(1, params[1], SCALES)) if params[0] == LISTED else (values,)


def _matches_layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    """Return the layout of the literals, in a form of their own, and of three numbers of each match."""
    count = prod(shape)
    valid = dtype in DTYPES[MATCHES] and len(params) >= 4 and count < 1 << 31
    if valid:
        _, matches, literals, orders, *form = params
        valid = 0 < literals < count and 0 < matches <= count - literals and 0 <= orders < _ORDERS**3
        valid = valid and form[:1] != [MATCHES]
    if not valid:
        raise ArtifactError(
            f"scheme lossless has parameters {params} for {dtype} of shape {shape}; the file is corrupt or newer"
        )
    numbers = StreamLayout(1, matches, SCALES)
    return (*layout((literals,), dtype, tuple(form)), numbers, numbers, numbers)


def _levels_layout(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> tuple[StreamLayout, ...]:
    """Return the layout of the numbers of levels, and of levels and scales, or of the levels of each row."""
    rows, columns = rows_columns(shape)
    valid = dtype in DTYPES[SCALED] and len(params) == (5 if params[0] == SCALED else 2)
    if valid and params[0] == SCALED:
        _, height, width, levels, kind = params
        valid = 1 <= height <= rows and 1 <= width <= columns and 0 <= kind < 2 * len(SCALE_DTYPES)
    elif valid:
        levels = params[1]
    if not valid or rows * columns == 0 or not 1 <= levels <= MAX_LEVELS:
        raise ArtifactError(
            f"scheme lossless has parameters {params} for {dtype} of shape {shape}; the file is corrupt or newer"
        )
    numbers = StreamLayout(rows, columns, SYMBOLS, np.dtype(np.uint8) if levels <= 256 else INT16)
    if params[0] == TABLES:
        return numbers, *plane_layout((rows, levels), dtype)
    floats, scale = divmod(kind, len(SCALE_DTYPES))
    table = plane_layout((levels,), torch.float32) if floats else (StreamLayout(1, levels, SCALES),)
    return numbers, *table, *plane_layout((-(-rows // height), -(-columns // width)), SCALE_DTYPES[scale])


def cost(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> Cost:
    """Return the cost of joining planes, or of a form."""
    output = elementwise(shape, dtype, params)
    if not params:
        return output
    if params[0] == MATCHES:
        literals = cost((params[2],), dtype, params[4:])
        return Cost(
            literals.operations + 4 * output.operations + 80 * params[1],
            literals.bytes + output.bytes + 48 * params[1],
        )
    if params[0] in (SCALED, TABLES):
        rows, columns = rows_columns(shape)
        blocks = -(-rows // params[1]) * -(-columns // params[2]) if params[0] == SCALED else rows * params[1]
        values = in_blocks(shape, dtype, 24)
        return Cost(values.operations + 8 * blocks, values.bytes + 24 * blocks + 16 * (rows + columns))
    if params[0] == RUNS:
        return Cost(2 * output.operations + 64 * params[1], output.bytes + 48 * params[1] + 64 * params[2])
    listed = params[1] if params[0] == LISTED else 0
    # The list is read twice: with and without the sign bit.
    operations = (8 * dtype.itemsize if params[0] == HALVES else 6) * output.operations + 8 * listed
    return Cost(operations, output.bytes + 2 * dtype.itemsize * listed)


def decode(encoded: Encoded) -> Tensor:
    """Return the tensor, bit for bit."""
    streams, params, dtype = encoded.streams, encoded.params, encoded.dtype
    if not params:
        return join_planes(encoded, dtype)
    if params[0] == LISTED:
        words = _from_list(streams[0], streams[1], dtype)
    elif params[0] == RUNS:
        return _from_runs(encoded)
    elif params[0] == MATCHES:
        words = _from_matches(encoded)
    elif params[0] == SCALED:
        return _from_scales(encoded)
    elif params[0] == TABLES:
        words = _from_tables(encoded)
    elif params[0] == HALVES:
        words = _from_halves(streams[0], encoded.shape, dtype)
    else:
        words = _from_values(streams[0], params[0], dtype)
    return from_bits(words, encoded.shape, dtype)


def plane_layout(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[StreamLayout, ...]:
    """Return the layout of the bit planes of a tensor."""
    rows, columns = rows_columns(shape)
    if rows * columns == 0:
        return ()
    word, words = FORMATS[dtype]
    types = zip(plane_hints(word), plane_dtypes(word), strict=True)
    return tuple(StreamLayout(rows, columns * words, hints, integer) for hints, integer in types)


def join_planes(encoded: Encoded, dtype: torch.dtype) -> Tensor:
    """Return the tensor of `dtype` whose bit planes are the streams of `encoded`."""
    form = FORMATS[dtype][0]
    if not encoded.streams:
        return from_bits(np.empty(0, word_dtype(form)), encoded.shape, dtype)
    (integer, *more), first = plane_dtypes(form), encoded.streams[0]
    if (
        more
        or dtype is torch.bool
        or not (first.dtype == integer and first.flags.c_contiguous and first.flags.writeable)
    ):
        return from_bits(join(encoded.streams, form), encoded.shape, dtype)
    return from_bits(first.view(word_dtype(form)), encoded.shape, dtype)  # the one plane is the tensor itself: no copy


def _from_halves(halves: Integers, shape: tuple[int, ...], dtype: torch.dtype) -> Bits:
    """Return words (rows, columns) from half bytes, stored as separate rows, the lowest first."""
    if int(halves.max()) > 15 or int(halves.min()) < 0:
        raise ArtifactError("a half byte is above 15; the file is corrupt")
    rows, columns = rows_columns(shape)
    parts = halves.reshape(rows, 2 * dtype.itemsize, columns)
    out = np.zeros((rows, columns), f"u{dtype.itemsize}")
    for block in blocks(rows, columns):
        for index in range(parts.shape[1]):
            part = parts[block[0], index, block[1]].astype(out.dtype)
            out[block] |= part << out.dtype.type(4 * index)
    return out


def _from_values(values: Integers, form: int, dtype: torch.dtype) -> Bits:
    if dtype in WHOLE:
        low, high = -WHOLE[dtype], WHOLE[dtype]
    else:
        limits = np.iinfo(f"{'i' if dtype.is_signed else 'u'}{dtype.itemsize}")
        low, high = int(limits.min), int(limits.max)
    out: Bits = np.empty(values.shape, f"u{dtype.itemsize}")
    last = 0
    for block in blocks(*values.shape):  # in row-major order
        part = values[block]
        if form == DIFFERENCES:
            part = np.cumsum(part, dtype=np.int64).reshape(part.shape) + last
            last = int(part[-1, -1])
        if int(part.min()) < low or int(part.max()) > high:
            raise ArtifactError(f"an integer is outside {low}…{high}; the file is corrupt")
        out[block] = part if dtype not in WHOLE else to_bits(torch.from_numpy(part.astype(np.int64)).to(dtype))
    return out


def _from_list(numbers: Integers, gaps: Integers, dtype: torch.dtype) -> Bits:
    """Return words (rows, columns): magnitude n of the list, with the sign bit for −1 − n."""
    size, sign = gaps.size, 1 << (8 * dtype.itemsize - 1)
    rising = int(gaps[0, 0]) >= 0 and int(gaps[0, 1:].min(initial=1)) >= 1
    if not rising or int(gaps.sum(dtype=np.int64)) >= sign:
        raise ArtifactError(f"the list of a tensor's magnitudes does not rise within {dtype}; the file is corrupt")
    if int(numbers.min()) < -size or int(numbers.max()) >= size:
        raise ArtifactError(f"a number is beyond a list of {size:,} magnitudes; the file is corrupt")
    # Negative numbers index from the end, where the words with the sign bit lie in falling order.
    words = np.empty(2 * size, f"u{dtype.itemsize}")
    np.cumsum(gaps[0], dtype=words.dtype, out=words[:size])
    np.add(words[size - 1 :: -1], words.dtype.type(sign), out=words[size:])
    out: Bits = np.empty(numbers.shape, words.dtype)
    for block in blocks(*numbers.shape):
        out[block] = words[numbers[block]]
    return out


def _from_runs(encoded: Encoded) -> Tensor:
    *planes, differences, changes = encoded.streams
    listed = Encoded("lossless", (encoded.params[2],), encoded.dtype, (), tuple(planes))
    numbers, lengths = summed(differences[0], 1), summed(changes[0], 2)
    size = encoded.params[2]
    count = prod(encoded.shape)
    sound = int(numbers.min()) >= 0 and int(numbers.max()) < size
    if not sound or int(lengths.min()) < 1 or int(lengths.max()) > count or int(lengths.sum()) != count:
        raise ArtifactError("the runs of a tensor do not add up to it; the file is corrupt")
    words = to_bits(join_planes(listed, encoded.dtype))[0, numbers]
    return from_bits(np.repeat(words, lengths), encoded.shape, encoded.dtype)


def _from_matches(encoded: Encoded) -> Bits:
    _, _, literals, orders, *form = encoded.params
    *streams, counts, lengths, distances = encoded.streams
    words = to_bits(decode(Encoded("lossless", (literals,), encoded.dtype, tuple(form), tuple(streams))))[0]
    sums = (
        summed(stream[0], orders // _ORDERS**index % _ORDERS)
        for index, stream in enumerate((counts, lengths, distances))
    )
    out = expand(words, (*sums,), prod(encoded.shape))
    if out is None:
        raise ArtifactError("the matches of a tensor do not add up to it; the file is corrupt")
    return out


def _from_scales(encoded: Encoded) -> Tensor:
    _, height, width, count, kind = encoded.params
    rows, columns = rows_columns(encoded.shape)
    symbols, *streams = encoded.streams
    floats, scale = divmod(kind, len(SCALE_DTYPES))
    _require_levels(symbols, count)
    if floats:
        parts = len(plane_layout((count,), torch.float32))
        levels = _joined(streams[:parts], (count,), torch.float32).numpy()
    else:
        parts, gaps = 1, streams[0][0]
        integers = np.cumsum(gaps, dtype=np.int64)
        repeated = np.flatnonzero(gaps[1:] == 0)
        limit = max(abs(int(integers[0])), abs(int(integers[-1])))
        if int(gaps[1:].min(initial=0)) < 0 or limit > LARGEST or (integers[repeated] != 0).any() or repeated.size > 1:
            raise ArtifactError("the levels of a tensor do not rise within 24 bits; the file is corrupt")
        levels = integers.astype(np.float32)
        levels[repeated] = -0.0
    grid = -(-rows // height), -(-columns // width)
    scales = _joined(streams[parts:], grid, SCALE_DTYPES[scale]).float().numpy()
    if not (np.isfinite(levels).all() and np.isfinite(scales).all()):
        raise ArtifactError("a level or a scale of a tensor is not finite; the file is corrupt")
    return multiply(Scaled(height, width, symbols, levels, scales), encoded.shape, encoded.dtype)


def _from_tables(encoded: Encoded) -> Bits:
    numbers, *planes = encoded.streams
    rows, columns = numbers.shape
    count = encoded.params[1]
    _require_levels(numbers, count)
    words = to_bits(_joined(planes, (rows, count), encoded.dtype))
    out: Bits = np.empty(numbers.shape, words.dtype)
    for block in blocks(rows, columns):
        out[block] = np.take_along_axis(words[block[0]], numbers[block].astype(np.int64), axis=1)
    return out


def _joined(planes: Sequence[Integers], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor that stands in a few planes among the streams of another."""
    return join_planes(Encoded("lossless", shape, dtype, (), tuple(planes)), dtype)


def _require_levels(numbers: Integers, count: int) -> None:
    if int(numbers.max()) >= count or int(numbers.min()) < 0:
        raise ArtifactError(f"a number is beyond a table of {count} levels; the file is corrupt")


DECODER = Decoder("lossless", 1, layout, decode, cost, inner="tensor")


@dataclass(frozen=True, slots=True)
class Lossless(Scheme):
    """Stores every bit of a tensor of any dtype: NaN payloads, signed zeros and infinities included."""

    decoder = DECODER
    specs = (Spec("lossless", "every bit kept"),)
    quantizes = False

    @property
    def by_rows(self) -> bool:
        """Return True: every row is stored as it is."""
        return True

    def encode(
        self,
        name: str,
        weight: Tensor,
        *,
        sensitivity: Sensitivity | None = None,  # noqa: ARG002 (nothing is lost that could be weighted)
    ) -> Encoded:
        """Split `weight` into bit planes, or use the form of integers or listed floats if it codes smaller.

        Raises:
            WeightsError: the dtype is not one of `FORMATS`, or a boolean is neither 0 nor 1.
        """
        encoded = _without_repeats(name, weight)
        levels = _scaled(weight) or _tables(weight)
        if levels is not None and levels.params != encoded.params and _bytes(levels) < _bytes(encoded):
            encoded = levels
        runs = _runs(weight)
        if runs is not None and _bytes(runs) < _RUNS_GAIN * _bytes(encoded):
            encoded = runs
        matches = _matches(weight, encoded)
        return encoded if matches is None else matches


def _without_repeats(name: str, weight: Tensor) -> Encoded:
    listed = _listed(weight)
    if listed is not None:
        return Encoded("lossless", tuple(weight.shape), weight.dtype, (LISTED, listed[1].size), listed)
    form = _integer_form(weight)
    if form is None:
        return encode_planes(name, "lossless", weight, weight, ())
    return Encoded("lossless", tuple(weight.shape), weight.dtype, (form,), (_INTEGERS[form](weight),))


def encode_planes(name: str, scheme: str, weight: Tensor, stored: Tensor, params: tuple[int, ...]) -> Encoded:
    """Encode `weight` as the bit planes of `stored`, its numbers in the dtype that is written."""
    if stored.dtype not in FORMATS:
        raise WeightsError(f"tensor {name!r} has dtype {stored.dtype}, which birdie cannot store; convert it first")
    if not stored.numel():
        return Encoded(scheme, tuple(weight.shape), weight.dtype, params, ())
    bits = to_bits(stored)
    if stored.dtype is torch.bool and int(bits.max()) > 1:
        raise WeightsError(
            f"tensor {name!r} holds a boolean whose byte is neither 0 nor 1, which a file cannot keep; give its bytes, "
            "tensor.view(torch.uint8), or tensor.view(torch.uint8) != 0"
        )
    return Encoded(scheme, tuple(weight.shape), weight.dtype, params, tuple(split(bits, FORMATS[stored.dtype][0])))


def _halves(weight: Tensor) -> Integers:
    """Return the half bytes of each row of words as separate rows, the lowest first: (rows · halves, columns)."""
    bits = to_bits(weight)
    count = 2 * bits.itemsize
    parts = np.empty((bits.shape[0], count, bits.shape[1]), np.uint8)
    for index in range(count):
        parts[:, index] = (bits >> bits.dtype.type(4 * index)) & bits.dtype.type(15)
    return parts.reshape(-1, bits.shape[1])


def _values(weight: Tensor) -> Integers:
    """Return the integers themselves, (rows, columns) int64; those of uint64 beyond int64 wrap."""
    if weight.dtype in WHOLE:
        return to_bits(weight.detach().to(torch.int64)).view(np.int64)
    bits = to_bits(weight)
    return bits.view(f"i{bits.itemsize}") if weight.dtype.is_signed else bits.astype(np.int64)


def _differences(weight: Tensor) -> Integers:
    """Return each integer minus its predecessor in row-major order."""
    values = _values(weight).astype(np.int64)  # a copy
    flat = values.reshape(-1)
    flat[1:] -= flat[:-1].copy()
    return values


_INTEGERS = {HALVES: _halves, VALUES: _values, DIFFERENCES: _differences}


def _integer_form(weight: Tensor) -> int | None:
    """Return the form of integers that codes smallest on the first rows of `weight`; None stands for planes."""
    forms = [form for form in _INTEGERS if weight.dtype in DTYPES[form] and weight.numel()]
    if not forms or (weight.dtype in WHOLE and not _is_whole(weight)):
        return None
    fitting = [form for form in forms if form == HALVES or _fits(weight, form)]
    rows = max(1, SAMPLE_BYTES // max(1, weight[:1].nbytes)) if weight.ndim > 1 else SAMPLE_BYTES // weight.itemsize
    sample = weight[:rows] if weight.ndim else weight
    planes = split(to_bits(sample), FORMATS[weight.dtype][0])
    best, least = None, sum(_coded_bytes(plane) for plane in planes)
    for form in fitting:
        if form == HALVES and not _halves_are_independent(sample):
            continue
        cost = _coded_bytes(_INTEGERS[form](sample))
        if cost < least:
            best, least = form, cost
    return best


def in_levels(weight: Tensor) -> Encoded | None:
    """Return the levels of a tensor that is quantized already; None if it is not seen to be."""
    options = [_scaled(weight) or _tables(weight)]
    if weight.dtype in DTYPES[LISTED] and weight.numel():
        flat = to_bits(weight).reshape(-1)
        if np.unique(flat[:: -(-flat.size // _REPEATED)]).size <= MAX_LEVELS:  # few values in all of it
            options.append(_without_repeats("", weight))
    return min(filter(None, options), key=_bytes, default=None)


def _scaled(weight: Tensor) -> Encoded | None:
    scaled = search(weight)
    if scaled is None:
        return None
    if scaled.has_integers:
        integers = scaled.levels.astype(np.int64)
        table: tuple[Integers, ...] = (np.append(integers[:1], integers[1:] - integers[:-1])[None],)
    else:
        table = _planes(torch.from_numpy(scaled.levels))
    scales = torch.from_numpy(scaled.scales)
    narrow = next(index for index in (1, 2, 0) if torch.equal(scales.to(SCALE_DTYPES[index]).float(), scales))
    kind = narrow + len(SCALE_DTYPES) * (not scaled.has_integers)
    params = (SCALED, scaled.height, scaled.width, scaled.levels.size, kind)
    streams = (scaled.symbols, *table, *_planes(scales.to(SCALE_DTYPES[narrow])))
    return Encoded("lossless", tuple(weight.shape), weight.dtype, params, streams)


def _planes(tensor: Tensor) -> tuple[Integers, ...]:
    return encode_planes("", "lossless", tensor, tensor, ()).streams


def _tables(weight: Tensor) -> Encoded | None:
    """Return a table of the words of each row, and their numbers; None if some row has many."""
    if weight.dtype not in DTYPES[TABLES] or weight.ndim < 2 or not weight.numel():
        return None
    bits = to_bits(weight)
    most = min(MAX_LEVELS, bits.shape[1] // _ROW_OF_TABLE)
    if any(np.unique(bits[row]).size > most for row in {0, len(bits) // 2, len(bits) - 1}):
        return None
    tables = []
    for row in bits:
        words = np.unique(row)
        if words.size > most:
            return None
        tables.append(words)
    count = max(map(len, tables))
    numbers = np.empty(bits.shape, np.uint8 if count <= 256 else np.int16)
    listed = np.empty((len(bits), count), bits.dtype)
    for row, words in enumerate(tables):
        floats = from_bits(words[None], words.shape, weight.dtype).float().numpy()
        order = np.lexsort((words, floats))  # by value, so that neighbors are similar
        rank = np.empty(words.size, numbers.dtype)
        rank[order] = np.arange(words.size)
        numbers[row] = rank[np.searchsorted(words, bits[row])]
        listed[row] = np.pad(words[order], (0, count - words.size), mode="edge")
    streams = (numbers, *_planes(from_bits(listed, listed.shape, weight.dtype)))
    return Encoded("lossless", tuple(weight.shape), weight.dtype, (TABLES, count), streams)


def _runs(weight: Tensor) -> Encoded | None:
    """Return the runs of equal words in row-major order; None if they are short, or of many different words."""
    if weight.dtype not in DTYPES[RUNS] or not 2 <= weight.numel() < 1 << 31:
        return None
    flat = to_bits(weight).reshape(-1)
    if weight.dtype is torch.bool and int(flat.max()) > 1:
        return None  # refused by `encode_planes`
    for part in (flat[:_REPEATED], flat):  # the beginning is enough to tell most weights
        ends = np.flatnonzero(part[1:] != part[:-1])
        if (len(ends) + 1) * _LONG_RUNS > len(part):
            return None
    starts = np.concatenate([[0], ends + 1])
    words, numbers = np.unique(flat[starts], return_inverse=True)
    changes = steps(np.diff(starts, append=flat.size).astype(np.int64), 2)[None]
    if not 2 <= len(words) <= _MOST_WORDS or int(np.abs(changes).max()) >= 1 << 31:
        return None
    planes = _planes(from_bits(words, (len(words),), weight.dtype))
    differences = steps(numbers.reshape(-1).astype(np.int64), 1)[None]
    params = (RUNS, len(starts), len(words))
    return Encoded("lossless", tuple(weight.shape), weight.dtype, params, (*planes, differences, changes))


def _matches(weight: Tensor, other: Encoded) -> Encoded | None:
    """Return the matches of words that repeat; None if `other` takes less than they do, or about as much."""
    if weight.dtype not in DTYPES[MATCHES] or not 2 <= weight.numel() < 1 << 31 or weight.nbytes <= _LEAST_BYTES:
        return None
    flat = to_bits(weight).reshape(-1)
    if not may_repeat(flat, singles=other.params[:1] not in ((SCALED,), (TABLES,))):
        return None
    effort: Effort = "max" if flat.size <= _MOST_MIXED else "fast"  # an estimate would not find the smaller one
    if (least := _bytes(other, effort)) <= _LEAST_BYTES:
        return None
    parsed = parse(flat, _plane_bits(flat, weight.dtype) / flat.size)
    if not parsed.counts.size:
        return None
    literals = _without_repeats("", from_bits(flat[parsed.literals], (parsed.literals.size,), weight.dtype))
    orders, streams = 0, list(literals.streams)
    for index, numbers in enumerate((parsed.counts, parsed.lengths, parsed.distances)):
        options = [steps(numbers, order)[None] for order in range(_ORDERS)]
        sizes = [_coded_bytes(stream, effort) if np.abs(stream).max() < 1 << 31 else np.inf for stream in options]
        order = int(np.argmin(sizes))
        orders += order * _ORDERS**index
        streams.append(options[order])
    params = (MATCHES, parsed.counts.size, parsed.literals.size, orders, *literals.params)
    encoded = Encoded("lossless", tuple(weight.shape), weight.dtype, params, tuple(streams))
    return encoded if _bytes(encoded, effort) < _MATCHES_GAIN * least else None


def _plane_bits(words: Bits, dtype: torch.dtype) -> float:
    """Return the entropy of the bit planes of words (n,), in bits for all of them."""
    planes = split(words[None], FORMATS[dtype][0])
    return sum(_entropy_bits(_counts(plane)) for plane in planes)


def _counts(plane: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return how often each value occurs, in the order of the values."""
    if plane.dtype.itemsize > 2:
        counts: NDArray[np.int64] = np.unique(plane, return_counts=True)[1]
        return counts
    values = plane.reshape(-1).astype(np.int64)
    return np.bincount(values - int(values.min()))


def _listed(weight: Tensor) -> tuple[Integers, Integers] | None:
    """Return the number of each magnitude in the list of those that occur (−1 − number with the sign), and its gaps.

    None unless the entropy is lower than that of bit planes.
    """
    if weight.dtype not in DTYPES[LISTED] or weight.numel() < 2:
        return None
    bits = to_bits(weight)
    word = bits.dtype.type
    mask, top = word((1 << (8 * bits.itemsize - 1)) - 1), word(8 * bits.itemsize - 1)
    sample = bits.reshape(-1)[:: -(-bits.size // _REPEATED)] & mask
    if np.unique(sample).size > _DISTINCT * sample.size:
        return None
    if bits.itemsize == 2:  # a histogram of words tells without sorting whether the list pays
        counts = np.zeros(1 << 16, np.int64)
        count_words(bits.reshape(-1), counts)
        words = np.flatnonzero(counts).astype(bits.dtype)
        magnitudes = np.flatnonzero(counts[: 1 << 15] + counts[1 << 15 :]).astype(bits.dtype)
        if not _list_pays(words, counts[words], magnitudes, weight.dtype):
            return None
    magnitudes, ranks = np.unique(bits & mask, return_inverse=True)
    numbers = ranks.reshape(bits.shape).astype(np.int32)
    np.invert(numbers, out=numbers, where=(bits >> top).astype(bool))
    gaps = np.diff(magnitudes.astype(np.int64), prepend=0)
    if int(gaps.max()) >= 1 << 31:
        return None
    counts = np.bincount(numbers.reshape(-1) + magnitudes.size, minlength=2 * magnitudes.size)
    words = np.concatenate([magnitudes[::-1] | (word(1) << top), magnitudes])
    return (numbers, gaps[None]) if _list_pays(words, counts, magnitudes, weight.dtype) else None


def _list_pays(
    words: Bits, counts: NDArray[np.int64], magnitudes: NDArray[np.unsignedinteger], dtype: torch.dtype
) -> bool:
    """Return whether numbers in a list of magnitudes have a lower entropy than bit planes of words that occur so often.

    Args:
        words: (n,) words; counts: (n,) how often each occurs.
        magnitudes: that occur, rising.
        dtype: of the words.
    """
    least = sum(
        _entropy_bits(np.bincount(plane[0].astype(np.int64), counts)) for plane in split(words[None], FORMATS[dtype][0])
    )
    gaps = np.diff(magnitudes.astype(np.int64), prepend=0)
    return _entropy_bits(counts) + float((np.log2(gaps + 1) + 2).sum()) < _LISTED_GAIN * least


def _bytes(encoded: Encoded, effort: Effort = "fast") -> int:
    """Return the coded bytes of all streams."""
    return sum(_coded_bytes(stream, effort) for stream in encoded.streams)


def _coded_bytes(stream: Integers, effort: Effort = "fast") -> int:
    """Return the coded bytes of `stream`, including its bytes in the header."""
    return _STREAM_BYTES + len(coder.encode(stream, effort=effort).payload)


def _fits(weight: Tensor, form: int) -> bool:
    """Return whether the stream of `form` stays within 32 bits and can represent every value of `weight`."""
    values = _values(weight)
    if weight.dtype is torch.uint64 and int(values.min()) < 0:
        return False
    low, high = int(values.min()), int(values.max())
    reach = max(high, high - low) if form == DIFFERENCES else max(high, -low - 1)
    return reach < 1 << 31 and low >= -(1 << 31)


def _is_whole(weight: Tensor) -> bool:
    """Return whether all floats are integers that `DIFFERENCES` holds: no −0.0, which would lose its sign."""
    limit = WHOLE[weight.dtype]
    for part in parts(weight):
        flat = part.reshape(-1)
        for some in (flat[:_FEW], flat):  # a few are enough to tell weights
            integral = (some.abs() <= limit) & (some == some.round()) & ~(torch.signbit(some) & (some == 0))
            if not bool(integral.all()):
                return False
    return True


def _halves_are_independent(sample: Tensor) -> bool:
    """Return whether the half bytes of a byte are statistically independent, as if a byte packs two integers."""
    data = to_bits(sample).view(np.uint8)
    joint = np.bincount(data.reshape(-1), minlength=256).reshape(16, 16)
    separate = _entropy_bits(joint.sum(0)) + _entropy_bits(joint.sum(1))
    return separate <= _PACKED * _entropy_bits(joint.reshape(-1))


def _entropy_bits(counts: NDArray[np.number]) -> float:
    present = counts[counts > 0]
    return float((present * np.log2(present.sum() / present)).sum())
