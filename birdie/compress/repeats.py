"""Repeats of words in row-major order: a tensor as literals, and matches of words that occurred some way before.

    a b c d b c d b c d e ──parse──► literals a b c d e; one match: after 4 literals, 6 words from 3 words before

Rows that repeat, tiles, and circulant or Toeplitz matrices have distances of one row, one row more or less, or of a
slope. Most distances are therefore the last one, the one before it, or continue a line through those: the parser takes
such a distance to be cheap, and the coded streams are differences of numbers (`steps`). Prices are in bits, and the
cheapest way through the words is searched for by dynamic programming (as in zstd's optimal parser).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from birdie.system.kernels import inner, njit

Words = NDArray[np.unsignedinteger[Any]]
Numbers = NDArray[np.int64]

_SAMPLE = 1 << 12  # windows of words, chosen by their content, among which repeats are counted
_WINDOW_BYTES = 16  # of such a window
_ANCHOR_BYTES = 4  # at its beginning that choose it
_LEAST_REPEATED = 1 / 64  # share of the windows that must occur again
_LEAST_SINGLE = 1 / 5  # the same for single words, which are rarely worth the bits of a distance
_WIDE = 4  # bytes of a word from which single words are counted
_INDEX_BITS = 12.0, 32.0, 256.0  # information in the words that a match must begin with, for three indices
_TABLE_BITS = 16
_DEPTH = 12  # earlier positions that are compared
_ENOUGH_BITS = 1024.0  # information in a match after which no further position is compared
_SUFFICIENT = 1 << 10  # words of a match that is taken at once
_SEGMENT = 1 << 15  # words through which the cheapest way is searched for
# Prices in bits: of a match, of a distance that is expected, and of one that is not (beside its logarithm).
_MATCH, _EXPECTED, _NEW = 4.0, 1.0, 2.0


@dataclass(frozen=True, slots=True)
class Parse:
    """A tensor's words as literals and matches."""

    literals: Numbers  # positions of words that are no part of a match, rising
    counts: Numbers  # literals before each match
    lengths: Numbers  # its words
    distances: Numbers  # how many words before they stand


def may_repeat(words: Words, *, singles: bool = True) -> bool:
    """Return whether so many of the words (n,) occur again that a search for matches is worth its time.

    Some windows are evenly spaced, which shows those that occur often. Others are chosen by a hash of their words, so
    that all copies of one are chosen or none. Without `singles` only windows count, not words that occur alone.
    """
    if words.size < 16:
        return False
    singles &= words.itemsize >= _WIDE
    anchor, width = max(1, _ANCHOR_BYTES // words.itemsize), max(2, _WINDOW_BYTES // words.itemsize)
    seen, table = np.empty((2, 2 * _SAMPLE), np.uint64), np.empty(4 * _SAMPLE, np.uint64)  # twice the most hashes
    every = max(1, words.size // _SAMPLE)
    for choose in (_by_content, _evenly)[: 1 if every == 1 else 2]:
        count = choose(words, anchor, width, every, seen)
        if count:
            repeated = [
                1 - _count_distinct(hashes[:count], table, np.zeros(table.size, np.bool_)) / count for hashes in seen
            ]
            if repeated[0] > _LEAST_REPEATED or (singles and repeated[1] > _LEAST_SINGLE):
                return True
    return False


def parse(words: Words, literal_bits: float) -> Parse:
    """Return the matches of words (n,), n < 2³¹, where a literal costs so many bits."""
    bits = max(literal_bits, 0.5)
    longest = max(1, 24 // words.itemsize)
    widths = [min(longest << 2 * i, max(i + 1, int(np.ceil(size / bits)))) for i, size in enumerate(_INDEX_BITS)]
    enough = max(32, int(_ENOUGH_BITS / bits))
    out = np.empty((3, words.size), np.int32)
    literals = np.empty(words.size, np.int32)
    count, singles = _parse(words.astype(np.uint64), np.array(widths), enough, literal_bits, literals, out)
    counts, lengths, distances = out[:, :count].astype(np.int64)
    return Parse(literals[:singles].astype(np.int64), counts, lengths, distances)


def expand(literals: Words, matches: tuple[Numbers, ...], size: int) -> Words | None:
    """Return the words (size,) that literals and matches (counts, lengths, distances) make up; None if they do not."""
    out = np.empty(size, literals.dtype)
    return out if _expand(literals, *matches, out) else None


def steps(numbers: Numbers, times: int) -> Numbers:
    """Return each number minus the one before the last, so many times over; the first two minus 0."""
    for _ in range(times):
        smaller = numbers.copy()
        smaller[2:] -= numbers[:-2]
        numbers = smaller
    return numbers


def summed(numbers: NDArray[np.integer], times: int) -> Numbers:
    """Return the inverse of `steps`."""
    out = numbers.astype(np.int64)
    for _ in range(times):
        for start in (0, 1):
            np.cumsum(out[start::2], out=out[start::2])
    return out


@njit(nogil=True, cache=True, _nrt=False)
def _evenly(words, anchor, width, every, seen):  # type: ignore[no-untyped-def] # noqa: ARG001 (as the other)
    """Fill `seen` with hashes of every n-th window of so many words, and with its first word; return their number."""
    count = 0
    for start in range(0, words.size - width + 1, max(every, width)):
        if count < seen.shape[1]:
            seen[0, count], seen[1, count] = _hash(words, start, width), words[start]
            count += 1
    return count


@njit(nogil=True, cache=True, _nrt=False)
def _count_distinct(hashes, table, used):  # type: ignore[no-untyped-def]
    size, count = table.size, 0  # a power of two
    for value in hashes:
        slot = np.int64((value * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)) & (size - 1)
        while used[slot] and table[slot] != value:
            slot = (slot + 1) & (size - 1)
        if not used[slot]:
            used[slot], table[slot] = True, value
            count += 1
    return count


@njit(nogil=True, cache=True, _nrt=False)
def _by_content(words, anchor, width, every, seen):  # type: ignore[no-untyped-def]
    """Do the same with windows that are chosen by a hash of their first words, one of n."""
    count, factor = 0, np.uint64(0x9E3779B97F4A7C15)
    most = np.uint64(0xFFFFFFFFFFFFFFFF) // np.uint64(every)
    for start in range(words.size - width + 1):
        mixed = np.uint64(words[start])
        for i in range(1, anchor):
            mixed = mixed << np.uint64(8) ^ np.uint64(words[start + i]) * np.uint64(0x5851F42D4C957F2D)
        if (mixed + np.uint64(1)) * factor <= most:
            seen[0, count], seen[1, count] = _hash(words, start, width), words[start]
            count += 1
            if count == seen.shape[1]:
                break
    return count


@njit(nogil=True, cache=True)
def _parse(words, widths, enough, literal, literals, out):  # type: ignore[no-untyped-def]
    """Write the positions of literals, and counts, lengths and distances of matches; return how many of both."""
    n = words.size
    heads = np.full((widths.size, 1 << _TABLE_BITS), -1, np.int32)
    chains = np.empty((widths.size, n), np.int32)
    matches = singles = pending = start = inserted = 0
    known = np.zeros(4, np.int64)  # distances of the last matches
    price = np.empty(_SEGMENT + 1, np.float64)
    length_to = np.zeros(_SEGMENT + 1, np.int32)
    distance_to = np.zeros(_SEGMENT + 1, np.int32)
    states = np.zeros((_SEGMENT + 1, 4), np.int64)
    way = np.empty(_SEGMENT + 1, np.int32)
    taken = np.empty(_SEGMENT + 1, np.int32)
    while start < n:
        size = min(_SEGMENT, n - start)
        price[: size + 1] = np.inf
        price[0] = 0.0
        states[0] = known
        end, long_distance, long_length = size, 0, 0
        for k in range(size):
            at = start + k
            state = states[k]
            if price[k] + literal < price[k + 1]:
                price[k + 1] = price[k] + literal
                length_to[k + 1] = 0
                states[k + 1] = state
            best = 0
            for which in range(4 + widths.size):
                if which < 4:  # distances that are expected
                    if which == 0:
                        distance = state[0]
                    elif which == 1:
                        distance = state[1]
                    elif which == 2:
                        distance = 2 * state[1] - state[3]
                    else:
                        distance = 2 * state[0] - state[1]
                    if distance < 1 or distance > at or words[at] != words[at - distance]:
                        continue
                    depth, candidate = 1, at - distance
                    base = _MATCH + _EXPECTED
                    reached = 0
                else:
                    width = widths[which - 4]
                    if at + width > n:
                        continue
                    depth, reached = _DEPTH, best
                    candidate = heads[which - 4, _slot(words, at, width)]
                    base = _MATCH + _NEW
                while depth and candidate >= 0:
                    depth -= 1
                    distance = at - candidate
                    if at + reached < n and words[candidate + reached] == words[at + reached]:
                        length = 0
                        while at + length < n and words[candidate + length] == words[at + length]:
                            length += 1
                        if length > reached:
                            cost = price[k] + base
                            if which >= 4:
                                cost += np.log2(distance)
                            if length >= _SUFFICIENT and length > long_length:
                                long_length, long_distance = length, distance
                            for more in range(reached + 1, min(length, size - k) + 1):
                                total = cost + np.log2(more)
                                if total < price[k + more]:
                                    price[k + more] = total
                                    length_to[k + more] = more
                                    distance_to[k + more] = distance
                                    states[k + more, 0] = distance
                                    states[k + more, 1] = state[0]
                                    states[k + more, 2] = state[1]
                                    states[k + more, 3] = state[2]
                            reached = length
                            best = max(best, length)
                            if length >= enough:
                                break
                    if which < 4:
                        break
                    candidate = chains[which - 4, candidate]
            while inserted <= at:
                for index in range(widths.size):
                    if inserted + widths[index] <= n:
                        slot = _slot(words, inserted, widths[index])
                        chains[index, inserted] = heads[index, slot]
                        heads[index, slot] = inserted
                inserted += 1
            if long_length:
                end = k
                break
        # The cheapest way to the end, backwards, and then as it is written.
        steps, k = 0, end
        while k > 0:
            way[steps], taken[steps] = length_to[k], distance_to[k]
            k -= max(1, length_to[k])
            steps += 1
        at = start
        for step in range(steps - 1, -1, -1):
            if way[step] == 0:
                literals[singles] = at
                singles += 1
                pending += 1
                at += 1
            else:
                out[0, matches], out[1, matches], out[2, matches] = pending, way[step], taken[step]
                matches += 1
                pending = 0
                at += way[step]
        known[:] = states[end]
        if long_length:
            out[0, matches], out[1, matches], out[2, matches] = pending, long_length, long_distance
            matches += 1
            pending = 0
            known[3], known[2], known[1] = known[2], known[1], known[0]
            known[0] = long_distance
            at += long_length
            skipped = max(inserted, at - _SUFFICIENT)  # the words of a long match stand in the index already
            inserted = skipped
        start = at
    return matches, singles


@inner
def _hash(words, at, width):  # type: ignore[no-untyped-def]
    mixed = np.uint64(0)
    for i in range(width):
        mixed = (mixed + np.uint64(words[at + i]) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return mixed * np.uint64(0xBF58476D1CE4E5B9)


@inner
def _slot(words, at, width):  # type: ignore[no-untyped-def]
    return np.int64(_hash(words, at, width) >> np.uint64(64 - _TABLE_BITS))


@njit(nogil=True, cache=True, _nrt=False)
def _expand(literals, counts, lengths, distances, out):  # type: ignore[no-untyped-def]
    """Write all words; return False where a match does not fit."""
    at = used = 0
    for index in range(counts.size):
        count, length, distance = counts[index], lengths[index], distances[index]
        if count < 0 or count > literals.size - used or count > out.size - at:
            return False
        for _ in range(count):
            out[at] = literals[used]
            at += 1
            used += 1
        if length < 1 or length > out.size - at or distance < 1 or distance > at:
            return False
        for _ in range(length):
            out[at] = out[at - distance]
            at += 1
    if out.size - at != literals.size - used:
        return False
    for index in range(used, literals.size):
        out[at] = literals[index]
        at += 1
    return True
