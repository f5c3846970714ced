"""Entry point of the challenge: settings come from its environment variables, and the log has its lines.

`train_gpt.py` calls `main`. Each setting of the challenge's script is a field of a recipe dataclass that names its
environment variable, and `gpt.run.environment` handles the variables that the records added, so their commands run
unchanged. Lines, order and number formats of the log are those of the challenge's script, because people and programs
read them. birdie adds lines that begin with `birdie:`, `quantization_gap:` or `cpu_cost:`.

Four variables are no settings: EVAL_ONLY_PATH names an artifact that is scored and nothing else (parameter-golf#1530),
RESUME=1 continues from the last checkpoint, RESTORE=1 exports the float weights of a finished run again, and CAP_BYTES
replaces the 16,000,000 bytes of code and model.
"""

import dataclasses
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from birdie.cli.challenge_log import Log, is_set, log_roundtrip, score_as_recipe, score_roundtrip
from birdie.cli.console import exit_code_of, leave, stop_on_signal
from birdie.compress.rate.target import parse_size
from birdie.golf import int8_zlib as baseline
from birdie.golf.audit.rules import CAP_BYTES
from birdie.golf.record_log import (
    capped_line,
    data_lines,
    memory_line,
    score_lines,
    settings_lines,
    step_line,
    validation_line,
)
from birdie.gpt.run.environment import remarks
from birdie.gpt.run.events import Checked, Event, Interrupted, Profiled, Started, Validated
from birdie.gpt.run.loading import load_recipe
from birdie.gpt.run.pipeline import Run
from birdie.gpt.run.recipe import Recipe
from birdie.gpt.run.run_folder import read_metrics
from birdie.gpt.score.accumulator import Score
from birdie.gpt.score.request import EvaluationRequest
from birdie.gpt.score.settings import EvaluationSettings
from birdie.gpt.train.loop import Step
from birdie.small.qat.settings import Qat
from birdie.system.device import choose_device
from birdie.system.distributed import World, process_group, run_on_main, world_from_environment
from birdie.system.files import write_bytes

PACKAGE = Path(__file__).resolve().parents[2]
"""Folder that holds birdie."""

UNPACKED_BYTES = 2**32
"""Most bytes that the int8+zlib export may unpack to: far more than any model in this challenge has."""


def main() -> None:
    """Run with the settings of the environment and exit as `exit_code_of` says."""
    leave(exit_code_of(_main))


def _main() -> None:
    origins: dict[str, str] = {}
    recipe = load_recipe(origins=origins)
    device = choose_device(recipe.device, world_from_environment().local_rank)
    with process_group(device) as world:
        run_id = world.broadcast(os.environ.get("RUN_ID") or str(uuid.uuid4()))
        if path := os.environ.get("EVAL_ONLY_PATH"):
            score_only(recipe, run_id, world, Path(path))
        else:
            train_and_score(recipe, run_id, world, origins)


def score_only(recipe: Recipe, run_id: str, world: World, path: Path) -> None:
    """Score an artifact with the settings of the recipe, and log the challenge's last lines."""
    log = Log(run_id, world)
    code = _log_provenance(log, recipe)
    score = score_roundtrip(log, path, _request(recipe, EvaluationSettings()), world)
    _final(log, recipe, path, world, score, code)


def train_and_score(recipe: Recipe, run_id: str, world: World, origins: Mapping[str, str] | None = None) -> None:
    """Train, export, score and log as the challenge's script does."""
    log = Log(run_id, world)
    code = _log_provenance(log, recipe)
    folder = Path("runs") / run_id
    run = Run(
        recipe,
        folder,
        replace=True,
        profiled=is_set("PROFILE"),
        world=world,
        notify=lambda line: log(f"birdie:{line}"),
        log=log.path,
        origins=origins,
    )
    for line in remarks(os.environ):
        log(f"birdie:{line}")
    with run.locked():
        last = _restored(log, run) if is_set("RESTORE") else _trained(log, run)
        log(memory_line(run.device))
        if last is not None:
            _finish(log, run, last, code)


def _trained(log: Log, run: Run) -> Validated | None:
    """Train, and return the last validation."""
    last: Validated | None = None
    capped: Step | None = None
    with stop_on_signal(shown=run.world.is_main) as stop:
        for event in run.train(
            resume=is_set("RESUME"), stop=stop, on_warmup=lambda done, total: log(f"warmup_step:{done}/{total}")
        ):
            _log_event(log, event, run)
            if isinstance(event, Validated):
                last = event
            elif isinstance(event, Step) and event.stopping and _at_cap(event, run):
                capped = event
            elif isinstance(event, Interrupted):
                log(f"birdie:continue with: birdie train {run.folder}/recipe.toml --folder {run.folder} --resume")
                raise KeyboardInterrupt
    if capped is not None:
        log(capped_line(capped.number, run.recipe.train.iterations, capped.train_ms))
    return last


def _restored(log: Log, run: Run) -> Validated:
    """Load the float weights of the finished run, log its training if the log has none, and return its score."""
    run.restore()
    last = run.last or Validated(run.steps, 0.0, run.score(run.model), run.weights)
    if not log.continued:
        total = run.recipe.train.iterations
        _log_data(log, run)
        log(f"seed:{run.recipe.train.seed}")
        for line in read_metrics(run.folder):
            log(step_line(int(line["step"]), total, line["loss"], line["train_ms"]))
        _log_event(log, last, run)
        if last.step < total:
            log(capped_line(last.step, total, last.train_ms))
    log(f"birdie:weights of step {last.step} restored; they are exported again")
    return last


def _at_cap(step: Step, run: Run) -> bool:
    cap_ms = run.training.cap_ms
    return cap_ms is not None and step.train_ms >= cap_ms and step.number < run.training.iterations


def _log_provenance(log: Log, recipe: Recipe) -> int:
    """Log the sources and the machine; return the bytes of the script that they would be packed into.

    Ranks that log nothing return 0: packing takes seconds.
    """
    if not log.active:
        return 0
    code = _log_checkout(log, recipe)
    log("=" * 100, console=False)
    log(f"Running Python {platform.python_version()}", console=False)
    log(f"Running PyTorch {torch.__version__}", console=False)
    smi = shutil.which("nvidia-smi")
    gpus = subprocess.run([smi], capture_output=True, text=True, check=False).stdout if smi else "nvidia-smi: not found"
    log(gpus, console=False)
    log("=" * 100, console=False)
    return code


def _log_checkout(log: Log, recipe: Recipe) -> int:
    """Log the sources of a checkout; return the bytes of the script that they would be packed into."""
    from birdie.golf.packed import pack

    if recipe.qat.budget:
        log("birdie:qat.budget does not fit in one script; the code is counted as that of the recipe without it")
        recipe = dataclasses.replace(recipe, qat=Qat())
    packed = pack("train", recipe)
    if not packed.minified:
        log("birdie:python-minifier is not installed, so the code is larger; pip install 'birdie-compress[submit]'")
    _log_sources(log, [Path(sys.argv[0]), *(PACKAGE / name for name in sorted(packed.sources))])
    return len(packed.script)


def _log_sources(log: Log, paths: Iterable[Path]) -> None:
    for path in paths:
        if path.suffix == ".py" and not log.continued:
            log(f"# {path.name}\n{path.read_text(encoding='utf-8')}", console=False)


def _log_data(log: Log, run: Run) -> None:
    data, length, shards = run.recipe.data, run.recipe.train.train_seq_len, run.dataset.train
    pattern = data.val[0] if data.val else str(Path(data.path) / "fineweb_val_*.bin")
    for line in data_lines(run.tokenizer.kind, data.tokenizer, shards, pattern, len(run.val_text.tokens), length):
        log(line)


def _log_started(log: Log, started: Started, run: Run) -> None:
    recipe = run.recipe
    _log_data(log, run)
    parts = started.parameters, started.world_size, started.micro_steps
    for line in settings_lines(*parts, recipe.model, recipe.train, recipe.optimizer):
        log(line)
    log(
        f"birdie:device:{started.device} compute_dtype:{started.compute_dtype} "
        f"newton_schulz_dtype:{started.newton_schulz_dtype} compiled:{started.compiled} run_folder:{run.folder}"
    )
    for name, group in started.groups.items():
        log(f"birdie:group:{name} tensors:{group['tensors']} parameters:{group['parameters']} lr:{group['lr']}")


def _log_event(log: Log, event: Event, run: Run) -> None:
    total = run.recipe.train.iterations
    if isinstance(event, Started):
        _log_started(log, event, run)
    elif isinstance(event, Step):
        if run.recipe.run.logs(event.number) or (event.stopping and run.recipe.run.log_every):
            log(step_line(event.number, total, event.loss, event.train_ms))
    elif isinstance(event, Validated):
        log(validation_line(event.step, total, event.score, event.train_ms))
        if run.recipe.average.kind != "none":
            log(f"birdie:step:{event.step}/{total} validated {event.weights}")
    elif isinstance(event, Checked):
        for check in event.checks:
            log(f"birdie:{check.line}")
    elif isinstance(event, Profiled):
        for name, ms in event.ranges.items():
            log(f"birdie:profile:{name} {ms:.3f}ms")
    elif isinstance(event, Interrupted):
        log(f"interrupted: step:{event.step}/{total} saved:{event.path}")


def _finish(log: Log, run: Run, last: Validated, code: int) -> None:
    """Export, as the challenge's script does and as a .birdie file, score both, and log the challenge's last lines.

    Args:
        last: validation of the float weights.
        code: bytes of the sources.
    """
    trained = last.score
    run_on_main(run.world, run.device, run.calibrate)
    old = _int8_zlib(log, run, code)
    path = run.folder / "model.birdie"
    run_on_main(run.world, run.device, lambda: _write_birdie(log, run, code, path))
    new = score_roundtrip(log, path, _request(run.recipe, EvaluationSettings()), run.world)
    log(
        f"quantization_gap: float_bpb:{trained.bpb:.8f} "
        f"int8_zlib_bpb:{old.bpb:.8f} int8_zlib_gap:{old.bpb - trained.bpb:+.8f} "
        f"birdie_bpb:{new.bpb:.8f} birdie_gap:{new.bpb - trained.bpb:+.8f}"
    )
    log(*score_lines("final_int8_zlib_roundtrip", old))
    scored = _final(log, run.recipe, path, run.world, new, code)
    if log.active:
        values = {
            "run": str(run.folder),
            "artifact": str(path),
            "bytes": path.stat().st_size,
            "code_bytes": code,
            "bpb_float": trained.bpb,
            "bpb_artifact": new.bpb,
            "steps": last.step,
            "train_seconds": last.train_ms / 1000,
            "never_began": run.not_begun,
            "evaluation": asdict(new),
            "evaluation_asked": asdict(scored),
        }
        write_bytes(run.folder / "summary.json", json.dumps(values, indent=1).encode() + b"\n")


def _final(log: Log, recipe: Recipe, path: Path, world: World, score: Score, code: int) -> Score:
    """Log the exact score and the bytes of an artifact; return its score by the recipe's `[evaluation]`."""
    log_roundtrip(log, score)
    log(f"Total submission size birdie: {path.stat().st_size + code} bytes")
    if not recipe.scores_twice:
        return score
    return score_as_recipe(log, path, _request(recipe, recipe.evaluation), world)


def _request(recipe: Recipe, settings: EvaluationSettings) -> EvaluationRequest:
    """Return a request that scores an artifact on the recipe's data in the training dtype."""
    return EvaluationRequest(
        data=None if recipe.data.val else recipe.data.path,
        tokenizer=recipe.data.tokenizer,
        max_tokens=recipe.validation.max_tokens,
        device=recipe.device,
        dtype=recipe.train.compute_dtype,
        batch_tokens=recipe.validation.batch_tokens,
        settings=settings,
    )


def _int8_zlib(log: Log, run: Run, code: int) -> Score:
    """Write the challenge's int8+zlib export, read it back, and return its score."""
    path = run.folder / "final_model.int8.ptz"
    run_on_main(run.world, run.device, lambda: _write_int8_zlib(log, run, code, path))
    began = time.perf_counter()
    score = run.score(run.model_of(baseline.unpack(path.read_bytes(), UNPACKED_BYTES)))
    log(score_lines("final_int8_zlib_roundtrip", score, (time.perf_counter() - began) * 1000)[0])
    return score


def _write_int8_zlib(log: Log, run: Run, code: int, path: Path) -> None:
    state, export = run.model.state_dict(), run.recipe.export
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_bytes(run.folder / "final_model.pt", buffer.getvalue())
    log(f"Serialized model: {buffer.tell()} bytes")
    log(f"Code size: {code} bytes")
    log(f"Total submission size: {buffer.tell() + code} bytes")
    packed = baseline.pack(state, int4_layers=export.int4_layers, int4_step=export.int4_step)
    write_bytes(path, packed.blob)
    log(
        f"Serialized model int8+zlib: {len(packed.blob)} bytes (payload:{packed.payload_bytes} "
        f"raw_torch:{packed.raw_bytes} payload_ratio:{packed.payload_ratio:.2f}x)"
    )
    log(f"Total submission size int8+zlib: {len(packed.blob) + code} bytes")


def _write_birdie(log: Log, run: Run, code: int, path: Path) -> None:
    """Write the .birdie artifact, whose size the recipe decides; if the cap allows less, precision is lowered."""
    budget = parse_size(os.environ.get("CAP_BYTES", str(CAP_BYTES))) - code
    limit = run.recipe.export.budget
    summary = run.export(path, budget=None if limit is None else min(parse_size(limit), budget))
    if summary.bytes > budget:
        log(f"birdie:{summary.bytes} bytes exceed the budget of {budget} (cap minus code); lowering precision to fit")
        summary = run.export(path, budget=budget)
    log(f"Serialized model birdie: {summary.bytes} bytes ({summary.bits_per_weight:.3f} bits per weight)")
