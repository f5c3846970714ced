"""Files that every run leaves in its folder, so that a paid run is never lost and runs can be compared.

environment.json     versions, commit, machine, device, ranks, seed, command, times of the starts
metrics.jsonl        one JSON object a line for each logged step: {"step", "train_ms", "loss", "lr_multiplier"}
float.safetensors    the weights before the export (birdie.gpt.run.float_weights)
"""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from birdie.errors import DataError
from birdie.gpt.run.work import Work
from birdie.gpt.train.loop import Step
from birdie.system.callbacks import Notify
from birdie.system.files import open_append, write_bytes
from birdie.system.locks import HOLDER, LOCK
from birdie.system.outputs import require_own_folder
from birdie.system.parsing import to_json
from birdie.system.structured import keep_damaged, read_json, rewrite_steps

ENVIRONMENT, METRICS, RECIPE = "environment.json", "metrics.jsonl", "recipe.toml"
CHAIN = "checkpoints.birdie"
FOLDERS = ("checkpoints", CHAIN, "profile", "tensorboard")
# What a run makes first, or the sweep that starts it, or somebody who restores a checkpoint to go on from it.
_BEFORE = {LOCK, HOLDER, ".worker", "checkpoints", CHAIN}
LOGGED = ("train_ms", "loss")
"""Names that every line of the metrics has."""


def require_run_folder(folder: Path) -> None:
    """Check that a run may write into `folder`: a new or empty one, or one of a run."""
    require_own_folder(folder, ENVIRONMENT, beside=_BEFORE, folders=FOLDERS)


def begin_folder(folder: Path) -> None:
    """Write the file by which a folder is known to be one of a run, before anything else, unless it is there."""
    if not os.path.lexists(folder / ENVIRONMENT):
        write_bytes(folder / ENVIRONMENT, b'{"starts": []}\n')


def write_environment(
    folder: Path, work: Work, *, resumed_at: int | None, changes: Sequence[tuple[str, Any, Any]] = ()
) -> None:
    """Write where and how a run was started; a resumed run keeps the times and the changes of its earlier starts.

    Args:
        resumed_at: step from which the run goes on; None: it starts.
        changes: (setting, value up to that step, value from now on) of each setting of training that differs.
    """
    path = folder / ENVIRONMENT
    starts, changed = ([], []) if resumed_at is None else _earlier(path, work.context.notify)
    changed += [{"after_step": resumed_at, "setting": name, "from": old, "to": new} for name, old, new in changes]
    values = work.start()
    values["starts"] = [*starts, *values["starts"]]
    if changed:
        values["changed"] = changed
    write_bytes(path, to_json(values, indent=1).encode() + b"\n")


def _earlier(path: Path, notify: Notify) -> tuple[list[str], list[Any]]:
    """Return the times of the earlier starts of a run, and the changes of its settings; none if they are damaged."""
    try:
        values = read_json(path)
        starts, changed = values.get("starts"), values.get("changed", [])
        if not isinstance(starts, list) or not all(isinstance(start, str) for start in starts):
            raise DataError(f"{path} is damaged (it has no list of starts)")
        if not isinstance(changed, list):
            raise DataError(f"{path} is damaged (its changes are no list)")
    except FileNotFoundError:
        return [], []
    except DataError as error:
        keep_damaged(path, str(error), notify)
        return [], []
    return starts, changed


class Metrics:
    """The file of metrics of a run.

    Args:
        step: lines of later steps are dropped; a run that does not resume gives -1.
        notify: called with a warning if the file is damaged.
    """

    def __init__(self, folder: Path, step: int, notify: Notify) -> None:
        self._path = folder / METRICS
        if step < 0:
            write_bytes(self._path, b"")
        else:
            rewrite_steps(self._path, LOGGED, step, notify)

    def record(self, step: Step) -> None:
        """Append the line of `step`; if that fails, the file ends with the line before."""
        values = {name: getattr(step, name) for name in ("train_ms", "loss", "lr_multiplier")}
        line = (to_json({"step": step.number, **values}) + "\n").encode()
        with open_append(self._path) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            except OSError:
                file.truncate(end)
                raise
