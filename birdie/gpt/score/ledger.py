"""Ledger of an evaluation: every target is scored exactly once, and trained on only afterwards.

    ledger.score(first, stop)        before the losses of these targets count
    ledger.learn((first, stop), …)   before a step that learns from these targets, or from a cache filled with them
    ledger.all_reduce(first, stop)   after ranks shared the scoring: a target scored by one rank counts for all
    ledger.close()                   at the end: no target is missing

Position i of N + 1 tokens is that of target token i + 1; positions run from 0 to N − 1. A violation raises RuleError,
so there is no score: conditions C3 and C4 of parameter-golf#1017 (github.com/openai/parameter-golf/issues/1017).
"""

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.errors import RuleError
from birdie.system.distributed import World

Range = tuple[int, int]
"""First position, and the one after the last."""


class Ledger:
    """Record of which of `targets` targets were scored.

    Attributes:
        scored: number of targets scored on this rank.
        learned: number of targets in all steps, counted once for each step they are in.
        steps: number of steps declared.
    """

    def __init__(self, targets: int) -> None:
        self._scored = np.zeros(targets, dtype=bool)
        self._remote = np.zeros(targets, dtype=bool)  # scored by another rank
        self.scored = self.learned = self.steps = 0

    def __len__(self) -> int:
        return len(self._scored)

    @property
    def scored_mask(self) -> NDArray[np.bool_]:
        """Mask of the targets scored on any rank, (targets,), read-only."""
        return _read_only(self._scored)

    @property
    def local_mask(self) -> NDArray[np.bool_]:
        """Mask of the targets scored on this rank, (targets,)."""
        return self._scored & ~self._remote

    def score(self, first: int, stop: int) -> None:
        """Mark the losses of positions first … stop − 1 as final.

        Raises:
            RuleError: one of them was scored before.
            IndexError: a position is out of range.
        """
        self._check_range(first, stop)
        repeated = np.flatnonzero(self._scored[first:stop])
        if len(repeated):
            raise RuleError(
                f"target {first + int(repeated[0]):,} is scored a second time; a target is scored once (C4)"
            )
        self._scored[first:stop] = True
        self.scored += stop - first

    def learn(self, *ranges: Range) -> None:
        """Declare one step that is about to learn from the targets in `ranges`.

        Raises:
            RuleError: one of them is not scored yet.
            IndexError: a position is out of range.
        """
        for first, stop in ranges:
            self._check_range(first, stop)
            unscored = np.flatnonzero(~self._scored[first:stop])
            if len(unscored):
                raise RuleError(
                    f"a step would learn from target {first + int(unscored[0]):,} before it is scored; score first (C3)"
                )
            self.learned += stop - first
        self.steps += 1

    def all_reduce(self, first: int, stop: int, world: World, device: torch.device) -> None:
        """Mark the positions first … stop − 1 that any rank scored as scored on all. Every rank must call it.

        Each rank contributes only the marks of its own scoring, so a target with two marks was scored twice.

        Raises:
            RuleError: two ranks scored the same target.
            IndexError: a position is out of range.
        """
        self._check_range(first, stop)
        if world.size == 1:
            return
        local = self.local_mask[first:stop]
        counts = world.sum_(torch.from_numpy(local.astype(np.int32)).to(device)).cpu().numpy()
        repeated = np.flatnonzero(counts > 1)
        if len(repeated):
            raise RuleError(f"target {first + int(repeated[0]):,} is scored on two ranks; a target is scored once (C4)")
        self._remote[first:stop] |= (counts > 0) & ~local
        self._scored[first:stop] |= counts > 0

    def close(self) -> None:
        """Check that every target was scored.

        Raises:
            RuleError: some were not.
        """
        missing = np.flatnonzero(~self._scored)
        if len(missing):
            raise RuleError(
                f"{len(missing):,} of {len(self):,} targets were never scored, the first is {int(missing[0]):,}"
            )

    def _check_range(self, first: int, stop: int) -> None:
        if not 0 <= first <= stop <= len(self._scored):
            raise IndexError(f"positions {first} to {stop} are not among {len(self._scored)} targets")


def _read_only(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    view = mask.view()
    view.flags.writeable = False
    return view
