"""Ledger: what the run folders below a folder hold, read without torch.

Every run of `birdie train` and `train_gpt.py` leaves a folder with recipe, environment, metrics, log, weights, artifact
and scores (`birdie.run.pipeline`). Nothing else is kept about runs, so the ledger cannot disagree with them.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from birdie.errors import DataError
from birdie.lab.logs import MAX_WEIGHT, TrainingLog, read_log

RECIPE = "recipe.toml"
COLUMNS = (
    *("name", "started", "state", "seed", "steps", "bytes", "code_bytes"),
    *("bpb_float", "bpb_artifact", "train_seconds"),
)
"""Keys of `RunRecord.columns`."""


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
    def settings(self) -> dict[str, Any]:
        """Settings of the recipe by their full names, as in "model.num_layers"; those that are None are absent."""
        return flat(self.recipe)

    @property
    def columns(self) -> dict[str, Any]:
        """Values of `COLUMNS`; None where the run has none. Bits per byte of the artifact are those of `score`."""
        summary = self.summary
        last = max([*self.metrics, *self.history], key=lambda line: line["step"], default={})
        seconds = summary.get("train_seconds", last["train_ms"] / 1000 if last.get("train_ms") is not None else None)
        size = summary.get("bytes", None if self.artifact is None else self.artifact.stat().st_size)
        bpb = summary.get("bpb_float", self.history[-1]["bpb"] if self.history else None)
        values = (
            *(self.name, self.started or None, self.state, self.settings.get("train.seed")),
            *(summary.get("steps", last.get("step")), size, summary.get("code_bytes")),
            *(bpb, (self.score or {}).get("bpb", summary.get("bpb_artifact")), seconds),
        )
        return dict(zip(COLUMNS, values, strict=True))

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
    folders = [path.parent for path in sorted(root.rglob(RECIPE)) if ".part" not in str(path)]
    above = {parent for folder in folders for parent in folder.parents}  # a recipe there is that of several runs
    records = [read_run(folder) for folder in folders if folder not in above]
    if not records:
        raise DataError(f"{root} holds no runs; train one with `birdie train`, or give the folder that holds them")
    yield from sorted(records, key=lambda record: (record.started, str(record.folder)))


@dataclass(frozen=True)
class LogRecord(RunRecord):
    """A run of which only its log is known: one of the challenge's scripts wrote it.

    Attributes:
        parsed: the figures of the log; `folder` is its path.
    """

    parsed: TrainingLog

    @property
    def name(self) -> str:
        """Name of the file without its ending."""
        return self.folder.stem

    @property
    def state(self) -> str:
        """One of: complete (scored), begun."""
        return "complete" if self.parsed.final else "begun"

    @property
    def artifact(self) -> None:
        """None: a log has no artifact beside it that is known to be its own."""
        return

    @property
    def log(self) -> Path:
        """Path of the log."""
        return self.folder

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """Losses of training batches: step, train_ms if the log has it, loss."""
        return [_point(p.step, p.ms, "loss", p.loss) for p in self.parsed.curve if p.loss is not None]

    @cached_property
    def history(self) -> list[dict[str, float]]:
        """Validations: step, train_ms if the log has it, bpb."""
        return [_point(p.step, p.ms, "bpb", p.bpb) for p in self.parsed.curve if p.bpb is not None]


def _point(step: float, ms: float | None, name: str, value: float) -> dict[str, float]:
    return {"step": int(step), name: value, **({} if ms is None else {"train_ms": ms})}


def read_log_run(path: Path) -> LogRecord | None:
    """Return the run that the challenge's log `path` tells of; None if no line of it is one of a training run.

    Raises:
        DataError: the log is too long, or no regular file.
        OSError: the file cannot be read.
    """
    log = read_log(path)
    if log is None:
        return None
    code = list(log.code_bytes.values())
    floats = [score for score in log.scores if score.of_float_model] or log.validations
    summary = {
        "bytes": log.model and int(log.model.value),
        "code_bytes": int(code[-1].value) if code else None,  # the last one is the compressed one
        "bpb_float": floats[-1].bpb if floats else None,
        "steps": int(max((point.step for point in log.curve), default=0)) or None,
        "train_seconds": log.train_ms and log.train_ms.value / 1000,
        "evaluation": {"bpb": log.final.bpb, "val_loss": log.final.loss, "method": log.final.name}
        if log.final
        else None,
    }
    recipe = {} if log.seed is None else {"train": {"seed": int(log.seed.value)}}
    return LogRecord(path, recipe, {}, summary, log)


def find_logs(root: Path, runs: Sequence[RunRecord] = ()) -> Iterator[LogRecord]:
    """Yield the runs of the logs (`.log`, `.txt`) at or below `root`; those of the folders of `runs` are left out.

    Raises:
        OSError: a file cannot be read.
    """
    folders = {run.folder.resolve() for run in runs}
    logs = {run.log.resolve() for run in runs if run.log is not None}
    for path in [root] if root.is_file() else sorted(root.rglob("*")):
        if path.suffix not in (".log", ".txt") or not path.is_file() or path.stat().st_size > MAX_WEIGHT:
            continue
        if path.resolve() in logs or folders.intersection(path.resolve().parents):
            continue
        data = path.read_bytes()  # most text files are no logs, and this finds out faster than reading their lines
        if (b"val_bpb" in data or b"train_time" in data) and (record := read_log_run(path)) is not None:
            yield record


def find_runs_and_logs(root: Path) -> list[RunRecord]:
    """Return the runs at or below `root`, those of the challenge's logs last.

    Raises:
        DataError: there is none, or one is damaged.
    """
    root = Path(root)
    runs = list(find_runs(root)) if root.is_dir() and next(root.rglob(RECIPE), None) is not None else []
    logs = list(find_logs(root, runs))
    return [*runs, *logs] if logs else runs or list(find_runs(root))


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, with keys such as "model.num_layers"."""
    table: dict[str, Any] = {}
    for key, value in settings.items():
        table |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return table


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
