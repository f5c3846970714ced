"""Selection of runs by their settings and columns, and groups of seeds compared with one another."""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from birdie.compress import parse_size
from birdie.errors import ConfigError, DataError
from birdie.lab.run_ledger import COLUMNS, LogRecord, RunRecord, find_runs_and_logs, flat
from birdie.lab.significance import Test, compare
from birdie.system.names import shown

SEED = "train.seed"
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_CONDITION = re.compile(r"([\w.-]+?)(<=|>=|!=|=|<|>)(.*)")


def full_key(name: str, keys: Collection[str]) -> str:
    """Return the key that `name` means: the key itself, or the only one that ends in ".NAME"."""
    name = name.replace("-", "_")
    if name in keys:
        return name
    matches = [key for key in keys if key.endswith(f".{name}")]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"{name!r} may be {' or '.join(sorted(matches))}; give the full name")
    last = {key.rpartition(".")[2]: key for key in keys}
    nearest = difflib.get_close_matches(name, keys, 1)
    nearest = nearest or [last[word] for word in difflib.get_close_matches(name.rpartition(".")[2], last, 1)]
    nearest = nearest or sorted(key for key in keys if name in key)
    hint = f"did you mean {nearest[0]}?" if nearest else "`birdie recipe show NAME` lists the settings of a recipe"
    raise ConfigError(f"there is no setting {name!r}; {hint}")


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a setting or column, as in "model.num_layers=9", "started>2026-01-31" or "bytes<140kB".

    Values are compared as what they are: numbers, sizes, times in UTC (a day is all of it), or else text.

    Attributes:
        key: as the user writes it.
        sign: one of = != < > <= >=.
        value: text to compare with.
    """

    key: str
    sign: str
    value: str

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Return the condition that `text` states."""
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text!r} is no condition; write KEY=VALUE, as in state=complete or model.num_layers=9")
        return cls(*match.groups())

    def holds(self, value: Any) -> bool:
        """Return whether the condition holds for `value`; None, a value that a run lacks, equals only "none"."""
        pair = self._pair(value)
        if pair is None:
            return self.sign == "!="
        left, right = pair
        if self.sign in ("=", "!="):
            return bool(left == right) == (self.sign == "=")
        return bool({"<": left < right, ">": left > right, "<=": left <= right, ">=": left >= right}[self.sign])

    def require_comparable(self, values: Sequence[Any]) -> None:
        """Check that any of `values` can be compared with the condition's, unless no run has one."""
        values = [value for value in values if value is not None]
        if values and all(self._pair(value) is None for value in values):
            raise ConfigError(
                f"{self.key}{self.sign}{self.value}: {self.key} is {str(values[0])[:100]!r}, which {self.value!r} "
                f"cannot be compared with by {self.sign}; give a value of that kind, such as 1.2, 140kB or 2026-01-31"
            )

    def _pair(self, value: Any) -> tuple[Any, Any] | None:
        """Return what to compare of a run's value and the condition's; None if they cannot be compared."""
        text = self.value
        if value is None or isinstance(value, bool | list) or text.lower() == "none":
            if self.sign not in ("=", "!="):
                return None
            if isinstance(value, list):
                return ",".join(map(str, value)), text.strip("[]").replace(" ", "")
            fits = not isinstance(value, bool) or text.lower() in ("true", "false", "none")
            return (str(value).lower(), text.lower()) if fits else None
        if isinstance(value, int | float):
            number = _number(text)
            return None if number is None else (value, number)
        value = str(value)
        if _DATE.match(value):  # in ISO 8601, which sorts as text
            return (value[: len(text)], text.replace(" ", "T")) if _DATE.match(text) else None
        sizes = _number(value), _number(text)
        return (value, text) if None in sizes else sizes


def _number(text: str) -> float | None:
    """Return the number or size that `text` states, or None."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return parse_size(text)
    except ConfigError:
        return None


def values_of(records: Sequence[RunRecord], name: str) -> list[Any]:
    """Return the setting or column called `name` of each run, None where a run lacks it."""
    keys = {key for record in records for key in record.settings} | set(COLUMNS)
    try:
        key = full_key(name, keys)
    except ConfigError:
        from birdie.gpt.run.recipe_settings import Recipe  # imported late: it needs torch

        key = full_key(name, keys | flat(Recipe().to_dict()).keys())
    if key in COLUMNS:
        return [record.columns[key] for record in records]
    return [record.settings.get(key) for record in records]


def select(records: Sequence[RunRecord], conditions: Sequence[str]) -> list[RunRecord]:
    """Return the runs for which all conditions hold."""
    chosen = list(records)
    for condition in map(Condition.parse, conditions):
        values = values_of(chosen, condition.key) if chosen else []
        condition.require_comparable(values)
        chosen = [record for record, value in zip(chosen, values, strict=True) if condition.holds(value)]
    return chosen


def sort(records: Sequence[RunRecord], name: str) -> list[RunRecord]:
    """Return the runs by a setting or column, ascending; those that lack it come last."""

    def key(pair: tuple[RunRecord, Any]) -> tuple[bool, bool, float, str]:
        value = pair[1]
        number = float(value) if isinstance(value, int | float) else 0.0
        return value is None, isinstance(value, str | list), number, str(value)

    return [record for record, _ in sorted(zip(records, values_of(records, name), strict=True), key=key)]


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs that differ in nothing but their seeds.

    Attributes:
        name: of the run, or of the folder that holds several.
    """

    name: str
    records: tuple[RunRecord, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that the runs share."""
        return {key: value for key, value in self.records[0].settings.items() if key != SEED}

    @property
    def scores(self) -> dict[int, float]:
        """Bits per byte of the artifact by seed; runs without a score are left out."""
        return {record.seed: bpb for record in self.records if (bpb := record.columns["bpb_artifact"]) is not None}

    def mean(self, column: str) -> float | None:
        """Return the mean of a column over the runs that have it."""
        values = [record.columns[column] for record in self.records if record.columns[column] is not None]
        return fmean(values) if values else None

    def against(self, reference: "RunGroup") -> Test | None:
        """Return the test of whether this group's bits per byte are lower; None where a side has no score.

        Runs with the same seeds are compared seed by seed.
        """
        ours, theirs = self.scores, reference.scores
        if not ours or not theirs:
            return None
        paired = len(ours) > 1 and ours.keys() == theirs.keys()
        seeds = sorted(ours)
        right = [theirs[seed] for seed in seeds] if paired else list(theirs.values())
        return compare([ours[seed] for seed in seeds], right, paired=paired)


def group(names: Sequence[str], root: Path) -> list[RunGroup]:
    """Return the runs named by paths, or by names below `root`, in groups that differ in more than the seed.

    Args:
        names: a run folder, a log, or a folder with the runs of several seeds.
    """
    groups: list[RunGroup] = []
    for name in names:
        path = next((path for path in (Path(name), root / name) if path.exists()), None)
        if path is None:
            raise DataError(f"there is no run {name!r}, neither as a path nor in {root}; `birdie runs` lists the names")
        new = RunGroup(shown(path.name or str(path)), tuple(find_runs_and_logs(path)))
        for problem in (problem for record in new.records for problem in record.damage):
            raise DataError(f"{problem}; restore the file, or leave the run out")
        for record in new.records[1:]:
            if differing := _differences(new.settings, record.settings):
                raise DataError(
                    f"the runs in {path} differ in {differing[0]}, not only in their seeds; name the runs one by one"
                )
        same = None
        if not any(isinstance(record, LogRecord) for record in new.records):  # a log does not tell its recipe
            same = next((old for old in groups if not _differences(old.settings, new.settings) and old.settings), None)
        if same is None:
            groups.append(new)
        else:
            groups[groups.index(same)] = RunGroup(same.name, same.records + new.records)
    return groups


def by_recipe(records: Sequence[RunRecord]) -> list[RunGroup]:
    """Return the runs in groups that differ in more than the seed; each log is a group, as it does not tell its recipe.

    A group of several runs has the name of their folder if they share one that has no other run.
    """
    groups: list[list[RunRecord]] = []
    for record in records:
        for known in groups:
            alike = not isinstance(record, LogRecord) and known[0].settings
            if alike and not _differences(known[0].settings, record.settings):
                known.append(record)
                break
        else:
            groups.append([record])
    named = []
    for known in groups:
        parents = {record.folder.resolve().parent for record in known}
        others = {record.folder.resolve().parent for other in groups if other is not known for record in other}
        shared = len(known) > 1 and len(parents) == 1 and not parents & others
        named.append(RunGroup(shown(parents.pop().name) if shared else known[0].name, tuple(known)))
    return named


def _differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    return [key for key in {**left, **right} if key != SEED and left.get(key) != right.get(key)]
