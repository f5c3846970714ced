"""The training script: it trains, exports, decodes and scores a recipe, with the log of the challenge's script.

    recipe ─► birdie.gpt.run.program: train ─► calibrate ─► export ─► model.birdie ─► script_score.py: decode ─► score

`birdie script RECIPE` packs it with the modules that it imports; `train_gpt.py` of a checkout runs it with the
variables of the records (birdie.golf.checkout). It reads SEED, DATA_PATH, TOKENIZER_PATH and RUN_ID, and leaves
runs/RUN_ID with the files of a run, the weights before the export among them. EVAL_ONLY_PATH names an artifact that is
scored and nothing else; RESTORE=1 exports those weights again.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from birdie.compress import parse_size
from birdie.errors import ConfigError
from birdie.golf.record_log import (
    capped_line,
    data_lines,
    memory_line,
    settings_lines,
    step_line,
    validation_line,
)
from birdie.golf.script_score import Log, opened, or_exit, roundtrip, with_data
from birdie.gpt.model.gpt import GPT
from birdie.gpt.run.events import LogPace, Validated
from birdie.gpt.run.float_weights import Trained, load_float, save_float
from birdie.gpt.run.program import calibrate, export, finish, follow, training
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.run.work import Work
from birdie.gpt.train.loop import Step
from birdie.system.distributed import run_on_main
from birdie.system.files import write_bytes
from birdie.system.parsing import to_json

CAP_BYTES = 16_000_000


def main(script: Path, sources: Path, settings: Mapping[str, Any], fixed: str) -> None:
    """Run the script; an error is one sentence on stderr.

    Args:
        script: the file that runs; its bytes are the code.
        sources: folder of the modules, which go into the log.
        settings: of the recipe, those that are not defaults.
        fixed: names of environment variables of settings, which this script has no more.
    """

    def run() -> None:
        with opened(resolved(settings, fixed)) as (log, work):
            log.sources(sorted(sources.rglob("*.py")))
            run_script(log, work, script.stat().st_size)

    or_exit(run)


def resolved(settings: Mapping[str, Any], fixed: str) -> Recipe:
    """Return the recipe with the seed and the data of the environment."""
    if ignored := sorted(set(fixed.split()) & os.environ.keys()):
        raise ConfigError(f"{ignored[0]} is set, and this script has its settings; unset it, or pack another recipe")
    recipe = with_data(Recipe.from_dict(settings))
    seed = os.environ.get("SEED", str(recipe.train.seed)).strip()
    if not seed.isdecimal():
        raise ConfigError(f"SEED is {seed[:80]!r}; give a whole number from 0")
    return replace(recipe, train=replace(recipe.train, seed=int(seed)))


def run_script(log: Log, work: Work, code: int) -> None:
    """Train, export and score as the recipe says; or what EVAL_ONLY_PATH or RESTORE asks for."""
    if path := os.environ.get("EVAL_ONLY_PATH"):
        roundtrip(log, work, Path(path), code)
    else:
        model, trained = trained_model(log, work)
        write_artifact(log, work, model, trained, code)


def trained_model(log: Log, work: Work) -> tuple[GPT, Trained]:
    """Return the model with its weights: trained now, or restored from the folder of the run."""
    recipe, main, folder = work.recipe, work.context.world.is_main, Path("runs") / log.run_id
    torch.manual_seed(recipe.train.seed)
    model = work.new_model()
    if os.environ.get("RESTORE") == "1":
        trained = load_float(folder, model)
        score = work.score(model).score
        trained = replace(trained, score=score)
        log(validation_line(trained.steps, recipe.train.iterations, score, trained.train_ms))
        log.note(f"weights of step {trained.steps} restored; they are exported again")
    else:
        if main:
            start_folder(folder, work)
        trained = train(log, work, model, folder)
        if main:
            save_float(folder, model.state_dict(), trained)
    log(memory_line(work.context.device))
    return model, trained


def start_folder(folder: Path, work: Work) -> None:
    """Write what a run folder has from the start: recipe, environment, and no step yet."""
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / "recipe.toml", work.recipe.to_toml().encode())
    about = {**work.start(), "log": f"logs/{folder.name}.txt"}
    write_bytes(folder / "environment.json", to_json(about, indent=1).encode() + b"\n")
    for name in ("metrics", "history"):
        write_bytes(folder / f"{name}.jsonl", b"")


def train(log: Log, work: Work, model: GPT, folder: Path) -> Trained:
    """Train a model, with a line for each event; steps and validations also go into the files of the run folder."""
    recipe, total, last = work.recipe, work.recipe.train.iterations, None
    pace = LogPace(recipe.run)

    def keep(name: str, values: Mapping[str, float]) -> None:
        if log.active:
            with (folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
                file.write(to_json(values) + "\n")

    with training(work, model) as run:
        for line in data_lines(recipe.data, work.data, recipe.train.train_seq_len):
            log(line)
        for line in settings_lines(recipe, sum(p.numel() for p in model.parameters()), run):
            log(line)
        for event in follow(work, run):
            if isinstance(event, Validated):
                last = event
                log(validation_line(event.step, total, event.score, event.train_ms))
                keep("history", {"step": event.step, "train_ms": event.train_ms, "bpb": event.score.bpb})
            elif isinstance(event, Step):
                if recipe.run.log_every and (pace.due(event.number) or event.stopping):
                    log(step_line(event.number, total, event.loss, event.train_ms))
                if recipe.run.logs(event.number) or event.stopping:
                    values = {"step": event.number, "train_ms": event.train_ms, "loss": event.loss}
                    keep("metrics", {**values, "lr_multiplier": event.lr_multiplier})
        cap = recipe.training.cap_ms
        if run.number < total and cap is not None and run.clock.ms >= cap:
            log(capped_line(run.number, total, run.clock.ms))
        return finish(work, run, last)


def write_artifact(log: Log, work: Work, model: GPT, trained: Trained, code: int) -> None:
    """Export the weights, score what the file holds, and write the summary of the run."""
    folder = Path("runs") / log.run_id
    artifact, score = folder / "model.birdie", trained.score
    assert score is not None
    log(f"Code size: {code} bytes")
    run_on_main(work.context.world, work.context.device, lambda: write_model(log, work, model, trained, artifact, code))
    plain, scored = roundtrip(log, work, artifact, code, score)
    if log.active:
        summary = {
            "run": str(folder),
            "artifact": str(artifact),
            "bytes": artifact.stat().st_size,
            "code_bytes": code,
            "bpb_float": score.bpb,
            "bpb_artifact": plain.bpb,
            "steps": trained.steps,
            "train_seconds": trained.train_ms / 1000,
            "never_began": trained.never_began,
            "evaluation": asdict(plain),
            "evaluation_asked": asdict(scored),
        }
        write_bytes(folder / "summary.json", to_json(summary, indent=1).encode() + b"\n")


def write_model(log: Log, work: Work, model: GPT, trained: Trained, path: Path, code: int) -> None:
    """Write the artifact: at most the recipe's budget, and at most what the cap leaves beside the code."""
    room = parse_size(os.environ.get("CAP_BYTES", str(CAP_BYTES))) - code
    limit, calibration = work.recipe.export.budget, calibrate(work, model)
    budget = None if limit is None else min(parse_size(limit), room)
    size = export(work, model, trained, path, budget=budget, calibration=calibration)
    if size > room:
        log.note(f"{size} bytes exceed the budget of {room} (cap minus code); lowering precision to fit")
        size = export(work, model, trained, path, budget=room, calibration=calibration)
    log(f"Serialized model birdie: {size} bytes ({8 * size / sum(p.numel() for p in model.parameters()):.3f} bits)")
