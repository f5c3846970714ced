"""`birdie estimate`: what a recipe will take, and where a run will end."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from birdie.cli.console import Json, compiling_told, emit, plain, say, show
from birdie.cli.recipe import settings_of
from birdie.errors import ConfigError
from birdie.run.estimate import (
    Artifact,
    Load,
    Machine,
    Schedule,
    artifact,
    groups,
    h100,
    load,
    schedule,
    this_cpu,
    training,
)
from birdie.run.forecast import Forecast, forecast
from birdie.run.history import read
from birdie.run.recipe import Recipe
from birdie.run.registry import RegisteredRecipe, find


@compiling_told()
def estimate(
    recipe: Annotated[str, Parameter(help="A name that `birdie recipe list` shows, a .toml file, or a run folder.")],
    /,
    *,
    scale: Annotated[str | None, Parameter(help="Shrunk: cpu or smoke, as `birdie train --scale` has it.")] = None,
    json: Json = False,
) -> None:
    """Tell what a recipe will take before anything of it runs; of a run folder, also the bits per byte it will end at.

    Counts are exact, bytes and memory derived, times those of machines like the records'. docs/estimate.md says what
    each number means and how far off it was where it could be checked.
    """
    folder = Path(recipe) if Path(recipe).is_dir() else None
    known = _known(recipe, folder)
    settings = settings_of(known, scale)
    if scale is not None:
        known = dataclasses.replace(known, about=known.about.unmeasured())
    run = None if folder is None else _forecast(settings, folder)
    machines = [this_cpu(settings), h100(8), h100(1)]
    plans = [_schedule(settings, machine) for machine in machines]
    # the cost of a step is that with depth recurrence, if the recipe has it
    whole, apart = (
        load(settings, devices, machines[1].dtype, depth_recurrence=True) for devices in (1, _ranks(settings))
    )
    counted, file = groups(settings.model), artifact(settings)
    if json:
        emit(
            {
                "name": known.name,
                "parameters": {"total": sum(counted.values()), "groups": counted},
                "artifact": dataclasses.asdict(file),
                "step": _step_json(settings, whole),
                "communication": {
                    "ranks": _ranks(settings),
                    "reduced_bytes": apart.reduced_bytes,
                    "sent_bytes": apart.sent_bytes,
                },
                "machines": [_plan_json(machine, plan) for machine, plan in zip(machines, plans, strict=True)],
                "recorded": {"bytes": known.about.bytes, "step_ms": known.about.step_ms, "bpb": known.about.bpb},
                "forecast": None if run is None else dataclasses.asdict(run),
            }
        )
        return
    show(_model_table(known, settings, counted, file, whole, apart))
    show(_machine_table(settings, machines, plans))
    if run is not None:
        say(_told(run))


def _known(name: str, folder: Path | None) -> RegisteredRecipe:
    if folder is None:
        return find(name)
    if not (folder / "recipe.toml").is_file():
        raise ConfigError(f"{folder} is no run folder: it has no recipe.toml; give one that birdie train wrote")
    return dataclasses.replace(find(str(folder / "recipe.toml")), name=folder.name)


def _forecast(recipe: Recipe, folder: Path) -> Forecast:
    return forecast(read(folder), training(recipe))


def _ranks(recipe: Recipe) -> int:
    """Eight, as in the challenge, or as many as can share the batch."""
    return next(ranks for ranks in (8, 4, 2, 1) if recipe.train.accumulation % ranks == 0)


def _schedule(recipe: Recipe, machine: Machine) -> Schedule | str:
    """What it says of a machine that cannot run it is why not."""
    try:
        return schedule(recipe, machine)
    except ConfigError as error:
        return str(error)


def _step_json(recipe: Recipe, whole: Load) -> dict[str, int]:
    return {
        "tokens": recipe.train.train_batch_tokens,
        "matrix_flops": whole.micro_steps * whole.cost.matrix_flops,
        "attention_flops": whole.micro_steps * whole.cost.attention_flops,
        "update_flops": whole.update_flops,
        "moved_bytes": whole.micro_steps * whole.cost.moved_bytes,
    }


def _plan_json(machine: Machine, plan: Schedule | str) -> dict[str, Any]:
    about = {"name": machine.name, "devices": machine.devices}
    if isinstance(plan, str):
        return {**about, "error": plan}
    return {
        **about,
        "step_ms": 1e3 * plan.mean_s,
        "steps": plan.steps,
        "tokens": plan.tokens,
        "train_seconds": plan.seconds,
        "priming_seconds": plan.warmup_s,
        "flops": plan.flops,
        "memory": {**dataclasses.asdict(plan.memory), "total": plan.memory.total},
    }


def _model_table(
    known: RegisteredRecipe, recipe: Recipe, counted: dict[str, int], file: Artifact, whole: Load, apart: Load
) -> Table:
    about, tera = known.about, 1e12
    table = Table(title=plain(f"{known.name}: before it runs"))
    for name in ("what", "estimate", "unit", "recorded"):
        table.add_column(name, justify="left" if name in ("what", "unit") else "right")
    recorded = f"{about.parameters:,}" if about.parameters else ""
    table.add_row("parameters", f"{sum(counted.values()):,}", "weights", recorded)
    for group, count in counted.items():
        table.add_row(f"  {group}", f"{count:,}", "weights", "")
    table.add_section()
    # records count their code, too
    table.add_row("artifact", f"{file.bytes:,}", "bytes", f"{about.bytes:,} with code" if about.bytes else "")
    table.add_row("  from", f"{file.low:,}", "bytes", "")
    table.add_row("  to", f"{file.high:,}", "bytes", "")
    table.add_row("  a weight", f"{file.bits_per_weight:.2f}", "bits", "")
    table.add_section()
    table.add_row("a step: products", f"{whole.micro_steps * whole.cost.matrix_flops / tera:,.3f}", "TFLOPs", "")
    table.add_row("  attention, causal", f"{whole.micro_steps * whole.cost.attention_flops / tera:,.3f}", "TFLOPs", "")
    table.add_row("  Newton–Schulz", f"{whole.update_flops / tera:,.3f}", "TFLOPs", "")
    table.add_row("  tokens", f"{recipe.train.train_batch_tokens:,}", "tokens", "")
    table.add_row(f"  reduced over {_ranks(recipe)} ranks", f"{apart.reduced_bytes / 1e6:,.1f}", "MB", "")
    table.add_row("  sent by each", f"{apart.sent_bytes / 1e6:,.1f}", "MB", "")
    return table


def _machine_table(recipe: Recipe, machines: list[Machine], plans: list[Schedule | str]) -> Table:
    table = Table(
        title="by machine", caption=f"{recipe.train.max_wallclock_seconds:g} s cap" if recipe.train.cap_ms else None
    )
    table.add_column("what")
    for machine in machines:
        table.add_column(machine.name, justify="right")
    rows: dict[str, list[str]] = {name: [] for name in _ROWS}
    for plan in plans:
        cells = [plan, *[""] * (len(_ROWS) - 1)] if isinstance(plan, str) else _cells(plan)
        for name, cell in zip(_ROWS, cells, strict=True):
            rows[name].append(cell)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


_ROWS = ("ms a step", "steps", "tokens, millions", "training, s", "priming, s", "PFLOPs in all", "memory a device, GB")


def _cells(plan: Schedule) -> list[str]:
    return [
        f"{1e3 * plan.mean_s:,.1f}",
        f"{plan.steps:,}",
        f"{plan.tokens / 1e6:,.1f}",
        f"{plan.seconds:,.0f}",
        f"{plan.warmup_s:,.1f}",
        f"{plan.flops / 1e15:,.3g}",
        f"{plan.memory.total / 1e9:,.2f}",
    ]


def _told(run: Forecast) -> str:
    if run.step == run.steps:
        return f"the run ended after {run.steps:,} steps at {run.bpb:.4f} bits per byte"
    return (
        f"after step {run.step:,} of about {run.steps:,}: the run should end at {run.bpb:.4f} bits per byte, "
        f"nine in ten between {run.low:.4f} and {run.high:.4f} ({run.validations} validations)"
    )
