"""Context mixing of one array: binary decisions, adaptive predictions, logistic mixing, a correction, a range coder.

A symbol is found by walking down a binary tree over the alphabet, balanced for a prior, so a symbol of H bits takes
little more than H decisions. For each decision, counters chosen by contexts and the prior itself give probabilities;
two mixers, one chosen by the node and one by the expected scale, weigh their logits; the mean of both is corrected by
what became of such odds before, and drives the range coder. What the contexts know is scale: that of the row so far, of
the column so far, their product, a quicker one of the column, the neighbours'. Counters that scale decides start
from the prior at that scale, so that small arrays have little to learn.

Logistic mixing, adaptive counters and the correction are those of Mahoney's PAQ; the contexts are made for weights.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from birdie.entropy.compiled import njit
from birdie.entropy.logistic import LIMIT, prior, tables
from birdie.entropy.trellis import machine
from birdie.errors import ArtifactError

Words = NDArray[np.uint32]

MAX_SIZE = 512  # symbols
MAX_STEADINESS = 12
_BINS = 16  # of scale, half an octave each, the middle one at the array's own mean
_FINE = 64  # bins of the prior as an input, an eighth of an octave
_COUNTERS, _INPUTS = 6, 8
_CONTEXTS = 4 * _BINS + 64 + 64
_OWN = 48  # nodes with mixer weights of their own; those after them share by depth
_SETS = 64  # of mixer weights, and of corrections
_CONFIDENCE, _PATIENCE = 3, 1000  # observations a counter's seed is worth, and after which it moves no slower
_TRUST, _MEMORY = 6, 250  # the same of a correction
_QUICK = 30  # rows after which the quicker column scale moves no slower
_RATE, _LEAST_RATE, _COOLING = 24, 8, 4000  # of the mixers: first, last, symbols per step between
_WEIGHTS = (4915, 4915, 4915, 4915, 4915, 4915, 21299, 14746)  # of the inputs at first, of 65,536


@dataclass(frozen=True, slots=True)
class Model:
    """What both sides must agree on before the first symbol.

    Attributes:
        size: symbols are 0 … size - 1, 2 ≤ size ≤ MAX_SIZE.
        zero: the symbol magnitudes are counted from.
        scale: 16 · log2 of the mean magnitude in 1/64 symbols, 0 … 383.
        kind: the prior (`logistic.GAUSSIAN`, …).
        rows, columns: log2 of the symbols of a row or column that tell as much about its scale as all others do.
        states: of the trellis whose paths run down the columns, minus so many of one along the rows, 1 for none. In
            odd states symbols stand for half a step more, and have counters of their own.
        parity: of the value of each symbol, 0 or 1, `size` of them; empty for none.
    """

    size: int
    zero: int
    scale: int
    kind: int
    rows: int
    columns: int
    states: int = 1
    parity: bytes = b""


def encode(symbols: NDArray[np.uint16], model: Model) -> Words:
    """Code `symbols` (rows, columns), not empty."""
    room = symbols.size // 2 + 64
    while True:
        words = np.zeros(room, np.uint32)
        used = _run(symbols, model, words, decoding=False)
        if used <= room:
            break
        room = used
    while used and words[used - 1] == 0:
        used -= 1
    return words[:used]


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
    return np.asarray(cells[np.clip(high, 0, 4096)] - cells[np.clip(low, 0, 4096)] + 2)


def _run(symbols: NDArray[np.uint16], model: Model, words: Words, *, decoding: bool) -> int:
    table, cells, count = tables(), prior(model.kind), model.size - 1
    looked_up = table.squash, table.stretch, table.log2, table.power, table.pace
    nodes = np.empty((count, 6), np.int32)
    _build(masses(model), nodes)
    paths = machine(model.states)
    kinds = 1 + int(paths.odd.any())
    counters, expert = np.empty((_CONTEXTS, kinds, count), np.uint32), np.empty((_FINE, kinds, count), np.int32)
    for odd in range(kinds):
        _seed(
            nodes, model.zero, model.scale, odd, cells, table.inverse, table.stretch, counters[:, odd], expert[:, odd]
        )
    weights = np.tile(np.array(_WEIGHTS, np.int32), 2 * _SETS)
    facts = np.array([model.zero, model.scale, 1 << model.rows, 1 << model.columns, kinds, paths.mask])
    learned = counters.reshape(-1), expert.reshape(-1), weights
    states = paths.odd, paths.following, np.frombuffer(model.parity or bytes(model.size), np.uint8)
    return int(_code(symbols, decoding, nodes, *states, *learned, words, facts, *looked_up))


@njit(inline="always")
def _cell(place, inverse):  # type: ignore[no-untyped-def]
    return min(max((place * inverse >> 14) + 2048, 0), 4096)


@njit(nogil=True, cache=True, error_model="numpy")
def _build(masses, nodes):  # type: ignore[no-untyped-def]
    # Columns: lowest symbol, last of the left side, highest, depth, left child, right child (-1 - symbol for a leaf).
    sums = np.zeros(masses.size + 1, np.int64)
    sums[1:] = np.cumsum(masses)
    nodes[0, 0], nodes[0, 2], nodes[0, 3] = 0, masses.size - 1, 0
    filled = 1
    for node in range(nodes.shape[0]):
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
def _seed(nodes, zero, scale, odd, cells, inverses, stretch, counters, expert):  # type: ignore[no-untyped-def]
    top = nodes.shape[0]  # the highest symbol
    under, over = 32 * odd - 32, 32 * odd + 32  # the sides of a symbol's cell, in 1/64 symbols
    for fine in range(_FINE):
        inverse = inverses[min(max(scale + 2 * fine - _FINE, 0), 383)]
        for node in range(nodes.shape[0]):
            low, middle, high = np.int64(nodes[node, 0]), np.int64(nodes[node, 1]), np.int64(nodes[node, 2])
            left = cells[_cell((low - zero) * 64 + under, inverse)] if low > 0 else 0
            split = cells[_cell((middle - zero) * 64 + over, inverse)]
            right = cells[_cell((high - zero) * 64 + over, inverse)] if high < top else cells[4096]
            odds = ((right - split) << 22) // (right - left) if right > left else 1 << 21
            odds = min(max(odds, 1 << 12), (1 << 22) - (1 << 12))
            expert[fine, node] = stretch[odds >> 10]
            if fine & 3 == 0:
                counter = np.uint32(odds << 10 | _CONFIDENCE)
                for kind in range(4):
                    counters[kind * _BINS + fine // 4, node] = counter
                if fine == _FINE // 2:
                    counters[4 * _BINS :, node] = counter


@njit(inline="always")
def _log2(value, log2):  # type: ignore[no-untyped-def]
    # 16 · log2 of a positive integer below 2**53: exponent and first eight bits of its float
    bits = np.float64(value).view(np.int64)
    return ((bits >> 52) - 1023) * 16 + log2[np.uint64((bits >> 44) & 255)]


@njit(inline="always")
def _scale(squares, log2):  # type: ignore[no-untyped-def]
    # Of a mean square in 1/64 symbols squared; 86 makes up for the units, and for mean squares being larger
    return (_log2(squares, log2) + 86) >> 1


@njit(inline="always")
def _between(value, least, most):  # type: ignore[no-untyped-def]
    return min(max(value, least), most)


@njit(inline="always")
def _carry(words, at):  # type: ignore[no-untyped-def]
    back = at - 1
    while words[back] == np.uint32(0xFFFFFFFF):
        words[back] = np.uint32(0)
        back -= 1
    words[back] += np.uint32(1)


@njit(nogil=True, cache=True, error_model="numpy")
def _code(  # type: ignore[no-untyped-def]
    symbols,
    decoding,
    nodes,
    odd,
    following,
    parity,
    counters,
    expert,
    weights,
    words,
    facts,
    squash,
    stretch,
    log2,
    power,
    pace,
):
    rows, columns = symbols.shape
    zero, scale, steady, even, kinds, path = facts
    count = np.uint64(nodes.shape[0])
    stride = count * np.uint64(kinds)
    splits, children = nodes[:, 1].copy(), nodes[:, 4:].copy()
    sets = np.empty(nodes.shape[0], np.uint64)
    for node in range(nodes.shape[0]):
        sets[node] = np.uint64(node if node < _OWN else min(_OWN + nodes[node, 3], _SETS - 1))
    outcomes = np.empty((_SETS, 33), np.uint32)
    for k in range(33):
        odds = squash[_between((k - 16) * 128, -LIMIT, LIMIT) + 2048]
        outcomes[:, k] = np.uint32(odds) << np.uint32(16) | np.uint32(_TRUST)
    base = scale - _FINE  # the scale of bin 0
    mean = power[scale] + 1  # magnitude
    most = 2 * (mean // 16 + 2)  # half symbols; what is larger says no more about scale
    level = usual = (mean * mean * 25 >> 10) + 1  # mean squares: of the columns, of the latest rows
    # A single row may be as long as a tensor, and teaches its columns nothing: they share one place.
    kept, mask = (columns, np.int64(-1)) if rows > 1 else (1, np.int64(0))
    column, quick = np.full(kept, level, np.int64), np.full(kept, level, np.int64)
    scales = np.full(kept, _scale(level, log2) - base, np.int64)
    quick_scales = scales.copy()
    place = np.empty(columns, np.uint8)
    for j in range(columns):
        place[j] = j * 8 // columns * 8 + 4 * _BINS + 64
    state, sizes = np.zeros(columns, np.uint8), np.zeros(columns, np.int64)  # magnitudes in half symbols
    contexts, logits = np.zeros(_COUNTERS, np.uint64), np.zeros(_INPUTS, np.int32)
    ones, latest = np.uint32(1023), np.uint32(0xFFFF)
    low, width, code = np.uint64(0), ~np.uint64(0), np.uint64(0)
    at = 0
    if decoding:
        for word in range(2):
            code = code << np.uint64(32) | (np.uint64(words[word]) if word < words.size else np.uint64(0))
        at = 2
    for i in range(rows):
        here, expected = steady * usual, steady * level
        usual_scale = _scale(usual, log2) - base
        rate = np.int32(max(_LEAST_RATE, _RATE - i * columns // _COOLING))
        last = before = np.int64(0)
        band = i * 8 // rows
        for j in range(columns):
            shift = np.int64(odd[state[j & path]])
            own_nodes = count * np.uint64(shift)
            row = (_log2(here, log2) - _log2(expected, log2)) >> 1
            alone = scales[j & mask]
            product, quicker = alone + row, quick_scales[j & mask] + row
            near = _log2(((2 * last + before + 2 * sizes[j]) * 13 >> 1) + (mean >> 2) + 1, log2) - base
            bin_ = _between((product + 4) >> 3, 0, _BINS - 1)
            contexts[0] = np.uint64(bin_) * stride + own_nodes
            contexts[1] = np.uint64(_BINS + _between((row + usual_scale + 4) >> 3, 0, _BINS - 1)) * stride + own_nodes
            contexts[2] = np.uint64(2 * _BINS + _between((quicker + 4) >> 3, 0, _BINS - 1)) * stride + own_nodes
            contexts[3] = (
                np.uint64(3 * _BINS + _between((3 * product + near + 16) >> 5, 0, _BINS - 1)) * stride + own_nodes
            )
            contexts[4] = np.uint64(4 * _BINS + _between((alone + 1) >> 1, 0, 63)) * stride + own_nodes
            contexts[5] = np.uint64(np.int64(place[j]) + band) * stride + own_nodes
            first = np.uint64(_between((product + 1) >> 1, 0, _FINE - 1)) * stride + own_nodes
            second = np.uint64(_between((quicker + 1) >> 1, 0, _FINE - 1)) * stride + own_nodes
            other = np.uint64((_SETS + bin_) * _INPUTS)
            symbol = np.int64(symbols[i, j])
            node = np.uint64(0)  # type: ignore[assignment]
            while True:
                for k in range(_COUNTERS):
                    logits[k] = stretch[counters[contexts[k] + node] >> np.uint32(20)]
                logits[6], logits[7] = expert[first + node], expert[second + node]
                kind = sets[node]
                own = kind * np.uint64(_INPUTS)
                one = two = np.int64(0)
                for k in range(_INPUTS):
                    one += np.int64(weights[own + np.uint64(k)]) * np.int64(logits[k])
                    two += np.int64(weights[other + np.uint64(k)]) * np.int64(logits[k])
                one, two = _between(one >> 16, -LIMIT, LIMIT), _between(two >> 16, -LIMIT, LIMIT)
                logit = ((one + two) >> 1) + 2048
                slot, part = logit >> 7, logit & 127
                under = np.int64(outcomes[kind, np.uint64(slot)] >> np.uint32(16))
                over = np.int64(outcomes[kind, np.uint64(slot + 1)] >> np.uint32(16))
                odds = 3 * squash[np.uint64(logit)] + ((under * (128 - part) + over * part) >> 7)
                bound = (width >> np.uint64(16)) * np.uint64(_between(odds >> 2, 8, 65528))
                if decoding:
                    bit = code < bound
                    if not bit:
                        code -= bound
                else:
                    bit = symbol > splits[node]
                    if not bit:
                        low += bound
                        if low < bound and at <= words.size:
                            _carry(words, at)
                width = bound if bit else width - bound
                if width < np.uint64(1 << 32):
                    width <<= np.uint64(32)
                    if decoding:
                        code = code << np.uint64(32) | (np.uint64(words[at]) if at < words.size else np.uint64(0))
                    else:
                        if at < words.size:
                            words[at] = np.uint32(low >> np.uint64(32))
                        low <<= np.uint64(32)
                    at += 1
                goal = np.int32(65536 if bit else 0)
                miss = (goal - squash[np.uint64(one + 2048)]) * rate >> np.int32(4)
                other_miss = (goal - squash[np.uint64(two + 2048)]) * rate >> np.int32(4)
                for k in range(_INPUTS):
                    weights[own + np.uint64(k)] += (logits[k] * miss + np.int32(16384)) >> np.int32(15)
                    weights[other + np.uint64(k)] += (logits[k] * other_miss + np.int32(16384)) >> np.int32(15)
                nearest = np.uint64(slot + (part >> 6))
                outcome = outcomes[kind, nearest]
                seen, odds = outcome & latest, np.int64(outcome >> np.uint32(16))
                odds += ((65535 if bit else 0) - odds) * pace[np.uint64(seen)] >> 16
                outcomes[kind, nearest] = np.uint32(odds) << np.uint32(16) | min(
                    seen + np.uint32(1), np.uint32(_MEMORY)
                )
                target = np.int64(4194303 if bit else 0)
                for k in range(_COUNTERS):
                    counter = counters[contexts[k] + node]
                    seen, odds = counter & ones, np.int64(counter >> np.uint32(10))
                    odds += (target - odds) * pace[np.uint64(seen)] >> 16
                    counters[contexts[k] + node] = np.uint32(odds) << np.uint32(10) | min(
                        seen + np.uint32(1), np.uint32(_PATIENCE)
                    )
                child = children[node, np.uint64(bit)]
                if child < 0:
                    break
                node = np.uint64(child)  # type: ignore[assignment]
            if decoding:
                symbol = np.int64(-1 - child)
                symbols[i, j] = symbol
            before, last = last, abs(2 * (symbol - zero) + shift)
            sizes[j] = last
            state[j & path] = following[state[j & path], parity[symbol]]
            size = min(last, most)
            here += size * size * 16
            expected += column[j & mask]
        if i == rows - 1:
            break
        # Columns learn from the row as it would be at the usual scale, as far as it tells its own.
        share = ((expected + 64) << 16) // (here + 64)
        slow, fast = pace[min(i + even, 1023)], pace[min(i + even, max(_QUICK, even), 1023)]
        usual = max((7 * usual + (here - steady * usual) // columns) // 8 if i else here // (columns + steady), 0) + 1
        level = np.int64(0)
        for j in range(columns):
            size = min(sizes[j], most)
            size = (size * size * 16 * share >> 16) + 1
            column[j] += (size - column[j]) * slow >> 16
            quick[j] += (size - quick[j]) * fast >> 16
            level += column[j]
            scales[j], quick_scales[j] = _scale(column[j], log2) - base, _scale(quick[j], log2) - base
        level = level // columns + 1
    if decoding:
        return at - 1
    # The next multiple of 2**32 lies within [low, low + width): one word tells it, the zeros after it are understood.
    whole = (low + np.uint64(0xFFFFFFFF)) >> np.uint64(32)
    if low + np.uint64(0xFFFFFFFF) < low:
        if at <= words.size:
            _carry(words, at)
        whole = np.uint64(0)
    if at < words.size:
        words[at] = np.uint32(whole)
    return at + 1
