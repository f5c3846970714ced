"""Context mixing of one chunk of symbols: the probability model of PAQ, with contexts made for weights.

A symbol is binarized: it is reached by walking down a binary tree over the alphabet, one decision (a bit) per node. The
tree is balanced for a prior, so a symbol of H bits takes little more than H decisions. This happens at each decision:

    local scale of the symbol ─► contexts
                                    │
        6 counters, one per context ┤ stretch      ┌► mixer, weight set by tree node ┐ mean
        2 priors of the local scale ┴─────► logits ┤                                 ├────► APM ─► probability of a 1
                                                   └► mixer, weight set by scale ────┘                     │
    bit ◄───────────────────────────────────────────────────────────────────────────── arithmetic coder ◄──┘
     └─► trains both mixers, the APM and the counters

Given their local scale, weights are nearly independent of each other. So the contexts describe scale: that of the row
so far, of the column so far, their product, a fast-adapting one of the column, and that of the neighbors.

Counters, mixers and the arithmetic coder are those of `birdie.entropy.binary`. The APM (adaptive probability map; also
SSE, secondary symbol estimation) is that of PAQ. All arithmetic is integer; docs/coders.md defines every bit.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from birdie.entropy import binary
from birdie.entropy.mixing_tables import CDF_BUCKETS, LIMIT, SCALES, prior_cdf, tables
from birdie.entropy.trellis_states import machine
from birdie.errors import ArtifactError
from birdie.system.kernels import inlined, njit

Words = binary.Words

MAX_SIZE = 512  # symbols
MAX_LOG_PSEUDO_COUNT = 12

# Contexts. A scale falls into one of 16 coarse buckets (half an octave each) to choose a counter, and into one of 64
# fine buckets (an eighth of an octave) to choose a prior. The middle bucket holds the mean scale of the array.
_COARSE, _FINE = 16, 64
_COLUMN_CONTEXT = 4 * _COARSE  # four sets of coarse buckets come first, then fine buckets of the column's scale,
_REGION_CONTEXT = _COLUMN_CONTEXT + _FINE  # then the regions of the chunk, 8 × 8
_CONTEXTS = _REGION_CONTEXT + 64

# Entries of the APM: a probability, and below it a count of observations.
_APM_BUCKETS, _APM_CONFIDENCE, _APM_LIMIT = 33, 6, 250  # limit: observations after which the entry moves no slower
_FAST_LIMIT = 30  # the same in rows, of the fast-adapting scale of a column

# Mixers.
_COUNTERS, _INPUTS = 6, binary.INPUTS
_NODE_SETS = 48  # nodes with a weight set of their own; the nodes after them share one set per depth
_SETS = 64  # weight sets of a mixer, and APMs
_FIRST_RATE, _LAST_RATE, _COOLING = 24, 8, 4000  # learning rate, which falls by 1 every 4,000 symbols
_FIRST_WEIGHTS = (4915, 4915, 4915, 4915, 4915, 4915, 21299, 14746)  # in 1/65,536: at first the priors know most


@dataclass(frozen=True, slots=True)
class Model:
    """Parameters that encoder and decoder share.

    A row starts at the scale of the other rows, and that prior knowledge counts as much as a number of symbols of its
    own: the pseudo-count. Columns likewise.
    """

    size: int  # symbols are 0 … size - 1, 2 ≤ size ≤ MAX_SIZE
    zero: int  # the symbol magnitudes are counted from
    scale: int  # 16 · log2 of the mean magnitude in 1/64 symbols, 0 … 383
    prior: int  # the distribution of symbols of a known scale (`mixing_tables.GAUSSIAN`, …)
    # row_log_pseudo_count, column_log_pseudo_count: log2 of the pseudo-counts, 0 … MAX_LOG_PSEUDO_COUNT
    row_log_pseudo_count: int
    column_log_pseudo_count: int
    # states of the trellis whose paths run down the columns, minus so many of one along the rows, 1 for none. In odd
    # states symbols stand for half a step more, and have counters of their own
    states: int = 1
    parity: bytes = b""  # 0 or 1 for each symbol, the parity of its value; empty for none


def encode(symbols: NDArray[np.uint16], model: Model) -> Words:
    """Code `symbols` (rows, columns), not empty."""
    return binary.coded(
        lambda words: _code(symbols, *_initial_state(model, *symbols.shape), *_inputs(), words, False),
        symbols.size // 2 + 64,
    )


def decode(words: Words, model: Model, out: NDArray[np.uint16]) -> None:
    """Undo `encode` into `out` (rows, columns)."""
    length = _code(out, *_initial_state(model, *out.shape), *_inputs(), words, True)
    if words.size > length or (words.size and words[-1] == 0):
        raise ArtifactError("a chunk of a mixed stream ends too late or with a zero word; the file is damaged")


def masses(model: Model) -> NDArray[np.int64]:
    """Probability of each symbol under the prior, up to a common factor: (size,), all positive."""
    edges = 64 * np.arange(-model.zero, model.size + 1 - model.zero) - 32
    buckets = (edges * int(tables().inverse[model.scale]) >> 14) + CDF_BUCKETS // 2
    return np.asarray(np.diff(prior_cdf(model.prior)[np.clip(buckets, 0, CDF_BUCKETS)]) + 2)


# The state of a chunk ------------------------------------------------------------------------------------------------


class Tree(NamedTuple):
    """Binarization of the symbols; nodes are numbered breadth first."""

    split: NDArray[np.int32]  # (nodes,) the last symbol of the left side: the bit is 1 for symbols above it
    children: NDArray[np.int32]  # (2 · nodes,) at 2 · node + bit the next node, or -1 - symbol
    sets: NDArray[np.uint64]  # (nodes,) the weight set of the first mixer, and the APM


class Predictor(NamedTuple):
    """Everything that learns from each bit, and the tables it needs."""

    # (contexts · trellis parities · nodes,) a probability of 22 bits over a count of 10 bits
    counters: NDArray[np.uint32]
    # (fine buckets · trellis parities · nodes,) logit of a 1 under the prior at that scale; never changes
    priors: NDArray[np.int32]
    weights: NDArray[np.int32]  # (2 · _SETS · _INPUTS,) of both mixers, in 1/65,536
    apm: NDArray[np.uint32]  # (_SETS, _APM_BUCKETS) a probability of 16 bits over a count of 16 bits
    # squash, stretch, adaptation: those of `mixing_tables.Tables`
    squash: NDArray[np.int32]
    stretch: NDArray[np.int32]
    adaptation: NDArray[np.int64]


class Scales(NamedTuple):
    """Local scales, which learn from each row. An energy is a mean square, in 1/64 of a squared symbol."""

    # slow, fast: (columns,) energy of each column; the second adapts faster
    slow: NDArray[np.int64]
    fast: NDArray[np.int64]
    # slow_scale, fast_scale: (columns,) the same as scales, counted from `base`
    slow_scale: NDArray[np.int64]
    fast_scale: NDArray[np.int64]
    magnitudes: NDArray[np.int64]  # (columns,) of the latest symbol of each column, in half symbols
    region: NDArray[np.uint8]  # (columns,) the first context of the regions that the column crosses
    log2: NDArray[np.int64]  # that of `mixing_tables.Tables`
    base: int  # the scale of fine bucket 0
    mean: int  # the mean magnitude of the model, in 1/64 symbols
    cap: int  # magnitude in half symbols above which a symbol tells no more about scale
    zero: int  # the symbol magnitudes are counted from
    # row_pseudo_count, column_pseudo_count: see `Model`
    row_pseudo_count: int
    column_pseudo_count: int
    mask: int  # column j has entry j & mask of slow, fast and their scales
    nodes: int  # nodes of the tree
    stride: int  # counters of one context


class Paths(NamedTuple):
    """Paths through a trellis, which say for each symbol whether its state is odd."""

    # odd, next_state, mask: those of `trellis.Machine`
    odd: NDArray[np.uint8]
    next_state: NDArray[np.uint8]
    mask: int
    parity: NDArray[np.uint8]  # (size,) parity of the value of each symbol
    state: NDArray[np.uint8]  # (columns,) the state of each path


def _initial_state(model: Model, rows: int, columns: int) -> tuple[Tree, Predictor, Scales, Paths]:
    """Return what a chunk of (rows, columns) symbols starts from."""
    table, cdf, count = tables(), prior_cdf(model.prior), model.size - 1
    nodes, sets = np.empty((count, 6), np.int32), np.empty(count, np.uint64)
    _grow_tree(np.concatenate([[0], np.cumsum(masses(model))]), nodes, sets)
    tree = Tree(nodes[:, 1].copy(), nodes[:, 4:].reshape(-1), sets)
    trellis = machine(model.states)
    parities = 1 + int(trellis.odd.any())
    counters = np.empty((_CONTEXTS, parities, count), np.uint32)
    priors = np.empty((_FINE, parities, count), np.int32)
    for odd in range(parities):
        _seed(nodes, model.zero, model.scale, odd, cdf, table.inverse, table.stretch, counters, priors)
    weights, apm = _initial_weights()
    learned = counters.reshape(-1), priors.reshape(-1), weights.copy(), apm.copy()
    predictor = Predictor(*learned, table.squash, table.stretch, table.adaptation)
    # A chunk of a single row may be as long as a tensor, and its columns never learn: they share one entry.
    entries, mask = (columns, -1) if rows > 1 else (1, 0)
    mean = int(table.power[model.scale]) + 1
    energy = (mean * mean * 25 >> 10) + 1  # π/2 · mean² of a Gaussian, from (1/64)² to 1/64
    slow, fast = np.full(entries, energy), np.full(entries, energy)
    slow_scale, fast_scale = np.empty(entries, np.int64), np.empty(entries, np.int64)
    magnitudes = np.zeros(columns, np.int64)
    region = (_REGION_CONTEXT + 8 * (8 * np.arange(columns) // columns)).astype(np.uint8)
    base, cap, stride = model.scale - _FINE, 2 * (mean // 16 + 2), count * parities
    pseudo_counts = 1 << model.row_log_pseudo_count, 1 << model.column_log_pseudo_count
    arrays = slow, fast, slow_scale, fast_scale, magnitudes, region, table.log2
    scales = Scales(*arrays, base, mean, cap, model.zero, *pseudo_counts, mask, count, stride)
    parity = np.frombuffer(model.parity or bytes(model.size), np.uint8)
    return tree, predictor, scales, Paths(*trellis, parity, np.zeros(columns, np.uint8))


def _inputs() -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """Return memory for the contexts and the logits of a symbol."""
    return np.zeros(_INPUTS, np.uint64), np.zeros(_INPUTS, np.int32)


@cache
def _initial_weights() -> tuple[NDArray[np.int32], NDArray[np.uint32]]:
    """Return the weights of both mixers and the entries of all APMs, which at first change nothing."""
    logits = np.clip(128 * np.arange(-16, 17), -LIMIT, LIMIT)
    entries = tables().squash[logits + 2048].astype(np.uint32) << np.uint32(16) | np.uint32(_APM_CONFIDENCE)
    return np.tile(np.array(_FIRST_WEIGHTS, np.int32), 2 * _SETS), np.tile(entries, (_SETS, 1))


@njit(nogil=True, cache=True, error_model="numpy", _nrt=False)
def _grow_tree(sums, nodes, sets):  # type: ignore[no-untyped-def]
    """Split the alphabet into halves of about equal mass, again and again; `sums` are those of the masses before.

    Columns of `nodes`: lowest symbol, last of the left side, highest, depth, left child, right child.
    """
    nodes[0, 0], nodes[0, 2], nodes[0, 3] = 0, sums.size - 2, 0
    filled = 1
    for node in range(nodes.shape[0]):
        low, high = nodes[node, 0], nodes[node, 2]
        twice = sums[low] + sums[high + 1]
        first, last = low, high - 1  # bisect for the first split whose left side has at least half of the mass
        while first < last:
            middle = (first + last) // 2
            if 2 * sums[middle + 1] < twice:
                first = middle + 1
            else:
                last = middle
        if first > low and twice - 2 * sums[first] < 2 * sums[first + 1] - twice:
            first -= 1  # the split before it is nearer to the half
        nodes[node, 1] = first
        sets[node] = np.uint64(node if node < _NODE_SETS else min(_NODE_SETS + nodes[node, 3], _SETS - 1))
        for side in range(2):
            start, stop = (low, first) if side == 0 else (first + 1, high)
            if start == stop:
                nodes[node, 4 + side] = -1 - start
            else:
                nodes[filled, 0], nodes[filled, 2], nodes[filled, 3] = start, stop, nodes[node, 3] + 1
                nodes[node, 4 + side] = filled
                filled += 1


@inlined
def _cdf_bucket(position, inverse):  # type: ignore[no-untyped-def]
    """Bucket of a position, in 1/64 symbols from zero, for a prior whose mean magnitude has this inverse."""
    return binary.clip((position * inverse >> 14) + CDF_BUCKETS // 2, 0, CDF_BUCKETS)


@njit(nogil=True, cache=True, error_model="numpy", _nrt=False)
def _seed(nodes, zero, scale, odd, cdf, inverses, stretch, counters, priors):  # type: ignore[no-untyped-def]
    """Start every counter at the probability that the prior gives at the scale of its context.

    So the first symbols already cost about their entropy, and small arrays have little to learn. A counter that starts
    at 1/2 would have to see dozens of symbols in each context first, at a bit per decision.
    """
    top = nodes.shape[0]  # the highest symbol
    lower, upper = 32 * odd - 32, 32 * odd + 32  # the bounds of a symbol, in 1/64 symbols from its middle
    for fine in range(_FINE):
        inverse = inverses[binary.clip(scale + 2 * fine - _FINE, 0, SCALES - 1)]
        for node in range(nodes.shape[0]):
            low, middle, high = np.int64(nodes[node, 0]), np.int64(nodes[node, 1]), np.int64(nodes[node, 2])
            left = cdf[_cdf_bucket((low - zero) * 64 + lower, inverse)] if low > 0 else 0
            split = cdf[_cdf_bucket((middle - zero) * 64 + upper, inverse)]
            right = cdf[_cdf_bucket((high - zero) * 64 + upper, inverse)] if high < top else cdf[CDF_BUCKETS]
            probability = ((right - split) << 22) // (right - left) if right > left else 1 << 21
            probability = binary.clip(probability, 1 << 12, (1 << 22) - (1 << 12))
            priors[fine, odd, node] = stretch[probability >> 10]
            if fine & 3 == 0:
                counter = np.uint32(probability << binary.COUNT_BITS | binary.COUNTER_CONFIDENCE)
                for coarse in range(fine // 4, _COLUMN_CONTEXT, _COARSE):
                    counters[coarse, odd, node] = counter
                if fine == _FINE // 2:  # contexts that say nothing about scale start at the mean scale
                    for context in range(_COLUMN_CONTEXT, _CONTEXTS):
                        counters[context, odd, node] = counter


# Scales and contexts -------------------------------------------------------------------------------------------------


@inlined
def _scale(energy, log2):  # type: ignore[no-untyped-def]
    """Scale of an energy: half its logarithm, from 1/64 to (1/64)² (+96), from mean square to mean magnitude (-10)."""
    return (binary.log2(energy, log2) + 86) >> 1


@inlined
def _energy(magnitude, cap):  # type: ignore[no-untyped-def]
    """Square of a magnitude in half symbols, in 1/64 of a squared symbol; without the cap outliers would rule."""
    capped = min(magnitude, cap)
    return 16 * capped * capped


@inlined
def _learning_rate(symbols):  # type: ignore[no-untyped-def]
    """Learning rate of the mixers after so many symbols.

    Large steps find good weights soon; later they would only let the weights jitter, so they become small.
    """
    return np.int32(max(_LAST_RATE, _FIRST_RATE - symbols // _COOLING))


@inlined
def _set_contexts(start, scales, column, band, row_sum, expected_sum, row_scale, left, left2, odd):  # type: ignore[no-untyped-def]
    """Fill `start` (_INPUTS,) with the index of node 0 in the counters and priors of a symbol.

    Args:
        row_sum, expected_sum: sums over the row so far, of its symbols and of the energies of their columns.
        left, left2: magnitudes of the two symbols before, in half symbols.

    Returns:
        the weight set of the second mixer.
    """
    stride, first = np.uint64(scales.stride), np.uint64(odd) * np.uint64(scales.nodes)
    # How the row differs from what its columns would lead to expect, as a difference of scales.
    row = (binary.log2(row_sum, scales.log2) - binary.log2(expected_sum, scales.log2)) >> 1
    slow = scales.slow_scale[column & scales.mask]
    product, fast = slow + row, scales.fast_scale[column & scales.mask] + row
    # Five magnitudes of half a symbol make a mean in 1/64 symbols times 6.4; some of the overall mean steadies it.
    neighbors = ((2 * left + left2 + 2 * scales.magnitudes[column]) * 13 >> 1) + (scales.mean >> 2) + 1
    near = binary.log2(neighbors, scales.log2) - scales.base
    coarse = binary.clip((product + 4) >> 3, 0, _COARSE - 1)
    start[0] = np.uint64(coarse) * stride + first
    # The row alone; the column that adapts faster; three parts product to one part neighbors; the column alone; the
    # region of the chunk, for what the scales do not describe; then the two scales that the priors stand for.
    start[1] = np.uint64(_COARSE + binary.clip((row + row_scale + 4) >> 3, 0, _COARSE - 1)) * stride + first
    start[2] = np.uint64(2 * _COARSE + binary.clip((fast + 4) >> 3, 0, _COARSE - 1)) * stride + first
    start[3] = np.uint64(3 * _COARSE + binary.clip((3 * product + near + 16) >> 5, 0, _COARSE - 1)) * stride + first
    start[4] = np.uint64(_COLUMN_CONTEXT + binary.clip((slow + 1) >> 1, 0, _FINE - 1)) * stride + first
    start[5] = np.uint64(scales.region[column] + band) * stride + first
    start[6] = np.uint64(binary.clip((product + 1) >> 1, 0, _FINE - 1)) * stride + first
    start[7] = np.uint64(binary.clip((fast + 1) >> 1, 0, _FINE - 1)) * stride + first
    return np.uint64(_SETS + coarse)


@njit(no_cpython_wrapper=True, error_model="numpy", _nrt=False)
def _learn_row(scales, adaptation, row, row_sum, expected_sum, row_level):  # type: ignore[no-untyped-def]
    """Let the columns learn from a complete row; return the energies of recent rows and of all columns.

    A row of large values says little about its columns, so its energies are first normalized to the usual level. The
    pseudo-count of a row is in `row_sum` and `expected_sum` from the start of the row; that of a column is the number
    of observations that its running mean starts with.
    """
    columns, pseudo = scales.magnitudes.size, scales.row_pseudo_count
    normalize = ((expected_sum + 64) << 16) // (row_sum + 64)
    if row:
        row_level = max((7 * row_level + (row_sum - pseudo * row_level) // columns) // 8, 0) + 1
    else:
        row_level = row_sum // (columns + pseudo) + 1
    count = row + scales.column_pseudo_count
    slow = adaptation[min(count, 1023)]
    fast = adaptation[min(count, max(_FAST_LIMIT, scales.column_pseudo_count), 1023)]
    total = np.int64(0)
    for column in range(columns):
        energy = (_energy(scales.magnitudes[column], scales.cap) * normalize >> 16) + 1
        scales.slow[column] += (energy - scales.slow[column]) * slow >> 16
        scales.fast[column] += (energy - scales.fast[column]) * fast >> 16
        total += scales.slow[column]
        scales.slow_scale[column] = _scale(scales.slow[column], scales.log2) - scales.base
        scales.fast_scale[column] = _scale(scales.fast[column], scales.log2) - scales.base
    return row_level, total // columns + 1


# Prediction of a bit -------------------------------------------------------------------------------------------------


@njit(inline="always")
def _refine(apm, node_set, logit):  # type: ignore[no-untyped-def]
    """Probability, in 1/65,536, that bits of such a node and such a logit (+ 2,048) had: between two APM entries."""
    bucket, part = logit >> 7, logit & 127
    below = np.int64(apm[node_set, np.uint64(bucket)] >> np.uint32(16))
    above = np.int64(apm[node_set, np.uint64(bucket + 1)] >> np.uint32(16))
    return (below * (128 - part) + above * part) >> 7


@njit(inline="always")
def _update_apm(apm, node_set, logit, bit, adaptation):  # type: ignore[no-untyped-def]
    """Move the entry nearest to the logit (+ 2,048) towards the bit."""
    bucket = np.uint64((logit + 64) >> 7)
    entry = apm[node_set, bucket]
    count, probability = entry & np.uint32(0xFFFF), np.int64(entry >> np.uint32(16))
    probability += (np.int64(65535 if bit else 0) - probability) * adaptation[np.uint64(count)] >> 16
    apm[node_set, bucket] = np.uint32(probability) << np.uint32(16) | min(count + np.uint32(1), np.uint32(_APM_LIMIT))


@njit(inline="always")
def _predict(predictor, start, logits, node, node_set, scale_set):  # type: ignore[no-untyped-def]
    """Predict the bit at a node; fill `logits` (_INPUTS,).

    There are two mixers because two things decide which inputs to trust: which decision it is (the sign is learned from
    other contexts than a far tail) and how large the scale is. Their mean in the logistic domain needs no weights.

    The mixers are over- or underconfident where the inputs are, which the APM corrects: it knows how often a 1 really
    came at such a logit. It counts a quarter, because it is coarse and learns slowly.

    Returns:
        the probability of a 1 in 1/65,536, the logits of both mixers, and the logit (+ 2,048) that the APM took.
    """
    for k in range(_COUNTERS):
        logits[k] = predictor.stretch[predictor.counters[start[k] + node] >> np.uint32(20)]
    for k in range(_COUNTERS, _INPUTS):
        logits[k] = predictor.priors[start[k] + node]
    by_node = binary.mix(predictor.weights, node_set, logits)
    by_scale = binary.mix(predictor.weights, scale_set, logits)
    mean = ((by_node + by_scale) >> 1) + 2048
    probability = (3 * predictor.squash[np.uint64(mean)] + _refine(predictor.apm, node_set, mean)) >> 2
    return np.uint64(binary.clip(probability, 8, 65528)), by_node, by_scale, mean


@njit(inline="always")
def _learn_bit(predictor, start, logits, node, node_set, scale_set, by_node, by_scale, mean, rate, bit):  # type: ignore[no-untyped-def]
    """Train everything that took part in a prediction. Each mixer learns from its own error, not from their mean's."""
    target = np.int32(65536 if bit else 0)
    error = (target - predictor.squash[np.uint64(by_node + 2048)]) * rate >> np.int32(4)
    binary.train(predictor.weights, node_set, logits, error)
    error = (target - predictor.squash[np.uint64(by_scale + 2048)]) * rate >> np.int32(4)
    binary.train(predictor.weights, scale_set, logits, error)
    _update_apm(predictor.apm, node_set, mean, bit, predictor.adaptation)
    for k in range(_COUNTERS):
        binary.update_counter(predictor.counters, start[k] + node, bit, predictor.adaptation)


# The loop over the symbols of a chunk ---------------------------------------------------------------------------------


@njit(nogil=True, cache=True, error_model="numpy", _nrt=False)
def _code(symbols, tree, predictor, scales, paths, start, logits, words, decoding):  # type: ignore[no-untyped-def]
    """Code `symbols` (rows, columns) to `words`, or decode them: one kernel, which takes a third less to compile.

    Returns:
        how many words the encoder needs, which may be more than there are, or that it may have written at most.
    """
    rows, columns = symbols.shape
    # The low end of the interval; in the decoder the code, counted from there.
    low, width, position = np.uint64(0), ~np.uint64(0), 0
    if decoding:
        low, position = binary.word(words, 0) << np.uint64(32) | binary.word(words, 1), 2
    row_level = column_level = scales.slow[0]
    for j in range(scales.slow.size):
        scales.slow_scale[j] = scales.fast_scale[j] = _scale(scales.slow[0], scales.log2) - scales.base
    for i in range(rows):
        row_sum, expected_sum = scales.row_pseudo_count * row_level, scales.row_pseudo_count * column_level
        row_scale, band = _scale(row_level, scales.log2) - scales.base, 8 * i // rows
        rate = _learning_rate(i * columns)
        left = left2 = np.int64(0)
        for j in range(columns):
            path = np.uint64(j & paths.mask)
            state = paths.state[path]
            odd = np.int64(paths.odd[state])
            scale_set = _set_contexts(start, scales, j, band, row_sum, expected_sum, row_scale, left, left2, odd)
            symbol = np.int64(0 if decoding else symbols[i, j])
            node = np.uint64(0)
            while True:
                node_set = tree.sets[node]
                probability, by_node, by_scale, mean = _predict(predictor, start, logits, node, node_set, scale_set)
                if decoding:
                    bit, low, width = binary.decode_bit(low, width, probability)
                else:
                    bit, low_before = symbol > tree.split[node], low
                    low, width = binary.encode_bit(low, width, bit, probability)
                    if low < low_before and position <= words.size:
                        binary.carry(words, position)
                if width < np.uint64(binary.RENORMALIZE):
                    low, width = binary.shift(low, words, position, decoding), width << np.uint64(32)
                    position += 1
                _learn_bit(predictor, start, logits, node, node_set, scale_set, by_node, by_scale, mean, rate, bit)
                child = tree.children[node + node + np.uint64(bit)]
                if child < 0:
                    break
                node = np.uint64(child)
            if decoding:
                symbol = np.int64(-1 - child)
                symbols[i, j] = symbol
            left2, left = left, abs(2 * (symbol - scales.zero) + odd)
            scales.magnitudes[j] = left
            paths.state[path] = paths.next_state[state, paths.parity[np.uint64(symbol)]]
            row_sum += _energy(left, scales.cap)
            expected_sum += scales.slow[j & scales.mask]
        if i < rows - 1:
            row_level, column_level = _learn_row(scales, predictor.adaptation, i, row_sum, expected_sum, row_level)
    return position - 1 if decoding else binary.finish(low, words, position)
