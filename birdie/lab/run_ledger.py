"""Ledger: what the run folders below a folder hold, read without torch.

Every run of `birdie train` and `train_gpt.py` leaves a folder with recipe, environment, metrics, log, weights, artifact
and scores (`birdie.gpt.run.pipeline`). Nothing else is kept about runs, so the ledger cannot disagree with them.

A damaged run is listed with what is wrong with it: it hides no other run. Values are checked here, at the door.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from birdie.errors import DataError
from birdie.lab.logs import MAX_WEIGHT, TrainingLog, read_log
from birdie.system.names import shown
from birdie.system.outputs import require_path
from birdie.system.structured import StepLines, is_number, read_json, read_steps, read_toml

RECIPE = "recipe.toml"
COLUMNS = (
    *("name", "started", "state", "seed", "steps", "bytes", "code_bytes"),
    *("bpb_float", "bpb_artifact", "train_seconds"),
)
"""Keys of `RunRecord.columns`."""
_TEMPORARY = ".birdie-"
"""Beginning of the names of birdie's temporary folders, which may hold a recipe that is being written."""


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder tells it; what is missing is None or empty.

    Attributes:
        recipe: resolved settings, in nested tables.
        environment: versions, commit, machine, seed, command, starts (`environment.json`).
        summary: bytes and scores of a finished run (`summary.json`).
        damage: what is wrong with the files of these three, one sentence each; such a file counts as empty.
    """

    folder: Path
    recipe: Mapping[str, Any]
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]
    damage: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def name(self) -> str:
        """Name of the folder, as it may be shown."""
        return shown(self.folder.name)

    @property
    def seed(self) -> int:
        """Seed of the training."""
        return int(self.recipe.get("train", {}).get("seed", 0))

    @property
    def state(self) -> str:
        """One of: damaged, complete (scored), trained (not scored), stopped (has a checkpoint), begun."""
        if self.damage:
            return "damaged"
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
        folder = self.folder.absolute()
        paths = [folder / "log.txt"]
        if self.environment.get("log") and len(folder.parents) > 1:  # train_gpt.py has it beside, whatever is written
            paths.append(folder.parents[1] / "logs" / f"{folder.name}.txt")
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
    def _steps(self) -> tuple[StepLines, StepLines]:
        return (
            read_steps(self.folder / "metrics.jsonl", ("train_ms", "loss")),
            read_steps(self.folder / "history.jsonl", ("train_ms", "bpb")),
        )

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Logged steps: step, train_ms, loss, lr_multiplier."""
        return self._steps[0].lines

    @property
    def history(self) -> list[dict[str, float]]:
        """Validations: step, train_ms, bpb."""
        return self._steps[1].lines

    @property
    def problems(self) -> tuple[str, ...]:
        """The damage, and that of the curves, of which the lines before it are used."""
        return (*self.damage, *(log.damage for log in self._steps if log.damage))


def read_run(folder: Path) -> RunRecord:
    """Return the run in `folder`."""
    folder = Path(folder)
    if not os.path.lexists(folder / RECIPE):
        raise DataError(f"{folder} holds no run (no {RECIPE}); give a run folder, as `birdie train` prints it")
    return _sound(_read_run(folder))


def _sound(record: RunRecord) -> RunRecord:
    if record.damage:
        raise DataError(f"{record.damage[0]}; restore the file, or delete the run")
    return record


def _read_run(folder: Path) -> RunRecord:
    """Return the run in `folder`, whatever its files hold."""
    damage: list[str] = []

    def read(name: str, load: Callable[[Path], dict[str, Any]], check: Callable[[dict[str, Any]], None]) -> Any:
        path = folder / name
        try:
            values = load(path)
            check(values)
        except FileNotFoundError:
            return {}
        except DataError as error:
            damage.append(str(error))
        except (ValueError, RecursionError) as error:
            damage.append(f"{path} is damaged ({error})")
        else:
            return values
        return {}

    recipe = read(RECIPE, read_toml, _check_recipe)
    environment = read("environment.json", read_json, _check_environment)
    summary = read("summary.json", read_json, _check_summary)
    return RunRecord(folder, recipe, environment, summary, damage=tuple(damage))


def _check_recipe(recipe: Mapping[str, Any]) -> None:
    for key, value in flat(recipe).items():
        if isinstance(value, int) and abs(value) >= 2**64:
            raise ValueError(f"{key[:40]} has more than 64 bits")
    train = recipe.get("train", {})
    if not isinstance(train, dict) or not is_number(train.get("seed", 0)):
        raise ValueError("train.seed is no number")


def _check_environment(environment: Mapping[str, Any]) -> None:
    starts = environment.get("starts", [])
    if not isinstance(starts, list) or not all(isinstance(start, str) for start in starts):
        raise ValueError("starts is no list of times")
    for key in ("log", "commit"):
        if not isinstance(environment.get(key), str | None):
            raise ValueError(f"{key} is no text")
    if not is_number(environment.get("ranks", 1)):
        raise ValueError("ranks is no number")


def _check_summary(summary: Mapping[str, Any]) -> None:
    numbers = {key: summary.get(key) for key in COLUMNS[4:]}
    for key in ("evaluation", "evaluation_asked"):
        score = summary.get(key)
        if not isinstance(score, dict | None):
            raise ValueError(f"{key} is no object")
        numbers[f"{key}.bpb"] = (score or {}).get("bpb")
    for key, value in numbers.items():
        if not (value is None or isinstance(value, float) or is_number(value)):
            raise ValueError(f"{key} is no number")


def find_runs(root: Path) -> Iterator[RunRecord]:
    """Yield the runs in `root` and in folders below it, the oldest first."""
    yield from map(_sound, _find_runs(Path(root)))


def _find_runs(root: Path) -> list[RunRecord]:
    """Return the runs in `root` and in folders below it, damaged ones as well, the oldest first."""
    folders = sorted(path.parent for path in _files(root) if path.name == RECIPE)
    above = {parent for folder in folders for parent in folder.parents}  # a recipe there is that of several runs
    records = [_read_run(folder) for folder in folders if folder not in above]
    if not records:
        raise DataError(f"{root} holds no runs; train one with `birdie train`, or give the folder that holds them")
    return sorted(records, key=lambda record: (record.started, str(record.folder)))


def _files(root: Path) -> Iterator[Path]:
    """Yield what is no folder below `root`; links to folders are not followed, nor is nesting limited."""
    folders = [root]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        yield Path(entry.path)
                    elif not entry.name.startswith(_TEMPORARY):
                        folders.append(Path(entry.path))
        except OSError:  # what cannot be looked into
            continue


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
        return shown(self.folder.stem)

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

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Losses of training batches: step, train_ms if the log has it, loss."""
        return [_point(p.step, p.ms, "loss", p.loss) for p in self.parsed.curve if p.loss is not None]

    @property
    def history(self) -> list[dict[str, float]]:
        """Validations: step, train_ms if the log has it, bpb."""
        return [_point(p.step, p.ms, "bpb", p.bpb) for p in self.parsed.curve if p.bpb is not None]


def _point(step: float, ms: float | None, name: str, value: float) -> dict[str, float]:
    return {"step": int(step), name: value, **({} if ms is None else {"train_ms": ms})}


def read_log_run(path: Path) -> LogRecord | None:
    """Return the run that the challenge's log `path` tells of; None if no line of it is one of a training run."""
    log = read_log(path)
    if log is None:
        return None
    summary = {
        "bytes": log.model and int(log.model.value),
        "code_bytes": log.code and int(log.code.value),
        "bpb_float": log.validations[-1].bpb if log.validations else None,
        "steps": int(max((point.step for point in log.curve), default=0)) or None,
        "train_seconds": log.train_ms and log.train_ms.value / 1000,
        "evaluation": {"bpb": log.final.bpb, "val_loss": log.final.loss, "method": log.final.name}
        if log.final
        else None,
    }
    recipe = {} if log.seed is None else {"train": {"seed": int(log.seed.value)}}
    return LogRecord(path, recipe, {}, summary, log)


def find_logs(root: Path, runs: Sequence[RunRecord] = ()) -> Iterator[RunRecord]:
    """Yield the runs of the logs (`.log`, `.txt`) at or below `root`; those of the folders of `runs` are left out."""
    folders = {run.folder.resolve() for run in runs}
    logs = {run.log.resolve() for run in runs if run.log is not None}
    for path in [root] if root.is_file() else sorted(_files(root)):
        if path.suffix not in (".log", ".txt") or not path.is_file() or path.stat().st_size > MAX_WEIGHT:
            continue
        if path.resolve() in logs or folders.intersection(path.resolve().parents):
            continue
        try:
            data = path.read_bytes()  # most text files are no logs, and this is faster than reading their lines
            if (b"val_bpb" in data or b"train_time" in data) and (record := read_log_run(path)) is not None:
                yield record
        except DataError as error:
            yield RunRecord(path, {}, {}, {}, damage=(str(error),))
        except OSError as error:
            yield RunRecord(path, {}, {}, {}, damage=(f"{path} cannot be read ({error.strerror})",))


def find_runs_and_logs(root: Path) -> list[RunRecord]:
    """Return the runs at or below `root`, damaged ones as well, those of the challenge's logs last."""
    require_path(root)
    root = Path(root)
    try:
        runs = _find_runs(root)
    except DataError:
        if not (logs := list(find_logs(root))):
            raise
        return logs
    return [*runs, *find_logs(root, runs)]


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, with keys such as "model.num_layers"."""
    table: dict[str, Any] = {}
    for key, value in settings.items():
        table |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return table
