"""One audit of a result of any kind: a .birdie file, a submission folder, or a script.

    PATH ─┬─ .birdie ─► artifact: model, probes, text
          ├─ folder ──► script, logs, claims, shipped bytes, and the artifact if there is one
          └─ .py ─────► scan, bytes of code; with `run`, execution in a sandbox
                                                      └──► Report: pass, fail or unknown, rule by rule

A folder or a script gets 30 seconds. Parts that this does not suffice for are reported as "unknown: out of time".
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from birdie.artifact.container import MAGIC
from birdie.errors import ConfigError, DataError
from birdie.golf.audit import claims, foreign, rules, shipped
from birdie.golf.audit.artifact import OF_ARTIFACTS, AuditOptions, audit_artifact
from birdie.golf.audit.deadline import FOLDER_SECONDS, Deadline, OutOfTimeError
from birdie.golf.audit.log_checks import check_log
from birdie.golf.audit.rules import CAP_SECONDS, Finding, Report, Rule
from birdie.golf.audit.scan import SCANNED, scan
from birdie.lab import logs
from birdie.lab.logs import TrainingLog
from birdie.run import history
from birdie.run.preflight import warm_up_coder
from birdie.run.recipe import Recipe
from birdie.runtime.callbacks import Progress, no_progress
from birdie.runtime.outputs import require_path
from birdie.runtime.regular import open_regular, read_text, require_regular

README = "README.md"
MAX_LOGS = 200
"""Files of a folder that are read as logs."""
MAX_LOG_WEIGHT = 4 * logs.MAX_WEIGHT
"""Weight of all logs of a folder together."""

OF_LOGS = (rules.SEEDS, rules.TRAIN_TIME, rules.EVAL_TIME, rules.SIZE, rules.COVERAGE, rules.BYTES)
"""Rules that logs are evidence for."""
_LOG_SUFFIXES = (".log", ".txt")
_LOG_FOLDERS = ("logs", "log")


def audit(
    path: str | Path,
    *,
    run: bool = False,
    data: str | None = None,
    tokenizer: str | None = None,
    train: Sequence[str] = (),
    log_files: Sequence[str | Path] = (),
    tokens: int = 4096,
    seconds: float | None = None,
    progress: Progress = no_progress,
) -> Report:
    """Check `path` against every rule that it has evidence for.

    Args:
        path: a .birdie file, a submission folder, or a script.
        run: run foreign code, in a sandbox of its own time limit, and measure the time an artifact's evaluation takes.
        data: validation shards (a folder, a file or a glob) for an artifact; None: those its recipe names.
        tokenizer: a .model file or "bytes"; None: the one its recipe names.
        train: training shards in which validation documents are searched.
        log_files: training logs beside those in the folder.
        tokens: validation tokens that the probes run over.
        seconds: the time limit; None: 30 for a folder or a script, none for an artifact.
        progress: reports the work of the current part.
    """
    for name in (path, *log_files):
        require_path(name)
    path = Path(path)
    if tokens < 2:
        raise ConfigError(f"tokens is {tokens}; probes need at least 2")
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"seconds is {seconds:g}; give a limit above 0")
    if not path.exists():
        raise ConfigError(f"there is nothing at {path}; give a .birdie file, a submission folder or a script")
    named = [_named_log(Path(name), str(name)) for name in log_files]
    if not path.is_dir():
        require_regular(path)
    kind = "folder" if path.is_dir() else "script" if path.suffix == ".py" else "artifact"
    if kind == "artifact" and not _is_artifact(path):
        raise ConfigError(f"{path} is no .birdie file, no Python script and no folder; give one of these")
    deadline = Deadline(FOLDER_SECONDS if seconds is None and kind != "artifact" else seconds)
    work = _Audit(deadline, AuditOptions(data, tokenizer, tuple(train), tokens, run, deadline.watch(progress)))
    if kind == "folder":
        work.folder(path, named)
    elif kind == "script":
        unlimited = claims.is_unlimited(None, path)
        work.script(shipped.shipped_script(path), named, unlimited)
        work.logs(named, unlimited)
        work.run(path)
    else:
        work.artifact(path)
        work.logs(named, unlimited=False)
    return Report(str(path), kind, tuple(work.findings))


def _is_artifact(path: Path) -> bool:
    """Return whether a file is an artifact, damaged or not: by its name or its first bytes."""
    with open_regular(path) as file:
        return path.suffix == ".birdie" or file.read(len(MAGIC)) == MAGIC


def _named_log(path: Path, shown: str) -> TrainingLog:
    try:
        log = logs.read_log(path, shown)
    except OSError as error:
        raise DataError(f"cannot read log {path}: {(error.strerror or str(error)).lower()}") from error
    if log is None:
        raise DataError(f"{path} has no line of a training run; give a log as train_gpt.py writes it")
    return log


class _Audit:
    """The findings of one audit, part by part, until time is up."""

    def __init__(self, deadline: Deadline, options: AuditOptions) -> None:
        self.deadline, self.options = deadline, options
        self.findings: list[Finding] = []

    def add(self, concerned: Sequence[Rule], part: Callable[[], Iterable[Finding]]) -> None:
        """Add the findings of a part, which concerns some rules; those found before time is up are kept."""
        try:
            self.deadline.check()
            for finding in part():
                self.findings.append(finding)
        except OutOfTimeError as error:
            self.findings += [Finding(rule, "unknown", str(error), "time limit") for rule in concerned]

    def folder(self, folder: Path, named: Sequence[TrainingLog]) -> None:
        """Audit a submission folder, or a run folder: what is quick to read comes first."""
        ships = shipped.shipped_folder(folder)
        claim, problems = _claim(folder / shipped.CLAIM)
        texts = [*self._logs_in(folder), *named]
        if not (ships.script or ships.model or claim or problems or texts):
            raise ConfigError(f"{folder} has no script, artifact, log or {shipped.CLAIM}: there is nothing to audit")
        unlimited = claims.is_unlimited(claim, folder)
        readme, unread = _readme(folder / README)
        self.findings += [*problems, *unread, *_check_history(folder)]
        self.logs(texts, unlimited)
        self.add((rules.SEEDS, rules.SIZE), partial(claims.check_claims, claim, readme, texts, unlimited=unlimited))
        if ships.script is not None:
            self.script(ships, texts, unlimited)
            source, name = ships.sources[ships.script], ships.script.name
            self.add((rules.SEEDS,), partial(claims.check_script_of_logs, source, name, texts, claim, self.deadline))
        if ships.model is not None and _is_artifact(ships.model):
            self.artifact(ships.model)
        self.run(ships.script)

    def artifact(self, path: Path) -> None:
        """Rebuild and probe a .birdie file."""
        self.deadline.extend(warm_up_coder(Recipe()) or 0.0)  # after an installation, it compiles the kernels
        self.add(OF_ARTIFACTS, partial(audit_artifact, path, str(path), self.options))

    def script(self, ships: shipped.Shipped, training_logs: Sequence[TrainingLog], unlimited: bool) -> None:
        """Check what code shows without running: its size, and lines to read."""
        self.add((rules.SIZE,), partial(shipped.check_size, ships, training_logs, str(ships.script), self.deadline))
        for path, source in sorted(ships.sources.items()):
            self.add(SCANNED, partial(scan, source, str(path), unlimited=unlimited, deadline=self.deadline))

    def run(self, script: Path | None) -> None:
        """Run a script in the sandbox, if that was asked for; last, as it has a time limit of its own."""
        if script is not None and self.options.run:
            self.findings += foreign.run_script(script)
        elif script is not None:
            evidence = "the script was not run (--run runs it, without network and with limits)"
            self.findings.append(Finding(rules.RUNS, "unknown", evidence, "sandbox", str(script)))

    def logs(self, training_logs: Sequence[TrainingLog], unlimited: bool) -> None:
        """Check each log by itself."""
        for log in training_logs:
            self.findings += check_log(log, unlimited=unlimited)

    def _logs_in(self, folder: Path) -> list[TrainingLog]:
        """Return the training logs of a folder and of its folders of logs; other text is skipped.

        A log that is not text, too large to be read, or one too many, is returned empty, with a finding: its seed does
        not count as missing.
        """
        folders = [folder, *(folder / name for name in _LOG_FOLDERS if (folder / name).is_dir())]
        paths = sorted(path for part in folders for path in part.iterdir() if path.suffix in _LOG_SUFFIXES)
        training_logs, left = [], MAX_LOG_WEIGHT
        for number, path in enumerate(path for path in paths if path.is_file()):
            log: TrainingLog | None = TrainingLog(str(path))
            try:
                weight = logs.weight(path)
                if number >= MAX_LOGS or weight > left:
                    most = f"{MAX_LOGS} logs and {MAX_LOG_WEIGHT:,} bytes"
                    raise DataError(f"{path} was not read: the limits of a folder are {most}")
                if not self.deadline.passed:
                    log = logs.read_log(path)
                    left -= weight
            except DataError as error:
                self.findings.append(Finding(rules.SEEDS, "unknown", str(error), "log", str(path)))
            training_logs += [log] if log is not None else []
        if self.deadline.passed:
            self.add(OF_LOGS, tuple)
        return training_logs


def _claim(path: Path) -> tuple[claims.Claim | None, list[Finding]]:
    """Return the claim in a submission.json if there is one, else what is wrong with it."""
    if not path.is_file():
        return None, []
    try:
        return claims.read_claim(path, str(path)), []
    except DataError as error:
        too_large = path.stat().st_size > claims.MAX_BYTES
        return None, [Finding(rules.SEEDS, "unknown" if too_large else "fail", str(error), "claim", str(path))]


def _readme(path: Path) -> tuple[tuple[str, str] | None, list[Finding]]:
    """Return the path and text of a README, unless it is too large or no text."""
    if not path.is_file():
        return None, []
    size = path.stat().st_size
    if size > claims.MAX_BYTES:
        evidence = f"the README has {size:,} bytes and was not read"
        return None, [Finding(rules.SEEDS, "unknown", evidence, "README", str(path))]
    try:
        return (str(path), read_text(path)), []
    except DataError as error:
        return None, [Finding(rules.SEEDS, "unknown", str(error), "README", str(path))]


def _check_history(folder: Path) -> list[Finding]:
    """Return the training time of a run folder of birdie, which keeps it beside the model."""
    path = folder / history.NAME
    try:
        if path.is_file() and path.stat().st_size > claims.MAX_BYTES:
            raise DataError(f"{path} is too large")
        entries = history.read(folder)
    except (DataError, RecursionError):
        evidence = f"{history.NAME} is no history of a run"
        return [Finding(rules.TRAIN_TIME, "unknown", evidence, "history", str(path))]
    if not entries:
        evidence = f"{history.NAME} has no complete line"
        is_begun = path.is_file() and path.stat().st_size > 0
        return [Finding(rules.TRAIN_TIME, "unknown", evidence, "history", str(path))] if is_begun else []
    seconds = entries[-1].train_ms / 1e3
    evidence = f"training took {seconds:,.1f} s of {CAP_SECONDS:g}"
    if seconds > CAP_SECONDS:
        evidence = f"training took {seconds:,.1f} s on this hardware; the cap of {CAP_SECONDS:g} is for eight H100"
    return [Finding(rules.TRAIN_TIME, "unknown" if seconds > CAP_SECONDS else "pass", evidence, "history", str(path))]
