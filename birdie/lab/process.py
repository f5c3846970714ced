"""Training runs and measurements in processes and process groups of their own: a crash costs one run.

Each child is a session leader, so Ctrl-C in the terminal reaches only the parent, which passes it on and waits until
the child has saved a checkpoint. The same call then continues from the checkpoint.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from birdie.errors import ConfigError, DataError
from birdie.lab.ledger import RECIPE, RunRecord, flat, read_run
from birdie.run.recipe import Recipe, load_recipe
from birdie.run.registry import changes
from birdie.runtime.files import require_writable, write_bytes

SAVING_S = 120.0
"""Seconds that an interrupted child has to save its checkpoint before it is killed."""
OUTPUT = "stderr.txt"


def train(recipe: Recipe, folder: Path) -> RunRecord:
    """Train, export and score `recipe` in `folder` by `birdie train`; continue or return the run if it is there.

    Args:
        recipe: as `resolved` returns it.

    Raises:
        DataError: the run failed; the message has its reason.
        OutputError: the folder cannot be written.
    """
    if (folder / RECIPE).is_file():
        record = read_run(folder)
        if record.state == "complete" and record.score is not None:
            return record
    require_writable(folder)
    write_bytes(folder / RECIPE, recipe.to_toml().encode())
    command = ["-m", "birdie", "train", str(folder / RECIPE), "--folder", str(folder), "--resume", "--json"]
    code, output = call(command, folder / OUTPUT)
    if code:
        raise DataError(f"the run in {folder} failed: {_reason(code, output, folder / OUTPUT)}")
    record = read_run(folder)
    if record.score is None:
        raise DataError(f"the run in {folder} ended without a score; see {folder / OUTPUT}")
    return record


def resolved(recipe: Recipe) -> Recipe:
    """Return the recipe as `birdie train` will read it from its file, where the environment applies as well.

    Raises:
        ConfigError: a variable of the environment changes a setting.
    """
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


def call(arguments: Sequence[str], errors: Path) -> tuple[int, str]:
    """Run Python with `arguments` in a process group of its own; return its exit code and its stdout.

    Args:
        errors: file that its stderr is appended to.

    Raises:
        OSError: the file cannot be written.
    """
    with errors.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=file, start_new_session=True
        )
        try:
            output, _ = process.communicate()
        except BaseException:
            _end(process)
            raise
    return process.returncode, output.decode(errors="replace")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Interrupt the child's process group; kill it if it has not ended in time."""
    for number, seconds in ((signal.SIGINT, SAVING_S), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
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
