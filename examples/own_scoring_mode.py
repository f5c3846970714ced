"""A scoring mode of your own: windows at the temperature that would have been best on the text scored so far.

    python examples/own_scoring_mode.py evaluate model.birdie --mode online-temperature --online-temperature.spread 0.2

Once imported, the mode is like birdie's own: in requests, recipes, `--help` and JSON, below the n-gram bias.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from cyclopts import Parameter

from birdie.cli import main
from birdie.gpt.score.mode import Losses, ScoringMode
from birdie.gpt.score.settings import register
from birdie.gpt.score.window_losses import hints_at, ids_and_targets, losses_of_logits, rotary_base_of, sliding


@register
@dataclass(frozen=True, slots=True)
class OnlineTemperature(ScoringMode):
    """Score non-overlapping windows at the best of five temperatures on the windows before."""

    name = "online-temperature"
    ngram_bias = True
    spread: Annotated[float, Parameter(help="Logarithm of the highest candidate; the lowest has minus it.")] = 0.1

    def score(self, scoring):
        if scoring.world.rank:  # each window depends on all windows before it, so rank 0 scores alone
            return
        candidates = np.exp(self.spread * np.array([0, -1, -0.5, 0.5, 1]))
        nats = np.zeros(len(candidates))  # of the windows so far, at each temperature
        for window in sliding(len(scoring.tokens) - 1, scoring.length, scoring.length).groups(1):
            first, stop = int(window.firsts[0]), int(window.stops[0])
            ids, targets = ids_and_targets(scoring.tokens, window.begins, stop - first, scoring.device)
            with torch.inference_mode(), rotary_base_of(scoring.model, scoring.length):
                logits = scoring.model(ids).float()
            hints = hints_at(scoring.hint_tokens, window.firsts, stop - first)
            losses = losses_of_logits(logits / candidates[nats.argmin()], targets, hints)
            yield Losses(window.firsts, *losses)  # recorded when the next line runs
            scoring.ledger.learn((first, stop))  # raises RuleError unless these targets are scored
            nats += [losses_of_logits(logits / t, targets)[0].sum() for t in candidates]

    def describe(self, scoring):
        return f"windows of {scoring.length:,}, temperature within e^±{self.spread:g} by the text so far"


if __name__ == "__main__":
    main()
