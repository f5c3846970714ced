"""One audit of a result of any kind: a .birdie file, a submission folder, or a script.

PATH ─┬─ .birdie ─► artifact: model, probes, text
      ├─ folder ──► logs, submission.json, shipped bytes, and the artifact if there is one
      └─ .py ─────► bytes of code; with `run`, it is loaded in a sandbox
                                                  └──► Report: pass, fail or unknown, rule by rule
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from birdie.artifact import MAGIC
from birdie.errors import ConfigError, DataError
from birdie.golf.audit import box, rules
from birdie.golf.audit.artifact import AuditOptions, audit_artifact
from birdie.golf.audit.log_checks import check_log, check_seeds, is_unlimited
from birdie.golf.audit.rules import CAP_SECONDS, Finding, Report
from birdie.golf.audit.shipped import check_size, script_and_model, shipped
from birdie.gpt.run import history
from birdie.lab.logs import TrainingLog, read_log
from birdie.system.callbacks import Progress, no_progress
from birdie.system.outputs import require_path
from birdie.system.regular import open_regular, require_regular
from birdie.system.structured import read_json

CLAIM = "submission.json"
MAX_LOGS = 200
"""Files of a folder that are read as logs."""


def audit(
    path: str | Path,
    *,
    run: bool = False,
    data: str | None = None,
    tokenizer: str | None = None,
    train: Sequence[str] = (),
    tokens: int = 4096,
    progress: Progress = no_progress,
) -> Report:
    """Check `path` against every rule that it has evidence for.

    Args:
        path: a .birdie file, a submission folder, or a script.
        run: load a script, in a sandbox of bubblewrap.
        data: validation shards (a folder, a file or a glob) for an artifact; None: those its recipe names.
        tokenizer: a .model file or "bytes"; None: the one its recipe names.
        train: training shards in which validation documents are searched.
        tokens: validation tokens that the probes run over.
        progress: reports the work of the current part.
    """
    require_path(path)
    path = Path(path)
    if tokens < 2:
        raise ConfigError(f"tokens is {tokens}; probes need at least 2")
    if not path.exists():
        raise ConfigError(f"there is nothing at {path}; give a .birdie file, a submission folder or a script")
    options = AuditOptions(data, tokenizer, tuple(train), tokens, progress)
    if path.is_dir():
        return Report(str(path), "folder", tuple(_folder(path, options, run=run)))
    require_regular(path)
    if path.suffix == ".py":
        return Report(str(path), "script", (check_size(shipped(path), ()), _run(path, run=run)))
    if not _is_artifact(path):
        raise ConfigError(f"{path} is no .birdie file, no Python script and no folder; give one of these")
    return Report(str(path), "artifact", tuple(audit_artifact(path, str(path), options)))


def _is_artifact(path: Path) -> bool:
    """Return whether a file is an artifact, damaged or not: by its name or its first bytes."""
    with open_regular(path) as file:
        return path.suffix == ".birdie" or file.read(len(MAGIC)) == MAGIC


def _folder(folder: Path, options: AuditOptions, *, run: bool) -> Iterator[Finding]:
    """Yield all findings about a submission folder, or a run folder."""
    script, model = script_and_model(folder)
    logs, unread = _logs_in(folder)
    path, claim = folder / CLAIM, dict[str, Any]()
    try:
        claim = read_json(path) if path.is_file() else claim
    except DataError as error:
        unread.append(Finding(rules.SEEDS, "fail", str(error), "claim", str(path)))
    if not (script or model or claim or logs or unread):
        raise ConfigError(f"{folder} has no script, artifact, log or {CLAIM}: there is nothing to audit")
    yield from unread
    yield from _check_history(folder)
    for log in logs:
        yield from check_log(log, unlimited=is_unlimited(claim))
    yield from check_seeds(claim, logs, str(path))
    if script is not None:
        yield check_size(shipped(script, model), logs, folder)
        yield _run(script, run=run)
    if model is not None and _is_artifact(model):
        yield from audit_artifact(model, str(model), options)


def _run(script: Path, *, run: bool) -> Finding:
    """Return whether a script loads, if that was asked for."""
    if run:
        return box.load(script)
    evidence = "the script was not run (--run loads it, in a sandbox without network)"
    return Finding(rules.RUNS, "unknown", evidence, "run", str(script))


def _logs_in(folder: Path) -> tuple[list[TrainingLog], list[Finding]]:
    """Return the training logs of a folder and of `logs` in it, and a finding for each that was not read."""
    paths = sorted(path for path in (*folder.iterdir(), *folder.glob("logs/*")) if path.suffix in (".log", ".txt"))
    logs, findings = [], []
    for number, path in enumerate(path for path in paths if path.is_file()):
        try:
            if number >= MAX_LOGS:
                raise DataError(f"{path} was not read: {MAX_LOGS} logs of a folder are")
            logs += [log for log in [read_log(path)] if log is not None]
        except DataError as error:
            findings.append(Finding(rules.SEEDS, "unknown", str(error), "log", str(path)))
    return logs, findings


def _check_history(folder: Path) -> Iterator[Finding]:
    """Yield the training time of a run folder of birdie, which keeps it beside the model."""
    path = folder / history.NAME
    try:
        entries = history.read(folder) if path.is_file() else []
    except (DataError, RecursionError):
        yield Finding(rules.TRAIN_TIME, "unknown", f"{history.NAME} is no history of a run", "history", str(path))
        return
    if entries:
        seconds = entries[-1].train_ms / 1e3
        evidence = f"training took {seconds:,.1f} s on this hardware; the cap is {CAP_SECONDS:g} on eight H100"
        yield Finding(rules.TRAIN_TIME, "pass" if seconds <= CAP_SECONDS else "unknown", evidence, "history", str(path))
