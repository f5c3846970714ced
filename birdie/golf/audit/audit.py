"""One audit of whatever somebody calls a result: a .birdie file, a submission folder, or a script.

PATH ─┬─ .birdie ─► own: model, probes, text
      ├─ folder ──► script, logs, claims, shipped bytes, and the artifact if there is one
      └─ .py ─────► scan, bytes of code; run, if asked, in a sandbox
                                                      └──► Report: pass, fail or could not tell, rule by rule
"""

from collections.abc import Sequence
from pathlib import Path

from birdie.artifact.container import MAGIC
from birdie.errors import ConfigError, DataError
from birdie.golf.audit import claims, foreign, logged, rules, shipped
from birdie.golf.audit.claims import Claim, read_claim
from birdie.golf.audit.logged import against_cap_bytes
from birdie.golf.audit.logs import MAX_WEIGHT, TrainingLog, read_log, weight
from birdie.golf.audit.own import Given, Told, audit_artifact
from birdie.golf.audit.rules import Finding, Report, Verdict
from birdie.golf.audit.scan import scan
from birdie.golf.audit.shipped import CLAIM, Shipped
from birdie.run import history

README = "README.md"
MAX_LOGS = 200
"""Files of a folder that are read as logs."""
MAX_TOGETHER = 4 * MAX_WEIGHT
"""What they may weigh together."""

_LOGS = (".log", ".txt")
_LOG_FOLDERS = ("logs", "log")


def audit(
    path: str | Path,
    *,
    run: bool = False,
    data: str | None = None,
    tokenizer: str | None = None,
    train: Sequence[str] = (),
    logs: Sequence[str | Path] = (),
    tokens: int = 4096,
    progress: Told | None = None,
) -> Report:
    """Judge `path` by every rule that it gives evidence for.

    Args:
        path: a .birdie file, a submission folder, or a script.
        run: run foreign code, in a sandbox, and measure the time that an artifact of ours takes.
        data: validation shards (a folder, a file or a glob) for an artifact; None: those its recipe names.
        tokenizer: a .model file or "bytes"; None: the one its recipe names.
        train: training shards in which validation documents are looked for.
        logs: training logs beside those in the folder.
        tokens: of the validation text that the probes run over.
        progress: called with (part, done, total) as work goes on.

    Raises:
        ConfigError: there is nothing to audit at `path`, or a number is out of range.
        DataError: data, a tokenizer or a log that was asked for by name cannot be read.
    """
    path = Path(path)
    if tokens < 2:
        raise ConfigError(f"tokens is {tokens}; probes need at least 2")
    if not path.exists():
        raise ConfigError(f"there is nothing at {path}; give a .birdie file, a submission folder or a script")
    given = Given(data, tokenizer, tuple(train), tokens, run, progress)
    more = [_log(Path(each), str(each)) for each in logs]
    if path.is_dir():
        return Report(str(path), "folder", _folder(path, more, given))
    if path.suffix == ".py":
        unlimited = claims.has_no_cap(None, path)
        found = _script(shipped.of_script(path), given, unlimited)
        return Report(str(path), "script", (*found, *_of_logs(more, unlimited=unlimited)))
    if _is_artifact(path):
        return Report(str(path), "artifact", (*audit_artifact(path, str(path), given), *_of_logs(more)))
    raise ConfigError(f"{path} is no .birdie file, no Python script and no folder; give one of these")


def _is_artifact(path: Path) -> bool:
    """By its name or its first bytes; a damaged one is one, too."""
    with path.open("rb") as file:
        return path.suffix == ".birdie" or file.read(len(MAGIC)) == MAGIC


def _log(path: Path, shown: str) -> TrainingLog:
    try:
        log = read_log(path, shown)
    except OSError as error:
        raise DataError(f"cannot read log {path}: {(error.strerror or str(error)).lower()}") from error
    if log is None:
        raise DataError(f"{path} has no line of a training run; give a log as train_gpt.py writes it")
    return log


def _of_logs(found: Sequence[TrainingLog], *, unlimited: bool = False) -> list[Finding]:
    return [finding for log in found for finding in logged.findings(log, unlimited=unlimited)]


def _folder(folder: Path, more: Sequence[TrainingLog], given: Given) -> tuple[Finding, ...]:
    ships = shipped.look(folder)
    claim, broken = _claim(folder / CLAIM)
    found_logs = [*_logs_in(folder), *more]
    if not (ships.script or ships.model or claim or broken or found_logs):
        raise ConfigError(f"{folder} holds no script, artifact, log or {CLAIM}: there is nothing to audit")
    unlimited = claims.has_no_cap(claim, folder)
    readme, unread = _readme(folder / README)
    findings = [
        *broken,
        *unread,
        *_script(ships, given, unlimited),
        *shipped.findings(ships, found_logs, str(ships.script or folder)),
        *_of_logs(found_logs, unlimited=unlimited),
        *claims.findings(claim, readme, found_logs, unlimited=unlimited),
    ]
    if ships.script is not None:
        findings += claims.belongs(ships.script, str(ships.script), found_logs, claim, ships.sources[ships.script])
    findings += _history(folder)
    if ships.model is not None and _is_artifact(ships.model):
        findings += audit_artifact(ships.model, str(ships.model), given)
    return tuple(findings)


def _claim(path: Path) -> tuple[Claim | None, list[Finding]]:
    """The claim in a submission.json, if there is one; what is wrong with it otherwise."""
    if not path.is_file():
        return None, []
    try:
        return read_claim(path, str(path)), []
    except DataError as error:
        verdict: Verdict = "fail" if path.stat().st_size <= claims.MAX_BYTES else "unknown"
        return None, [Finding(rules.SEEDS, verdict, str(error), "claim", str(path))]


def _readme(path: Path) -> tuple[tuple[str, str] | None, list[Finding]]:
    """The name and text of a README, if there is one that is read."""
    if not path.is_file():
        return None, []
    size = path.stat().st_size
    if size > claims.MAX_BYTES:
        said = f"the README has {size:,} bytes and was not read"
        return None, [Finding(rules.SEEDS, "unknown", said, "README", str(path))]
    return (str(path), path.read_text(encoding="utf-8", errors="replace")), []


def _history(folder: Path) -> list[Finding]:
    """The training time of a run folder of ours, which keeps it beside the model."""
    path = str(folder / history.NAME)
    try:
        if (folder / history.NAME).is_file() and (folder / history.NAME).stat().st_size > claims.MAX_BYTES:
            raise DataError("it is too large for one")
        entries = history.read(folder)
    except (DataError, RecursionError):
        said = f"{history.NAME} is no history of a run"
        return [Finding(rules.TRAIN_TIME, "unknown", said, "history", path)]
    if not entries:
        return []
    took = entries[-1].train_ms
    if took <= logged.CAP_MS:
        said = f"training took {took:,.0f} ms of {logged.CAP_MS:,}"
        return [Finding(rules.TRAIN_TIME, "pass", said, "history", path)]
    said = f"training took {took:,.0f} ms, on whatever it ran; the cap of {logged.CAP_MS:,} is for eight H100"
    return [Finding(rules.TRAIN_TIME, "unknown", said, "history", path)]


def _logs_in(folder: Path) -> list[TrainingLog]:
    """The training logs of a folder and of its folders of logs; other text is passed over.

    What is too large, or too much, to be read is a log that says nothing: so its seed is not taken for missing.
    """
    places = [folder, *(folder / name for name in _LOG_FOLDERS if (folder / name).is_dir())]
    paths = sorted(path for place in places for path in place.iterdir() if path.suffix in _LOGS and path.is_file())
    logs, left = [], MAX_TOGETHER
    for number, path in enumerate(paths):
        weighs = weight(path)
        if number >= MAX_LOGS or weighs > min(left, MAX_WEIGHT):
            logs.append(TrainingLog(str(path)))
            continue
        left -= weighs
        log = read_log(path)
        if log is not None:
            logs.append(log)
    return logs


def _script(ships: Shipped, given: Given, unlimited: bool) -> list[Finding]:
    """What the code shows without running and, if that is asked, in a sandbox."""
    if ships.script is None:
        return []
    found: list[Finding] = []
    for path, source in sorted(ships.sources.items()):
        found += scan(source, str(path), unlimited=unlimited)
    if given.run:
        found += foreign.run_script(ships.script)
    else:
        said = "the script was not run (--run runs it, without network and with limits)"
        found.append(Finding(rules.RUNS, "unknown", said, "sandbox", str(ships.script)))
    if ships.alone:
        verdict, said = against_cap_bytes(ships.code_bytes, "the code alone, without a model")
        found.append(Finding(rules.SIZE, "fail" if verdict == "fail" else "unknown", said, "files", str(ships.script)))
    return found
