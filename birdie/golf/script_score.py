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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from birdie.artifact.file import File
from birdie.compress import registry
from birdie.errors import BirdieError
from birdie.golf.record_log import score_lines
from birdie.gpt.data.tokenizer import check_same_tokenizer, require_tokenizer
from birdie.gpt.model.attention_kernels import best_kernels
from birdie.gpt.model.gpt import GPT
from birdie.gpt.model.stored_shape import require_shape
from birdie.gpt.run.dataset import RunData, open_run_data
from birdie.gpt.run.recipe import Recipe
from birdie.gpt.score import evaluator
from birdie.gpt.score.accumulator import Score
from birdie.gpt.score.settings import EvaluationSettings
from birdie.system.device import choose_device, choose_dtype
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
    device = choose_device("auto", world_from_environment().local_rank)
    with process_group(device) as world:
        with File(path, registry.decoder) as file:
            recipe = with_data(Recipe.from_dict(file.fields.get("metadata", {}).get("recipe", {})))
        log = Log(world.broadcast(os.environ.get("RUN_ID") or str(uuid.uuid4())), world)
        roundtrip(log, recipe, open_run_data(recipe, log.note), path, device, world)


def with_data(recipe: Recipe) -> Recipe:
    """Return the recipe with the data and the tokenizer of the environment."""
    data, variables = recipe.data, os.environ
    path, tokenizer = variables.get("DATA_PATH", data.path), variables.get("TOKENIZER_PATH", data.tokenizer)
    return replace(recipe, data=replace(data, path=path, tokenizer=tokenizer))


class Log:
    """The log: a file, and stdout; rank 0 writes it."""

    def __init__(self, run_id: str, world: World) -> None:
        self.path, self.active = Path("logs") / f"{run_id}.txt", world.is_main
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

    def sources(self, folder: Path) -> None:
        """Append the modules, and what runs them."""
        for path in sorted(folder.rglob("*.py")) if self.active else ():
            self(f"# {path.name}\n{path.read_text(encoding='utf-8')}", console=False)
        self("=" * 100, console=False)
        self(f"Running Python {platform.python_version()}", console=False)
        self(f"Running PyTorch {torch.__version__}", console=False)
        self("=" * 100, console=False)


def new_model(recipe: Recipe, device: torch.device) -> GPT:
    """Return the recipe's GPT on its device, with the dtype and the kernels it computes with."""
    model = GPT(recipe.model).to(device)
    model.compute_dtype = choose_dtype(recipe.train.compute_dtype, device)
    model.kernels = best_kernels(device, model.compute_dtype, recipe.model.head_dim)
    return model


def validated(recipe: Recipe, data: RunData, model: GPT, device: torch.device, world: World) -> Score:
    """Return the score of `model` on non-overlapping windows, shared out to all ranks."""
    model.eval()  # in training mode, QAT would score quantized weights
    try:
        return evaluator.score(
            model,
            data.text,
            train_seq_len=recipe.train.train_seq_len,
            batch_tokens=recipe.validation.batch_tokens,
            device=device,
            world=world,
        ).score
    finally:
        model.train()


def roundtrip(
    log: Log,
    recipe: Recipe,
    data: RunData,
    path: Path,
    device: torch.device,
    world: World,
    code: int | None = None,
    trained: Score | None = None,
) -> tuple[Score, Score]:
    """Decode the artifact and score what comes out, by plain windows and by the recipe's evaluation."""
    with File(path, registry.decoder) as file:
        file.require()
        about = file.fields.get("metadata", {})
        require_tokenizer(about.get("tokenizer"), path)
        check_same_tokenizer(data.tokenizer, about.get("tokenizer"), recipe.data.tokenizer)
        require_shape(recipe.model, {name: file.entry(name).shape for name in file.names}, path)
        state = file.decode_all()
    model = new_model(recipe, device)
    model.load_state_dict(state)
    model.eval()
    began = time.perf_counter()
    plain = evaluated(log, recipe, data, model, EvaluationSettings(), device, world)
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
    score = evaluated(log, recipe, data, model, settings, device, world)
    mode, stride = settings.scoring_mode, ""
    name = mode.log_name
    if mode.name == "windows" and settings.stride and not settings.documents:
        name, stride = "final_sliding_window_eval", f" stride:{settings.stride}"
    for line in score_lines(name, score, 1000 * (time.perf_counter() - began), stride):
        log(line)
    return plain, score


def evaluated(
    log: Log,
    recipe: Recipe,
    data: RunData,
    model: GPT,
    settings: EvaluationSettings,
    device: torch.device,
    world: World,
) -> Score:
    """Return the score of the decoded model by a scoring mode, shared out to all ranks."""
    began = time.perf_counter()
    scored = evaluator.score(
        model,
        data.text,
        settings,
        train_seq_len=recipe.train.train_seq_len,
        device=device,
        batch_tokens=recipe.validation.batch_tokens,
        world=world,
    )
    seconds, limit = time.perf_counter() - began, settings.budget_seconds
    log.note(f"evaluation: {scored.method}; score:{seconds:.1f}s")
    if 0 < limit < seconds:
        log.note(f"the evaluation took {seconds:,.0f} s, more than its budget of {limit:,.0f} s")
    if scored.report is not None:
        log.note(scored.report.diagnostics)
        if not scored.report.steps:
            log.note(f"{settings.mode} trained on nothing: all of the text is in one chunk; use smaller chunks")
    return scored.score
