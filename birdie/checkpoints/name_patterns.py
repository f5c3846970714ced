"""Patterns of the names of tensors to take and to leave out: encoder.*, *.num_batches_tracked."""

import copy
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from torch import Tensor

from birdie.checkpoints.nested import memories
from birdie.errors import ConfigError

_NEAR = 4  # names in an error


@dataclass(frozen=True, slots=True)
class NamePatterns:
    """Patterns of names: of `include`, if it has any, one must match, and none of `exclude`."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.include or self.exclude)

    def chosen(self, state: dict[str, Tensor], path: Path) -> tuple[dict[str, Tensor], str]:
        """Return the tensors whose names match, and a sentence on the others.

        Args:
            state: name in the .birdie file → tensor.
            path: their file, for error messages.

        Raises:
            ConfigError: a pattern matches no name, or nothing is left.
        """
        included = self._matches("--include", self.include, [*state], path) if self.include else {*state}
        wanted = included - self._matches("--exclude", self.exclude, [*state], path)
        if not wanted:
            raise ConfigError(f"nothing of {path} is left to compress; give fewer patterns to --exclude")
        chosen = copy.copy(state)  # with the versions of its modules
        left = {name: chosen.pop(name) for name in state if name not in wanted}
        size = sum(count for _, count in memories(left) - memories(chosen))
        return chosen, f"left out by --include and --exclude: {len(left):,} of {len(state):,} tensors, {size:,} B"

    def _matches(self, flag: str, patterns: Sequence[str], names: Sequence[str], path: Path) -> set[str]:
        matches: set[str] = set()
        for pattern in patterns:
            hits = [name for name in names if fnmatchcase(name, pattern)]
            if not hits:
                near = difflib.get_close_matches(pattern, names, _NEAR, 0.5) or names[:_NEAR]
                raise ConfigError(f"no tensor of {path} matches {flag} {pattern!r}; near it: {', '.join(near)}")
            matches.update(hits)
        return matches


ALL = NamePatterns()
"""Patterns that leave nothing out."""
