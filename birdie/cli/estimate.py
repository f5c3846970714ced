"""`birdie estimate`: estimate size, time and memory of a recipe."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from birdie.cli.console import Json, plain, print_json, print_table
from birdie.errors import ConfigError

if TYPE_CHECKING:
    from birdie.gpt.run.recipe_registry import RegisteredRecipe
    from birdie.gpt.run.recipe_settings import Recipe
    from birdie.gpt.run.run_estimate import Schedule

GROUP = "Train"


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
    from torch import bfloat16

    from birdie.gpt.run.run_estimate import artifact, groups, load

    known = _known(recipe)
    settings = known.recipe(preset)
    if preset is not None:
        known = dataclasses.replace(known, about=known.about.unmeasured())
    plans = {devices: _schedule(settings, devices) for devices in (8, 1)}
    # a step with depth recurrence active, if the recipe has it, once on one device and once sharded over the ranks
    ranks = _ranks(settings)
    step, sharded = (load(settings, devices, bfloat16, depth_recurrence=True) for devices in (1, ranks))
    counts, file = groups(settings.model), artifact(settings)
    step_flops = {
        "matrix_flops": step.micro_steps * step.cost.matrix_flops,
        "attention_flops": step.micro_steps * step.cost.attention_flops,
        "update_flops": step.update_flops,
    }
    if json:
        communication = {"ranks": ranks, "reduced_bytes": sharded.reduced_bytes, "sent_bytes": sharded.sent_bytes}
        print_json(
            {
                "name": known.name,
                "parameters": {"total": sum(counts.values()), "groups": counts},
                "artifact": dataclasses.asdict(file),
                "step": {"tokens": settings.train.train_batch_tokens, **step_flops},
                "communication": communication,
                "machines": [_plan_json(devices, plan) for devices, plan in plans.items()],
                "recorded": {"bytes": known.about.bytes, "step_ms": known.about.step_ms, "bpb": known.about.bpb},
            }
        )
        return
    about = known.about
    rows = [("parameters", f"{sum(counts.values()):,}", f"{about.parameters:,}" if about.parameters else "")]
    rows += [(f"  {group}", f"{count:,}", "") for group, count in counts.items()]
    # the bytes of a record include its code
    rows += [("artifact, bytes", f"{file.bytes:,}", f"{about.bytes:,} with code" if about.bytes else "")]
    rows += [("  low and high", f"{file.low:,} – {file.high:,}", "")]
    rows += [("  bits per weight", f"{file.bits_per_weight:.2f}", "")]
    rows += [(f"one step, {name.replace('_', ' ')}", f"{flops:.4g}", "") for name, flops in step_flops.items()]
    rows += [(f"  bytes sent by each of {ranks} ranks", f"{sharded.sent_bytes:,}", "")]
    for devices, plan in plans.items():
        rows += [(f"{devices} × H100: {name}", cell, "") for name, cell in _cells(plan).items()]
    table = Table(title=plain(f"{known.name}: estimate"))
    for name in ("quantity", "estimate", "recorded"):
        table.add_column(name, justify="left" if name == "quantity" else "right")
    for row in rows:
        table.add_row(*row)
    print_table(table)


def _known(name: str) -> "RegisteredRecipe":
    from birdie.gpt.run.recipe_registry import find

    folder = Path(name)
    if not folder.is_dir():
        return find(name)
    if not (folder / "recipe.toml").is_file():
        raise ConfigError(f"{folder} has no recipe.toml; give a run folder that birdie train wrote, or a recipe")
    return dataclasses.replace(find(str(folder / "recipe.toml")), name=folder.name)


def _ranks(recipe: "Recipe") -> int:
    """Return eight ranks, as in the challenge, or the most that divide the batch evenly."""
    return next(ranks for ranks in (8, 4, 2, 1) if recipe.train.accumulation % ranks == 0)


def _schedule(recipe: "Recipe", devices: int) -> "Schedule | str":
    """Return the schedule on so many H100s, or the reason why they cannot run the recipe."""
    from birdie.gpt.run.run_estimate import schedule

    try:
        return schedule(recipe, devices)
    except ConfigError as error:
        return str(error)


def _plan_json(devices: int, plan: "Schedule | str") -> dict[str, Any]:
    about = {"name": f"{devices} × H100", "devices": devices}
    if isinstance(plan, str):
        return {**about, "error": plan}
    return {
        **about,
        "step_ms": 1e3 * plan.step_s,
        "steps": plan.steps,
        "tokens": plan.tokens,
        "train_seconds": plan.seconds,
        "flops": plan.flops,
        "memory": {**dataclasses.asdict(plan.memory), "total": plan.memory.total},
    }


def _cells(plan: "Schedule | str") -> dict[str, str]:
    if isinstance(plan, str):
        return {"steps": plan}
    return {
        "ms per step": f"{1e3 * plan.step_s:,.1f}",
        "steps": f"{plan.steps:,}",
        "million tokens": f"{plan.tokens / 1e6:,.1f}",
        "training, s": f"{plan.seconds:,.0f}",
        "PFLOPs in total": f"{plan.flops / 1e15:,.3g}",
        "GB per device": f"{plan.memory.total / 1e9:,.2f}",
    }
