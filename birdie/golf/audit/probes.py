"""Tests of a scorer that can be called: what it says of a token must not depend on that token, nor on later ones.

    probe          scorers under the contract of birdie.score.reference: predict the distribution, then reveal the token
    probe_losses   functions: tokens (N + 1,) → nats (N,) of the targets, all at once

A function that only gives the loss of the token there is can still be asked for its whole distribution: exchange the
target for each token of the vocabulary and see whether the probabilities sum to one. That is how the n-gram caches
were caught that blend the probability of the known token alone (openai/parameter-golf #677, #978).
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from birdie.golf.audit.rules import CAUSAL, NORMALISED, ONE_PASS, RUNS, Finding
from birdie.score.reference import TOLERANCE, Scorer

Losses = Callable[[NDArray[np.int64]], NDArray[np.float64]]

CLOSE = 1e-4
"""Nats by which losses may differ that ought to be equal: what another batch shape does to float32."""
EXACT = 4096
"""Up to this vocabulary every token is tried as the target; beyond, SAMPLED of them: a bound of the sum from below."""
SAMPLED = 256
BORDERS = (16, 32, 48, 64, 128, 256, 512, 1024, 2048, 4096, 32_768)
"""Lengths that chunks and windows have: positions around their multiples are always among those tried."""


def probe(
    make: Callable[[], Scorer],
    vocabulary: int,
    tokens: NDArray[np.integer],
    *,
    positions: int = 16,
    seed: int = 0,
    by: str = "probe",
) -> tuple[Finding, ...]:
    """Findings on scorers that `make` makes new, over `tokens` (N + 1,) of a `vocabulary`.

    Their form keeps a token from its own prediction; what is tried is whether predictions are distributions over the
    whole vocabulary, stay the same when asked again and when the run is repeated, and whether objects that are made
    anew know what others were shown.

    Args:
        positions: targets at which whole distributions are compared.
        seed: of what is put in the place of tokens.
        by: named in the findings.
    """
    stream = np.asarray(tokens, dtype=np.int64)
    places = _places(len(stream) - 1, positions, seed)
    rng = np.random.default_rng(seed)
    try:
        first = _predictions(make, stream, places)
        wrong = next(_wrong(first, places, vocabulary), None)
        if wrong is not None:
            return (Finding(NORMALISED, "fail", wrong, by),)
        sums = max(abs(_logsumexp(said)) for said in first.values())
        findings = [
            Finding(
                NORMALISED,
                "pass",
                f"{len(places)} distributions over {vocabulary} tokens sum to 1, |ln Σp| ≤ {sums:.1e}",
                by,
            )
        ]
        other = stream.copy()
        middle = places[len(places) // 2]
        other[middle + 1 :] = (
            other[middle + 1 :] + 1 + rng.integers(0, vocabulary - 1, len(other) - middle - 1)
        ) % vocabulary
        again = _predictions(make, other, [place for place in places if place <= middle])
        far = max(float(np.abs(again[place] - first[place]).max()) for place in again)
        told = (
            f"{len(again)} distributions before a change of all tokens from {middle + 1:,} on differ by {far:.1e} nats"
        )
        findings.append(Finding(CAUSAL, "pass" if far <= CLOSE else "fail", told, by))
        repeated = _predictions(make, stream, places)
        apart = max(float(np.abs(repeated[place] - first[place]).max()) for place in places)
        findings.append(_repeats(apart, len(places), by))
    except Exception as error:
        return (Finding(RUNS, "fail", f"the scorer stopped with {_said(error)}", by),)
    return tuple(findings)


def probe_losses(
    score: Losses,
    vocabulary: int,
    tokens: NDArray[np.integer],
    *,
    positions: int = 16,
    seed: int = 0,
    by: str = "probe",
) -> tuple[Finding, ...]:
    """Findings on a function that gives the nats (N,) of the targets of `tokens` (N + 1,), all of a `vocabulary`.

    Args:
        score: of one run; what it keeps from one call to the next is found out.
        positions: targets that are tried, beside those at borders of chunks and windows.
        seed: of the choice of positions, and of what is put in the place of tokens.
        by: named in the findings.
    """
    stream = np.asarray(tokens, dtype=np.int64)
    targets = len(stream) - 1
    try:
        first = _losses(score, stream)
        counted = _counted(first, targets, by)
        if counted.verdict == "fail":
            return (counted,)
        places = _places(targets, positions, seed)
        return (
            counted,
            _repeats(float(np.abs(_losses(score, stream) - first).max()), targets, by),
            _perturbed(score, stream, first, places, vocabulary, seed, by),
            _swapped(score, stream, places, vocabulary, seed, by),
        )
    except Exception as error:
        return (Finding(RUNS, "fail", f"scoring stopped with {_said(error)}", by),)


def _perturbed(
    score: Losses,
    stream: NDArray[np.int64],
    first: NDArray[np.float64],
    places: Sequence[int],
    vocabulary: int,
    seed: int,
    by: str,
) -> Finding:
    """Everything after a target is changed: its loss and those before it must stay."""
    rng = np.random.default_rng(seed)
    worst, where = 0.0, places[0]
    for place in places:
        other = stream.copy()
        later = other[place + 2 :]
        other[place + 2 :] = (later + 1 + rng.integers(0, max(1, vocabulary - 1), len(later))) % vocabulary
        far = float(np.abs(_losses(score, other)[: place + 1] - first[: place + 1]).max())
        if far > worst:
            worst, where = far, place
    if worst > CLOSE:
        why = f"losses up to target {where:,} change by up to {worst:.3g} nats when only later tokens change"
        return Finding(CAUSAL, "fail", why, by)
    why = f"later tokens changed at {len(places)} places, borders of chunks too: losses before differ ≤ {worst:.1e}"
    return Finding(CAUSAL, "pass", why, by)


def _swapped(
    score: Losses,
    stream: NDArray[np.int64],
    places: Sequence[int],
    vocabulary: int,
    seed: int,
    by: str,
) -> Finding:
    """Each token of the vocabulary is put in the place of a target: their probabilities must sum to 1."""
    rng = np.random.default_rng(seed)
    every = vocabulary <= EXACT
    # all targets of all places at once would be one call each: few places where the vocabulary is large
    tried = places if vocabulary <= 64 else places[:: max(1, len(places) // max(2, 1024 // vocabulary))]
    most, least, where = -math.inf, math.inf, (0, 0)
    for place in tried:
        chosen = np.arange(vocabulary)
        if not every:
            chosen = np.unique(np.append(rng.choice(vocabulary, SAMPLED, replace=False), stream[place + 1]))
        total = 0.0
        for token in chosen:
            # what follows the target is left off: where a loss depends on it, that is another rule's finding
            other = np.append(stream[: place + 1], token)
            total += math.exp(-float(_losses(score, other)[place])) if len(other) > 1 else 0.0
        if total > most:
            most, where = total, (place, where[1])
        if total < least:
            least, where = total, (where[0], place)
    high, low = most > 1 + TOLERANCE, every and least < 1 - TOLERANCE
    of = f"all {vocabulary}" if every else f"{SAMPLED} of {vocabulary}"
    if high:
        why = f"with {of} tokens as target {where[0]:,} in turn, their probabilities sum to {most:.4g}, more than 1"
        return Finding(NORMALISED, "fail", why, by)
    if low:
        why = f"with {of} tokens as target {where[1]:,} in turn, their probabilities sum to {least:.4g}, less than 1"
        return Finding(NORMALISED, "fail", why, by)
    why = f"with {of} tokens as target in turn at {len(tried)} places, probabilities sum to {least:.4f} to {most:.4f}"
    return Finding(NORMALISED, "pass" if every else "unknown", why, by)


def _counted(nats: NDArray[np.float64], targets: int, by: str) -> Finding:
    broken = np.flatnonzero(~np.isfinite(nats))
    if nats.shape != (targets,):
        return Finding(ONE_PASS, "fail", f"{nats.size:,} losses came back for {targets:,} targets", by)
    if len(broken):
        why = f"{len(broken):,} of {targets:,} losses are not finite, the first at target {int(broken[0]):,}"
        return Finding(ONE_PASS, "fail", why, by)
    if nats.min() < -CLOSE:
        why = f"the loss of target {int(nats.argmin()):,} is {nats.min():.4g} nats, a probability above 1"
        return Finding(NORMALISED, "fail", why, by)
    return Finding(ONE_PASS, "pass", f"{targets:,} targets, {targets:,} finite losses", by)


def _repeats(apart: float, many: int, by: str) -> Finding:
    if apart <= CLOSE:
        return Finding(
            ONE_PASS, "pass", f"scoring the same {many:,} targets again gives the same to {apart:.1e} nats", by
        )
    why = f"scoring the same targets again gives losses that differ by up to {apart:.3g} nats: it knows them by then"
    return Finding(ONE_PASS, "fail", why + ", or it is not deterministic", by)


def _places(targets: int, positions: int, seed: int) -> list[int]:
    """Targets to try: the first and the last, those around borders of chunks, and some others; ascending."""
    borders = sorted({at for length in BORDERS for at in (length - 2, length - 1, length) if 0 <= at < targets})
    rng = np.random.default_rng(seed)
    near = [borders[i] for i in rng.permutation(len(borders))[: positions // 2]]
    others = rng.choice(targets, min(targets, max(0, positions - len(near) - 2)), replace=False)
    return sorted({0, targets - 1, *near, *(int(each) for each in others)})


def _predictions(
    make: Callable[[], Scorer], stream: NDArray[np.int64], places: Sequence[int]
) -> dict[int, NDArray[np.float64]]:
    """What a new scorer predicts of the targets at `places`; it is asked twice."""
    scorer, wanted = make(), set(places)
    scorer.reveal(int(stream[0]))
    found: dict[int, NDArray[np.float64]] = {}
    for place in range(max(places) + 1):
        if place in wanted:
            found[place] = _array(scorer.predict())
            if not np.array_equal(found[place], _array(scorer.predict()), equal_nan=True):
                raise ValueError(f"predict() does not say the same when it is asked again, at target {place:,}")
        else:
            scorer.predict()
        scorer.reveal(int(stream[place + 1]))
    return found


def _array(said: object) -> NDArray[np.float64]:
    detached = getattr(said, "detach", None)
    return np.asarray(detached().cpu() if detached else said, dtype=np.float64).copy()


def _wrong(found: dict[int, NDArray[np.float64]], places: Sequence[int], vocabulary: int) -> Iterator[str]:
    for place in places:
        said = found[place]
        if said.shape != (vocabulary,):
            yield f"target {place:,} got an answer of shape {said.shape}, not one of {vocabulary} log-probabilities"
        elif not abs(_logsumexp(said)) <= TOLERANCE:
            yield f"the probabilities of target {place:,} sum to {math.exp(min(_logsumexp(said), 700)):.6g}, not to 1"


def _logsumexp(logs: NDArray[np.float64]) -> float:
    if np.isnan(logs).any():
        return math.nan
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum())) if math.isfinite(top) else top


def _losses(score: Losses, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    return _array(score(tokens.copy())).ravel()


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
