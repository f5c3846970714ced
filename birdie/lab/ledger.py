"""Ledger: what the run folders below a folder hold, read without torch.

Every run of `birdie train` and `train_gpt.py` leaves a folder with recipe, environment, metrics, log, weights, artifact
and scores (`birdie.run.pipeline`). Nothing else is kept about runs, so the ledger cannot disagree with them.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from birdie.errors import DataError

RECIPE = "recipe.toml"


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder tells it; what is missing is None or empty.

    Attributes:
        folder: of the run.
        recipe: resolved settings, in nested tables.
        environment: versions, commit, machine, seed, command, starts (`environment.json`).
        summary: bytes and scores of a finished run (`summary.json`).
    """

    folder: Path
    recipe: Mapping[str, Any]
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.name

    @property
    def seed(self) -> int:
        """Seed of the training."""
        return int(self.recipe.get("train", {}).get("seed", 0))

    @property
    def state(self) -> str:
        """One of: complete (scored), trained (not exported or not scored), stopped (has a checkpoint), begun."""
        if self.summary:
            return "complete"
        if (self.folder / "float.safetensors").is_file():
            return "trained"
        return "stopped" if any((self.folder / "checkpoints").glob("step-*")) else "begun"

    @property
    def started(self) -> str:
        """Time of the first start, in ISO 8601 and UTC; empty if unknown."""
        return str(next(iter(self.environment.get("starts", ())), ""))

    @property
    def artifact(self) -> Path | None:
        """The artifact, if there is one."""
        path = self.folder / "model.birdie"
        return path if path.is_file() else None

    @property
    def log(self) -> Path | None:
        """File of the log, if there is one."""
        paths = [self.folder / "log.txt", *([Path(path)] if (path := self.environment.get("log")) else [])]
        return next((path for path in paths if path.is_file()), None)

    @property
    def score(self) -> Mapping[str, Any] | None:
        """Score of the artifact by the recipe's own evaluation: bpb, val_loss, tokens, …; None if it was not scored."""
        score = self.summary.get("evaluation_asked") or self.summary.get("evaluation")
        return score if isinstance(score, Mapping) else None

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """Logged steps: step, train_ms, loss, lr_multiplier."""
        return _lines(self.folder / "metrics.jsonl")

    @cached_property
    def history(self) -> list[dict[str, float]]:
        """Validations: step, train_ms, bpb."""
        return _lines(self.folder / "history.jsonl")


def read_run(folder: Path) -> RunRecord:
    """Return the run in `folder`.

    Raises:
        DataError: the folder holds no run, or a file of it is damaged.
    """
    folder = Path(folder)
    path = folder / RECIPE
    if not path.is_file():
        raise DataError(f"{folder} holds no run (no {RECIPE}); give a run folder, as `birdie train` prints it")
    try:
        recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}; restore it, or delete the run") from error
    return RunRecord(folder, recipe, _object(folder / "environment.json"), _object(folder / "summary.json"))


def find_runs(root: Path) -> Iterator[RunRecord]:
    """Yield the runs in `root` and in folders below it, the oldest first.

    Raises:
        DataError: there is none, or one is damaged.
    """
    root = Path(root)
    if (root / RECIPE).is_file():
        yield read_run(root)
        return
    records = [read_run(path.parent) for path in sorted(root.rglob(RECIPE)) if ".part" not in str(path)]
    if not records:
        raise DataError(f"{root} holds no runs; train one with `birdie train`, or give the folder that holds them")
    yield from sorted(records, key=lambda record: (record.started, str(record.folder)))


def _object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}; delete it, and score the run again") from error
    return values


def _lines(path: Path) -> list[dict[str, float]]:
    """Return the objects of a JSON-lines file; a last line that a killed process left unfinished is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return []
    lines = []
    for line in text.splitlines():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and "step" in values:
            lines.append(values)
    return lines
