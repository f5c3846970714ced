"""Probes of a scorer that can be called: the prediction of a token must not depend on that token, nor on later ones.

Scorers keep the contract of gpt.score.reference: they predict the distribution of the next token, then are shown it.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.errors import RuleError
from birdie.golf.audit.rules import CAUSAL, NORMALIZED, ONE_PASS, RUNS, Finding
from birdie.gpt.score.reference import Scorer, check_distribution
from birdie.system.callbacks import Progress, no_progress

CLOSE = 1e-4
"""Nats by which losses may differ that ought to be equal: another batch shape changes float32 by as much."""
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
        positions: targets at which whole distributions are compared.
        progress: reports predictions.
    """
    stream = np.asarray(tokens, dtype=np.int64)
    targets = _positions(len(stream) - 1, positions, seed)
    rng = np.random.default_rng(seed)
    try:
        first = _predictions(new_scorer, stream, targets, vocabulary, progress)
        error = max(abs(float(torch.logsumexp(prediction, 0))) for prediction in first.values())
        evidence = f"{len(targets)} distributions over {vocabulary} tokens sum to 1, |ln Σp| ≤ {error:.1e}"
        findings = [Finding(NORMALIZED, "pass", evidence, "probe")]
        middle = targets[len(targets) // 2]
        changed = stream.copy()
        changed[middle + 1 :] = _other_tokens(changed[middle + 1 :], vocabulary, rng)
        earlier = [target for target in targets if target <= middle]
        second = _predictions(new_scorer, changed, earlier, vocabulary, progress)
        difference = _difference(first, second)
        evidence = f"{len(second)} distributions before a change of all tokens from {middle + 1:,} on differ by "
        evidence += f"{difference:.1e} nats"
        findings.append(Finding(CAUSAL, "pass" if difference <= CLOSE else "fail", evidence, "probe"))
        again = _predictions(new_scorer, stream, targets, vocabulary, progress)
        findings.append(_repeats(_difference(first, again), len(targets)))
    except RuleError as error:
        return (Finding(NORMALIZED, "fail", str(error), "probe"),)
    except Exception as error:  # of a scorer of another package
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        return (Finding(RUNS, "fail", f"the scorer stopped with {reason}", "probe"),)
    return tuple(findings)


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
    new_scorer: Callable[[], Scorer],
    stream: NDArray[np.int64],
    targets: Sequence[int],
    vocabulary: int,
    progress: Progress,
) -> dict[int, Tensor]:
    """Return a new scorer's predictions of `targets`, ascending; each is asked for twice."""
    scorer = new_scorer()
    scorer.reveal(int(stream[0]))
    predictions: dict[int, Tensor] = {}
    for position in range(targets[-1] + 1):
        prediction = scorer.predict()
        if position in targets:
            predictions[position] = check_distribution(prediction, position).detach().cpu().double().clone()
            if len(prediction) != vocabulary:
                raise RuleError(f"target {position:,} got {len(prediction):,} log-probabilities, not {vocabulary:,}")
            if not torch.equal(predictions[position], scorer.predict().detach().cpu().double()):
                raise ValueError(f"predict() changes when it is asked again, at target {position:,}")
        scorer.reveal(int(stream[position + 1]))
        progress(position + 1, targets[-1] + 1)
    return predictions


def _difference(one: dict[int, Tensor], other: dict[int, Tensor]) -> float:
    return max(float((one[target] - other[target]).abs().max()) for target in other)
