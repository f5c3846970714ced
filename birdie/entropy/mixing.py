"""Context mixing of one array: binary decisions, adaptive predictions, logistic mixing, a range coder.

A symbol is found by walking down a binary tree over the alphabet, balanced for a prior, so a symbol of H bits takes
little more than H decisions. For each decision, counters chosen by contexts and the prior itself give probabilities;
two mixers, one chosen by the node and one by the expected scale, weigh their logits, and the mean of both drives the
range coder. What the contexts know is scale: that of the row so far, that of the column so far, their product, a
quicker one of the column, the neighbours'. Counters that scale decides start from the prior at that scale.

Logistic mixing and adaptive counters are those of Mahoney's PAQ; the contexts are made for weights.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from birdie.entropy.logistic import LIMIT, prior, tables
from birdie.errors import ArtifactError

Words = NDArray[np.uint32]

MAX_SIZE = 512  # symbols
_BINS = 32  # of scale, a quarter of an octave each, the middle one at the array's own mean
_FINE = 64  # bins of the prior as an input, an eighth of an octave
_COUNTERS, _INPUTS = 6, 8
_CONTEXTS = 4 * _BINS + 64 + 64
_OWN = 48  # nodes with mixer weights of their own; those after them share by depth
_SETS = 64  # of mixer weights
_CONFIDENCE = 3  # observations a seed is worth
_PATIENCE = 1000  # observations after which a counter moves no slower
_STEADY = 8  # what the row's own scale is weighed against, in symbols of the array's mean
_QUICK = 30  # rows after which the quicker column scale moves no slower
_RATE, _LEAST_RATE, _COOLING = 16, 8, 4000  # of the mixers: first, last, symbols per step between
_WEIGHTS = (4915, 4915, 4915, 4915, 4915, 4915, 21299, 14746)  # of the inputs at first, of 65,536


@dataclass(frozen=True, slots=True)
class Model:
    """What both sides must agree on before the first symbol.

    Attributes:
        size: symbols are 0 … size - 1, 2 ≤ size ≤ MAX_SIZE.
        zero: the symbol magnitudes are counted from.
        scale: 16 · log2 of the mean magnitude in 1/64 symbols, 0 … 383.
        kind: the prior (`logistic.GAUSSIAN`, …).
    """

    size: int
    zero: int
    scale: int
    kind: int


def encode(symbols: NDArray[np.uint16], model: Model) -> Words:
    """Code `symbols` (rows, columns), not empty."""
    # A decision costs at most 13 bits, a symbol at most size - 1 decisions; what does not fit is tried with more room.
    room = symbols.size // 2 + 64
    while True:
        words = np.zeros(room, np.uint32)
        used = _run(symbols, model, words, decoding=False)
        if used <= room:
            count = int(used)
            while count and words[count - 1] == 0:
                count -= 1
            return words[:count]
        room *= 4


def decode(words: Words, model: Model, out: NDArray[np.uint16]) -> None:
    """Undo `encode` into `out` (rows, columns).

    Raises:
        ArtifactError: the words are not those of this many symbols.
    """
    taken = _run(out, model, words, decoding=True)
    if words.size > taken or (words.size and words[-1] == 0):
        raise ArtifactError("a mixed chunk does not end where it should; the file is damaged")


def masses(model: Model) -> NDArray[np.int64]:
    """What the prior makes of each symbol: (size,), all positive, up to a common factor."""
    place = (np.arange(model.size) - model.zero) * 64
    inverse = int(tables().inverse[model.scale])
    low, high = (((place + side) * inverse >> 14) + 2048 for side in (-32, 32))
    cells = prior(model.kind)
    return cells[np.clip(high, 0, 4096)] - cells[np.clip(low, 0, 4096)] + 2


def _run(symbols: NDArray[np.uint16], model: Model, words: Words, *, decoding: bool) -> int:
    table, cells = tables(), prior(model.kind)
    nodes = np.empty((model.size - 1, 6), np.int32)
    _build(masses(model), nodes)
    counters = np.empty((_CONTEXTS, model.size - 1), np.uint32)
    expert = np.empty((_FINE, model.size - 1), np.int32)
    _seed(nodes, model.zero, model.scale, cells, table.inverse, table.stretch, counters, expert)
    weights = np.tile(np.array(_WEIGHTS, np.int32), 2 * _SETS)
    return int(
        _code(symbols, decoding, nodes, counters.ravel(), expert.ravel(), weights, words, model.zero, model.scale, *table)
    )


@njit(inline="always")
def _cell(place, inverse):  # type: ignore[no-untyped-def]
    return min(max((place * inverse >> 14) + 2048, 0), 4096)


@njit(nogil=True, cache=True, error_model="numpy")
def _build(masses, nodes):  # type: ignore[no-untyped-def]
    # Columns: lowest symbol, last of the left side, highest, depth, left child, right child (-1 - symbol for a leaf).
    size = masses.size
    sums = np.zeros(size + 1, np.int64)
    sums[1:] = np.cumsum(masses)
    nodes[0, 0], nodes[0, 2], nodes[0, 3] = 0, size - 1, 0
    filled = 1
    for node in range(size - 1):
        low, high = nodes[node, 0], nodes[node, 2]
        twice = sums[low] + sums[high + 1]
        first, last = low, high - 1  # where the left side may end
        while first < last:
            middle = (first + last) // 2
            if 2 * sums[middle + 1] < twice:
                first = middle + 1
            else:
                last = middle
        if first > low and twice - 2 * sums[first] < 2 * sums[first + 1] - twice:
            first -= 1
        nodes[node, 1] = first
        for side in range(2):
            start, stop = (low, first) if side == 0 else (first + 1, high)
            if start == stop:
                nodes[node, 4 + side] = -1 - start
            else:
                nodes[filled, 0], nodes[filled, 2], nodes[filled, 3] = start, stop, nodes[node, 3] + 1
                nodes[node, 4 + side] = filled
                filled += 1


@njit(nogil=True, cache=True, error_model="numpy")
def _seed(nodes, zero, scale, cells, inverses, stretch, counters, expert):  # type: ignore[no-untyped-def]
    top = nodes.shape[0]  # the highest symbol
    for fine in range(_FINE):
        inverse = inverses[min(max(scale + 2 * fine - 64, 0), 383)]
        for node in range(nodes.shape[0]):
            low, middle, high = np.int64(nodes[node, 0]), np.int64(nodes[node, 1]), np.int64(nodes[node, 2])
            left = cells[_cell((low - zero) * 64 - 32, inverse)] if low > 0 else 0
            split = cells[_cell((middle - zero) * 64 + 32, inverse)]
            right = cells[_cell((high - zero) * 64 + 32, inverse)] if high < top else cells[4096]
            odds = ((right - split) << 22) // (right - left) if right > left else 1 << 21
            odds = min(max(odds, 1 << 12), (1 << 22) - (1 << 12))
            expert[fine, node] = stretch[odds >> 10]
            if fine & 1 == 0:
                counter = np.uint32(odds << 10 | _CONFIDENCE)
                for kind in range(4):
                    counters[kind * _BINS + fine // 2, node] = counter
                if fine == _FINE // 2:
                    for context in range(4 * _BINS, _CONTEXTS):
                        counters[context, node] = counter


@njit(inline="always")
def _log2(value, log2):  # type: ignore[no-untyped-def]
    # 16 · log2 of a positive integer below 2**53: exponent and first eight bits of its float
    bits = np.float64(value).view(np.int64)
    return ((bits >> 52) - 1023) * 16 + log2[np.uint64((bits >> 44) & 255)]


@njit(inline="always")
def _bin(scale):  # type: ignore[no-untyped-def]
    return min(max((scale + 2) >> 2, 0), _BINS - 1)


@njit(nogil=True, cache=True, error_model="numpy")
def _code(  # type: ignore[no-untyped-def]
    symbols, decoding, nodes, counters, expert, weights, words, zero, scale, squash, stretch, log2, power, inverse, pace
):
    rows, columns = symbols.shape
    count = np.uint64(nodes.shape[0])
    splits, children = nodes[:, 1].copy(), nodes[:, 4:].copy()
    sets = np.empty(nodes.shape[0], np.uint64)
    for node in range(nodes.shape[0]):
        sets[node] = np.uint64((node if node < _OWN else min(_OWN + nodes[node, 3], _SETS - 1)) * _INPUTS)
    base = scale - 64  # the scale of bin 0
    mean = power[scale] + 1
    column = np.full(columns, mean, np.int64)
    quick = np.full(columns, mean, np.int64)
    place = np.empty(columns, np.int64)
    for j in range(columns):
        place[j] = j * 8 // columns * 8
    contexts, logits = np.zeros(_COUNTERS, np.uint64), np.zeros(_INPUTS, np.int32)
    overall, overall_log = mean, _log2(mean, log2)
    limit, least = np.uint32(_PATIENCE), np.uint32(1023)
    low, width, code, at = np.uint64(0), ~np.uint64(0), np.uint64(0), 0
    if decoding:
        for at in range(2):
            code = code << np.uint64(32) | (np.uint64(words[at]) if at < words.size else np.uint64(0))
        at = 2
    for i in range(rows):
        here, expected = np.int64(_STEADY * overall), np.int64(_STEADY * overall)
        slow, fast = pace[min(i + 2, 1023)], pace[min(i + 2, _QUICK)]
        rate = np.int32(max(_LEAST_RATE, _RATE - i * columns // _COOLING))
        last = before = np.int64(0)
        band = 4 * _BINS + 64 + i * 8 // rows
        for j in range(columns):
            above = abs(np.int64(symbols[i - 1, j]) - zero) if i > 0 else np.int64(0)
            row = _log2(here, log2) - _log2(expected, log2)
            product = _log2(column[j], log2) + row - base
            quicker = _log2(quick[j], log2) + row - base
            near = _log2((2 * abs(last) + abs(before) + 2 * above) * 13 + (mean >> 2) + 1, log2) - base
            bin_ = _bin(product)
            contexts[0] = np.uint64(bin_) * count
            contexts[1] = np.uint64(_BINS + _bin(row + overall_log - base)) * count
            contexts[2] = np.uint64(2 * _BINS + _bin(quicker)) * count
            contexts[3] = np.uint64(3 * _BINS + _bin((3 * product + near) >> 2)) * count
            contexts[4] = np.uint64(4 * _BINS + min(max(last, -31), 31) + 31) * count
            contexts[5] = np.uint64(band + place[j]) * count
            first = np.uint64(min(max((product + 1) >> 1, 0), _FINE - 1)) * count
            second = np.uint64(min(max((quicker + 1) >> 1, 0), _FINE - 1)) * count
            other = np.uint64((_SETS + bin_) * _INPUTS)
            symbol = np.int64(symbols[i, j])
            node = np.uint64(0)
            while True:
                for k in range(_COUNTERS):
                    logits[k] = stretch[counters[contexts[k] + node] >> np.uint32(20)]
                logits[6] = expert[first + node]
                logits[7] = expert[second + node]
                own = sets[node]
                one = two = np.int64(0)
                for k in range(_INPUTS):
                    one += np.int64(weights[own + np.uint64(k)]) * np.int64(logits[k])
                    two += np.int64(weights[other + np.uint64(k)]) * np.int64(logits[k])
                one, two = min(max(one >> 16, -LIMIT), LIMIT), min(max(two >> 16, -LIMIT), LIMIT)
                odds = np.uint64(squash[np.uint64(((one + two) >> 1) + 2048)])
                bound = (width >> np.uint64(16)) * odds
                if decoding:
                    bit = code < bound
                    if bit:
                        width = bound
                    else:
                        code -= bound
                        width -= bound
                    if width < np.uint64(1 << 32):
                        width <<= np.uint64(32)
                        code <<= np.uint64(32)
                        if at < words.size:
                            code |= np.uint64(words[at])
                        at += 1
                else:
                    bit = symbol > splits[node]
                    if bit:
                        width = bound
                    else:
                        carry = low
                        low += bound
                        width -= bound
                        if low < carry and at <= words.size:
                            back = at - 1
                            while words[back] == np.uint32(0xFFFFFFFF):
                                words[back] = np.uint32(0)
                                back -= 1
                            words[back] += np.uint32(1)
                    if width < np.uint64(1 << 32):
                        if at < words.size:
                            words[at] = np.uint32(low >> np.uint64(32))
                        at += 1
                        low <<= np.uint64(32)
                        width <<= np.uint64(32)
                goal = np.int32(65536 if bit else 0)
                miss = (goal - squash[np.uint64(one + 2048)]) * rate >> np.int32(4)
                other_miss = (goal - squash[np.uint64(two + 2048)]) * rate >> np.int32(4)
                for k in range(_INPUTS):
                    weights[own + np.uint64(k)] += (logits[k] * miss + np.int32(16384)) >> np.int32(15)
                    weights[other + np.uint64(k)] += (logits[k] * other_miss + np.int32(16384)) >> np.int32(15)
                target = np.int32(4194303 if bit else 0)
                for k in range(_COUNTERS):
                    counter = counters[contexts[k] + node]
                    seen = counter & least
                    odd = np.int32(counter >> np.uint32(10))
                    odd += np.int32(np.int64(target - odd) * pace[np.uint64(seen)] >> 16)
                    counters[contexts[k] + node] = np.uint32(odd) << np.uint32(10) | min(seen + np.uint32(1), limit)
                child = children[node, np.uint64(bit)]
                if child < 0:
                    break
                node = np.uint64(child)
            if decoding:
                symbol = np.int64(-1 - child)
                symbols[i, j] = symbol
            before, last = last, symbol - zero
            size = abs(last) * 64
            here += size
            expected += column[j]
            column[j] += (size + 1 - column[j]) * slow >> 16
            quick[j] += (size + 1 - quick[j]) * fast >> 16
            if i == 0:
                overall += (size + 1 - overall) * pace[min(j + 20, 1023)] >> 16
        if i > 0:
            overall = (7 * overall + (here - _STEADY * overall) // columns) // 8 + 1
        overall_log = _log2(overall, log2)
    if decoding:
        return at - 1
    # The one multiple of 2**32 within [low, low + width) that is nearest: a single word tells it.
    last_word = (low >> np.uint64(32)) + np.uint64((low & np.uint64(0xFFFFFFFF)) != np.uint64(0))
    if last_word >> np.uint64(32) and at <= words.size:
        back = at - 1
        while words[back] == np.uint32(0xFFFFFFFF):
            words[back] = np.uint32(0)
            back -= 1
        words[back] += np.uint32(1)
    if at < words.size:
        words[at] = np.uint32(last_word & np.uint64(0xFFFFFFFF))
    return at + 1
