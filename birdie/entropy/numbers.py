"""Small numbers, coded one after another with adaptive binary models: all side information, and small arrays whole.

Every number comes with a context, and each context learns for itself. A number v is written as n = v + 1 in the manner
of Elias: the length of n in unary, then its lower bits, the first three of which are learned too, as a tree. Each
learned bit costs what its own history says: p moves towards the bit by 1/(count + 1.5), which is the estimator of
Krichevsky and Trofimov for the first bits and a slow average later. The coder is binary rANS with the state and the
16-bit words of `rans`; the first two words are the first state.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from birdie.entropy.compiled import njit
from birdie.errors import ArtifactError

Words = NDArray[np.uint16]

CONTEXTS = 96
MAX_NUMBER = (1 << 34) - 1
_LENGTHS = 35  # n = v + 1 has 1 … 35 bits
_SLOTS = _LENGTHS + _LENGTHS * 8  # of a context: the unary bits, then a tree of 8 nodes for each length
_SLOWEST = 60  # counts stop here, so p keeps moving by at least 1/61.5


def zigzag(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, -1, 1, -2, … → 0, 1, 2, 3, …"""
    return (values << 1) ^ (values >> 63)


def unzigzag(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Undo `zigzag`."""
    return (numbers >> 1) ^ -(numbers & 1)


class Writer:
    """Collects (context, number) pairs; `finish` codes them."""

    def __init__(self) -> None:
        self._contexts: list[NDArray[np.int64]] = []
        self._numbers: list[NDArray[np.int64]] = []

    def put(self, context: int, number: int) -> None:
        """One number, 0 … 2**34 - 1."""
        self.put_all(context, np.array([number], np.int64))

    def put_signed(self, context: int, number: int) -> None:
        """One number of either sign."""
        self.put_all(context, zigzag(np.array([number], np.int64)))

    def put_all(self, context: int, numbers: NDArray[np.int64] | Sequence[int]) -> None:
        """Many numbers in one context."""
        numbers = np.asarray(numbers, np.int64)
        self._contexts.append(np.full(numbers.size, context, np.int64))
        self._numbers.append(numbers)

    def put_chain(self, context: int, numbers: NDArray[np.int64], most: int) -> None:
        """Many numbers, each in the context `context + min(the number before, most)`."""
        before = np.concatenate([np.zeros(1, np.int64), numbers[:-1]])[: numbers.size]
        self._contexts.append(context + np.minimum(before, most))
        self._numbers.append(numbers)

    def finish(self) -> Words:
        """The words of all that was put."""
        numbers = np.concatenate([np.zeros(0, np.int64), *self._numbers])
        contexts = np.concatenate([np.zeros(0, np.int64), *self._contexts])
        count = int((2 * _bit_lengths(numbers + 1)).sum())
        bits, odds = np.empty(count, np.uint8), np.empty(count, np.uint32)
        used = _model(numbers, contexts, bits, odds, *_fresh())
        words = np.empty(used + 2, np.uint16)
        return words[_encode_bits(bits[:used], odds[:used], words) :]


class Reader:
    """Takes the numbers of a `Writer` in the same order with the same contexts.

    Running out of words yields zeros; `finish` tells.
    """

    def __init__(self, words: Words) -> None:
        if words.size < 2:
            raise ArtifactError("the side information of a stream is missing; the file is damaged")
        self._words = words
        self._state = np.array([int(words[0]) | int(words[1]) << 16, 2], np.uint64)
        self._models = _fresh()

    def take(self, context: int, limit: int, what: str) -> int:
        """One number; more than `limit` is an ArtifactError that names `what`."""
        number = int(self.take_all(context, 1)[0])
        if number > limit:
            raise ArtifactError(f"{what} of a stream is {number:,}, at most {limit:,} is possible; the file is damaged")
        return number

    def take_signed(self, context: int) -> int:
        """One number of either sign."""
        return int(unzigzag(self.take_all(context, 1))[0])

    def take_all(self, context: int, count: int) -> NDArray[np.int64]:
        """`count` numbers in one context."""
        return self.take_chain(context, count, 0)

    def take_chain(self, context: int, count: int, most: int) -> NDArray[np.int64]:
        """`count` numbers, each in the context `context + min(the number before, most)`."""
        out = np.empty(count, np.int64)
        if not _take(self._words, self._state, *self._models, context, most, out):
            raise ArtifactError(f"a number in a stream is above {MAX_NUMBER:,}; the file is damaged")
        return out

    @property
    def source(self) -> tuple[Words, NDArray[np.uint64], NDArray[np.uint16], NDArray[np.uint8]]:
        """What `take_number` takes from; it moves on as this reader does."""
        return self._words, self._state, *self._models

    def finish(self) -> None:
        """Raises ArtifactError unless every word was taken and the state is the one encoding began with."""
        if int(self._state[0]) != 1 << 16 or int(self._state[1]) != self._words.size:
            raise ArtifactError("the side information of a stream does not end where it should; the file is damaged")


def _fresh() -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    return np.full(CONTEXTS * _SLOTS, 1 << 15, np.uint16), np.zeros(CONTEXTS * _SLOTS, np.uint8)


def _bit_lengths(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.frexp(numbers.astype(np.float64))[1].astype(np.int64)  # exact below 2**53


@njit(nogil=True, cache=True)
def _learn(probability, count, slot, bit):  # type: ignore[no-untyped-def]
    old = np.int64(probability[slot])
    target = np.int64(65535) if bit else np.int64(0)
    probability[slot] = np.uint16(old + (((target - old) * (131072 // (2 * np.int64(count[slot]) + 3))) >> 16))
    if count[slot] < _SLOWEST:
        count[slot] += 1


@njit(nogil=True, cache=True)
def _odds(probability, slot):  # type: ignore[no-untyped-def]
    return min(max(np.int64(probability[slot]) >> 1, 32), 32736)


@njit(nogil=True, cache=True)
def _model(numbers, contexts, bits, odds, probability, count):  # type: ignore[no-untyped-def]
    at = 0
    for index in range(numbers.size):
        n = numbers[index] + 1
        base = contexts[index] * _SLOTS
        length = 0
        while n >> (length + 1):
            length += 1
        for step in range(min(length + 1, _LENGTHS - 1)):
            bits[at] = step < length
            odds[at] = _odds(probability, base + step)
            _learn(probability, count, base + step, bits[at])
            at += 1
        tree, node = base + _LENGTHS + length * 8, 1
        for place in range(length - 1, -1, -1):
            bit = (n >> place) & 1
            bits[at], odds[at] = bit, 16384
            if node < 8:
                odds[at] = _odds(probability, tree + node)
                _learn(probability, count, tree + node, bit)
                node = 2 * node + bit
            at += 1
    return at


@njit(nogil=True, cache=True)
def _encode_bits(bits, odds, words):  # type: ignore[no-untyped-def]
    x, at = np.uint64(65536), words.size
    for index in range(bits.size - 1, -1, -1):
        odd = np.uint64(odds[index])
        frequency = odd if bits[index] else np.uint64(32768) - odd
        if x >= frequency << np.uint64(17):
            at -= 1
            words[at] = np.uint16(x & np.uint64(0xFFFF))
            x >>= np.uint64(16)
        whole = x // frequency
        x = (whole << np.uint64(15)) + (x - whole * frequency)
        if not bits[index]:
            x += odd
    words[at - 2] = np.uint16(x & np.uint64(0xFFFF))
    words[at - 1] = np.uint16(x >> np.uint64(16))
    return at - 2


@njit(nogil=True, cache=True)
def _take_bit(words, state, odd):  # type: ignore[no-untyped-def]
    x = state[0]
    slot = x & np.uint64(32767)
    bit = slot < odd
    # A bit of 1 owns the first `odd` of the 32,768 slots, a 0 the others.
    start = np.uint64(0) if bit else odd
    x = (odd if bit else np.uint64(32768) - odd) * (x >> np.uint64(15)) + slot - start
    if x < np.uint64(65536):
        word = np.uint64(0)
        if state[1] < np.uint64(words.size):
            word = np.uint64(words[state[1]])
        x = x << np.uint64(16) | word
        state[1] += np.uint64(1)
    state[0] = x
    return np.int64(bit)


@njit(nogil=True, cache=True)
def take_number(words, state, probability, count, context):  # type: ignore[no-untyped-def]
    """One number in one context; other kernels take theirs with it."""
    base = context * _SLOTS
    length = 0
    while length < _LENGTHS - 1:
        bit = _take_bit(words, state, np.uint64(_odds(probability, base + length)))
        _learn(probability, count, base + length, bit)
        if not bit:
            break
        length += 1
    tree, node, n = base + _LENGTHS + length * 8, 1, np.int64(1)
    for _ in range(length):
        if node < 8:
            bit = _take_bit(words, state, np.uint64(_odds(probability, tree + node)))
            _learn(probability, count, tree + node, bit)
            node = 2 * node + bit
        else:
            bit = _take_bit(words, state, np.uint64(16384))
        n = 2 * n + bit
    return n - 1


@njit(nogil=True, cache=True)
def _take(words, state, probability, count, context, most, out):  # type: ignore[no-untyped-def]
    before = np.int64(0)
    for index in range(out.size):
        before = take_number(words, state, probability, count, context + min(before, np.int64(most)))
        out[index] = before
        if before > MAX_NUMBER:
            return False
    return True
