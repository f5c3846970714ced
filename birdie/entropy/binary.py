"""Binary decisions: their adaptive probabilities, mixed, and the arithmetic coder.

    counters ─► logits ─► mixers ─► probability of a 1 ─► arithmetic coder ─► words

`context_mixing` and `differences` choose what to decide and the contexts. Counters and logistic mixing are those of
PAQ: M. Mahoney, "Adaptive weighing of context models for lossless data compression", Florida Tech CS-2005-16. The
arithmetic coder is a range coder (G. N. N. Martin, 1979): the code of a chunk is a number in an interval [low, low +
width), which every bit narrows. All arithmetic is integer; docs/coders.md defines every bit.

Indices of inner loops are unsigned, which saves the test for negative ones. A step that branches on every bit takes no
array: reference counts would cost 5 % of the time.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from birdie.entropy.mixing_tables import LIMIT
from birdie.system.kernels import inlined, njit

Words = NDArray[np.uint32]

# Counters: a probability of 22 bits, and below it a count of observations.
COUNT_BITS, COUNTER_CONFIDENCE, _COUNTER_LIMIT = 10, 3, 1000  # confidence: observations that the first value is worth
INPUTS = 8  # of a mixer
RENORMALIZE = 1 << 32  # width below which a word is shifted out; a bound then has 16 significant bits at least


def coded(code: Callable[[Words], int], capacity: int) -> Words:
    """Return the words that `code` writes to the array that it is given; it returns how many it needs."""
    while True:
        words = np.zeros(capacity, np.uint32)
        length = int(code(words))
        if length <= capacity:
            break
        capacity = length
    while length and words[length - 1] == 0:  # words beyond the last are read as 0
        length -= 1
    return words[:length].copy()


@inlined
def clip(value, least, most):  # type: ignore[no-untyped-def]
    return min(max(value, least), most)


@inlined
def log2(value, table):  # type: ignore[no-untyped-def]
    """16 · log2 of a positive integer below 2**53, from the exponent and the first 8 bits of its float64."""
    bits = np.float64(value).view(np.int64)
    return ((bits >> 52) - 1023) * 16 + table[np.uint64((bits >> 44) & 255)]


@njit(inline="always")
def mix(weights, weight_set, logits):  # type: ignore[no-untyped-def]
    """Dot product of a weight set and the inputs: a logit."""
    first, total = weight_set * np.uint64(INPUTS), np.int64(0)
    for k in range(INPUTS):
        total += np.int64(weights[first + np.uint64(k)]) * np.int64(logits[k])
    return clip(total >> 16, -LIMIT, LIMIT)


@njit(inline="always")
def train(weights, weight_set, logits, error):  # type: ignore[no-untyped-def]
    """Take one step of gradient descent on the coding cost: its gradient for weight k is -error · logit k."""
    first = weight_set * np.uint64(INPUTS)
    for k in range(INPUTS):
        weights[first + np.uint64(k)] += (logits[k] * error + np.int32(16384)) >> np.int32(15)


@njit(inline="always")
def update_counter(counters, index, bit, adaptation):  # type: ignore[no-untyped-def]
    """Move a counter towards the bit: p += (bit - p) / (n + 1.6).

    As n grows this is the mean of all bits so far. From the limit on it forgets the oldest, as statistics drift.
    """
    counter = counters[index]
    count = counter & np.uint32((1 << COUNT_BITS) - 1)
    probability = np.int64(counter >> np.uint32(COUNT_BITS))
    probability += (np.int64((1 << 22) - 1 if bit else 0) - probability) * adaptation[np.uint64(count)] >> 16
    count = min(count + np.uint32(1), np.uint32(_COUNTER_LIMIT))
    counters[index] = np.uint32(probability) << np.uint32(COUNT_BITS) | count


@njit(inline="always")
def encode_bit(low, width, bit, probability):  # type: ignore[no-untyped-def]
    """Narrow the interval to the lower part for a 1, to the upper part for a 0. `low` may overflow: that is a carry."""
    bound = (width >> np.uint64(16)) * probability
    if bit:
        return low, bound
    return low + bound, width - bound


@njit(inline="always")
def decode_bit(code, width, probability):  # type: ignore[no-untyped-def]
    """Tell in which part of the interval the code lies; `code` counts from the low end of the interval."""
    bound = (width >> np.uint64(16)) * probability
    bit = code < bound
    if not bit:
        code -= bound
    return bit, code, bound if bit else width - bound


@inlined
def carry(words, position):  # type: ignore[no-untyped-def]
    """Add 1 to the number that the words so far form: words of all ones become 0 and pass the carry on.

    The loop ends before the first word, because low + width never exceeds the interval of the whole chunk.
    """
    position -= 1
    while words[position] == np.uint32(0xFFFFFFFF):
        words[position] = np.uint32(0)
        position -= 1
    words[position] += np.uint32(1)


@njit(inline="always")
def word(words, position):  # type: ignore[no-untyped-def]
    """Word at a position; 0 beyond the last."""
    return np.uint64(words[position]) if position < words.size else np.uint64(0)


@njit(inline="always")
def shift(low, words, position, decoding):  # type: ignore[no-untyped-def]
    """Shift a word out of the interval, to `words`, or into the code of the decoder from there."""
    if decoding:
        return low << np.uint64(32) | word(words, position)
    if position < words.size:
        words[position] = np.uint32(low >> np.uint64(32))
    return low << np.uint64(32)


@inlined
def finish(low, words, position):  # type: ignore[no-untyped-def]
    """Write the multiple of 2**32 in [low, low + width): one word; the zeros after it need not be written."""
    last = (low + np.uint64(0xFFFFFFFF)) >> np.uint64(32)
    if low + np.uint64(0xFFFFFFFF) < low:
        if position <= words.size:
            carry(words, position)
        last = np.uint64(0)
    if position < words.size:
        words[position] = np.uint32(last)
    return position + 1
