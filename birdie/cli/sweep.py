"""`birdie sweep`: search settings of a recipe by many trials, with Optuna; resumable, in parallel, with pruning."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.box import SIMPLE_HEAD
from rich.table import Table

from birdie.cli.console import Json, log, plain, print_json, print_line, print_table, progress_bar
from birdie.errors import ConfigError

if TYPE_CHECKING:
    from birdie.lab.sweeping import SweepRun, TrialResult

GROUP = "Lab"


def command(
    file: Annotated[Path, Parameter(help="Sweep file, such as examples/learning_rate.toml; docs/lab.md describes it.")],
    /,
    *,
    folder: Annotated[
        Path | None, Parameter(help="Folder of study, runs and best recipe; default: sweeps/NAME_OF_THE_FILE.")
    ] = None,
    trials: Annotated[int | None, Parameter(help="Number of trials, instead of the file's.")] = None,
    parallel: Annotated[int, Parameter(help="Trials at a time on this machine.")] = 1,
    storage: Annotated[
        str | None, Parameter(help="URL of a database that several machines share; default: a journal in the folder.")
    ] = None,
    show: Annotated[bool, Parameter(negative=(), help="Show the trials so far; run none.")] = False,
    json: Json = False,
) -> None:
    """Search settings of a recipe: each trial trains, exports and scores it with other values.

    The same command continues a sweep that was stopped or killed. A trial that crashes is marked as failed and costs
    only itself.
    """
    try:
        from birdie.lab.sweeping import SweepRun, read_sweep
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "optuna":
            raise
        raise ConfigError("optuna is not installed; pip install 'birdie-compress[lab]'") from error
    sweep = read_sweep(file, trials)
    run = SweepRun(sweep, folder or Path("sweeps") / file.stem, storage, log)
    if not show:
        _run(run, parallel)
    results = run.results()
    if json:
        best = run.best
        print_json({"best": None if best is None else best.number, "trials": [asdict(trial) for trial in results]})
        return
    print_table(_table(run, results))
    if (run.folder / "best.toml").is_file():
        print_line(f"best recipe: {run.folder / 'best.toml'}, runs: birdie runs {run.folder / 'runs'}")


def _run(run: "SweepRun", parallel: int) -> None:
    total = run.sweep.trials
    log(f"{total} trials in {run.folder}, by {run.sweep.sampler}, pruner {run.sweep.pruner}, {parallel} at a time")
    if parallel > 1 and run.recipe.train.cap_ms is not None:
        log(
            f"warning: the recipe stops after {run.recipe.train.max_wallclock_seconds:g} s, in which parallel trials "
            'train fewer steps; set "train.max_wallclock_seconds" = 0 and "train.iterations" in [set]'
        )
    with progress_bar("sweep", "trials") as update:

        def show(trial: "TrialResult") -> None:
            done = sum(one.state in ("complete", "pruned", "failed") for one in run.results())
            update(done, total)
            log(f"trial {trial.number}: {_outcome(trial)} ({done} of {total}), {_values(trial)}")

        try:
            run.work(parallel, show)
        except KeyboardInterrupt:
            log("the same command continues the sweep")
            raise


def _table(run: "SweepRun", results: Sequence["TrialResult"]) -> Table:
    best = run.best
    table = Table(title=plain(f"{run.folder}: {len(results)} trials"), box=SIMPLE_HEAD, pad_edge=False)
    names = list(run.sweep.search)
    for name in ("trial", "state", f"{run.sweep.score}", "step"):
        table.add_column(name, justify="left" if name == "state" else "right")
    for name in names:
        table.add_column(plain(name.rpartition(".")[2]), justify="right", overflow="fold")
    for trial in sorted(results, key=lambda one: (one.state != "complete", one.score or 1e9, one.number)):
        values = [trial.values.get(name) for name in names]
        table.add_row(
            *(str(trial.number), trial.state, "" if trial.score is None else f"{trial.score:.4f}"),
            "" if trial.step is None else f"{trial.step:,}",
            *(
                plain("" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value))
                for value in values
            ),
            style="bold" if best is not None and trial.number == best.number else None,
        )
    return table


def _outcome(trial: "TrialResult") -> str:
    if trial.state == "failed":
        return f"failed: {trial.reason}"
    return f"{trial.score:.4f} bpb" + (f", pruned at step {trial.step:,}" if trial.state == "pruned" else "")


def _values(trial: "TrialResult") -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in trial.values.items()
    )
