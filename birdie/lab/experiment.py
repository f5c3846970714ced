"""Experiments: a folder of runs, each trained in a process of its own, so that a crash costs one run.

    Experiment(folder).run(recipe, name) ─► birdie train ─► FOLDER/runs/NAME ─► RunRecord

A run that was interrupted continues from its checkpoint, and one that is finished is used again. If this process is
killed, its child stops by itself (`birdie.system.child`). `birdie try` and `birdie sweep` are experiments.
"""

import json
import math
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from birdie.errors import ConfigError, DataError
from birdie.gpt.run.environment import CHOICES
from birdie.gpt.run.recipe_loading import load_recipe, setting_variables
from birdie.gpt.run.recipe_registry import changes
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.run.run_folder import begin_folder
from birdie.lab.run_ledger import RECIPE, RunRecord, flat, read_run
from birdie.system.child import SAVING_S, Watch, run_child, unwatched
from birdie.system.files import open_append, write_bytes
from birdie.system.locks import LOCK, is_held
from birdie.system.outputs import require_writable

OUTPUT = "stderr.txt"
_POLL_S = 0.5


class Experiment:
    """A folder of runs.

    Args:
        folder: of the experiment; its runs lie in `runs/`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def run_folder(self, name: str) -> Path:
        """Return the folder of a run."""
        return self.folder / "runs" / name

    def run(
        self,
        recipe: Recipe,
        name: str,
        *,
        score: str = "bpb_artifact",
        watch: Watch = unwatched,
        environment: Mapping[str, str] | None = None,
    ) -> RunRecord:
        """Train, export and score a recipe by `birdie train`; continue or return the run if it is there.

        Args:
            recipe: as `resolved` returns it.
            score: column of the record that must be finite.
            watch: called about twice a second; an exception of it stops the run, which saves a checkpoint, and is
                raised.
            environment: variables added to those of this process.
        """
        folder = self.run_folder(name)
        record = _known(folder) or _train(recipe, folder, watch, environment)
        value = record.columns[score]
        if value is None or not math.isfinite(value):
            raise DataError(f"the run in {folder} has no finite {score}: {value}")
        return record


def resolved(recipe: Recipe) -> Recipe:
    """Return the recipe as `birdie train` will read it from its file, where the environment applies as well."""
    if not {*setting_variables(), *CHOICES} & os.environ.keys():
        return recipe
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / RECIPE
        write_bytes(path, recipe.to_toml().encode())
        read = load_recipe(path)
    different = [name for name, _, _ in changes(flat(recipe.to_dict()), flat(read.to_dict()))]
    if different:
        raise ConfigError(
            f"a variable of the environment sets {different[0]}, which would change every run; unset it, and change "
            "settings with --set"
        )
    return read


def call(
    arguments: Sequence[str],
    errors: Path,
    *,
    watch: Watch = unwatched,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, list[str]]:
    """Run Python with `arguments`; return its exit code and the last lines of its stdout.

    Args:
        errors: file that its stderr is appended to.
        watch, environment: as for `Experiment.run`.
    """
    with open_append(errors) as file:
        variables = {**os.environ, **(environment or {})}
        return run_child(arguments, environment=variables, errors=file, watch=watch)


def _known(folder: Path) -> RunRecord | None:
    """Return the run in a folder if it is finished and scored."""
    if not (folder / RECIPE).is_file():
        return None
    record = read_run(folder)
    return record if record.state == "complete" and record.score is not None else None


def _train(recipe: Recipe, folder: Path, watch: Watch, environment: Mapping[str, str] | None) -> RunRecord:
    begin_folder(require_writable(folder))
    write_bytes(folder / RECIPE, recipe.to_toml().encode())
    _wait_for_holder(folder, watch)
    command = ["train", str(folder / RECIPE), "--folder", str(folder), "--resume", "--json"]
    arguments, errors = ["-m", "birdie.system.child", *command], folder / OUTPUT
    code, lines = call(arguments, errors, watch=watch, environment=environment)
    if code:
        raise DataError(f"the run in {folder} failed: {_reason(code, lines, errors)}")
    record = read_run(folder)
    if record.score is None:
        raise DataError(f"the run in {folder} ended without a score; see {errors}")
    return record


def _wait_for_holder(folder: Path, watch: Watch) -> None:
    """Wait until the child of a parent that was killed has saved its checkpoint and left the run folder."""
    end = time.monotonic() + SAVING_S
    while time.monotonic() < end and is_held(folder / LOCK):
        watch()
        time.sleep(_POLL_S)


def _reason(code: int, lines: Sequence[str], errors: Path) -> str:
    """Return the error of a child that failed: what it printed as JSON, or its signal, or its last line on stderr."""
    with suppress(ValueError, KeyError, TypeError, IndexError):
        return str(json.loads(lines[-1])["error"]["message"])
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}; see {errors}"
    text = errors.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(text) if line.strip()), f"exit code {code}")
