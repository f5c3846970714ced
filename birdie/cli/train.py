"""`birdie train`: train a GPT by a recipe, compress it and score the file.

The run folder gets checkpoints, the artifact `model.birdie` and `summary.json`.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.table import Table

from birdie.artifact import Summary
from birdie.cli.console import (
    Json,
    log,
    log_file,
    new_app,
    plain,
    print_json,
    print_line,
    print_table,
    progress_bar,
    stderr,
    stop_on_signal,
)
from birdie.errors import ConfigError
from birdie.gpt.run.recipe_file import Source, sources
from birdie.gpt.run.recipe_loading import FLAT, configuration, without_none
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.score.request import EvaluationRequest
from birdie.gpt.score.settings import EvaluationSettings
from birdie.system.callbacks import Progress, in_lines, no_message
from birdie.system.files import write_bytes
from birdie.system.parsing import to_json

if TYPE_CHECKING:
    from birdie.cli.tensorboard_events import Board
    from birdie.gpt.run.evaluation import Evaluation
    from birdie.gpt.run.events import Event, Interrupted, LogPace, Validated
    from birdie.gpt.run.pipeline import Run
    from birdie.system.distributed import World

GROUP = "Train"


def build_app(tokens: Sequence[str]) -> App:
    """Return the application of `birdie train`, configured by the recipe and the preset among `tokens`.

    cyclopts takes configuration before it parses tokens, so the recipe is looked up first. The command is an
    application of its own: beside other commands cyclopts would take the recipe's table [train] for a command.
    """
    named, preset = recipe_and_preset(tokens)
    minutes = _minutes(tokens)
    recipe = _small_recipe() if named is None and minutes is not None else named
    origins: dict[str, str] = {}
    app = new_app("birdie train", config=configuration_of(recipe, preset, origins, minutes))

    @wraps(command)
    def checked(recipe_file: str | None = None, /, **flags: Any) -> None:
        if recipe_file != named:  # its settings were not read
            raise ConfigError(f"name the recipe first: birdie train {recipe_file} …")
        command(recipe, **flags, origins=origins)

    app.default(checked)
    return app


def recipe_and_preset(tokens: Sequence[str]) -> tuple[str | None, str | None]:
    recipe = next((token for token in tokens if token.endswith(".toml") and not token.startswith("-")), None)
    if recipe is None and tokens and not tokens[0].startswith("-"):
        recipe = tokens[0]
    return recipe, _value_of("--preset", tokens)


def _value_of(name: str, tokens: Sequence[str]) -> str | None:
    """Return the last value of a flag among `tokens`; None without the flag."""
    result = None
    for index, token in enumerate(tokens):
        flag, equals, value = token.partition("=")
        if flag == name:
            result = value if equals else "".join(tokens[index + 1 : index + 2])
    return result


def _minutes(tokens: Sequence[str]) -> float | None:
    with suppress(ValueError):  # cyclopts refuses what is no number
        return float(text) if (text := _value_of("--minutes", tokens)) is not None else None
    return None


def _small_recipe() -> str | None:
    """Return the recipe for a training of minutes that names none: on a CPU that of a laptop."""
    import torch

    return None if torch.cuda.is_available() else "laptop"


def configuration_of(
    recipe: str | None, preset: str | None, origins: dict[str, str] | None = None, minutes: float | None = None
) -> tuple[Source, ...]:
    """Return the settings of a recipe (a registered name or a file), shrunk by a preset or to minutes, if given.

    Flags and environment variables override them, and `origins` takes those that they give.
    """
    from birdie.gpt.run.presets import apply_preset, with_minutes
    from birdie.gpt.run.recipe_registry import find

    known = None if recipe is None else find(recipe)
    if preset is None and minutes is None:
        return configuration(None if known is None else known.path, origins)
    settings = Recipe() if known is None else known.recipe(preset)
    if known is None and preset is not None:
        settings = apply_preset(settings, preset)
    if minutes is not None:
        settings = with_minutes(settings, minutes)
    return sources(without_none(settings.to_dict()), preset or "--minutes", origins)


def command(
    recipe_file: Annotated[
        str | None,
        Parameter(help="A name that `birdie recipe list` shows, or a .toml file."),
    ] = None,
    /,
    *,
    preset: Annotated[
        str | None,
        Parameter(help="Shrink the recipe. cpu: ten minutes on two cores; smoke: four steps, to see that it runs."),
    ] = None,
    minutes: Annotated[
        float | None,
        Parameter(
            help="Train for so long; the schedule fits, and validation and export come on top. A CPU without a recipe "
            "takes that of a laptop."
        ),
    ] = None,
    folder: Annotated[
        Path | None, Parameter(help="Run folder; default: runs/DIGEST, the digest of the recipe.")
    ] = None,
    resume: Annotated[
        bool, Parameter(negative=(), help="Continue from the latest checkpoint in the run folder.")
    ] = False,
    recipe: Annotated[Recipe | None, FLAT] = None,
    profile: Annotated[
        bool,
        Parameter(
            negative=(), help="Also measure the parts of a step, and write a trace to profile/ in the run folder."
        ),
    ] = False,
    tensorboard: Annotated[
        bool, Parameter(negative=(), help="Also write loss, rates and validations to tensorboard/ in the run folder.")
    ] = False,
    json: Json = False,
    origins: Annotated[Mapping[str, str] | None, Parameter(parse=False)] = None,
) -> None:
    """Train a GPT by a recipe, compress it and score the file.

    A setting comes from its flag, else from its environment variable, else from the recipe, else it has its default.
    Ctrl-C, SIGTERM or SIGHUP saves a checkpoint, and --resume continues from it. Under torchrun every rank trains; if
    a rank dies, all restart from the last checkpoint: `torchrun --nproc_per_node=2 --max-restarts=3 -m birdie train …`.
    """
    from birdie.cli.tensorboard_events import Board
    from birdie.gpt.run.pipeline import Run
    from birdie.gpt.run.recipe_registry import find
    from birdie.gpt.run.run_folder import require_run_folder
    from birdie.system.context import Context
    from birdie.system.device import choose_device
    from birdie.system.distributed import process_group, run_on_main, world_from_environment

    recipe = recipe or Recipe()  # with the recipe file and the preset applied: build_app configured them
    folder = folder or Path("runs") / recipe.digest
    require_run_folder(folder)
    device = choose_device(recipe.device, world_from_environment().local_rank)
    with process_group(device) as world:
        notify = log if world.is_main else no_message
        work = Run(recipe, folder, Context(device, world, notify), profiled=profile, origins=origins)
        if resume:
            work.require_unchanged()  # before a line is added to the log
        with work.locked(), log_file(folder / "log.txt"):
            if preset is not None or minutes is not None:
                shrunk = "" if preset is None else f", preset {preset}"
                shrunk += "" if minutes is None else f", {minutes:g} minutes"
                notify(f"recipe: {recipe_file or 'defaults'}{shrunk}")
            if recipe_file is not None and (needs := find(recipe_file).about.needs):
                notify(f"not supported, training without: {', '.join(needs)}")
            board = Board(folder / "tensorboard") if tensorboard and world.is_main else None
            last, interrupted = follow(work, resume=resume, shown=world.is_main, board=board)
            if interrupted is not None:
                if world.is_main:
                    log(f"Stopped after step {interrupted.step}; saved in {interrupted.path}")
                    log("Continue with the same command and --resume.")
                raise KeyboardInterrupt
            path = folder / "model.birdie"
            summaries: list[Summary] = []
            run_on_main(world, device, lambda: summaries.append(compressed(work)))
            plain_windows = EvaluationRequest(device=recipe.device, settings=EvaluationSettings())
            result = scored(path, plain_windows, world, "scoring the file")
            by_recipe = None
            if recipe.scores_twice:
                request = EvaluationRequest(device=recipe.device)
                by_recipe = scored(path, request, world, "scoring with [evaluation]")
            if not world.is_main:
                return
            answer = run_json(work, last, summaries[0], result, by_recipe)
            write_bytes(folder / "summary.json", to_json(answer, indent=1).encode() + b"\n")
    if json:
        print_json(answer)
    else:
        if work.profile is not None:
            print_table(profile_table(work.profile))
        print_table(run_table(work, last, summaries[0], result, by_recipe))
        print_line(f"artifact: {path}")


def compressed(work: "Run") -> Summary:
    """Calibrate, if the recipe does, and write the artifact."""
    if work.recipe.calibration.data != "none":
        with progress_bar("calibrating", "tokens") as update:
            work.calibrate(update)
    with progress_bar("compressing", "tensors") as update:
        return work.export(progress=update)


def scored(path: Path, request: EvaluationRequest, world: "World", title: str) -> "Evaluation":
    """Score the artifact; all ranks share the work, and rank 0 shows it."""
    from birdie.gpt.run.evaluation import evaluate

    if not world.is_main:
        return evaluate(path, request, world=world)
    with progress_bar(title, "tokens") as update:
        return evaluate(path, request, world=world, notify=log, progress=update)


def follow(
    work: "Run", *, resume: bool = False, shown: bool = True, board: "Board | None" = None
) -> tuple["Validated | None", "Interrupted | None"]:
    """Train to the end with a progress bar and log lines; return the last validation and the interruption, if any."""
    from birdie.gpt.run.events import Interrupted, LogPace, Validated

    last: Validated | None = None
    interrupted: Interrupted | None = None
    pace = LogPace(work.recipe.run)
    with stop_on_signal(shown=shown) as stop, progress_bar("training", "steps") as update:
        warm_up = update if stderr.is_terminal else in_lines(work.context.notify, "warming up", "steps")
        for event in work.train(resume=resume, stop=stop, on_warmup=warm_up):
            if isinstance(event, Validated):
                last = event
            elif isinstance(event, Interrupted):
                interrupted = event
            if board is not None:
                board.record(event)
            if shown:
                _log_event(event, work, update, pace)
        if interrupted is None and stop():  # during the last step
            if shown:
                log("Training is complete and saved; the same command with --resume compresses the model.")
            raise KeyboardInterrupt
    return last, interrupted


def _log_event(event: "Event", work: "Run", update: Progress, pace: "LogPace") -> None:
    from birdie.gpt.run.events import Checked, Profiled, Saved, Started, Validated
    from birdie.gpt.train.loop import Step
    from birdie.gpt.train.plan import fraction_done

    if isinstance(event, Step):
        if stderr.is_terminal:  # else `pace` says how far it is
            update(event.number, event.number / fraction_done(work.recipe.training, event.number, event.train_ms))
        if pace.due(event.number) or event.stopping:
            log(
                f"step {event.number}  loss {event.loss:.4f}  lr ×{event.lr_multiplier:.3f}  "
                f"{event.train_ms / 1000:.1f} s  {event.train_ms / event.number:.1f} ms/step"
            )
    elif isinstance(event, Validated):
        weights = "" if work.recipe.average.kind == "none" else f", {event.weights}"
        log(f"step {event.step}  validation {event.score.bpb:.4f} bpb ({event.score.tokens:,} tokens{weights})")
    elif isinstance(event, Checked):
        for check in event.checks:
            log(check.line)
    elif isinstance(event, Profiled):
        parts = ", ".join(f"{name} {ms:.1f} ms" for name, ms in event.ranges.items())
        log(f"profile: {parts}; not counted as training time; table and trace in {event.folder}")
    elif isinstance(event, Saved):
        log(f"step {event.step}  saved {event.path}")
    elif isinstance(event, Started):
        log(
            f"{event.parameters:,} parameters, {event.compute_dtype} (Newton–Schulz {event.newton_schulz_dtype}) on "
            f"{event.device}, attention by {event.attention_kernel}, "
            f"{event.world_size} rank(s) × {event.micro_steps} micro-step(s), "
            f"{event.train_tokens:,} training tokens in {event.dataset}"
            + (f", resumed at step {event.resumed_at}" if event.resumed_at else "")
        )


def run_json(
    work: "Run",
    last: "Validated | None",
    summary: Summary,
    result: "Evaluation",
    by_recipe: "Evaluation | None" = None,
) -> dict[str, Any]:
    """Return the object of `birdie train --json`, which is also `summary.json`; programs depend on its keys.

    Args:
        result: score with non-overlapping windows, the same for every recipe.
        by_recipe: score with the recipe's `[evaluation]` settings; None: they are the same.
    """
    from birdie.cli.evaluate import evaluation_json

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
        "never_began": list(work.trained.never_began),
        "preflight": [asdict(check) for check in work.checks],
        "profile": work.profile,
        "evaluation": evaluation_json(result),
        "evaluation_asked": None if by_recipe is None else evaluation_json(by_recipe),
    }


def startup_json(work: "Run") -> dict[str, Any]:
    """Return the seconds before training time counts, and the number of graphs compiled in them."""
    compiling = work.compiling
    graphs = compiling and {"graphs": compiling.warmup_graphs, "inside_the_clock": compiling.late_graphs}
    return {"seconds": work.startup.seconds, "compiled": graphs}


def calibration_json(work: "Run") -> dict[str, Any] | None:
    """Return data, tokens and seconds of the calibration; None without it."""
    calibration = work.calibration
    if calibration is None:
        return None
    return {
        "data": work.recipe.calibration.data,
        "tokens": calibration.tokens,
        "seconds": calibration.seconds,
        "reserved_seconds": work.recipe.reserved_seconds,
    }


def run_table(
    work: "Run",
    last: "Validated | None",
    summary: Summary,
    result: "Evaluation",
    by_recipe: "Evaluation | None" = None,
) -> Table:
    """Return the table of bytes and bits per byte: float weights, artifact, budget."""
    weights = sum(p.numel() for p in work.model.parameters())
    table = Table(title=plain(f"{work.folder}: {weights:,} weights"))
    table.add_column("model")
    table.add_column("bytes", justify="right")
    table.add_column("bits/weight", justify="right")
    table.add_column("bits per byte", justify="right")
    if last is not None:
        table.add_row("float32 weights", f"{weights * 4:,}", "32.00", f"{last.score.bpb:.4f}")
    table.add_row("birdie artifact", f"{summary.bytes:,}", f"{summary.bits_per_weight:.2f}", f"{result.score.bpb:.4f}")
    if by_recipe is not None:
        table.add_row(plain(f"  {by_recipe.method}"), "", "", f"{by_recipe.score.bpb:.4f}")
    if summary.budget is not None:
        table.add_row("budget", f"{summary.budget:,}", "", "")
    return table


def profile_table(ranges: dict[str, float]) -> Table:
    """Return the table of milliseconds per step, by named range."""
    table = Table(title="a step, by named range")
    table.add_column("range")
    table.add_column("ms", justify="right")
    for name, ms in ranges.items():
        table.add_row(plain(name), f"{ms:.2f}", style="dim" if "/" in name else None)
    return table
