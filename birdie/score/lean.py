"""Scoring that leans on hints (`tilt`): losses are kept until all are there, then tilted in one causal pass.

    hints of the stream ─► asked for beside the targets ─► all ranks' log-probabilities ─► tilt ─► tally

Hints need the tokens alone, so they are made first; how much to lean on them is learned from place to place, so that
comes last. What is entered is what `tilt.Tilted` says token by token.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.errors import RuleError
from birdie.runtime.distributed import World
from birdie.score.ledger import Ledger
from birdie.score.ngram import TiltSettings, hints
from birdie.score.tally import Tally
from birdie.score.tilt import tilt


class Lean:
    """A sink for the losses of a stream's N targets.

    Args:
        tokens: (N + 1,).
        settings: of hints and strength.

    Attributes:
        asked: the hint after each input; any token where there is none.
        ledger: of the targets.
    """

    def __init__(self, tokens: NDArray[np.uint16], settings: TiltSettings) -> None:
        self._targets, self._settings = np.asarray(tokens[1:]).astype(np.int64), settings
        self._hints = hints(np.asarray(tokens[:-1]), settings)
        self.asked: NDArray[np.integer] | None = np.maximum(self._hints.tokens, 0)
        self._kept = np.zeros((2, len(self._targets)), dtype=np.float32)  # nats, log p(hint)
        self.ledger = Ledger(len(self._targets))

    def add(
        self, firsts: NDArray[np.integer], nats: NDArray[np.floating], logp: NDArray[np.floating] | None = None
    ) -> None:
        """Keep the losses of places firsts[i] …, (windows, n), and the log-probabilities of their hints."""
        assert logp is not None
        for row, first in enumerate(firsts.tolist()):
            stop = first + nats.shape[1]
            self.ledger.score(first, stop)
            self._kept[0, first:stop], self._kept[1, first:stop] = nats[row], logp[row]

    def close(self, tally: Tally, world: World, device: torch.device) -> None:
        """Enter all ranks' targets, tilted, in rank 0's tally.

        Raises:
            RuleError: one was scored never, or on two ranks.
        """
        seen = (self.ledger.seen & ~self.ledger.elsewhere).astype(np.int32)
        if world.size > 1:
            home = device if device.type == "cuda" else torch.device("cpu")
            self._kept = world.sum_(torch.from_numpy(self._kept).to(home)).cpu().numpy()
            seen = world.sum_(torch.from_numpy(seen).to(home)).cpu().numpy()
        wrong = np.flatnonzero(seen != 1)
        if len(wrong):
            raise RuleError(f"target {int(wrong[0]):,} was scored {seen[wrong[0]]} times; each is scored once (C4)")
        if world.is_main:
            nats, logp = self._kept.astype(np.float64)
            tally.add(np.array([0]), tilt(nats, logp, self._hints, self._targets, self._settings)[None])
