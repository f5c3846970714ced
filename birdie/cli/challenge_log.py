"""The log of `birdie.cli.challenge`, and its lines that give scores."""

import os
import sys
import time
from pathlib import Path

from birdie.golf.record_log import score_lines
from birdie.gpt.run.environment import is_on
from birdie.gpt.run.evaluation import evaluate
from birdie.gpt.score.accumulator import Score
from birdie.gpt.score.request import EvaluationRequest
from birdie.system.distributed import World
from birdie.system.files import open_append, write_bytes
from birdie.system.outputs import require_writable


def is_set(variable: str) -> bool:
    """Return whether an environment variable is on."""
    return is_on(os.environ.get(variable, ""))


class Log:
    """Log in `logs/RUN_ID.txt` and on stdout, written by rank 0 only; that of a run that is continued grows."""

    def __init__(self, run_id: str, world: World) -> None:
        self.path = Path("logs") / f"{run_id}.txt"
        self.active = world.is_main
        self.continued = (is_set("RESUME") or is_set("RESTORE")) and self.path.is_file()
        if self.active:
            require_writable(self.path.parent)
            if not self.continued:
                write_bytes(self.path, b"")
            sys.stdout.write(f"{self.path}\n")

    def __call__(self, line: str, *, console: bool = True) -> None:
        """Append `line` to the file and, unless `console` is False, print it on stdout."""
        if not self.active:
            return
        with open_append(self.path) as file:
            file.write(f"{line}\n".encode())
        if console:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


def score_roundtrip(log: Log, path: Path, request: EvaluationRequest, world: World) -> Score:
    """Score an artifact as the challenge scores its export, log it, and return the score."""
    began = time.perf_counter()
    score = evaluate(path, request, world=world).score
    log(score_lines("final_birdie_roundtrip", score, (time.perf_counter() - began) * 1000)[0])
    return score


def log_roundtrip(log: Log, score: Score) -> None:
    """Log the exact score of an artifact, the line that the challenge reads."""
    log(*score_lines("final_birdie_roundtrip", score))


def score_as_recipe(log: Log, path: Path, request: EvaluationRequest, world: World) -> Score:
    """Score an artifact with the `[evaluation]` settings of its recipe, and log the score in the records' format."""
    began = time.perf_counter()
    result = evaluate(path, request, world=world, notify=lambda line: log(f"birdie:{line}"))
    score, settings, mode = result.score, result.settings, result.mode
    for warning in result.warnings:
        log(f"birdie:{warning}")
    log(f"birdie:evaluation: {result.method}; " + " ".join(f"{part}:{s:.1f}s" for part, s in result.seconds.items()))
    if result.diagnostics:
        log(f"birdie:{result.diagnostics}")
    name, stride = mode.log_name, ""
    if mode.name == "windows" and settings.stride and not settings.documents:
        name, stride = "final_sliding_window_eval", f" stride:{settings.stride}"
    for line in score_lines(name, score, (time.perf_counter() - began) * 1000, stride):
        log(line)
    return score
