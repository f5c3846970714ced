"""One audit of a result of any kind: a .birdie file, a submission folder, or a script.

PATH ─┬─ .birdie ─► artifact: model, probes, text
      ├─ folder ──► logs, claims, script, shipped bytes, and the artifact if there is one
      └─ .py ─────► bytes of code, lines to read; with `run`, it is loaded in a sandbox
                                                  └──► Report: pass, fail or unknown, rule by rule
"""

from collections.abc import Sequence
from pathlib import Path

from birdie.artifact.container import MAGIC
from birdie.errors import ConfigError, DataError
from birdie.golf.audit import box, claims, rules, shipped
from birdie.golf.audit.artifact import AuditOptions, audit_artifact
from birdie.golf.audit.log_checks import check_log
from birdie.golf.audit.rules import CAP_SECONDS, Finding, Report
from birdie.golf.audit.scan import scan
from birdie.gpt.run import history
from birdie.lab import logs
from birdie.lab.logs import TrainingLog
from birdie.system.callbacks import Progress, no_progress
from birdie.system.outputs import require_path
from birdie.system.regular import open_regular, read_text, require_regular

README = "README.md"
MAX_LOGS = 200
"""Files of a folder that are read as logs."""
MAX_LOG_WEIGHT = 4 * logs.MAX_WEIGHT
"""Weight of all logs of a folder together."""

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
    progress: Progress = no_progress,
) -> Report:
    """Check `path` against every rule that it has evidence for.

    Args:
        path: a .birdie file, a submission folder, or a script.
        run: load foreign code, in a sandbox of bubblewrap, and measure the time an artifact's evaluation takes.
        data: validation shards (a folder, a file or a glob) for an artifact; None: those its recipe names.
        tokenizer: a .model file or "bytes"; None: the one its recipe names.
        train: training shards in which validation documents are searched.
        log_files: training logs beside those in the folder.
        tokens: validation tokens that the probes run over.
        progress: reports the work of the current part.
    """
    for name in (path, *log_files):
        require_path(name)
    path = Path(path)
    if tokens < 2:
        raise ConfigError(f"tokens is {tokens}; probes need at least 2")
    if not path.exists():
        raise ConfigError(f"there is nothing at {path}; give a .birdie file, a submission folder or a script")
    named = [_named_log(Path(name), str(name)) for name in log_files]
    options = AuditOptions(data, tokenizer, tuple(train), tokens, run, progress)
    if path.is_dir():
        return Report(str(path), "folder", tuple(_folder(path, named, options)))
    require_regular(path)
    if path.suffix == ".py":
        unlimited = claims.is_unlimited(None, path)
        findings = [*_script(shipped.shipped_script(path), named, unlimited), *_logs(named, unlimited)]
        return Report(str(path), "script", (*findings, *_run(path, options)))
    if not _is_artifact(path):
        raise ConfigError(f"{path} is no .birdie file, no Python script and no folder; give one of these")
    findings = [*audit_artifact(path, str(path), options), *_logs(named, unlimited=False)]
    return Report(str(path), "artifact", tuple(findings))


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


def _folder(folder: Path, named: Sequence[TrainingLog], options: AuditOptions) -> list[Finding]:
    """Return all findings about a submission folder, or a run folder."""
    ships = shipped.shipped_folder(folder)
    claim, findings = _claim(folder / shipped.CLAIM)
    read, unread = _logs_in(folder)
    training_logs = [*read, *named]
    if not (ships.script or ships.model or claim or findings or training_logs):
        raise ConfigError(f"{folder} has no script, artifact, log or {shipped.CLAIM}: there is nothing to audit")
    unlimited = claims.is_unlimited(claim, folder)
    readme, problems = _readme(folder / README)
    findings += [*unread, *problems, *_check_history(folder), *_logs(training_logs, unlimited)]
    findings += claims.check_claims(claim, readme, training_logs, unlimited=unlimited)
    if ships.script is not None:
        findings += _script(ships, training_logs, unlimited)
        source, name = ships.sources[ships.script], ships.script.name
        findings += claims.check_script_of_logs(source, name, training_logs, claim)
    if ships.model is not None and _is_artifact(ships.model):
        findings += audit_artifact(ships.model, str(ships.model), options)
    return [*findings, *_run(ships.script, options)]


def _script(ships: shipped.Shipped, training_logs: Sequence[TrainingLog], unlimited: bool) -> list[Finding]:
    """Return what code shows without running: its size, and lines to read."""
    findings = [*shipped.check_size(ships, training_logs, str(ships.script))]
    for path, source in sorted(ships.sources.items()):
        findings += scan(source, str(path), unlimited=unlimited)
    return findings


def _run(script: Path | None, options: AuditOptions) -> list[Finding]:
    """Return whether a script loads, if that was asked for."""
    if script is None:
        return []
    if options.run:
        return [box.load(script)]
    evidence = "the script was not run (--run loads it, in a sandbox without network)"
    return [Finding(rules.RUNS, "unknown", evidence, "run", str(script))]


def _logs(training_logs: Sequence[TrainingLog], unlimited: bool) -> list[Finding]:
    return [finding for log in training_logs for finding in check_log(log, unlimited=unlimited)]


def _logs_in(folder: Path) -> tuple[list[TrainingLog], list[Finding]]:
    """Return the training logs of a folder and of its folders of logs, and a finding for each that was not read.

    Other text is skipped. A log that is not text, too large to be read, or one too many, is returned empty: its seed
    does not count as missing.
    """
    folders = [folder, *(folder / name for name in _LOG_FOLDERS if (folder / name).is_dir())]
    paths = sorted(path for part in folders for path in part.iterdir() if path.suffix in _LOG_SUFFIXES)
    training_logs, findings, left = [], [], MAX_LOG_WEIGHT
    for number, path in enumerate(path for path in paths if path.is_file()):
        log: TrainingLog | None = TrainingLog(str(path))
        try:
            weight = logs.weight(path)
            if number >= MAX_LOGS or weight > left:
                most = f"{MAX_LOGS} logs and {MAX_LOG_WEIGHT:,} bytes"
                raise DataError(f"{path} was not read: the limits of a folder are {most}")
            log = logs.read_log(path)
            left -= weight
        except DataError as error:
            findings.append(Finding(rules.SEEDS, "unknown", str(error), "log", str(path)))
        training_logs += [log] if log is not None else []
    return training_logs, findings


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
