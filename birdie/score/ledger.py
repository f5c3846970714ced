"""The ledger of a scoring: every target is scored once, and learned from only afterwards.

    ledger.score(first, stop)     before these targets' losses count
    ledger.learn(first, stop)     before a step that learns from these targets, or from any cache filled with them
    ledger.agree(first, stop)     after scoring that ranks share: what one of them scored is scored for all
    ledger.close()                at the end: nothing was left out

Places are those of targets: place i is the token after input i; N + 1 tokens have places 0 … N − 1. Whoever
breaks a rule gets a RuleError instead of a score: conditions C3 and C4 of openai/parameter-golf #1017.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.errors import RuleError
from birdie.runtime.distributed import World

Places = tuple[int, int]
"""First place, and the one after the last."""


class Ledger:
    """What was scored, of `targets` targets.

    Attributes:
        scored: how many were scored on this rank.
        learned: how many places steps learned from, each as often as it was.
        steps: declarations of `learn`.
    """

    def __init__(self, targets: int) -> None:
        self._seen = np.zeros(targets, dtype=bool)
        self._elsewhere = np.zeros(targets, dtype=bool)  # scored by other ranks
        self.scored = self.learned = self.steps = 0

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def seen(self) -> NDArray[np.bool_]:
        """Whether each place was scored, (targets,); read only."""
        return _read_only(self._seen)

    @property
    def elsewhere(self) -> NDArray[np.bool_]:
        """Whether another rank scored it, (targets,); read only."""
        return _read_only(self._elsewhere)

    def score(self, first: int, stop: int) -> None:
        """The losses of places first … stop − 1 are final.

        Raises:
            RuleError: one of them was scored before.
            IndexError: there are no such places.
        """
        self._check(first, stop)
        again = np.flatnonzero(self._seen[first:stop])
        if len(again):
            raise RuleError(f"target {first + int(again[0]):,} is scored a second time; a target is scored once (C4)")
        self._seen[first:stop] = True
        self.scored += stop - first

    def learn(self, *ranges: Places) -> None:
        """One step is about to learn from the targets in `ranges`.

        Raises:
            RuleError: one of them was not scored yet.
            IndexError: there are no such places.
        """
        for first, stop in ranges:
            self._check(first, stop)
            early = np.flatnonzero(~self._seen[first:stop])
            if len(early):
                raise RuleError(
                    f"a step would learn from target {first + int(early[0]):,} before it is scored; score first (C3)"
                )
            self.learned += stop - first
        self.steps += 1

    def agree(self, first: int, stop: int, world: World, device: torch.device) -> None:
        """Of places first … stop − 1, those that any rank scored are scored for all. Every rank must call it.

        The ranks' marks are added up, so nobody takes another's word for more than it has entered itself.

        Raises:
            RuleError: two ranks scored the same one.
            IndexError: there are no such places.
        """
        self._check(first, stop)
        if world.size == 1:
            return
        own = self._seen[first:stop] & ~self._elsewhere[first:stop]
        times = world.sum_(torch.from_numpy(own.astype(np.int32)).to(device)).cpu().numpy()
        again = np.flatnonzero(times > 1)
        if len(again):
            raise RuleError(f"target {first + int(again[0]):,} is scored on two ranks; a target is scored once (C4)")
        self._elsewhere[first:stop] |= (times > 0) & ~own
        self._seen[first:stop] |= times > 0

    def load(self, seen: NDArray[np.bool_], *, elsewhere: bool) -> None:
        """Begin with the places that an earlier part of this scoring has scored: here, or on other ranks."""
        self._seen[:] = seen
        self._elsewhere[:] = seen & elsewhere
        self.scored = 0 if elsewhere else int(seen.sum())

    def close(self) -> None:
        """All targets were scored.

        Raises:
            RuleError: some were not.
        """
        missing = np.flatnonzero(~self._seen)
        if len(missing):
            raise RuleError(
                f"{len(missing):,} of {len(self):,} targets were never scored, the first is {int(missing[0]):,}"
            )

    def _check(self, first: int, stop: int) -> None:
        if not 0 <= first <= stop <= len(self._seen):
            raise IndexError(f"places {first} to {stop} are not among {len(self._seen)} targets")


def _read_only(marks: NDArray[np.bool_]) -> NDArray[np.bool_]:
    view = marks.view()
    view.flags.writeable = False
    return view
