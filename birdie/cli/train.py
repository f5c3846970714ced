"""`birdie train`: a recipe into a run folder with checkpoints, an artifact and its score."""

from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.config import Dict
from rich.table import Table

from birdie.artifact.summary import Summary
from birdie.cli.console import Json, compiling_told, ctrl_c_asks, emit, plain, progress_bar, remark, say, show
from birdie.cli.evaluate import evaluation_json
from birdie.cli.recipe import settings_of
from birdie.errors import ConfigError
from birdie.run.estimate import on_this_cpu
from birdie.run.evaluation import Evaluation
from birdie.run.evaluation import evaluate as evaluate_artifact
from birdie.run.events import Checked, Event, Interrupted, Profiled, Saved, Started, Validated
from birdie.run.pipeline import Run
from birdie.run.presets import apply_preset
from birdie.run.recipe import FLAT, Recipe
from birdie.run.recipe_file import configuration, sources
from birdie.run.registry import find
from birdie.runtime.device import choose_device
from birdie.runtime.distributed import process_group, world_from_environment
from birdie.runtime.files import write_bytes
from birdie.score.request import EvaluationRequest
from birdie.score.settings import EvaluationSettings
from birdie.train.loop import Step
from birdie.train.profile import Profile
from birdie.train.schedule import fraction_done


def configured(recipe: str | None, scale: str | None) -> tuple[Dict, ...]:
    """What a recipe of the book or a file sets, at a scale if there is one; flags and environment come over it.

    Raises:
        ConfigError: there is no such recipe or no such scale, or the recipe is none.
    """
    known = None if recipe is None else find(recipe)
    if scale is None:
        return configuration(None if known is None else known.path)
    values = (apply_preset(Recipe(), scale) if known is None else settings_of(known, scale)).to_dict()
    return sources({key: _set(value) if isinstance(value, dict) else value for key, value in values.items()}, scale)


def _set(table: dict[str, Any]) -> dict[str, Any]:
    return {key: _set(value) if isinstance(value, dict) else value for key, value in table.items() if value is not None}


def after_reading(read: str | None) -> Callable[..., None]:
    """`train`, which refuses a recipe other than `read`: settings of any other never came in."""

    @wraps(train)
    def command(recipe_file: str | None = None, /, **rest: Any) -> None:
        if recipe_file != read:
            raise ConfigError(f"name the recipe first: birdie train {recipe_file} …")
        train(recipe_file, **rest)

    return command


@compiling_told()
def train(
    recipe_file: Annotated[
        str | None,
        Parameter(help="A recipe (`birdie recipe list`, or a .toml file); flags and environment override it."),
    ] = None,
    /,
    *,
    scale: Annotated[
        str | None, Parameter(help="cpu: shrunk to ten minutes on two cores; smoke: to a few steps that run all of it.")
    ] = None,
    folder: Annotated[Path | None, Parameter(help="Run folder; default: runs/ and the recipe's digest.")] = None,
    resume: Annotated[bool, Parameter(negative=(), help="Go on from the latest checkpoint of the run folder.")] = False,
    recipe: Annotated[Recipe | None, FLAT] = None,
    profile: Annotated[
        bool, Parameter(negative=(), help="Also show where a step goes, with a trace, in the run folder's profile/.")
    ] = False,
    json: Json = False,
) -> None:
    """Train a GPT by a recipe, compress it and score the file.

    Settings come from the flags below, else the environment, else the recipe file, else the defaults. Ctrl-C saves a
    checkpoint; --resume goes on from it. Under torchrun every rank trains, and goes on from the last checkpoint when
    one of them died: `torchrun --nproc_per_node=2 --max-restarts=3 -m birdie train …`.
    """
    recipe = recipe or Recipe()  # recipe and scale were read before this call
    folder = folder or Path("runs") / recipe.digest
    device = choose_device(recipe.device, world_from_environment().local_rank)
    with process_group(device) as world:
        remark_here = remark if world.is_main else _nothing
        work = Run(recipe, folder, profiled=profile, world=world, notify=remark_here)
        if scale is not None:
            remark_here(f"{recipe_file or 'the defaults'} at scale {scale}")
        if recipe_file is not None and (needs := find(recipe_file).about.needs):
            remark_here(f"{recipe_file} also has {', '.join(needs)}: not here yet, going on without")
        last, interrupted = follow(work, resume=resume, shown=world.is_main)
        if interrupted is not None:
            if world.is_main:
                remark(f"Stopped after step {interrupted.step}; saved in {interrupted.path}")
                remark("Go on with the same command and --resume.")
            raise KeyboardInterrupt
        if not world.is_main:
            return
        calibrate(work)
        with progress_bar("compressing", "tensors") as update:
            summary = work.export(progress=update)
        with progress_bar("scoring the file", "tokens") as update:
            plain_windows = EvaluationRequest(device=recipe.device, settings=EvaluationSettings())
            result = evaluate_artifact(summary.path, plain_windows, progress=update)
        asked = None
        if recipe.evaluation.in_effect() != EvaluationSettings().in_effect():
            with progress_bar("scoring it as [evaluation] asks", "tokens") as update:
                request = EvaluationRequest(device=recipe.device)
                asked = evaluate_artifact(summary.path, request, notify=remark, progress=update)
    answer = run_json(work, last, summary, result, asked)
    write_bytes(folder / "summary.json", _dumps(answer))
    if json:
        emit(answer)
    else:
        if work.profile is not None:
            show(profile_table(work.profile))
        show(run_table(work, last, summary, result, asked))
        say(f"artifact: {summary.path}")


def follow(work: Run, *, resume: bool = False, shown: bool = True) -> tuple[Validated | None, Interrupted | None]:
    """Train to the end with a bar and log lines; returns the last validation and, if it was stopped, where."""
    last: Validated | None = None
    interrupted: Interrupted | None = None
    with ctrl_c_asks(shown=shown) as stop, progress_bar("training", "steps") as update:
        for event in work.train(resume=resume, stop=stop, on_warmup=update):
            if isinstance(event, Validated):
                last = event
            elif isinstance(event, Interrupted):
                interrupted = event
            if shown:
                _show(event, work, update)
                if isinstance(event, Started) and work.device.type == "cpu":
                    cost = on_this_cpu(work.recipe, work.training, work.world.size)
                    minutes = (cost.warmup_s + cost.seconds) / 60
                    remark(f"about {cost.mean_s:.2g} s a step on this CPU, {minutes:.1f} min in all")
    return last, interrupted


def _show(event: Event, work: Run, update: Callable[[float, float | None], None]) -> None:
    if isinstance(event, Step):
        update(event.number, event.number / fraction_done(work.training, event.number, event.train_ms))
        if work.recipe.run.logs(event.number) or event.stopping:
            remark(
                f"step {event.number}  loss {event.loss:.4f}  lr ×{event.lr_multiplier:.3f}  "
                f"{event.train_ms / 1000:.1f} s  {event.train_ms / event.number:.1f} ms/step"
            )
    elif isinstance(event, Validated):
        of = "" if work.recipe.average.kind == "none" else f" of {event.weights}"
        remark(f"step {event.step}  validation {event.score.bpb:.4f} bits per byte{of} ({event.score.tokens:,} tokens)")
    elif isinstance(event, Checked):
        for check in event.checks:
            remark(check.line)
    elif isinstance(event, Profiled):
        remark(f"{event.profile.title}; none of it on the clock; table and trace in {event.folder}")
    elif isinstance(event, Saved):
        remark(f"step {event.step}  saved {event.path}")
    elif isinstance(event, Started):
        remark(
            f"{event.parameters:,} parameters, {event.compute_dtype} (Newton–Schulz {event.newton_schulz_dtype}) on "
            f"{event.device}, attention by {event.attention_kernel}, "
            f"{event.world_size} rank(s) × {event.micro_steps} micro-step(s), "
            f"{event.train_tokens:,} training tokens in {event.dataset}"
            + (f", resumed at step {event.resumed_at}" if event.resumed_at else "")
        )


def calibrate(work: Run) -> None:
    """Calibrate with a bar, if the recipe wants it."""
    if work.recipe.calibration.data != "none":
        with progress_bar("calibrating", "tokens") as update:
            work.calibrate(update)


def run_json(
    work: Run, last: Validated | None, summary: Summary, result: Evaluation, asked: Evaluation | None = None
) -> dict[str, Any]:
    """What a run has to say for itself, for machines; `asked` is the evaluation that the recipe asks for."""
    return {
        "run": str(work.folder),
        "artifact": str(summary.path),
        "bytes": summary.bytes,
        "budget": summary.budget,
        "bits_per_weight": summary.bits_per_weight,
        "bpb_float": None if last is None else last.score.bpb,
        "bpb_artifact": result.score.bpb,
        "steps": 0 if last is None else last.step,
        "train_seconds": 0.0 if last is None else last.train_ms / 1000,
        "calibration": calibration_json(work),
        "startup": startup_json(work),
        "preflight": [asdict(check) for check in work.checks],
        "profile": None if work.profile is None else work.profile.to_dict(),
        "evaluation": evaluation_json(result),
        "evaluation_asked": None if asked is None else evaluation_json(asked),
    }


def startup_json(work: Run) -> dict[str, Any]:
    """Seconds before the clock started, and what was compiled in them."""
    seconds: dict[str, Any] = {"seconds": work.startup.seconds, "compiled": None}
    if work.compiling is not None:
        counts = work.compiling.warmup
        seconds["compiled"] = {
            "graphs": counts.graphs,
            "found": counts.cache_hits,
            "made": counts.cache_misses,
            "given_up": counts.fallbacks,
            "inside_the_clock": work.compiling.late_graphs,
        }
    return seconds


def calibration_json(work: Run) -> dict[str, Any] | None:
    """What calibration was made on and what it took; None without it."""
    found = work.calibration
    if found is None:
        return None
    return {
        "data": work.recipe.calibration.data,
        "tokens": found.tokens,
        "seconds": found.seconds,
        "reserved_seconds": work.reserved,
    }


def run_table(
    work: Run, last: Validated | None, summary: Summary, result: Evaluation, asked: Evaluation | None = None
) -> Table:
    """Float against artifact."""
    weights = sum(p.numel() for p in work.model.parameters())
    table = Table(title=plain(f"{work.folder}: {weights:,} weights"))
    table.add_column("model")
    table.add_column("bytes", justify="right")
    table.add_column("bits/weight", justify="right")
    table.add_column("bits per byte", justify="right")
    if last is not None:
        table.add_row("float32 weights", f"{weights * 4:,}", "32.00", f"{last.score.bpb:.4f}")
    table.add_row("birdie artifact", f"{summary.bytes:,}", f"{summary.bits_per_weight:.2f}", f"{result.score.bpb:.4f}")
    if asked is not None:
        table.add_row(plain(f"by {asked.method}"), "", "", f"{asked.score.bpb:.4f}")
    if summary.budget is not None:
        table.add_row("budget", f"{summary.budget:,}", "", "")
    return table


def profile_table(profile: Profile) -> Table:
    """Where a step goes: groups, and what is in them."""
    table = Table(title=plain(profile.title))
    table.add_column("part")
    table.add_column("ms", justify="right")
    table.add_column("of the step", justify="right")
    for name, ms in profile.rows():
        top, _, member = name.partition("/")
        style = "dim" if member else "bold"
        share = f"{ms / profile.step_ms:.1%}"
        table.add_row(plain(f"  {member}" if member else top), f"{ms:.2f}", share, style=style)
    return table


def _dumps(answer: dict[str, Any]) -> bytes:
    import json

    return json.dumps(answer, indent=1).encode() + b"\n"


def _nothing(_: str) -> None:
    return None
