"""Flipped bits in every file that a run leaves: `python -m tests.hostile flips --count 20`.

A finished run, with an average of its weights and a bandit, is copied, one random bit of one of its files is flipped,
and whoever reads the file is started: training with --resume, the evaluation of the artifact, the list of runs and the
report. The law: what comes out is what comes out of the sound run, or one sentence and exit code 1. The list and the
report show figures of files without digests; there the law is that the sound run beside it is in them as before.
"""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from birdie.system import provenance
from tests.hostile.workload import EVERY, End, Report, contents, forked, problem_of, reset, train_tokens, workplace

STEPS = 3 * EVERY
OPTIONS = ["--average.kind", "ema", "--bandit.every", "2"]


def campaign(count: int = 20, seed: int = 0, only: Sequence[str] = ("*",)) -> Report:
    """Flip `count` bits of each file of a run, or of those of these patterns, one at a time."""
    report, rng = Report(), random.Random(seed)
    # an artifact names the commit, which may change while a campaign runs for hours
    with workplace() as folder, patch.object(provenance, "commit", lambda: None):
        run, sound = folder / "out" / "run", folder / "sound"
        training = [*train_tokens(folder, STEPS), *OPTIONS]
        training[training.index("--validation.every") + 1] = str(EVERY)
        if (end := forked(training)).code:
            raise RuntimeError(end.message)
        shutil.copytree(run, folder / "out" / "beside")
        shutil.copytree(folder / "out", sound)
        readers = {
            "resume": [*training, "--resume"],
            "evaluate": ["evaluate", str(run / "model.birdie"), "--json"],
            "runs": ["runs", str(folder / "out"), "--json"],
            "report": ["report", str(folder / "out"), "-o", str(folder / "page.html"), "--no-samples"],
        }
        paths = {path for pattern in only for path in (sound / "run").rglob(pattern) if path.is_file()}
        expected = {}
        for reader in {reader for path in paths for reader in _readers(str(path.relative_to(sound / "run")))}:
            end, expected[reader] = _outcome(folder, reader, readers[reader])
            if end.code:
                raise RuntimeError(end.message)
        for path in sorted(paths):
            shown = str(path.relative_to(sound / "run"))
            for _ in range(count):
                bit = rng.randrange(8 * path.stat().st_size)
                for reader in _readers(shown):
                    reset(folder, sound)
                    (folder / "page.html").unlink(missing_ok=True)
                    _flip(folder / "out" / path.relative_to(sound), bit)
                    end, result = _outcome(folder, reader, readers[reader])
                    report.counts[f"{shown}, {reader}: {'refused' if end.code else 'the same'}"] += 1
                    wrong = problem_of(end) if end.code else result != expected[reader] and f"another result: {result}"
                    if end.code and reader == "runs":
                        wrong = f"the list ended: {end.message}"
                    if wrong:
                        report.failures.append(f"{shown}, bit {bit}, {reader}: {wrong}")
    return report


def _readers(name: str) -> tuple[str, ...]:
    """Return who reads a file of a run."""
    if name.startswith("checkpoints/"):
        return ("resume",)
    return ("resume", "evaluate", "runs", "report") if name == "model.birdie" else ("resume", "runs", "report")


def _flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def _outcome(folder: Path, reader: str, tokens: list[str]) -> tuple[End, str]:
    """Return how a command ended, and its result: a score, the digest of the artifact, …; "" if it failed."""
    end = forked(tokens)
    if end.code:
        return end, ""
    if reader == "evaluate":
        return end, str(json.loads(end.answer)["bpb"])
    if reader == "runs":
        runs = json.loads(end.answer)["runs"]
        return end, str((len(runs), [run for run in runs if run["name"] == "beside"]))
    if reader == "report":
        return end, str("beside" in (folder / "page.html").read_text(encoding="utf-8"))
    return end, contents(folder / "out")["run/model.birdie"]
