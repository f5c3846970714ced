"""Combinations of options that are refused, as rules, so that they stand in one list and a test can walk over them."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from birdie.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Excludes:
    """An option that combines with none of some others, and why: "keeps every bit"."""

    option: str
    others: tuple[str, ...]
    why: str

    def problem(self, chosen: Collection[str], spelled: Callable[[str], str]) -> str:
        """Return what is wrong with the chosen options, and what to do; nothing if they combine."""
        other = next((name for name in self.others if name in chosen), None)
        if self.option not in chosen or other is None:
            return ""
        words = spelled(self.option), spelled(other)
        return f"{words[0]} {self.why}, so it cannot be combined with {words[1]}; drop one of the two"


@dataclass(frozen=True, slots=True)
class Needs:
    """An option that needs one of some others, and why: "trains on inputs"."""

    option: str
    others: tuple[str, ...]
    why: str

    def problem(self, chosen: Collection[str], spelled: Callable[[str], str]) -> str:
        """Return what is wrong with the chosen options, and what to do; nothing if they combine."""
        if self.option not in chosen or any(name in chosen for name in self.others):
            return ""
        return f"{spelled(self.option)} {self.why}; add {' or '.join(map(spelled, self.others))}, or drop it"


Rule = Excludes | Needs


def require(rules: Iterable[Rule], chosen: Collection[str], spelled: Callable[[str], str]) -> None:
    """Check a combination of options.

    Args:
        chosen: names of the options.
        spelled: name → the option as the user writes it.
    """
    for rule in rules:
        if problem := rule.problem(chosen, spelled):
            raise ConfigError(problem)
