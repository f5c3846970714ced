"""Probes of a scorer that can be called: the prediction of a token must not depend on that token, nor on later ones.

    probe          scorers under the contract of gpt.score.reference: predict the distribution, then reveal the token
    probe_losses   functions: tokens (N + 1,) → nats (N,) of the targets, all at once

A function that only gives the loss of the actual token can still be asked for its whole distribution: replace the
target by each token of the vocabulary and sum the probabilities. That is how the n-gram caches were caught that blend
the probability of the known token alone (parameter-golf#677, #978).
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from birdie.golf.audit.rules import CAUSAL, NORMALIZED, ONE_PASS, RUNS, Finding
from birdie.gpt.score.reference import TOLERANCE, Scorer
from birdie.system.callbacks import Progress, no_progress

Losses = Callable[[NDArray[np.int64]], NDArray[np.float64]]

CLOSE = 1e-4
"""Nats by which losses may differ that ought to be equal: another batch shape changes float32 by as much."""
EXACT = 4096
"""Up to this vocabulary every token is tried as the target; above it SAMPLED of them, a lower bound of the sum."""
SAMPLED = 256
BORDERS = (16, 32, 48, 64, 128, 256, 512, 1024, 2048, 4096, 32_768)
"""Lengths of chunks and windows in use: positions around their multiples are always among those tried."""


def probe(
    new_scorer: Callable[[], Scorer],
    vocabulary: int,
    tokens: NDArray[np.integer],
    *,
    positions: int = 16,
    seed: int = 0,
    progress: Progress = no_progress,
) -> tuple[Finding, ...]:
    """Probe scorers over `tokens` (N + 1,) of a `vocabulary`.

    Their interface keeps a token from its own prediction. Tested is whether predictions are distributions over the
    whole vocabulary, stay the same when they are asked for again and when the run is repeated, and whether a new
    scorer knows what another was shown.

    Args:
        new_scorer: returns a scorer that has seen nothing.
        vocabulary: size of the vocabulary.
        tokens: a stream.
        positions: targets at which whole distributions are compared.
        seed: of the replacement tokens.
        progress: reports predictions.
    """
    stream = np.asarray(tokens, dtype=np.int64)
    targets = _positions(len(stream) - 1, positions, seed)
    rng = np.random.default_rng(seed)
    try:
        first = _predictions(new_scorer, stream, targets, progress)
        if (problem := _invalid(first, vocabulary)) is not None:
            return (Finding(NORMALIZED, "fail", problem, "probe"),)
        error = max(abs(_logsumexp(prediction)) for prediction in first.values())
        evidence = f"{len(targets)} distributions over {vocabulary} tokens sum to 1, |ln Σp| ≤ {error:.1e}"
        findings = [Finding(NORMALIZED, "pass", evidence, "probe")]
        middle = targets[len(targets) // 2]
        changed = stream.copy()
        changed[middle + 1 :] = _other_tokens(changed[middle + 1 :], vocabulary, rng)
        second = _predictions(new_scorer, changed, [target for target in targets if target <= middle], progress)
        difference = _difference(first, second)
        evidence = f"{len(second)} distributions before a change of all tokens from {middle + 1:,} on differ by "
        evidence += f"{difference:.1e} nats"
        findings.append(Finding(CAUSAL, "pass" if difference <= CLOSE else "fail", evidence, "probe"))
        findings.append(_repeats(_difference(first, _predictions(new_scorer, stream, targets, progress)), len(targets)))
    except Exception as error:  # of foreign code
        return (Finding(RUNS, "fail", f"the scorer stopped with {_described(error)}", "probe"),)
    return tuple(findings)


def probe_losses(
    score: Losses, vocabulary: int, tokens: NDArray[np.integer], *, positions: int = 16, seed: int = 0
) -> tuple[Finding, ...]:
    """Probe a function that gives the nats (N,) of the targets of `tokens` (N + 1,), all of a `vocabulary`.

    Args:
        score: scores one run; state that it keeps between calls is found.
        vocabulary: size of the vocabulary.
        tokens: a stream.
        positions: targets that are tried, those at borders of chunks and windows among them.
        seed: of the choice of positions and of the replacement tokens.
    """
    stream = np.asarray(tokens, dtype=np.int64)

    def losses(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        return _array(score(tokens.copy())).ravel()

    try:
        first = losses(stream)
        count = _count(first, len(stream) - 1)
        if count.result == "fail":
            return (count,)
        targets = _positions(len(stream) - 1, positions, seed)
        repeated = _repeats(float(np.abs(losses(stream) - first).max()), len(first))
        perturbed = _perturb(losses, stream, targets, vocabulary, np.random.default_rng(seed))
        swapped = _swap_targets(losses, stream, targets, vocabulary, np.random.default_rng(seed))
        return count, repeated, perturbed, swapped
    except Exception as error:  # of foreign code
        return (Finding(RUNS, "fail", f"scoring stopped with {_described(error)}", "probe"),)


def _perturb(
    losses: Losses, stream: NDArray[np.int64], targets: Sequence[int], vocabulary: int, rng: np.random.Generator
) -> Finding:
    """Change all tokens after a target: its loss and those before it must stay."""
    first, largest, position = losses(stream), 0.0, targets[0]
    for target in targets:
        changed = stream.copy()
        changed[target + 2 :] = _other_tokens(changed[target + 2 :], vocabulary, rng)
        difference = float(np.abs(losses(changed)[: target + 1] - first[: target + 1]).max())
        if difference > largest:
            largest, position = difference, target
    if largest > CLOSE:
        evidence = f"losses up to target {position:,} change by up to {largest:.3g} nats when only later tokens change"
        return Finding(CAUSAL, "fail", evidence, "probe")
    evidence = f"all tokens after a target changed, at {len(targets)} targets, borders of chunks among them: losses up "
    return Finding(CAUSAL, "pass", f"{evidence}to it differ by {largest:.1e} nats at most", "probe")


def _swap_targets(
    losses: Losses, stream: NDArray[np.int64], targets: Sequence[int], vocabulary: int, rng: np.random.Generator
) -> Finding:
    """Try each token of the vocabulary as a target: the probabilities must sum to 1."""
    exact = vocabulary <= EXACT
    if vocabulary > 64:  # a call per token: few targets where the vocabulary is large
        targets = targets[:: max(1, len(targets) // max(2, 1024 // vocabulary))]
    sums: dict[int, float] = {}
    for target in targets:
        tokens = np.arange(vocabulary)
        if not exact:
            tokens = np.unique(np.append(rng.choice(vocabulary, SAMPLED, replace=False), stream[target + 1]))
        prefix = stream[: target + 1]  # a loss that depends on later tokens breaks another rule
        sums[target] = sum(math.exp(-float(losses(np.append(prefix, token))[target])) for token in tokens)
    name = f"all {vocabulary}" if exact else f"{SAMPLED} of {vocabulary}"
    most, least = max(sums, key=sums.__getitem__), min(sums, key=sums.__getitem__)
    wrong = [most] * (sums[most] > 1 + TOLERANCE) + [least] * (exact and sums[least] < 1 - TOLERANCE)
    if wrong:
        evidence = f"with {name} tokens as target {wrong[0]:,} in turn, their probabilities sum to {sums[wrong[0]]:.4g}"
        return Finding(NORMALIZED, "fail", f"{evidence}, not to 1", "probe")
    evidence = f"with {name} tokens in turn as each of {len(sums)} targets, probabilities sum to {sums[least]:.4f} to "
    return Finding(NORMALIZED, "pass" if exact else "unknown", f"{evidence}{sums[most]:.4f}", "probe")


def _count(nats: NDArray[np.float64], targets: int) -> Finding:
    infinite = np.flatnonzero(~np.isfinite(nats))
    if nats.shape != (targets,):
        return Finding(ONE_PASS, "fail", f"{nats.size:,} losses were returned for {targets:,} targets", "probe")
    if len(infinite):
        evidence = f"{len(infinite):,} of {targets:,} losses are not finite, the first at target {int(infinite[0]):,}"
        return Finding(ONE_PASS, "fail", evidence, "probe")
    if nats.min() < -CLOSE:
        evidence = f"the loss of target {int(nats.argmin()):,} is {nats.min():.4g} nats, a probability above 1"
        return Finding(NORMALIZED, "fail", evidence, "probe")
    return Finding(ONE_PASS, "pass", f"{targets:,} targets, {targets:,} finite losses", "probe")


def _repeats(difference: float, targets: int) -> Finding:
    if difference <= CLOSE:
        evidence = f"scoring the same {targets:,} targets again gives the same losses to {difference:.1e} nats"
        return Finding(ONE_PASS, "pass", evidence, "probe")
    evidence = (
        f"scoring the same targets again changes losses by up to {difference:.3g} nats: it remembers them, or it "
    )
    return Finding(ONE_PASS, "fail", f"{evidence}is not deterministic", "probe")


def _positions(targets: int, count: int, seed: int) -> list[int]:
    """Return about `count` targets, ascending: the first, the last, some around borders of chunks, some others."""
    borders = sorted({at for length in BORDERS for at in (length - 2, length - 1, length) if 0 <= at < targets})
    rng = np.random.default_rng(seed)
    near = [borders[i] for i in rng.permutation(len(borders))[: count // 2]]
    others = rng.choice(targets, min(targets, max(0, count - len(near) - 2)), replace=False)
    return sorted({0, targets - 1, *near, *others.tolist()})


def _other_tokens(tokens: NDArray[np.int64], vocabulary: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return random tokens, each another one than in `tokens`."""
    return (tokens + 1 + rng.integers(0, max(1, vocabulary - 1), len(tokens))) % vocabulary


def _predictions(
    new_scorer: Callable[[], Scorer], stream: NDArray[np.int64], targets: Sequence[int], progress: Progress
) -> dict[int, NDArray[np.float64]]:
    """Return a new scorer's predictions of `targets`, ascending; each is asked for twice."""
    scorer = new_scorer()
    scorer.reveal(int(stream[0]))
    predictions: dict[int, NDArray[np.float64]] = {}
    for position in range(targets[-1] + 1):
        prediction = scorer.predict()
        if position in targets:
            predictions[position] = _array(prediction)
            if not np.array_equal(predictions[position], _array(scorer.predict()), equal_nan=True):
                raise ValueError(f"predict() changes when it is asked again, at target {position:,}")
        scorer.reveal(int(stream[position + 1]))
        progress(position + 1, targets[-1] + 1)
    return predictions


def _difference(one: dict[int, NDArray[np.float64]], other: dict[int, NDArray[np.float64]]) -> float:
    return max(float(np.abs(one[target] - other[target]).max()) for target in other)


def _array(values: object) -> NDArray[np.float64]:
    detached = getattr(values, "detach", None)
    return np.asarray(detached().cpu() if detached else values, dtype=np.float64).copy()


def _invalid(predictions: dict[int, NDArray[np.float64]], vocabulary: int) -> str | None:
    """Return why a prediction is no distribution over the vocabulary; None if all are."""
    for target, prediction in predictions.items():
        if prediction.shape != (vocabulary,):
            return f"target {target:,} got an answer of shape {prediction.shape}, not {vocabulary} log-probabilities"
        total = _logsumexp(prediction)
        if not abs(total) <= TOLERANCE:
            return f"the probabilities of target {target:,} sum to {math.exp(min(total, 700)):.6g}, not to 1"
    return None


def _logsumexp(logs: NDArray[np.float64]) -> float:
    if np.isnan(logs).any():
        return math.nan
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum())) if math.isfinite(top) else top


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
