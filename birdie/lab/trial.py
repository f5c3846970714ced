"""One change against the incumbent at equal time or steps and equal bytes, with a paired significance test.

    Lab(folder).start(recipe, budget)        the first incumbent
    Lab(folder).trial("wider", […]) ─► runs of both, seed by seed ─► paired t-test ─► keep, revert or undecided

*Equal time*: the incumbent's wall-clock cap ends the runs of both. *Equal steps*: no clock ends a run, so other load on
the machine cannot change a score. *Equal bytes*: both are exported into the same budget.

    LAB/start.toml        the recipe that the lab started with
    LAB/incumbent.toml    the recipe to beat; a change that is kept replaces it
    LAB/results.jsonl     one result a line
    LAB/diary.md          the same for people: date, hypothesis, change, result, verdict
    LAB/runs/DIGEST/      run folders
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from birdie.compress import parse_size
from birdie.errors import ConfigError, DataError
from birdie.gpt.run.recipe_registry import changes, find
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.run.run_estimate import artifact
from birdie.lab.assignments import parse, with_settings
from birdie.lab.experiment import Experiment, resolved
from birdie.lab.run_ledger import RunRecord, flat
from birdie.lab.significance import LEVEL, Test, compare
from birdie.system import provenance
from birdie.system.callbacks import Notify, no_message
from birdie.system.files import write_bytes
from birdie.system.locks import HOLDER, LOCK, locked_folder
from birdie.system.outputs import require_own_folder, require_writable
from birdie.system.parsing import parse_object, to_json
from birdie.system.structured import read_bytes

START = "start.toml"
By = Literal["time", "steps"]
Verdict = Literal["keep", "revert", "undecided"]
Change = Mapping[str, tuple[Any, Any]]

FIXED = {
    "train.seed": "--seeds gives both the same seeds",
    "train.iterations": "both train for the same time or steps (--by)",
    "train.force_stop_step": "both train for the same time or steps (--by)",
    "train.max_wallclock_seconds": "both train for the same time or steps (--by)",
    "export.budget": "both are exported into the same bytes",
}
"""Settings that a trial sets itself → the reason."""


@dataclass(frozen=True, slots=True)
class Side:
    """Runs of one recipe, by seed.

    Attributes:
        digest: of the recipe, without what a trial sets.
        bpb: of the decoded artifacts, by the recipe's own evaluation.
    """

    digest: str
    steps: tuple[int, ...]
    bpb: tuple[float, ...]
    bytes: tuple[int, ...]
    runs: tuple[str, ...]

    @property
    def mean(self) -> float:
        """Mean bits per byte; NaN without runs."""
        return math.fsum(self.bpb) / len(self.bpb) if self.bpb else math.nan


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a trial.

    Attributes:
        date: in ISO 8601 and UTC.
        hypothesis: in the user's words.
        change: setting → (the incumbent's value, the candidate's).
        by: equal time, or equal steps.
        budget: bytes that both may have.
        seeds: that both finished.
        incumbent, candidate: their runs.
        difference: mean bits per byte of the candidate minus the incumbent's; negative is better.
        error: its standard error; NaN with one seed.
        p_better, p_worse: of the paired one-sided t-tests that the candidate is better, or worse; NaN with one seed.
        level: of significance.
        verdict: keep, revert or undecided.
        reason: for the verdict, in a few words.
        failed: seed → reason, of the candidate's runs that failed.
        commit: of birdie.
    """

    date: str
    hypothesis: str
    change: Change
    by: By
    budget: int
    seeds: tuple[int, ...]
    incumbent: Side
    candidate: Side
    difference: float
    error: float
    p_better: float
    p_worse: float
    level: float
    verdict: Verdict
    reason: str
    failed: Mapping[str, str]
    commit: str | None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Result":
        """Return the result that a line of `results.jsonl` holds."""
        table: dict[str, Any] = {
            key: math.nan if value is None and key != "commit" else value for key, value in values.items()
        }
        for name in ("incumbent", "candidate"):
            side: dict[str, Any] = table[name]
            lists: dict[str, Any] = {key: tuple(part) for key, part in side.items() if isinstance(part, list)}
            table[name] = Side(**(side | lists))
        table["change"] = {key: tuple(pair) for key, pair in table["change"].items()}
        return cls(**(table | {"seeds": tuple(table["seeds"])}))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, which has null for NaN."""
        table: dict[str, Any] = _finite(dataclasses.asdict(self))
        return table

    @property
    def key(self) -> str:
        """Text that is the same for the same trial."""
        digests = f"{self.incumbent.digest} → {self.candidate.digest}"
        return f"{digests}, equal {self.by}, seeds {', '.join(map(str, self.seeds))}, level {self.level:g}"

    @property
    def p(self) -> float:
        """Significance of the difference: p of the one-sided test in its direction."""
        return min(self.p_better, self.p_worse)

    @property
    def changed(self) -> str:
        """The change in one line."""
        return ", ".join(f"{key} {_shown(old)} → {_shown(new)}" for key, (old, new) in self.change.items())


class Lab(Experiment):
    """A folder of trials.

    Args:
        folder: created by the first trial.
        notify: called with one-line messages.
    """

    def __init__(self, folder: Path, notify: Notify = no_message) -> None:
        super().__init__(folder)
        self.notify = notify

    @property
    def recipe_path(self) -> Path:
        """File of the incumbent's recipe."""
        return self.folder / "incumbent.toml"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the folder for this process, and create it if necessary."""
        require_writable(require_own_folder(self.folder, START, beside=[LOCK, HOLDER], folders=["runs"]))
        with locked_folder(self.folder, self.notify):
            yield

    def start(self, recipe: Recipe, budget: int | None = None) -> None:
        """Make `recipe` the first incumbent; do nothing if the lab started with it.

        Args:
            budget: bytes of every artifact of the lab; None: the recipe's, or the estimated size of its artifact.
        """
        if budget is None and recipe.export.budget is None:
            budget = artifact(recipe).bytes
            self.notify(f"the recipe has no export.budget; all artifacts get its estimated size, {budget:,} bytes")
        if budget is not None:
            recipe = dataclasses.replace(recipe, export=dataclasses.replace(recipe.export, budget=str(budget)))
        recipe = resolved(recipe)
        path = self.folder / START
        if not path.is_file():
            write_bytes(path, recipe.to_toml().encode())
            write_bytes(self.recipe_path, recipe.to_toml().encode())
        elif find(str(path)).recipe().digest != recipe.digest:
            raise ConfigError(
                f"{self.folder} has another incumbent; leave --recipe out to go on with it, or give another --lab"
            )

    def incumbent(self) -> Recipe:
        """Return the recipe to beat."""
        if not self.recipe_path.is_file():
            raise ConfigError(f"{self.folder} has no incumbent; name the first one with --recipe NAME_OR_FILE")
        recipe = resolved(find(str(self.recipe_path)).recipe())
        if recipe.export.budget is None:
            raise ConfigError(f"{self.recipe_path} has no export.budget; set the bytes that every artifact may have")
        return recipe

    def results(self) -> list[Result]:
        """Return all results, the oldest first."""
        path = self.folder / "results.jsonl"
        try:
            lines = read_bytes(path).splitlines()
            return [Result.from_dict(parse_object(line)) for line in lines if line.strip()]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise DataError(
                f"{path} cannot be read ({error}); restore it, or delete it to start a new table"
            ) from error

    def trial(
        self,
        hypothesis: str,
        assignments: Sequence[str],
        *,
        seeds: int = 3,
        by: By | None = None,
        level: float = LEVEL,
    ) -> Result:
        """Run the change against the incumbent, write the result, and keep the change if it is significantly better.

        Finished runs are used again; a trial that was interrupted continues where it stopped.

        Args:
            assignments: the change, as texts "KEY=VALUE".
            seeds: number of seeds, counted from the recipe's.
            by: equal time or steps; None: time if the incumbent has a wall-clock cap.
        """
        if seeds < 1 or not 0 < level < 0.5:
            raise ConfigError(f"{seeds} seeds at level {level:g} cannot be tested; give at least 2 seeds, and 0.05")
        incumbent = self.incumbent()
        capped = incumbent.train.cap_ms is not None
        by = by or ("time" if capped else "steps")
        if by == "time" and not capped:
            raise ConfigError(f"{self.recipe_path} has no train.max_wallclock_seconds; set it, or give --by steps")
        recipe = changed(incumbent, assignments)
        difference = changes(flat(incumbent.to_dict()), flat(recipe.to_dict()))
        change = {name: (old, new) for name, old, new in difference}
        if not change:
            raise ConfigError("the change equals the incumbent, so there is nothing to try; `birdie try` shows it")
        if seeds == 1:
            self.notify("one seed: no significance can be had, so the verdict will be undecided; give --seeds 3")
        numbers = range(incumbent.train.seed, incumbent.train.seed + seeds)
        pairs, failed = self._run(incumbent, recipe, by, numbers)
        budget = parse_size(str(recipe.export.budget))
        result = _result(
            *(datetime.now(UTC).isoformat(timespec="seconds"), hypothesis, change, by, budget),
            _side(incumbent, [left for left, _ in pairs.values()]),
            _side(recipe, [right for _, right in pairs.values()]),
            *(tuple(pairs), level, failed),
        )
        self._record(result)
        if result.verdict == "keep":
            write_bytes(self.recipe_path, recipe.to_toml().encode())
        return result

    def _run(
        self, incumbent: Recipe, recipe: Recipe, by: By, seeds: Sequence[int]
    ) -> tuple[dict[int, tuple[RunRecord, RunRecord]], dict[str, str]]:
        """Run both, seed by seed; return the pairs of runs, and the failures of the candidate, by seed."""
        pairs, failed = {}, {}
        for number, seed in enumerate(seeds, 1):
            head = f"seed {seed} ({number} of {len(seeds)})"
            reference = self._train(of_seed(incumbent, seed, by), f"{head}, incumbent")
            try:
                pairs[seed] = reference, self._train(of_seed(recipe, seed, by), f"{head}, candidate")
            except DataError as error:
                failed[str(seed)] = str(error)
                self.notify(str(error))
        return pairs, failed

    def _train(self, recipe: Recipe, head: str) -> RunRecord:
        folder = self.run_folder(recipe.digest)
        known = (folder / "summary.json").is_file()
        self.notify(f"{head}: {'known, ' if known else ''}{folder}")
        record = self.run(recipe, recipe.digest)
        values, commit = record.columns, record.environment.get("commit")
        self.notify(f"{head}: {values['bpb_artifact']:.4f} bpb, {values['bytes']:,} bytes")
        if known and commit != provenance.commit():
            self.notify(f"warning: {folder} was trained by commit {commit}, not by this one; delete it to train again")
        return record

    def _record(self, result: Result) -> None:
        """Append the result to table and diary, unless it is in them: a trial may be repeated."""
        if all(old.key != result.key or old.failed for old in self.results()):
            line = to_json(result.to_dict(), ensure_ascii=False) + "\n"
            _append(self.folder / "results.jsonl", line)
        if f"`{result.key}`" not in _text(self.folder / "diary.md") or result.failed:
            _append(self.folder / "diary.md", diary_entry(result))


def changed(recipe: Recipe, assignments: Sequence[str]) -> Recipe:
    """Return `recipe` with settings changed as the texts "KEY=VALUE" say; KEY may be the last part of a name."""
    if not assignments:
        raise ConfigError("a trial needs a change; give --set KEY=VALUE, as in --set optimizer.matrix_lr=0.03")
    values = parse(assignments, recipe)
    for key in values:
        if key in FIXED:
            raise ConfigError(f"{key} cannot be tried: {FIXED[key]}")
    return with_settings(recipe, values)


def of_seed(recipe: Recipe, seed: int, by: By) -> Recipe:
    """Return `recipe` with a seed; by steps no clock ends it."""
    seconds = recipe.train.max_wallclock_seconds if by == "time" else 0.0
    return dataclasses.replace(
        recipe, train=dataclasses.replace(recipe.train, seed=seed, max_wallclock_seconds=seconds)
    )


def decide(ours: Sequence[float], theirs: Sequence[float], level: float) -> tuple[Verdict, str, Test, Test]:
    """Return verdict, reason and the paired one-sided tests, at `level`, that `ours` is better and that it is worse."""
    better, worse = compare(ours, theirs, paired=True), compare(theirs, ours, paired=True)
    if math.isnan(better.p):
        return "undecided", "one seed has no significance", better, worse
    if list(ours) == list(theirs):
        return "undecided", "no effect: the scores are equal", better, worse
    if better.significant(level):
        return "keep", "significantly better", better, worse
    if worse.significant(level):
        return "revert", "significantly worse", better, worse
    return "undecided", "not significant", better, worse


def _result(
    date: str,
    hypothesis: str,
    change: Change,
    by: By,
    budget: int,
    incumbent: Side,
    candidate: Side,
    seeds: tuple[int, ...],
    level: float,
    failed: Mapping[str, str],
) -> Result:
    difference = error = p_better = p_worse = math.nan
    verdict: Verdict = "revert"
    reason = f"{len(failed)} of the candidate's runs failed: {next(iter(failed.values()), '')}"
    if seeds:
        decision, why, better, worse = decide(candidate.bpb, incumbent.bpb, level)
        difference, error, p_better, p_worse = better.difference, better.error, better.p, worse.p
        if not failed:
            verdict, reason = decision, why
    sides = incumbent, candidate
    return Result(
        *(date, hypothesis, change, by, budget, seeds, *sides, difference, error, p_better, p_worse),
        *(level, verdict, reason, failed, provenance.commit()),
    )


def _side(recipe: Recipe, records: Sequence[RunRecord]) -> Side:
    columns = [record.columns for record in records]
    return Side(
        recipe.digest,
        tuple(int(row["steps"] or 0) for row in columns),
        tuple(float(row["bpb_artifact"]) for row in columns),
        tuple(int(row["bytes"]) for row in columns),
        tuple(str(record.folder) for record in records),
    )


def diary_entry(result: Result) -> str:
    """Return the entry of a result in the diary, in Markdown."""
    sides = [
        f"- {name}: {max(side.steps, default=0):,} steps, "
        f"{max(side.bytes, default=0):,} bytes, {side.mean:.4f} bpb ({', '.join(f'{bpb:.4f}' for bpb in side.bpb)})"
        for name, side in (("incumbent", result.incumbent), ("candidate", result.candidate))
    ]
    test = "no pair of runs finished"
    if result.seeds:
        test = (
            f"difference: {result.difference:+.4f} ± {result.error:.4f} bpb, p {result.p:.2g} "
            f"(paired one-sided t-test, {len(result.seeds)} seeds)"
        )
    heading = f"## {result.date[:16].replace('T', ' ')} UTC: {' '.join(result.hypothesis.split())}"
    return "\n".join(
        (
            heading,
            "",
            f"- change: {result.changed}",
            f"- equal {result.by}, at most {result.budget:,} bytes",
            *sides,
            f"- {test}",
            f"- verdict: **{result.verdict}**, {result.reason}",
            f"- `{result.key}`",
            "",
            "",
        )
    )


def _append(path: Path, text: str) -> None:
    write_bytes(path, (_text(path) + text).encode())


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
