"""`birdie runs`: list, filter and compare finished and unfinished runs."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.box import SIMPLE_HEAD
from rich.table import Table

from birdie.cli.console import Json, plain, print_json, print_table, stdout
from birdie.errors import ConfigError
from birdie.lab.run_ledger import COLUMNS, RunRecord, find_runs_and_logs
from birdie.lab.selection import RunGroup, group, select, sort
from birdie.lab.significance import Test

GROUP = "Lab"

_LEFT = ("name", "started", "state")
_DECIMALS = {"bpb_float": 4, "bpb_artifact": 4, "train_seconds": 1}
_HEADS = {
    "code_bytes": "code\nbytes",
    "bpb_float": "bpb\nfloat",
    "bpb_artifact": "bpb\nartifact",
    "train_seconds": "train\ns",
}


def command(
    root: Annotated[Path, Parameter(help="Folder of runs, a run folder, a log, or a folder of logs.")] = Path("runs"),
    /,
    *,
    where: Annotated[
        tuple[str, ...],
        Parameter(
            negative=(),
            consume_multiple=True,
            help="Only runs with this setting or column: state=complete, 'bytes<140kB', 'started>2026-01-31'.",
        ),
    ] = (),
    sort_by: Annotated[
        str | None, Parameter(name="--sort", help="Setting or column; default: time of the start.")
    ] = None,
    compare: Annotated[
        tuple[str, ...],
        Parameter(
            negative=(),
            consume_multiple=True,
            help="Compare runs, by name or path, with the first; runs that differ only in the seed are one group.",
        ),
    ] = (),
    json: Json = False,
    curves: Annotated[bool, Parameter(negative=(), help="Add losses and validations to --json.")] = False,
) -> None:
    """List runs with their bytes and scores; compare their recipes and scores.

    Logs of the challenge's scripts are runs as well. "bpb artifact" is the score of the decoded artifact by the
    recipe's own evaluation. A damaged run is listed with what is wrong with it. docs/lab.md explains columns and test.
    """
    if curves and (compare or not json):
        raise ConfigError("--curves adds to the runs of --json; birdie report draws curves")
    if compare:
        groups = group(compare, root)
        if len(groups) < 2:
            raise ConfigError("--compare needs two runs or groups of runs that differ in more than their seeds")
        if json:
            print_json({"groups": [_group_json(one, groups[0]) for one in groups], "differences": _differences(groups)})
        else:
            print_table(_comparison(groups))
    else:
        records = select(find_runs_and_logs(root), where)
        records = records if sort_by is None else sort(records, sort_by)
        if json:
            print_json({"runs": [_run_json(record, curves=curves) for record in records]})
        else:
            print_table(runs_table(records, str(root)))
            for record in records:
                for problem in record.problems:
                    stdout.print(plain(f"{record.name}: {problem}"), soft_wrap=True)


def runs_table(records: Sequence[RunRecord], title: str) -> Table:
    """Return the table of runs, one a line."""
    rows = [record.columns for record in records]
    shown = [name for name in COLUMNS if any(row[name] is not None for row in rows)] or ["name"]
    heading = plain(f"{title}: {len(rows)} run{'s' * (len(rows) != 1)}")
    table = Table(title=heading, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)  # fits into 80 columns
    for name in shown:
        left = name in ("name", "started")
        justify: Literal["left", "right"] = "left" if name in _LEFT else "right"
        table.add_column(_HEADS.get(name, name), justify=justify, overflow="fold", no_wrap=not left)
    for row in rows:
        table.add_row(*(plain(cell(name, row[name])) for name in shown))
    return table


def cell(column: str, value: Any) -> str:
    """Return the text of a value of a column; empty for None."""
    if value is None:
        return ""
    if column == "started":
        return str(value)[:16].replace("T", " ")
    if column in _DECIMALS:
        return f"{value:,.{_DECIMALS[column]}f}"
    return str(value) if column in (*_LEFT, "seed") else f"{value:,.0f}"


def _run_json(record: RunRecord, *, curves: bool) -> dict[str, Any]:
    curve = {"metrics": record.metrics, "history": record.history} if curves else {}
    values = {"folder": str(record.folder), **record.columns, "settings": record.settings}
    return {**values, "damage": list(record.problems), **curve}


def _group_json(one: RunGroup, reference: RunGroup) -> dict[str, Any]:
    test = None if one is reference else one.against(reference)
    return {
        "name": one.name,
        "runs": [str(record.folder) for record in one.records],
        "scores": one.scores,
        **{name: one.mean(name) for name in COLUMNS[4:]},
        "against_first": None if test is None else test_json(test),
    }


def test_json(test: Test) -> dict[str, Any]:
    """Return the JSON object of a t-test; p is null if it is unknown."""
    return {"difference": test.difference, "error": test.error, "p": test.p, "paired": test.paired, "n": test.seeds}


def _differences(groups: Sequence[RunGroup]) -> dict[str, list[Any]]:
    """Return the settings in which any group differs from the first, with the value of every group."""
    from birdie.gpt.run.recipe_registry import changes  # imported late: it needs torch, which a list of runs does not

    first = groups[0].settings
    names = [name for other in groups[1:] for name, _, _ in changes(first, other.settings)]
    return {name: [one.settings.get(name) for one in groups] for name in dict.fromkeys(names)}


def _comparison(groups: Sequence[RunGroup]) -> Table:
    table = Table(title=plain(f"compared with {groups[0].name}"))
    table.add_column("")
    for one in groups:
        table.add_column(plain(one.name), justify="right", overflow="fold")
    for name, values in _differences(groups).items():
        table.add_row(plain(name), *(plain("" if value is None else str(value)) for value in values))
    table.add_section()
    table.add_row("seeds", *(plain(", ".join(str(record.seed) for record in one.records)) for one in groups))
    for name in COLUMNS[4:]:
        means = [one.mean(name) for one in groups]
        if any(value is not None for value in means):
            table.add_row(_HEADS.get(name, name).replace("\n", " "), *(cell(name, value) for value in means))
    tests = [one.against(groups[0]) for one in groups[1:]]
    table.add_row("difference, bpb", "", *("" if test is None else _difference(test) for test in tests))
    table.add_row("p, lower than the first", "", *("" if test is None else p_value(test) for test in tests))
    kinds = ["" if test is None or math.isnan(test.p) else "paired" if test.paired else "Welch" for test in tests]
    table.add_row("t-test", "", *kinds)
    return table


def _difference(test: Test) -> str:
    return f"{test.difference:+.4f}" + ("" if math.isnan(test.error) else f" ± {test.error:.4f}")


def p_value(test: Test) -> str:
    """Return p as text; one seed has none."""
    return "one seed: unknown" if math.isnan(test.p) else f"{test.p:.2g}"
