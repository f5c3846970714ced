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
from birdie.score.chunks import Adapted
from birdie.score.plan import plan
from birdie.score.scoring import enter
from birdie.score.tally import Tally

CLOSE = 1e-4
"""Nats by which losses may differ that nothing learned should have changed."""

CHUNKS = 4  # of the stretch, for SGD by chunks
PARTS = (0.3, 0.6, 0.9)  # of the stretch, after which it is exchanged


def check_learning(model: GPT, recipe: Recipe, tokens: Tokens, shown: str) -> list[Finding]:
    """What is found of the recipe's `evaluation.adapt`, on the CPU, over `tokens` (N + 1,)."""
    adapt = recipe.evaluation.adapt
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
    if adapt == "phased" or (adapt == "lora" and recipe.lora.warm_a):
        said = f"{adapt}: documents are scored by length, so what one learned may come from later in the text"
        return [*found, Finding(rules.CAUSAL, "unknown", f"{said} (never ruled upon)", "perturbation", shown)]
    return [*found, _perturbed(model, recipe, tokens, nats, shown)]


def _perturbed(model: GPT, recipe: Recipe, tokens: Tokens, nats: NDArray[np.float64], shown: str) -> Finding:
    """Whether losses change with tokens that come after them."""
    adapt, far, where = recipe.evaluation.adapt, 0.0, 0
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


def _losses(model: GPT, recipe: Recipe, tokens: Tokens) -> tuple[NDArray[np.float64], Adapted]:
    """Nats (N,) of the targets, by the recipe's adaptation with small chunks; the model gets its weights back.

    Raises:
        RuleError: a target was scored twice or never, or learned from before it was scored.
    """
    bos_id, cpu = recipe.model.bos_id, torch.device("cpu")
    length = min(recipe.evaluation.seq_len or recipe.train.train_seq_len, max(1, (len(tokens) - 1) // CHUNKS))
    settings = replace(recipe.evaluation, seq_len=length, stride=min(recipe.evaluation.stride, length))
    made = plan(settings, tokens, length, bos_id, recipe.model.isolate_documents)
    tally = Tally(made.tokens, np.ones(len(made.tokens), np.uint16), bos_id, keep=True)
    prefix = max(1, int((np.asarray(tokens) == bos_id).sum()) // 2)
    asked = replace(
        recipe,
        evaluation=settings,
        sgd=replace(recipe.sgd, chunk_tokens=min(recipe.sgd.chunk_tokens, length)),
        lora=replace(
            recipe.lora,
            chunk=min(recipe.lora.chunk, max(1, length // 2)),
            context=min(recipe.lora.context, length),
        ),
        phased=replace(recipe.phased, prefix_docs=min(recipe.phased.prefix_docs, prefix)),
    )
    batch_tokens = recipe.validation.batch_tokens
    _, adapted = enter(made, asked, model, tally, batch_tokens=batch_tokens, bos_id=bos_id, device=cpu)
    tally.ledger.close()
    assert adapted is not None  # it was asked to learn,
    assert tally.nats is not None  # and told to keep them
    return tally.nats, adapted
