"""`birdie try`: try one change against the incumbent at equal time or steps and bytes; keep it if it is better."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from rich.box import SIMPLE_HEAD
from rich.table import Table

from birdie.cli.console import Json, log, plain, print_json, print_line, print_table
from birdie.compress import parse_size
from birdie.errors import ConfigError
from birdie.lab.significance import LEVEL

if TYPE_CHECKING:
    from birdie.gpt.run.recipe_settings import Recipe
    from birdie.lab.trial import Result

GROUP = "Lab"


def command(
    hypothesis: Annotated[
        str | None, Parameter(help="Why the change should help; leave it out to see the results so far.")
    ] = None,
    /,
    *,
    assignments: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set",
            negative=(),
            consume_multiple=True,
            help="The change: settings as KEY=VALUE, such as optimizer.matrix_lr=0.03.",
        ),
    ] = (),
    seeds: Annotated[int, Parameter(help="Number of seeds; both are trained with the same ones.")] = 3,
    by: Annotated[
        Literal["time", "steps"] | None,
        Parameter(help="Both train for the same time or number of steps; default: time, if the recipe has a cap."),
    ] = None,
    level: Annotated[float, Parameter(help="Level of significance of the paired t-test.")] = LEVEL,
    recipe: Annotated[
        str | None, Parameter(help="The first incumbent: a name that `birdie recipe list` shows, or a .toml file.")
    ] = None,
    preset: Annotated[
        str | None, Parameter(help="Shrink --recipe as `birdie train --preset` does: cpu or smoke.")
    ] = None,
    budget: Annotated[
        str | None,
        Parameter(help="Bytes of every artifact; default: the recipe's export.budget, or its estimated size."),
    ] = None,
    lab: Annotated[Path, Parameter(help="Folder of incumbent, results, diary and runs.")] = Path("lab"),
    json: Json = False,
) -> None:
    """Try one change against the incumbent at equal time or steps and bytes; keep it if it is significantly better.

    Both are trained with the same seeds and exported into the same bytes; a paired t-test compares the scores of the
    decoded artifacts. Results go into LAB/results.jsonl and LAB/diary.md. The same command continues after Ctrl-C.
    """
    from birdie.gpt.run.recipe_registry import find
    from birdie.lab.trial import Lab

    work = Lab(lab, log)
    if hypothesis is None:
        if assignments or recipe:
            raise ConfigError('state a hypothesis: birdie try "higher learning rate" --set optimizer.matrix_lr=0.03')
        _show(work.incumbent(), work.results(), lab, json=json)
        return
    if (preset or budget) and recipe is None:
        raise ConfigError("--preset and --budget belong to the first incumbent; give --recipe with them")
    with work.locked():
        if recipe is not None:
            work.start(find(recipe).recipe(preset), None if budget is None else parse_size(budget))
        result = work.trial(hypothesis, assignments, seeds=seeds, by=by, level=level)
    if json:
        print_json(result.to_dict())
        return
    print_table(_sides_table(result))
    print_line(_verdict_line(result))
    print_line(f"table: {lab / 'results.jsonl'}, diary: {lab / 'diary.md'}")


def _show(incumbent: "Recipe", results: Sequence["Result"], lab: Path, *, json: bool) -> None:
    if json:
        facts: dict[str, Any] = {"digest": incumbent.digest, "recipe": incumbent.to_dict()}
        print_json({"incumbent": facts, "results": [result.to_dict() for result in results]})
        return
    print_table(_results_table(results, lab))
    print_line(f"incumbent: {lab / 'incumbent.toml'}, {parse_size(str(incumbent.export.budget)):,} bytes")


def _results_table(results: Sequence["Result"], lab: Path) -> Table:
    heading = plain(f"{lab}: {len(results)} trial{'s' * (len(results) != 1)}")
    table = Table(title=heading, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("hypothesis", "change"):
        table.add_column(name, overflow="fold")
    for name in ("seeds", "bpb", "difference", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for result in results:
        table.add_row(
            *(plain(result.hypothesis), plain(result.changed), str(len(result.seeds)), f"{result.candidate.mean:.4f}"),
            f"{result.difference:+.4f}" if result.seeds else "",
            *(_p(result.p), result.verdict),
        )
    return table


def _sides_table(result: "Result") -> Table:
    table = Table(title=plain(f"{result.hypothesis}: {result.changed}"))
    for name in ("", "incumbent", "candidate"):
        table.add_column(name, justify="right" if name else "left")
    sides = result.incumbent, result.candidate
    table.add_row("steps, most", *(f"{max(side.steps, default=0):,}" for side in sides))
    table.add_row("bytes, largest", *(f"{max(side.bytes, default=0):,}" for side in sides))
    for index, seed in enumerate(result.seeds):
        table.add_row(f"bpb, seed {seed}", *(f"{side.bpb[index]:.4f}" for side in sides))
    table.add_row("bpb, mean", *(f"{side.mean:.4f}" for side in sides))
    return table


def _verdict_line(result: "Result") -> str:
    test = f"difference {result.difference:+.4f} bpb" if result.seeds else "no pair of runs finished"
    if not math.isnan(result.p_better):
        test += f" ± {result.error:.4f}, p {_p(result.p)} (paired one-sided t-test)"
    return f"{result.verdict}: {result.reason}; {test}"


def _p(p: float) -> str:
    return "–" if math.isnan(p) else f"{p:.2g}"
