"""Training runs and measurements in processes and process groups of their own: a crash costs one run.

Each child is a session leader, so Ctrl-C in the terminal reaches only the parent, which passes it on and waits until
the child has saved a checkpoint. The same call then continues from the checkpoint. If the parent is killed, its child
stops by itself (`birdie.lab.child`).
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from birdie.errors import ConfigError, DataError
from birdie.lab.ledger import RECIPE, RunRecord, flat, read_run
from birdie.run.loading import load_recipe
from birdie.run.recipe import Recipe
from birdie.run.registry import changes
from birdie.run.run_folder import begin_folder
from birdie.runtime.files import open_append, write_bytes
from birdie.runtime.locks import LOCK, is_held
from birdie.runtime.outputs import require_writable
from birdie.runtime.platform import OWN_GROUP, interrupt, kill

SAVING_S = 120.0
"""Seconds that an interrupted child has to save its checkpoint before it is killed."""
OUTPUT = "stderr.txt"
_POLL_S = 0.5
Watch = Callable[[], None]


def unwatched() -> None:
    """Do nothing: the default of `watch`."""


def train(
    recipe: Recipe, folder: Path, *, watch: Watch = unwatched, environment: Mapping[str, str] | None = None
) -> RunRecord:
    """Train, export and score `recipe` in `folder` by `birdie train`; continue or return the run if it is there.

    Args:
        recipe: as `resolved` returns it.
        watch: called about twice a second; an exception of it stops the run, which saves a checkpoint, and is raised.
        environment: variables added to those of this process.
    """
    if (folder / RECIPE).is_file():
        record = read_run(folder)
        if record.state == "complete" and record.score is not None:
            return record
    begin_folder(require_writable(folder))
    write_bytes(folder / RECIPE, recipe.to_toml().encode())
    _wait_for_holder(folder, watch)
    command = ["train", str(folder / RECIPE), "--folder", str(folder), "--resume", "--json"]
    code, output = call(["-m", "birdie.lab.child", *command], folder / OUTPUT, watch=watch, environment=environment)
    if code:
        raise DataError(f"the run in {folder} failed: {_reason(code, output, folder / OUTPUT)}")
    record = read_run(folder)
    if record.score is None:
        raise DataError(f"the run in {folder} ended without a score; see {folder / OUTPUT}")
    return record


def resolved(recipe: Recipe) -> Recipe:
    """Return the recipe as `birdie train` will read it from its file, where the environment applies as well."""
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
) -> tuple[int, str]:
    """Run Python with `arguments` in a process group of its own; return its exit code and its stdout.

    Args:
        errors: file that its stderr is appended to.
        watch, environment: as for `train`.
    """
    with open_append(errors) as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,  # never written to: its end tells the child that this process has ended
            stdout=subprocess.PIPE,
            stderr=file,
            **OWN_GROUP,
            env={**os.environ, **(environment or {})},
        )
        try:
            output = _output(process, watch)
        except BaseException:
            _end(process)
            raise
    return process.returncode, output.decode(errors="replace")


def _output(process: "subprocess.Popen[bytes]", watch: Watch) -> bytes:
    """Return the child's stdout, once it has ended."""
    assert process.stdin is not None
    stdin, process.stdin = process.stdin, None  # communicate() would close it
    with stdin:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.communicate(timeout=_POLL_S)[0]
            watch()


def _wait_for_holder(folder: Path, watch: Watch) -> None:
    """Wait until the child of a parent that was killed has saved its checkpoint and left the run folder."""
    end = time.monotonic() + SAVING_S
    while time.monotonic() < end and is_held(folder / LOCK):
        watch()
        time.sleep(_POLL_S)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Interrupt the child's process group; kill it if it has not ended in time."""
    for end, seconds in ((interrupt, SAVING_S), (kill, None)):
        end(process)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=seconds)
            return


def _reason(code: int, output: str, errors: Path) -> str:
    """Return the error of a child that failed: what it printed as JSON, or its signal, or its last line on stderr."""
    with suppress(ValueError, KeyError, TypeError, IndexError):
        return str(json.loads(output.splitlines()[-1])["error"]["message"])
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}; see {errors}"
    lines = errors.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code}")
