"""The scoring script: it decodes an artifact and scores what comes out, by calling birdie's core alone.

    model.birdie ─► recipe, weights ─► GPT ─► bits per byte by plain windows, and by the recipe's evaluation

`birdie script RECIPE --kind score` packs it with the modules that it imports; the training script ends with it.
DATA_PATH, TOKENIZER_PATH and RUN_ID mean what they mean there; all else comes from the recipe in the file.
"""

import os
import platform
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from birdie.artifact import File
from birdie.compress import decoder
from birdie.errors import BirdieError
from birdie.golf.record_log import score_lines
from birdie.gpt.data.tokenizer import check_same_tokenizer
from birdie.gpt.model.gpt import GPT
from birdie.gpt.run.gpt_file import require_gpt
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.run.run_data import open_run_data
from birdie.gpt.run.work import Work
from birdie.gpt.score.accumulator import Score
from birdie.gpt.score.settings import EvaluationSettings
from birdie.system.context import Context
from birdie.system.device import choose_device
from birdie.system.distributed import World, process_group, world_from_environment


def main() -> None:
    """Score the file that the command line names, else model.birdie."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "model.birdie")
    or_exit(lambda: run(path))


def or_exit(work: Callable[[], None]) -> None:
    """Do the work of a script; an error is one sentence on stderr."""
    try:
        work()
    except (BirdieError, OSError, ValueError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit(130)


def run(path: Path) -> None:
    """Score an artifact with the recipe in it, on all ranks that torchrun has started."""
    with File(path, decoder) as file:
        recipe = with_data(recipe_in(file, path))
    with opened(replace(recipe, device="auto")) as (log, work):  # another machine has another device
        roundtrip(log, work, path)


@contextmanager
def opened(recipe: Recipe) -> Iterator[tuple["Log", Work]]:
    """Join the ranks that torchrun has started, open the log and the data of a recipe, and yield them."""
    device = choose_device(recipe.device, world_from_environment().local_rank)
    with process_group(device) as world:
        log = Log(world.broadcast(os.environ.get("RUN_ID") or str(uuid.uuid4())), world)
        context = Context(device, world, log.note, lambda done, total: log(f"warmup_step:{done}/{total}"))
        yield log, Work(recipe, open_run_data(recipe, log.note), context)


def with_data(recipe: Recipe) -> Recipe:
    """Return the recipe with the data and the tokenizer of the environment."""
    data, variables = recipe.data, os.environ
    path, tokenizer = variables.get("DATA_PATH", data.path), variables.get("TOKENIZER_PATH", data.tokenizer)
    return replace(recipe, data=replace(data, path=path, tokenizer=tokenizer))


class Log:
    """The log: a file, and stdout; rank 0 writes it."""

    def __init__(self, run_id: str, world: World) -> None:
        self.run_id, self.active = run_id, world.is_main
        self.path = Path("logs") / f"{run_id}.txt"
        if self.active:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if os.environ.get("RESTORE") != "1":  # else the log of the training goes on
                self.path.write_bytes(b"")
            sys.stdout.write(f"{self.path}\n")

    def __call__(self, line: str, *, console: bool = True) -> None:
        """Append a line."""
        if self.active:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
            if console:
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()

    def note(self, line: str) -> None:
        """Append a line that the challenge's script has not."""
        self(f"birdie:{line}")

    def sources(self, files: Iterable[Path]) -> None:
        """Append source files, and what runs them."""
        for path in files if self.active else ():
            self(f"# {path.name}\n{path.read_text(encoding='utf-8')}", console=False)
        self("=" * 100, console=False)
        self(f"Running Python {platform.python_version()}", console=False)
        self(f"Running PyTorch {torch.__version__}", console=False)
        self("=" * 100, console=False)


def roundtrip(
    log: Log, work: Work, path: Path, code: int | None = None, trained: Score | None = None
) -> tuple[Score, Score]:
    """Decode the artifact and score what comes out, by plain windows and by the recipe's evaluation.

    Args:
        code: bytes of the code; None: their sum with the artifact's is not logged.
        trained: score of the float weights.
    """
    with File(path, decoder) as file:
        file.require()
        tokenizer = file.fields.get("metadata", {}).get("tokenizer")
        recipe = replace(work.recipe, model=recipe_in(file, path).model)
        check_same_tokenizer(work.data.tokenizer, tokenizer, recipe.data.tokenizer)
        state = file.decode_all()
    work = replace(work, recipe=recipe)
    model = work.new_model(state)
    began = time.perf_counter()
    plain = evaluated(work, model, EvaluationSettings())
    rounded, exact = score_lines("final_birdie_roundtrip", plain, 1000 * (time.perf_counter() - began))
    log(rounded)
    if trained is not None:
        gap = f"birdie_bpb:{plain.bpb:.8f} birdie_gap:{plain.bpb - trained.bpb:+.8f}"
        log(f"quantization_gap: float_bpb:{trained.bpb:.8f} {gap}")
    log(exact)
    if code is not None:
        log(f"Total submission size birdie: {path.stat().st_size + code} bytes")
    if not recipe.scores_twice:
        return plain, plain
    began, settings = time.perf_counter(), recipe.evaluation
    score = evaluated(work, model, settings)
    mode, stride = settings.scoring_mode, ""
    name = mode.log_name
    if mode.name == "windows" and settings.stride and not settings.documents:
        name, stride = "final_sliding_window_eval", f" stride:{settings.stride}"
    for line in score_lines(name, score, 1000 * (time.perf_counter() - began), stride):
        log(line)
    return plain, score


def recipe_in(file: File, path: Path) -> Recipe:
    """Return the recipe of an open file, whose model its tensors fit."""
    shapes = {name: file.entry(name).shape for name in file.names}
    return require_gpt(file.fields.get("metadata", {}), shapes, path)


def evaluated(work: Work, model: GPT, settings: EvaluationSettings) -> Score:
    """Return the score of the decoded model by a scoring mode, and log how it came about."""
    began, note = time.perf_counter(), work.context.notify
    scored = work.score(model, settings)
    seconds = time.perf_counter() - began
    note(f"evaluation: {scored.method}; score:{seconds:.1f}s")
    if scored.report is not None:
        note(scored.report.diagnostics)
    for warning in scored.warnings(settings.scoring_mode, seconds, settings.budget_seconds):
        note(warning)
    return scored.score
