"""`birdie estimate`: estimate size, time and memory of a recipe."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from birdie.cli.console import Json, compiling_notice, plain, print_json, print_table
from birdie.errors import ConfigError

if TYPE_CHECKING:
    from birdie.gpt.run.estimate import Artifact, Load, Machine, Schedule
    from birdie.gpt.run.recipe import Recipe
    from birdie.gpt.run.registry import RegisteredRecipe

GROUP = "Train"


@compiling_notice()
def command(
    recipe: Annotated[str, Parameter(help="A name that `birdie recipe list` shows, a .toml file, or a run folder.")],
    /,
    *,
    preset: Annotated[
        str | None, Parameter(help="Shrink the recipe as `birdie train --preset` does: cpu or smoke.")
    ] = None,
    json: Json = False,
) -> None:
    """Estimate parameters, bytes, time and memory of a recipe without running it.

    Parameters and FLOPs are exact. Bytes, memory and times are estimates. docs/recipes.md explains each number and
    gives the measured errors.
    """
    from birdie.gpt.run.estimate import artifact, groups, h100, load, this_cpu

    known = _known(recipe)
    settings = known.recipe(preset)
    if preset is not None:
        known = dataclasses.replace(known, about=known.about.unmeasured())
    machines = [this_cpu(settings), h100(8), h100(1)]
    plans = [_schedule(settings, machine) for machine in machines]
    # a step with depth recurrence active, if the recipe has it, once on one device and once sharded over the ranks
    step, sharded = (
        load(settings, devices, machines[1].dtype, depth_recurrence=True) for devices in (1, _ranks(settings))
    )
    counts, file = groups(settings.model), artifact(settings)
    if json:
        print_json(
            {
                "name": known.name,
                "parameters": {"total": sum(counts.values()), "groups": counts},
                "artifact": dataclasses.asdict(file),
                "step": _step_json(settings, step),
                "communication": {
                    "ranks": _ranks(settings),
                    "reduced_bytes": sharded.reduced_bytes,
                    "sent_bytes": sharded.sent_bytes,
                },
                "machines": [_plan_json(machine, plan) for machine, plan in zip(machines, plans, strict=True)],
                "recorded": {"bytes": known.about.bytes, "step_ms": known.about.step_ms, "bpb": known.about.bpb},
            }
        )
        return
    print_table(_model_table(known, settings, counts, file, step, sharded))
    print_table(_machine_table(settings, machines, plans))


def _known(name: str) -> "RegisteredRecipe":
    from birdie.gpt.run.registry import find

    folder = Path(name)
    if not folder.is_dir():
        return find(name)
    if not (folder / "recipe.toml").is_file():
        raise ConfigError(f"{folder} has no recipe.toml; give a run folder that birdie train wrote, or a recipe")
    return dataclasses.replace(find(str(folder / "recipe.toml")), name=folder.name)


def _ranks(recipe: "Recipe") -> int:
    """Return eight ranks, as in the challenge, or the most that divide the batch evenly."""
    return next(ranks for ranks in (8, 4, 2, 1) if recipe.train.accumulation % ranks == 0)


def _schedule(recipe: "Recipe", machine: "Machine") -> "Schedule | str":
    """Return the schedule on a machine, or the reason why the machine cannot run the recipe."""
    from birdie.gpt.run.estimate import schedule

    try:
        return schedule(recipe, machine)
    except ConfigError as error:
        return str(error)


def _step_json(recipe: "Recipe", step: "Load") -> dict[str, int]:
    return {
        "tokens": recipe.train.train_batch_tokens,
        "matrix_flops": step.micro_steps * step.cost.matrix_flops,
        "attention_flops": step.micro_steps * step.cost.attention_flops,
        "update_flops": step.update_flops,
        "moved_bytes": step.micro_steps * step.cost.moved_bytes,
    }


def _plan_json(machine: "Machine", plan: "Schedule | str") -> dict[str, Any]:
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
    known: "RegisteredRecipe",
    recipe: "Recipe",
    counts: dict[str, int],
    file: "Artifact",
    step: "Load",
    sharded: "Load",
) -> Table:
    about, tera = known.about, 1e12
    table = Table(title=plain(f"{known.name}: estimate"))
    for name in ("quantity", "estimate", "unit", "recorded"):
        table.add_column(name, justify="left" if name in ("quantity", "unit") else "right")
    recorded = f"{about.parameters:,}" if about.parameters else ""
    table.add_row("parameters", f"{sum(counts.values()):,}", "weights", recorded)
    for group, count in counts.items():
        table.add_row(f"  {group}", f"{count:,}", "weights", "")
    table.add_section()
    # the bytes of a record include its code
    table.add_row("artifact", f"{file.bytes:,}", "bytes", f"{about.bytes:,} with code" if about.bytes else "")
    table.add_row("  low estimate", f"{file.low:,}", "bytes", "")
    table.add_row("  high estimate", f"{file.high:,}", "bytes", "")
    table.add_row("  per weight", f"{file.bits_per_weight:.2f}", "bits", "")
    table.add_section()
    table.add_row("one step: matrix products", f"{step.micro_steps * step.cost.matrix_flops / tera:,.3f}", "TFLOPs", "")
    table.add_row("  attention, causal", f"{step.micro_steps * step.cost.attention_flops / tera:,.3f}", "TFLOPs", "")
    table.add_row("  Newton–Schulz", f"{step.update_flops / tera:,.3f}", "TFLOPs", "")
    table.add_row("  tokens", f"{recipe.train.train_batch_tokens:,}", "tokens", "")
    table.add_row(f"  reduced over {_ranks(recipe)} ranks", f"{sharded.reduced_bytes / 1e6:,.1f}", "MB", "")
    table.add_row("  sent by each rank", f"{sharded.sent_bytes / 1e6:,.1f}", "MB", "")
    return table


def _machine_table(recipe: "Recipe", machines: list["Machine"], plans: list["Schedule | str"]) -> Table:
    table = Table(
        title="time and memory by machine",
        caption=f"training stops after {recipe.train.max_wallclock_seconds:g} s" if recipe.train.cap_ms else None,
    )
    table.add_column("quantity")
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


_ROWS = ("ms per step", "steps", "million tokens", "training, s", "warm-up, s", "PFLOPs in total", "GB per device")


def _cells(plan: "Schedule") -> list[str]:
    return [
        f"{1e3 * plan.mean_s:,.1f}",
        f"{plan.steps:,}",
        f"{plan.tokens / 1e6:,.1f}",
        f"{plan.seconds:,.0f}",
        f"{plan.warmup_s:,.1f}",
        f"{plan.flops / 1e15:,.3g}",
        f"{plan.memory.total / 1e9:,.2f}",
    ]
