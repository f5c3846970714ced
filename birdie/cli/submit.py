"""`birdie submit`: run a recipe with several seeds and write the submission folder, or write it from finished runs."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.table import Table

from birdie.cli.console import (
    Json,
    Overwrite,
    into_folder,
    log,
    new_app,
    plain,
    print_json,
    print_left,
    print_line,
    print_table,
    size,
)
from birdie.cli.train import configuration_of, recipe_and_preset
from birdie.compress import parse_size
from birdie.errors import ConfigError, DataError
from birdie.golf.audit.rules import CAP_BYTES
from birdie.gpt.run.recipe_loading import FLAT, configuration
from birdie.gpt.run.recipe_settings import Recipe
from birdie.lab.run_ledger import RECIPE, RunRecord, find_runs

if TYPE_CHECKING:
    from birdie.golf.submission import Submission

GROUP = "Train"


def build_app(tokens: Sequence[str]) -> App:
    """Return the application of `birdie submit`, configured by the recipe among `tokens`, or that of the first run."""
    runs = _runs(tokens)
    recipe, preset = recipe_and_preset(tokens)
    if runs:
        recipe = None
        app = new_app("birdie submit", config=configuration(runs[0].folder / RECIPE))
    else:
        app = new_app("birdie submit", config=configuration_of(recipe, preset))

    @wraps(command)
    def checked(recipe_file: str | None = None, /, **flags: Any) -> None:
        if recipe_file != recipe:  # its settings were not read
            raise ConfigError(
                "give a recipe or --from RUN, not both"
                if runs
                else f"name the recipe first: birdie submit {recipe_file} …"
            )
        command(recipe_file, **flags)

    app.default(checked)
    return app


def _runs(tokens: Sequence[str]) -> list[RunRecord]:
    """Return the runs behind --from: folders of a run, or of several; none if one cannot be read, as `command` says."""
    names: list[str] = []
    for index, token in enumerate(tokens):
        flag, equals, value = token.partition("=")
        if flag == "--from":
            following = [value] if equals else []
            for other in tokens[index + 1 :]:
                if other.startswith("-"):
                    break
                following.append(other)
            names += following
            if not following:
                raise ConfigError("--from names no run; give run folders, or a folder that holds them")
    with suppress(DataError):
        return [run for name in names for run in find_runs(Path(name))]
    return []


def command(
    recipe_file: Annotated[
        str | None, Parameter(help="A name that `birdie recipe list` shows, or a .toml file; none with --from.")
    ] = None,
    /,
    *,
    output: Annotated[Path, Parameter(name=["-o", "--output"], help="The submission folder to write.")],
    seeds: Annotated[str | None, Parameter(help="Seeds of the runs: 42,314,999.")] = None,
    runs: Annotated[
        tuple[Path, ...],
        Parameter(
            name="--from",
            consume_multiple=True,
            negative=(),
            help="Finished runs to export and score again, without training; settings of the export may differ.",
        ),
    ] = (),
    preset: Annotated[str | None, Parameter(help="Shrink the recipe as `birdie train --preset` does.")] = None,
    nproc: Annotated[int, Parameter(help="Processes of a run, started by torchrun: one for each GPU.")] = 1,
    baseline: Annotated[
        tuple[str, ...],
        Parameter(
            consume_multiple=True,
            negative=(),
            help="Scores to beat: nats per token, bits per byte (1.0611bpb), or run folders.",
        ),
    ] = (),
    cap: Annotated[str, Parameter(help="Maximum bytes of code and model.")] = str(CAP_BYTES),
    name: Annotated[str, Parameter(help="Title; default: the name of the folder.")] = "",
    author: Annotated[str, Parameter(help="Name of the author.")] = "",
    github_id: Annotated[str, Parameter(help="GitHub account of the author.")] = "",
    blurb: Annotated[str, Parameter(help="One sentence about the submission.")] = "",
    overwrite: Overwrite = False,
    recipe: Annotated[Recipe | None, FLAT] = None,
    json: Json = False,
) -> None:
    """Run a recipe with several seeds by one packed script, and write the challenge's submission folder.

    The runs are in OUTPUT.work. After Ctrl-C or a crash the same command goes on: finished seeds are taken from there,
    and an interrupted one begins again. With --from, finished runs are exported, packed and scored
    again from their float weights: `birdie submit --from OUTPUT.work/runs -o other --export.budget 15.8MB`.
    """
    from birdie.golf.submission import SubmissionAbout, submit
    from birdie.gpt.run.recipe_registry import find

    if nproc < 1:
        raise ConfigError(f"nproc is {nproc}; give at least 1 process")
    if recipe_file is None and not runs:
        raise ConfigError("there is nothing to submit; name a recipe, or finished runs with --from")
    if runs and (seeds is not None or preset is not None):
        raise ConfigError("the runs of --from have their seeds and their recipe; leave --seeds and --preset out")
    if recipe_file is not None and (needs := find(recipe_file).about.needs):
        log(f"not supported, training without: {', '.join(needs)}")
    records = [run for path in runs for run in find_runs(path)]
    with into_folder(output) as left:
        done = submit(
            recipe or Recipe(),
            output,
            seeds=_seeds(seeds),
            runs=records,
            baseline=baseline,
            cap=parse_size(cap),
            ranks=nproc,
            about=SubmissionAbout(name, author, github_id, blurb),
            overwrite=overwrite,
            notify=log,
        )
    if not done.minified:
        log("without python-minifier the script is larger than necessary; pip install 'birdie-compress[submit]'")
    if json:
        print_json(_json(done) | {"left": left})
        return
    print_table(_table(done))
    print_left(output, left)
    total = done.chosen.total_bytes
    print_line(f"code and model: {size(total)} of {size(parse_size(cap))}; all files: {size(done.folder_bytes)}")
    print_line(f"submission: {output}; the artifact is that of seed {done.chosen.seed}, the median")
    print_line(f"check it: birdie audit {output}")


def _seeds(text: str | None) -> list[int]:
    try:
        seeds = [int(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"seeds are {text!r}; give whole numbers with commas: 42,314,999") from None
    if any(not 0 <= seed < 2**63 for seed in seeds):
        raise ConfigError(f"seeds are {text!r}; a seed is from 0 to {2**63 - 1}")
    return seeds


def _json(done: "Submission") -> dict[str, Any]:
    """Return the object of `birdie submit --json`; programs depend on its keys."""
    test = done.comparison
    return {
        "folder": str(done.folder),
        "val_loss": done.val_loss,
        "val_bpb": done.val_bpb,
        "seeds": [asdict(seed) for seed in done.seeds],
        "artifact_seed": done.chosen.seed,
        "bytes_code": done.chosen.code_bytes,
        "bytes_total": done.chosen.total_bytes,
        "bytes_folder": done.folder_bytes,
        "minified": done.minified,
        "comparison": None if test is None else asdict(test),
    }


def _table(done: "Submission") -> Table:
    table = Table(title=plain(str(done.folder)))
    for column in ("seed", "steps", "ms/step", "float bpb", "bpb", "nats", "model", "total"):
        table.add_column(column, justify="right")
    for seed in done.seeds:
        table.add_row(
            str(seed.seed),
            f"{seed.steps:,}",
            f"{seed.step_ms:.2f}",
            f"{seed.float_bpb:.6f}",
            f"{seed.val_bpb:.6f}",
            f"{seed.val_loss:.6f}",
            f"{seed.model_bytes:,}",
            f"{seed.total_bytes:,}",
        )
    table.add_row("mean", "", "", "", f"{done.val_bpb:.6f}", f"{done.val_loss:.6f}", "", "")
    return table
