"""Side information of a stream: small non-negative numbers, coded one after another by adaptive binary models.

Every number comes with a context, and each context learns for itself (the contexts are listed in docs/coders.md). A
number v is binarized as the Elias gamma code of n = v + 1: the length of n in unary, then its lower bits, of which the
first three are modeled too, as a tree. Nothing has to be described first, so a hundred numbers cost little.

    number ─► binary decisions ─► adaptive probability of each ─► binary rANS ─► 16-bit words

A probability moves towards each bit by 1/(count + 1.5). For the first bits that is the estimator of Krichevsky and
Trofimov, later a slow average. The coder is rANS as in `rans`, with two symbols; the first two words are the first
state. Because rANS decodes in the opposite order, the encoder models all numbers first and then codes them backwards.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from birdie.errors import ArtifactError
from birdie.system.kernels import inner, njit

Words = NDArray[np.uint16]

CONTEXTS = 96
MAX_NUMBER = (1 << 34) - 1
_LENGTHS = 35  # n = v + 1 has 1 … 35 bits
_SLOTS = _LENGTHS + _LENGTHS * 8  # models of a context: the unary bits, then a tree of 8 nodes for each length
_COUNT_LIMIT = 60  # counts stop here, so a probability keeps moving by at least 1/61.5


def zigzag(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Map 0, -1, 1, -2, … to 0, 1, 2, 3, …"""
    return (values << 1) ^ (values >> 63)


def unzigzag(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Map 0, 1, 2, 3, … to 0, -1, 1, -2, …"""
    return (numbers >> 1) ^ -(numbers & 1)


class SideWriter:
    """Collects numbers and their contexts; `finish` codes them."""

    def __init__(self) -> None:
        self._contexts: list[NDArray[np.int64]] = []
        self._numbers: list[NDArray[np.int64]] = []

    def put(self, context: int, number: int) -> None:
        """Add a number, 0 … 2**34 - 1."""
        self.put_all(context, np.array([number], np.int64))

    def put_signed(self, context: int, number: int) -> None:
        """Add a number of either sign."""
        self.put_all(context, zigzag(np.array([number], np.int64)))

    def put_all(self, context: int, numbers: NDArray[np.int64] | Sequence[int]) -> None:
        """Add numbers that share a context."""
        numbers = np.asarray(numbers, np.int64)
        self._contexts.append(np.full(numbers.size, context, np.int64))
        self._numbers.append(numbers)

    def put_chain(self, context: int, numbers: NDArray[np.int64], most: int) -> None:
        """Add numbers, each in the context `context + min(previous number, most)`; the first follows a 0."""
        previous = np.concatenate([np.zeros(1, np.int64), numbers[:-1]])[: numbers.size]
        self._contexts.append(context + np.minimum(previous, most))
        self._numbers.append(numbers)

    def finish(self) -> Words:
        """Return the words of all numbers."""
        numbers = np.concatenate([np.zeros(0, np.int64), *self._numbers])
        contexts = np.concatenate([np.zeros(0, np.int64), *self._contexts])
        count = int((2 * _bit_lengths(numbers + 1)).sum())
        bits, probabilities = np.empty(count, np.uint8), np.empty(count, np.uint32)
        used = _model(numbers, contexts, bits, probabilities, *_initial_models())
        words = np.empty(used + 2, np.uint16)
        return words[_encode_bits(bits[:used], probabilities[:used], words) :]


class SideReader:
    """Decodes the numbers of a `Writer`, asked for in the same order with the same contexts.

    Words beyond the last are read as zeros; `finish` raises if there were any.
    """

    def __init__(self, words: Words) -> None:
        if words.size < 2:
            raise ArtifactError("the side information of a stream is missing; the file is damaged")
        self._words = words
        self._state = np.array([int(words[0]) | int(words[1]) << 16, 2], np.uint64)
        self._models = _initial_models()

    def take(self, context: int, limit: int, what: str) -> int:
        """Return a number; one above `limit` is an ArtifactError that names `what`."""
        number = int(self.take_all(context, 1)[0])
        if number > limit:
            raise ArtifactError(f"{what} of a stream is {number:,}, the most is {limit:,}; the file is damaged")
        return number

    def take_signed(self, context: int) -> int:
        """Return a number of either sign."""
        return int(unzigzag(self.take_all(context, 1))[0])

    def take_all(self, context: int, count: int) -> NDArray[np.int64]:
        """Return `count` numbers that share a context."""
        return self.take_chain(context, count, 0)

    def take_chain(self, context: int, count: int, most: int) -> NDArray[np.int64]:
        """Return `count` numbers, each in the context `context + min(previous number, most)`."""
        out = np.empty(count, np.int64)
        if not _take(self._words, self._state, *self._models, context, most, out):
            raise ArtifactError(f"a number in a stream is above {MAX_NUMBER:,}; the file is damaged")
        return out

    @property
    def source(self) -> tuple[Words, NDArray[np.uint64], NDArray[np.uint16], NDArray[np.uint8]]:
        """Arguments for `take_number`, which other kernels call; they share their state with this reader."""
        return self._words, self._state, *self._models

    def finish(self) -> None:
        """Raise ArtifactError unless every word was read and the state is the one that encoding began with."""
        if int(self._state[0]) != 1 << 16 or int(self._state[1]) != self._words.size:
            raise ArtifactError("the side information of a stream does not end where it should; the file is damaged")


def _initial_models() -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    return np.full(CONTEXTS * _SLOTS, 1 << 15, np.uint16), np.zeros(CONTEXTS * _SLOTS, np.uint8)


def _bit_lengths(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.frexp(numbers.astype(np.float64))[1].astype(np.int64)  # exact below 2**53


@inner
def _learn(probability, count, slot, bit):  # type: ignore[no-untyped-def]
    old = np.int64(probability[slot])
    target = np.int64(65535) if bit else np.int64(0)
    probability[slot] = np.uint16(old + (((target - old) * (131072 // (2 * np.int64(count[slot]) + 3))) >> 16))
    if count[slot] < _COUNT_LIMIT:
        count[slot] += 1


@inner
def _probability(probability, slot):  # type: ignore[no-untyped-def]
    """Probability of a 1 in 1/32,768, never so near to 0 or 1 that the other bit would cost more than 10 bits."""
    return min(max(np.int64(probability[slot]) >> 1, 32), 32736)


@njit(nogil=True, cache=True, _nrt=False)
def _model(numbers, contexts, bits, probabilities, probability, count):  # type: ignore[no-untyped-def]
    """Fill `bits` and `probabilities`, one per binary decision; return how many there are."""
    position = 0
    for index in range(numbers.size):
        n = numbers[index] + 1
        base = contexts[index] * _SLOTS
        length = 0
        while n >> (length + 1):
            length += 1
        for step in range(min(length + 1, _LENGTHS - 1)):
            bit = np.int64(step < length)
            bits[position], probabilities[position] = bit, _probability(probability, base + step)
            _learn(probability, count, base + step, bit)
            position += 1
        tree, node = base + _LENGTHS + length * 8, 1
        for low_bit in range(length - 1, -1, -1):
            bit = (n >> low_bit) & 1
            bits[position], probabilities[position] = bit, 16384
            if node < 8:
                probabilities[position] = _probability(probability, tree + node)
                _learn(probability, count, tree + node, bit)
                node = 2 * node + bit
            position += 1
    return position


@njit(nogil=True, cache=True, _nrt=False)
def _encode_bits(bits, probabilities, words):  # type: ignore[no-untyped-def]
    """Fill `words` from the end; return where they begin."""
    x, position = np.uint64(65536), words.size
    for index in range(bits.size - 1, -1, -1):
        ones = np.uint64(probabilities[index])
        frequency = ones if bits[index] else np.uint64(32768) - ones
        if x >= frequency << np.uint64(17):
            position -= 1
            words[position] = np.uint16(x & np.uint64(0xFFFF))
            x >>= np.uint64(16)
        quotient = x // frequency
        x = (quotient << np.uint64(15)) + (x - quotient * frequency)
        if not bits[index]:
            x += ones
    words[position - 2] = np.uint16(x & np.uint64(0xFFFF))
    words[position - 1] = np.uint16(x >> np.uint64(16))
    return position - 2


@inner
def _take_bit(words, state, ones):  # type: ignore[no-untyped-def]
    x = state[0]
    slot = x & np.uint64(32767)
    bit = slot < ones
    # A bit of 1 owns the first `ones` of the 32,768 slots, a 0 the others.
    start = np.uint64(0) if bit else ones
    x = (ones if bit else np.uint64(32768) - ones) * (x >> np.uint64(15)) + slot - start
    if x < np.uint64(65536):
        word = np.uint64(0)
        if state[1] < np.uint64(words.size):
            word = np.uint64(words[state[1]])
        x = x << np.uint64(16) | word
        state[1] += np.uint64(1)
    state[0] = x
    return np.int64(bit)


@inner
def take_number(words, state, probability, count, context):  # type: ignore[no-untyped-def]
    """Decode a number; kernels of other modules call this with the `source` of a `Reader`."""
    base = context * _SLOTS
    length = 0
    while length < _LENGTHS - 1:
        bit = _take_bit(words, state, np.uint64(_probability(probability, base + length)))
        _learn(probability, count, base + length, bit)
        if not bit:
            break
        length += 1
    tree, node, n = base + _LENGTHS + length * 8, 1, np.int64(1)
    for _ in range(length):
        if node < 8:
            bit = _take_bit(words, state, np.uint64(_probability(probability, tree + node)))
            _learn(probability, count, tree + node, bit)
            node = 2 * node + bit
        else:
            bit = _take_bit(words, state, np.uint64(16384))
        n = 2 * n + bit
    return n - 1


@njit(nogil=True, cache=True, _nrt=False)
def _take(words, state, probability, count, context, most, out):  # type: ignore[no-untyped-def]
    """Fill `out` with a chain of numbers; return False where one is too large."""
    number = np.int64(0)
    for index in range(out.size):
        number = take_number(words, state, probability, count, context + min(number, np.int64(most)))
        out[index] = number
        if number > MAX_NUMBER:
            return False
    return True
