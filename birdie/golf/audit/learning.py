"""Auditing test-time training: the recipe's adaptation is run on a stretch of text, twice, with its end exchanged.

    tokens  ─────────────┬──────────┐
    changed ─────────────┴≈≈≈≈≈≈≈≈≈≈┘   losses up to the change must be the same: what is learned from later is not seen
            ledger: every step declares what it learns from, which must have been scored

Chunks are made small enough for several to fit the stretch, so that something is learned before something is scored.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.data.byte_accounting import Tokens
from birdie.errors import BirdieError, RuleError
from birdie.golf.audit import rules
from birdie.golf.audit.rules import Finding
from birdie.model.gpt import GPT
from birdie.run.recipe import Recipe
from birdie.score.evaluator import prepare, record
from birdie.score.mode import TrainingReport

CLOSE = 1e-4
"""Nats by which losses may differ that nothing learned should have changed."""

CHUNKS = 4  # of the stretch, for SGD by chunks
PARTS = (0.3, 0.6, 0.9)  # of the stretch, after which it is exchanged


def check_learning(model: GPT, recipe: Recipe, tokens: Tokens, shown: str) -> list[Finding]:
    """What is found of the recipe's test-time training, on the CPU, over `tokens` (N + 1,)."""
    mode = recipe.evaluation.scoring_mode
    adapt = mode.name
    try:
        nats, adapted = _losses(model, recipe, tokens)
    except RuleError as error:
        return [Finding(rules.SCORE_FIRST, "fail", f"{adapt}: {error}", "ledger", shown)]
    except BirdieError as error:
        said = f"{adapt} could not be tried on {len(tokens) - 1:,} targets: {error}"
        return [Finding(rules.SCORE_FIRST, "unknown", said, "ledger", shown)]
    said = (
        f"{adapt}: {len(nats):,} targets were scored once, and {adapted.steps:,} steps learned from "
        f"{adapted.tokens:,} places, each after it was scored"
    )
    found = [Finding(rules.SCORE_FIRST, "pass" if adapted.steps else "unknown", said, "ledger", shown)]
    if not mode.left_to_right:
        said = f"{adapt}: documents are scored by length, so what one learned may come from later in the text"
        return [*found, Finding(rules.CAUSAL, "unknown", f"{said} (never ruled upon)", "perturbation", shown)]
    return [*found, _perturbed(model, recipe, tokens, nats, shown)]


def _perturbed(model: GPT, recipe: Recipe, tokens: Tokens, nats: NDArray[np.float64], shown: str) -> Finding:
    """Whether losses change with tokens that come after them."""
    adapt, far, where = recipe.evaluation.mode, 0.0, 0
    for part in PARTS:
        place = int(part * len(nats))
        apart = np.abs(
            _losses(model, recipe, _exchanged(tokens, place + 2, recipe))[0][: place + 1] - nats[: place + 1]
        )
        if apart.max() > far:
            far, where = float(apart.max()), int(apart.argmax())
    if far > CLOSE:
        said = f"{adapt}: the loss of target {where:,} changes by {far:.3g} nats with tokens that come after it"
        return Finding(rules.CAUSAL, "fail", said, "perturbation", shown)
    said = (
        f"{adapt}: exchanging all that follows {len(PARTS)} places changes no loss before them by more than {far:.1e}"
    )
    return Finding(rules.CAUSAL, "pass", f"{said} nats", "perturbation", shown)


def _exchanged(tokens: Tokens, first: int, recipe: Recipe) -> Tokens:
    """Other tokens from `first` on, where documents end elsewhere, too: one begins after a few tokens."""
    changed = np.array(tokens)
    rest = len(changed) - first
    changed[first:] = np.random.default_rng(first).integers(0, recipe.model.vocab_size, rest)
    changed[first + min(3, rest - 1)] = recipe.model.bos_id
    return changed


def _losses(model: GPT, recipe: Recipe, tokens: Tokens) -> tuple[NDArray[np.float64], TrainingReport]:
    """Nats (N,) of the targets, by the recipe's adaptation with small chunks; the model gets its weights back.

    Raises:
        RuleError: a target was scored twice or never, or learned from before it was scored.
    """
    bos_id, settings = recipe.model.bos_id, recipe.evaluation
    length = min(settings.seq_len or recipe.train.train_seq_len, max(1, (len(tokens) - 1) // CHUNKS))
    prefix = max(1, int((np.asarray(tokens) == bos_id).sum()) // 2)
    sgd, lora, phases = settings.ttt_sgd, settings.ttt_lora, settings.ttt_multi_phase
    settings = replace(
        settings,
        seq_len=length,
        stride=min(settings.stride, length),
        ttt_sgd=replace(sgd, chunk_tokens=min(sgd.chunk_tokens, length)),
        ttt_lora=replace(lora, chunk=min(lora.chunk, max(1, length // 2)), context=min(lora.context, length)),
        ttt_multi_phase=replace(phases, prefix_docs=min(phases.prefix_docs, prefix)),
    )
    mode = settings.scoring_mode
    scoring = prepare(
        model,
        tokens,
        np.ones(len(tokens), np.uint16),
        settings,
        mode,
        train_seq_len=length,
        bos_id=bos_id,
        device=torch.device("cpu"),
        batch_tokens=recipe.validation.batch_tokens,
        keep_losses=True,
    )
    _, adapted = record(mode, scoring)
    scoring.accumulator.ledger.close()
    assert adapted is not None  # it was asked to learn,
    assert scoring.accumulator.losses is not None  # and told to keep them
    return scoring.accumulator.losses, adapted
