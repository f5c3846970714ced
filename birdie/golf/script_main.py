"""The training script, as "int main": it trains, exports, decodes and scores a recipe, by calling birdie's core alone.

    recipe ─► data, GPT ─► train ─► calibrate ─► encode, code ─► model.birdie ─► decode ─► bits per byte

`birdie script RECIPE` packs it with the modules that it imports. It has the log of the challenge's script, reads SEED,
DATA_PATH, TOKENIZER_PATH and RUN_ID, and leaves runs/RUN_ID as `birdie train` does, with the weights before the export.
EVAL_ONLY_PATH names an artifact that is scored and nothing else; RESTORE=1 exports those weights again. What the recipe
asks for beside the plain path is imported where it is asked for; `packed.py` packs it then.
"""

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from birdie.artifact import metadata as file_metadata
from birdie.artifact.write import Beside
from birdie.checkpoints.order_field import order_field
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.rate.assignment import assign
from birdie.compress.rate.copies import merge_copies
from birdie.compress.rate.encoding import Coder
from birdie.compress.rate.fit import fit as encode
from birdie.compress.rate.groups import group_tiny_tensors
from birdie.compress.rate.target import Target, parse_size
from birdie.compress.state import ModelState, keys_of
from birdie.errors import ConfigError
from birdie.golf.record_log import (
    capped_line,
    data_lines,
    memory_line,
    settings_lines,
    step_line,
    validation_line,
)
from birdie.golf.script_score import Log, new_model, or_exit, roundtrip, validated, with_data
from birdie.gpt.data.batches import Batches
from birdie.gpt.model.documents import DocumentFinder
from birdie.gpt.model.gpt import GPT
from birdie.gpt.run.calibration import calibrate_gpt
from birdie.gpt.run.dataset import RunData, open_run_data
from birdie.gpt.run.float_weights import load_float, save_float
from birdie.gpt.run.onset import not_begun
from birdie.gpt.run.recipe import Recipe
from birdie.gpt.score.accumulator import Score
from birdie.gpt.train.average import Average
from birdie.gpt.train.compile_report import eager_pass
from birdie.gpt.train.loop import Step, Trainer, tensors_of
from birdie.gpt.train.optimizers import Optimizers
from birdie.gpt.train.plan import Plan, micro_steps
from birdie.system import provenance
from birdie.system.callbacks import StepHook
from birdie.system.device import choose_device, choose_dtype, make_current
from birdie.system.distributed import World, process_group, run_on_main, world_from_environment
from birdie.system.files import write_bytes
from birdie.system.torch_compile import CompiledOrEager

CAP_BYTES = 16_000_000


def main(script: Path, sources: Path, settings: Mapping[str, Any], fixed: str) -> None:
    """Run the script; an error is one sentence on stderr.

    Args:
        script: the file that runs; its bytes are the code.
        sources: folder of the modules, which go into the log.
        settings: of the recipe, those that are not defaults.
        fixed: names of environment variables of settings, which this script has no more.
    """
    or_exit(lambda: run(resolved(settings, fixed), script, sources))


def resolved(settings: Mapping[str, Any], fixed: str) -> Recipe:
    """Return the recipe with the seed and the data of the environment."""
    if ignored := sorted(set(fixed.split()) & os.environ.keys()):
        raise ConfigError(f"{ignored[0]} is set, and this script has its settings; unset it, or pack another recipe")
    recipe = with_data(Recipe.from_dict(settings))
    seed = os.environ.get("SEED", str(recipe.train.seed)).strip()
    if not seed.isdecimal():
        raise ConfigError(f"SEED is {seed[:80]!r}; give a whole number from 0")
    return replace(recipe, train=replace(recipe.train, seed=int(seed)))


def run(recipe: Recipe, script: Path, sources: Path) -> None:
    """Train, export and score as the recipe says, on all ranks that torchrun has started."""
    device = choose_device(recipe.device, world_from_environment().local_rank)
    with process_group(device) as world:
        run_id = world.broadcast(os.environ.get("RUN_ID") or str(uuid.uuid4()))
        folder, code = Path("runs") / run_id, script.stat().st_size
        log = Log(run_id, world)
        log.sources(sources)
        torch.manual_seed(recipe.train.seed)
        data = open_run_data(recipe, log.note)
        model = new_model(recipe, device)
        if path := os.environ.get("EVAL_ONLY_PATH"):
            roundtrip(log, recipe, data, Path(path), device, world, code)
            return
        restored = os.environ.get("RESTORE") == "1"
        if world.is_main and not restored:
            folder.mkdir(parents=True, exist_ok=True)
            write_bytes(folder / "recipe.toml", recipe.to_toml().encode())
            card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            machine = {"device": card, "ranks": world.size, "versions": provenance.versions()}
            write_bytes(folder / "environment.json", json.dumps(machine).encode() + b"\n")
        if restored:
            state, steps, weights, train_ms, _ = load_float(folder)
            model.load_state_dict(state)
            trained = validated(recipe, data, model, device, world)
            log(validation_line(steps, recipe.train.iterations, trained, train_ms))
            log.note(f"weights of step {steps} restored; they are exported again")
        else:
            trained, steps, train_ms, weights = train(log, recipe, data, model, device, world)
            if world.is_main:
                save_float(folder, model.state_dict(), trained, train_ms, steps, weights)
        log(memory_line(device))
        artifact = folder / "model.birdie"
        log(f"Code size: {code} bytes")
        run_on_main(world, device, lambda: export(log, recipe, data, model, artifact, device, code, steps, weights))
        plain, scored = roundtrip(log, recipe, data, artifact, device, world, code, trained)
        if world.is_main:
            summary = {
                "run": str(folder),
                "artifact": str(artifact),
                "bytes": artifact.stat().st_size,
                "code_bytes": code,
                "bpb_float": trained.bpb,
                "bpb_artifact": plain.bpb,
                "steps": steps,
                "train_seconds": train_ms / 1000,
                "evaluation": asdict(plain),
                "evaluation_asked": asdict(scored),
            }
            write_bytes(folder / "summary.json", json.dumps(summary, indent=1).encode() + b"\n")


def train(
    log: Log, recipe: Recipe, data: RunData, model: GPT, device: torch.device, world: World
) -> tuple[Score, int, float, str]:
    """Train `model`; return the last validation, the steps, the training time, and the name of the weights."""
    settings = recipe.training
    validation = recipe.data.val[0] if recipe.data.val else str(Path(recipe.data.path) / "fineweb_val_*.bin")
    length, total, every = settings.train_seq_len, settings.iterations, recipe.validation.every
    batches = Batches(
        data.dataset.train,
        batch_tokens=settings.train_batch_tokens,
        seq_len=length,
        accumulation=settings.accumulation,
        rank=world.rank,
        world_size=world.size,
        order=recipe.data.order,
        seed=settings.seed,
        bos_id=recipe.model.bos_id,
        vocab_size=recipe.model.vocab_size,
        pin_memory=device.type == "cuda",
    )
    qat = recipe.qat.prepare(model, log.note) if recipe.qat.enabled else None
    hooks = [*([] if qat is None else [qat]), *model.step_hooks(log.note)]
    trainer = new_trainer(log, recipe, model, batches, hooks, device, world)
    micro = micro_steps(settings, world.size, trainer.plan.micro_batch_tokens)
    tokenizer, parameters = recipe.data.tokenizer, sum(p.numel() for p in model.parameters())
    for line in data_lines(
        data.tokenizer.kind, tokenizer, data.dataset.train, validation, len(data.text.tokens), length
    ):
        log(line)
    for line in settings_lines(parameters, world.size, micro, recipe.model, recipe.train, recipe.optimizer):
        log(line)
    step = Step(0, 0.0, 0.0, 1.0, 0.0, 0, 0.0, stopping=total == 0)
    score: Score | None = None
    began_ms = ended_ms = 0.0
    try:
        if settings.warmup_steps and (device.type == "cuda" if settings.compile is None else settings.compile):
            eager_pass(model, length, device)
        fractions = trainer.plan.warmup_fractions(tuple(f for hook in hooks for f in getattr(hook, "changes", ())))
        for done, _ in enumerate(trainer.rehearse(fractions), 1):
            log(f"warmup_step:{done}/{len(fractions)}")
        if every:
            score = validated(recipe, data, model, device, world)
            log(validation_line(0, total, score, 0.0))
        for step in Trainer.__iter__(trainer):
            began_ms, ended_ms = ended_ms, step.train_ms
            if recipe.run.logs(step.number) or (step.stopping and recipe.run.log_every):
                log(step_line(step.number, total, step.loss, step.train_ms))
            if step.stopping or (every and step.number % every == 0):
                with trainer.average.in_model():
                    score = validated(recipe, data, model, device, world)
                log(validation_line(step.number, total, score, step.train_ms))
        if step.number < total and settings.cap_ms is not None and step.train_ms >= settings.cap_ms:
            log(capped_line(step.number, total, step.train_ms))
        weights = str(trainer.average)
        for line in filter(None, (trainer.average.finish(), *model.diagnostics())):
            log.note(f"active: {line}")
        averaged = weights != "the last weights"
        for line in not_begun(recipe, settings, step.number, began_ms, averaged=averaged):
            log.note(f"never began: {line}")
    finally:
        batches.close()
        if qat is not None:
            qat.remove()
    return score or validated(recipe, data, model, device, world), step.number, step.train_ms, weights


def new_trainer(
    log: Log,
    recipe: Recipe,
    model: GPT,
    batches: Batches,
    hooks: Sequence[StepHook],
    device: torch.device,
    world: World,
) -> Trainer:
    """Return what takes the steps: the core alone, unless the recipe asks for a feature around it."""
    settings, packed = recipe.training, recipe.data.order == "packed"
    isolated = packed or (recipe.model.isolate_documents and model.kernels.varlen is not None)
    documents = DocumentFinder(recipe.model.bos_id, device, packed=packed, notify=log.note) if isolated else None
    if has_features(recipe):
        from birdie.gpt.train.training import Training

        return Training(
            model,
            batches,
            settings,
            recipe.optimizer,
            average=recipe.average,
            bandit=recipe.bandit,
            hooks=hooks,
            documents=documents,
            world=world,
            device=device,
            notify=log.note,
        )
    make_current(device)
    model.train()
    newton_schulz_dtype = choose_dtype(recipe.optimizer.newton_schulz_dtype, device)
    optimizers = Optimizers(model, recipe.optimizer, newton_schulz_dtype=newton_schulz_dtype, world=world)
    compiled = device.type == "cuda" if settings.compile is None else settings.compile
    model.fuse_loss(settings.fused, compiled=compiled)
    return Trainer(
        model,
        batches,
        Plan(settings, recipe.optimizer, world.rank, world.size, packed),
        optimizers,
        Average(recipe.average, tensors_of(model)),
        hooks=hooks,
        documents=documents,
        loss=CompiledOrEager(model.loss, log.note) if compiled else model.loss,
    )


def has_features(recipe: Recipe) -> bool:
    """Return whether training has more than the core: fp8, CUDA graphs, fused MLPs, mixed lengths, a bandit."""
    train = recipe.train
    sized = train.micro_batch_tokens == "auto" or bool(train.mixed_seq_lens)
    return sized or train.fp8 or train.compile_mode != "default" or train.fused_mlp or bool(recipe.bandit.every)


def export(
    log: Log,
    recipe: Recipe,
    data: RunData,
    model: GPT,
    path: Path,
    device: torch.device,
    code: int,
    steps: int,
    weights: str,
) -> None:
    """Write the artifact: at most the recipe's budget, and at most what the cap leaves beside the code."""
    room = parse_size(os.environ.get("CAP_BYTES", str(CAP_BYTES))) - code
    limit = recipe.export.budget
    tokenizer = data.tokenizer
    about: dict[str, Any] = {
        "model": "gpt",
        **({"weights": weights} if recipe.average.kind != "none" else {}),
        "recipe": recipe.to_dict(),
        "tokenizer": {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "sha256": tokenizer.digest},
        "steps": steps,
        "device": str(device),
        "versions": provenance.versions(),
        "commit": None,
    }
    known: CalibrationResult | None = None
    if recipe.calibration.data != "none":
        state = {name: weight.detach().cpu() for name, weight in model.state_dict().items()}
        calibration = calibrate_gpt(recipe, state, recipe.calibration, device=device)
        known = calibration.result
        log.note(f"calibrated on {calibration.tokens:,} tokens in {calibration.seconds:.1f} s")
    model.cpu()
    size = written(path, recipe, model, about, None if limit is None else min(parse_size(limit), room), known)
    if size > room:
        log.note(f"{size} bytes exceed the budget of {room} (cap minus code); lowering precision to fit")
        size = written(path, recipe, model, about, room, known)
    log(f"Serialized model birdie: {size} bytes ({8 * size / sum(p.numel() for p in model.parameters()):.3f} bits)")


def written(
    path: Path,
    recipe: Recipe,
    model: GPT,
    about: Mapping[str, Any],
    budget: int | None,
    known: CalibrationResult | None,
) -> int:
    """Encode the weights by the recipe's schemes, or into `budget` bytes, write the file, and return its bytes."""
    rules = list(recipe.export.schemes() if budget is None else recipe.export.pinned())
    if recipe.qat.enabled:
        from birdie.small.qat.fake_quantization import storage_rules

        rules = [*storage_rules(recipe.qat, model), *rules]
    state, target = ModelState.of(model), Target(budget=budget)
    assignment = assign(state, rules, target)
    if known is None:
        assignment = group_tiny_tensors(merge_copies(assignment))
    else:
        assignment = replace(assignment, tensors=known.ordered(state).tensors)
    copies = file_metadata.copies_of(assignment.ties, assignment.copies)
    order = order_field(keys_of(model))
    beside = Beside({"metadata": about, "budget": budget, "copies": copies, "order": order}, groups=assignment.groups)
    coder = Coder(recipe.export.coder, beside.size, keeps_integers=known is not None)
    with threadpool_limits(1, "blas"):  # many threads code; BLAS with threads of its own would only disturb them
        beside.write(path, encode(assignment, target, coder, known).encoded)
    return path.stat().st_size
