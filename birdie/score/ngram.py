"""Hints: which token comes next if the text repeats itself, from nothing but the tokens that were revealed.

    token i ─► each order k: what came after the last k tokens when they were last here?  ─► candidate, its record
                    │                                                                              │
                    └── a table of 2^bits places; tokens are compared, a collision is no match     ▼
                                                                     hint i: the candidate of the best record

A place in a table remembers where its context ended last, the token that has followed it most of late, and how often
that was so and was not. Candidates of one order and one such record (a bucket) share their record of hits over the
whole stream, and the hint is the candidate from the bucket that was right most often: so long contexts win where they
are worth it. Hint i is a function of tokens 0 … i: what follows is entered only after it was revealed.

N-gram tables that hint are those of openai/parameter-golf #1514 and its followers; choosing by what was right so far,
in place of the longest match or a fixed threshold, is ours. Their experts for words are left out: with contexts from
one token on they gained 0.001 bits per byte, and they are where hints came to depend on the token to be predicted.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
from cyclopts import Parameter
from numpy.typing import NDArray

from birdie.errors import ConfigError, DataError
from birdie.runtime.kernels import njit

MAX_ORDER, MAX_ORDERS = 64, 16
MAX_STRENGTH = 8.0
"""Largest β either way: the odds of a hint change by no more than a factor of e^8."""

RECORDS = 6
"""Buckets of an order: the candidate followed once, 2 or 3 times, more; never, or sometimes, did another."""

_EXPECTED, _PATIENCE = 0.3, 2.0  # hit rate of a bucket that was never asked, and how many hints that is worth
_EMPTY = -1
_VOCABULARY = 1 << 16


@dataclass(frozen=True, slots=True)
class TiltSettings:
    """Whether and how predictions lean towards what the text said before.

    Raises:
        ConfigError: a value is out of range.
    """

    enabled: Annotated[
        bool, Parameter(env_var="NGRAM_TILT_ENABLED", help="Lean predictions towards what followed the same tokens.")
    ] = False
    orders: Annotated[
        tuple[int, ...], Parameter(negative=(), help="Numbers of tokens that are looked up together.")
    ] = (16, 8, 6, 5, 4, 3, 2, 1)
    beta: Annotated[
        float | None,
        Parameter(env_var="TOKEN_BOOST", help="Nats added to a hint before normalising; left out: learned on the way."),
    ] = None
    threshold: Annotated[
        float, Parameter(env_var="TOKEN_THRESHOLD", help="Least share of hits of its kind so far that makes a hint.")
    ] = 0.0
    table_bits: Annotated[
        int,
        Parameter(help="Each order's table has 2 to this power places, of 8 bytes; 22 for a whole validation split."),
    ] = 20

    def __post_init__(self) -> None:
        if not 1 <= len(set(self.orders)) == len(self.orders) <= MAX_ORDERS:
            raise ConfigError(f"orders are {self.orders}; give 1 to {MAX_ORDERS} different ones, such as 8, 4, 2")
        if not all(1 <= order <= MAX_ORDER for order in self.orders):
            raise ConfigError(f"orders are {self.orders}; each must be from 1 to {MAX_ORDER} tokens")
        if self.beta is not None and not -MAX_STRENGTH <= self.beta <= MAX_STRENGTH:
            raise ConfigError(f"beta is {self.beta}; it must be from -{MAX_STRENGTH:g} to {MAX_STRENGTH:g}, such as 2")
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"threshold is {self.threshold}; it is a share of hints, from 0 to 1")
        if not 4 <= self.table_bits <= 28:
            raise ConfigError(f"table_bits is {self.table_bits}; it must be from 4 to 28")

    @property
    def buckets(self) -> int:
        """Kinds of hints whose records are kept apart."""
        return RECORDS * len(self.orders)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables, whatever the length of the stream; a `Memory` also keeps 2 for each token."""
        return len(self.orders) * 8 << self.table_bits


class Hints(NamedTuple):
    """Of a stream of N tokens.

    Attributes:
        tokens: (N,) int32, the likeliest token after each; −1: nothing is known.
        buckets: (N,) int32, what kind of hint it is; bucket b is from contexts of sorted(orders)[b // RECORDS] tokens.
    """

    tokens: NDArray[np.int32]
    buckets: NDArray[np.int32]


def hints(tokens: NDArray[np.integer], settings: TiltSettings) -> Hints:
    """The hints of a whole stream (N,), in one pass.

    Raises:
        DataError: a token is not from 0 to 65,535.
    """
    stream = _checked(tokens)
    found = Hints(np.empty(len(stream), np.int32), np.empty(len(stream), np.int32))
    _advance(stream, 0, *_nothing_known(settings), settings.threshold, *found)
    return found


class Memory:
    """The same, a token at a time."""

    def __init__(self, settings: TiltSettings) -> None:
        self._known, self._threshold = _nothing_known(settings), settings.threshold
        self._stream, self._length = np.empty(1 << 10, np.uint16), 0
        self._hint = Hints(np.empty(1, np.int32), np.empty(1, np.int32))

    def reveal(self, token: int) -> tuple[int, int]:
        """The next token is this; returns the hint for the one after it (−1: none) and its bucket.

        Raises:
            DataError: the token is not from 0 to 65,535.
        """
        place = self._length
        if place == len(self._stream):
            self._stream = np.concatenate((self._stream, np.empty_like(self._stream)))
        self._stream[place] = _checked(np.array([token]))[0]
        self._length += 1
        _advance(self._stream[: self._length], place, *self._known, self._threshold, *self._hint)
        return int(self._hint.tokens[0]), int(self._hint.buckets[0])


class _Known(NamedTuple):
    """What is known besides the tokens; each array is changed in place.

    Attributes:
        orders: (K,) ascending.
        tables: (K, 2^bits): last token of the context's last occurrence · 2^32 + candidate · 2^16 + times it followed
            · 2^8 + times it did not; or _EMPTY.
        slots: (K,) places of the contexts that end with the last token; −1: there are too few tokens.
        candidates: (K,) what the tables say comes next; −1: nothing.
        kinds: (K,) the buckets of these.
        tallies: (buckets, 2) hits of each bucket, and hints.
    """

    orders: NDArray[np.int64]
    tables: NDArray[np.int64]
    slots: NDArray[np.int64]
    candidates: NDArray[np.int64]
    kinds: NDArray[np.int64]
    tallies: NDArray[np.float64]


def _nothing_known(settings: TiltSettings) -> _Known:
    orders = np.array(sorted(settings.orders), dtype=np.int64)
    tables = np.full((len(orders), 1 << settings.table_bits), _EMPTY, dtype=np.int64)
    none = np.full(len(orders), -1, dtype=np.int64)
    tallies = np.tile(np.array([_EXPECTED * _PATIENCE, _PATIENCE]), (settings.buckets, 1))
    return _Known(orders, tables, none.copy(), none.copy(), none.copy(), tallies)


def _checked(tokens: NDArray[np.integer]) -> NDArray[np.uint16]:
    """The tokens as the tables hold them."""
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < _VOCABULARY:
        raise DataError(
            f"tokens run from {int(tokens.min())} to {int(tokens.max())}; n-gram tables hold ids below {_VOCABULARY:,}"
        )
    return np.array(tokens, dtype=np.uint16)  # a copy: of one that cannot be written, kernels would be compiled anew


@njit(nogil=True, cache=True)
def _advance(  # type: ignore[no-untyped-def]
    tokens, first, orders, tables, slots, candidates, kinds, tallies, threshold, hinted, buckets
):
    # Tokens `first` and on are revealed one by one; hints go to the front of `hinted` and `buckets`.
    for i in range(first, tokens.size):
        token = np.int64(tokens[i])
        best, hint, bucket = -1.0, -1, 0
        for k in range(orders.size):
            if slots[k] >= 0:
                _enter(tables[k], slots[k], candidates[k], token, i - 1)
            if candidates[k] >= 0:
                tallies[kinds[k], 0] += candidates[k] == token
                tallies[kinds[k], 1] += 1
        hashed = np.uint64(0x9E3779B97F4A7C15)
        length = 0
        for k in range(orders.size):
            slots[k] = candidates[k] = -1
            if orders[k] > i + 1:
                continue
            while length < orders[k]:
                hashed = (hashed ^ np.uint64(tokens[i - length] + 1)) * np.uint64(0xD1342543DE82EF95)
                hashed ^= hashed >> np.uint64(29)
                length += 1
            slots[k] = np.int64(hashed & np.uint64(tables.shape[1] - 1))
            entry = tables[k, slots[k]]
            if entry != _EMPTY and _same(tokens, entry >> 32, i, length):
                candidates[k] = entry >> 16 & 0xFFFF
                kinds[k] = RECORDS * k + _record(entry >> 8 & 0xFF, entry & 0xFF)
        for k in range(orders.size):
            if candidates[k] >= 0:
                rate = tallies[kinds[k], 0] / tallies[kinds[k], 1]
                if rate >= best:  # of equals, the longest context
                    best, hint, bucket = rate, candidates[k], kinds[k]
        hinted[i - first] = hint if best >= threshold else -1
        buckets[i - first] = bucket


@njit(nogil=True, cache=True)
def _same(tokens, one, other, length):  # type: ignore[no-untyped-def]
    # Whether the last `length` tokens up to these two places are the same
    back = 0
    while back < length and tokens[one - back] == tokens[other - back]:
        back += 1
    return back == length


@njit(nogil=True, cache=True)
def _record(followed, not_followed):  # type: ignore[no-untyped-def]
    often = 0 if followed < 2 else 1 if followed < 4 else 2
    return 2 * often + (1 if not_followed > 0 else 0)


@njit(nogil=True, cache=True)
def _enter(table, slot, candidate, token, place):  # type: ignore[no-untyped-def]
    # The context that ends at `place` was followed by `token`; `candidate` was what the table said, -1: of another
    # context or nothing. What spoke against the present state of affairs is halved, so that old times are forgotten.
    followed, not_followed = 1, 0
    if candidate >= 0:
        followed, not_followed = table[slot] >> 8 & 0xFF, table[slot] & 0xFF
        if candidate == token:
            followed = min(followed + 1, 255)
            if not_followed > 2:
                not_followed = not_followed // 2 + 1
        else:
            not_followed = min(not_followed + 1, 255)
            followed = followed // 2 + 1 if followed > 2 else followed - 1
            if followed == 0:
                candidate, followed = token, 1
    else:
        candidate = token
    table[slot] = np.int64(place) << 32 | candidate << 16 | followed << 8 | not_followed
