"""Checkpoints: everything that a run needs to resume bit for bit.

    FOLDER/
    ├── step-00000080/              an older one, to which a run returns if the newest is damaged
    └── step-00000120/
        ├── model.safetensors       weights by name
        ├── optimizer.safetensors   state by "parameter/tensor", Muon's momentum gathered from all ranks
        ├── rng.safetensors         states of the random generators
        ├── average.safetensors     average of the weights, if the run has one
        ├── state.json              step, clock, position of the loader, settings, the caller's notes, versions
        └── SHA256SUMS              digest of every file above, as `sha256sum -c` reads it

A checkpoint appears under its name when it is complete, and only then are older ones removed: a process that is killed
at any moment leaves one that loads. No byte is used before the digests were compared, and no value before it was
checked: its form here, and by `birdie.gpt.train.resuming` whether it is what the run needs.
"""

import hashlib
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from birdie.errors import BirdieError, ConfigError, OutputError, WeightsError
from birdie.gpt.train.loop import State
from birdie.system.callbacks import Notify, no_message
from birdie.system.distributed import World
from birdie.system.files import atomic_folder, remove_folder
from birdie.system.parsing import parse_object, to_json
from birdie.system.regular import open_regular
from birdie.system.structured import is_number, read_bytes, unused_path
from birdie.system.tensor_files import write_tensors

FORMAT = 3
"""Number of the form that a checkpoint has; others are refused."""
SUMS = "SHA256SUMS"
FILES = ("model.safetensors", "optimizer.safetensors", "rng.safetensors", "average.safetensors", "state.json")
_NAME = re.compile(r"step-([0-9]{8,20})(?:-([0-9]{1,9}))?")
_LONGEST = 1000  # characters of a setting


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCheckpoint(State):
    """State of a run with what it was trained with; a loaded one is on the CPU.

    Attributes:
        settings: of the run, with every "auto" resolved.
        about: notes of the run's caller, as JSON can hold them.
        versions: of the software that wrote it.
        path: folder that it was read from, if any.
    """

    settings: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=lambda: {"torch": torch.__version__})
    path: Path | None = None


def require_same_checkpoint(checkpoint: TrainingCheckpoint | None, folder: Path, world: World) -> None:
    """Check that all ranks resume from the same checkpoint. Every rank must call it."""
    local = "none" if checkpoint is None else f"one of step {checkpoint.step} at {checkpoint.clock_ms:.3f} ms"
    for rank, other in enumerate(world.all_gather_strings(local)):
        if other != local:
            raise ConfigError(
                f"rank {world.rank} finds {local} as the checkpoint in {folder}, rank {rank} {other}; put the run "
                "folder where all nodes see it, or copy the checkpoint to each"
            )


def checkpoint_paths(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints in `folder`, newest first, unread; an empty list if there are none."""
    return [path for path in candidate_paths(folder) if os.path.isdir(path)]  # noqa: PTH112 (False where it cannot look)


def candidate_paths(folder: str | os.PathLike[str]) -> list[Path]:
    """Return whatever has the name of a checkpoint, newest first; a file or a link to nowhere is a damaged one."""
    names = ((_NAME.fullmatch(path.name), path) for path in Path(folder).glob("step-*"))
    numbered = [(int(name[1]), int(name[2] or 0), path) for name, path in names if name]
    return [path for _, _, path in sorted(numbered, reverse=True)]


def step_of(path: Path) -> int:
    """Return the step of a checkpoint that `checkpoint_paths` returned."""
    name = _NAME.fullmatch(path.name)
    assert name is not None
    return int(name[1])


def save_checkpoint(folder: str | os.PathLike[str], checkpoint: TrainingCheckpoint, *, keep: int = 2) -> Path:
    """Write `checkpoint` into `folder` as the newest one, remove all but `keep`, and return its path.

    Others of this step or a later one are removed as well: the run went back behind them.
    """
    folder = Path(folder)
    target = unused_path(folder / f"step-{checkpoint.step:08d}")  # a complete checkpoint is never overwritten
    state = {
        "format": FORMAT,
        "step": checkpoint.step,
        "clock_ms": checkpoint.clock_ms,
        "loader": checkpoint.loader,
        "settings": checkpoint.settings,
        "about": checkpoint.about,
        "versions": checkpoint.versions,
        "averaged": bool(checkpoint.average),
        "bandit": checkpoint.bandit,
    }
    with atomic_folder(target) as temporary:
        files = {"model": checkpoint.weights, "optimizer": checkpoint.optimizer, "rng": checkpoint.rng}
        if checkpoint.average:
            files["average"] = checkpoint.average
        for name, tensors in files.items():
            write_tensors(temporary / f"{name}.safetensors", tensors, target=target)
        (temporary / "state.json").write_text(to_json(state, indent=1, sort_keys=True), encoding="utf-8")
        (temporary / SUMS).write_text("".join(_digests(temporary)), encoding="utf-8")
    earlier = [path for path in checkpoint_paths(folder) if _step_of(path) < checkpoint.step]
    for old in checkpoint_paths(folder):
        if old not in (target, *earlier[: keep - 1]):
            with suppress(OutputError):  # the next save tries again
                _remove(old)
    return target


def remove_newer(checkpoint: TrainingCheckpoint) -> None:
    """Remove the checkpoints in the folder of `checkpoint` that are newer: they are damaged, as this one is loaded."""
    if checkpoint.path is not None:
        for path in checkpoint_paths(checkpoint.path.parent):
            if path == checkpoint.path:
                return
            _remove(path)


def remove_checkpoints(folder: Path) -> None:
    """Remove all checkpoints in `folder`, and the folder unless something else is in it."""
    for path in checkpoint_paths(folder):
        _remove(path)
    with suppress(OSError):
        folder.rmdir()


def _remove(path: Path) -> None:
    """Remove a checkpoint."""
    if others := sorted({file.name for file in path.iterdir()} - {*FILES, SUMS}):
        raise OutputError(f"{path} has {others[0]!r}, which is no file of a checkpoint; move it elsewhere")
    remove_folder(path)


def load_checkpoint(
    folder: str | os.PathLike[str],
    *,
    notify: Notify = no_message,
    require: Callable[[TrainingCheckpoint], None] = lambda _checkpoint: None,
) -> TrainingCheckpoint:
    """Return the newest usable checkpoint in `folder`; each damaged one before it is a warning to `notify`.

    Args:
        notify: called with the warnings.
        require: raises a WeightsError or ConfigError if the run cannot resume from a checkpoint; an older one is tried.
    """
    paths = candidate_paths(folder)
    if not paths:
        raise WeightsError(f"there is no checkpoint in {folder}; give the folder of a run that saved one")
    damaged: list[BirdieError] = []
    for path in paths:
        try:
            checkpoint = _read(path)
            require(checkpoint)
        except (WeightsError, ConfigError) as error:
            damaged.append(error)
        else:
            for damage in damaged:
                notify(f"warning: {damage}; going back to {path.name}")
            return checkpoint
    if isinstance(damaged[0], ConfigError):
        raise damaged[0]
    raise WeightsError(f"{damaged[0]}; {folder} has no other that can, so start a new run") from damaged[0]


def _read(source: Path) -> TrainingCheckpoint:
    """Return the checkpoint `source` if no file of it has changed since it was written."""
    try:
        if not os.path.isdir(source):  # noqa: PTH112 (False where it cannot look)
            raise WeightsError(f"checkpoint {source} is damaged: it is no folder")
        lines = _digests(source)
        if not os.path.lexists(source / SUMS):
            raise WeightsError(f"checkpoint {source} is damaged: {SUMS} is missing")
        if (written := read_bytes(source / SUMS)) != "".join(lines).encode():
            changed = [line.split()[1] for line in lines if line.encode() not in written]
            what = f"{changed[0]} has changed" if changed else f"its files are not those that {SUMS} lists"
            raise WeightsError(f"checkpoint {source} is damaged: {what}")
        state = parse_object(read_bytes(source / "state.json"))
        number = state["format"]
        if type(number) is not int or number != FORMAT:
            raise WeightsError(f"{source} has checkpoint format {number!r}; this version reads {FORMAT}")
        step, clock = state["step"], state["clock_ms"]
        if type(step) is not int or step != _step_of(source) or not (is_number(clock) and clock >= 0):
            raise WeightsError(f"checkpoint {source} contradicts itself: it says step {step!r} at {clock!r} ms")
        _require_plain(state["settings"])
        return TrainingCheckpoint(
            step=step,
            clock_ms=float(clock),
            weights=load_file(source / "model.safetensors"),
            optimizer=load_file(source / "optimizer.safetensors"),
            rng=load_file(source / "rng.safetensors"),
            loader=dict(state["loader"]),
            settings=dict(state["settings"]),
            about=dict(state["about"]),
            versions=dict(state["versions"]),
            average=load_file(source / "average.safetensors") if state["averaged"] else {},
            bandit=dict(state["bandit"]),
            path=source,
        )
    except WeightsError:
        raise
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise WeightsError(f"checkpoint {source} is damaged: it cannot be read ({reason})") from error


def _require_plain(settings: object) -> None:
    """Raise a ValueError if a setting is nothing that a run writes: they are compared and shown."""
    if not isinstance(settings, dict):
        raise ValueError("the settings are no table")
    for name, value in settings.items():
        for one in value if isinstance(value, list) else [value]:
            if not (one is None or isinstance(one, str | bool | int | float)) or len(str(one)) > _LONGEST:
                raise ValueError(f"setting {name[:40]!r} is no plain value")


def _digests(source: Path) -> list[str]:
    """Return the lines of SHA256SUMS for the files of a checkpoint that exist."""
    lines = []
    for name in FILES:
        if os.path.lexists(source / name):
            with open_regular(source / name) as file:
                lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    return lines


def _step_of(path: Path) -> int:
    return int(path.name.split("-")[1])
