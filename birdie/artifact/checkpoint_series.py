"""Checkpoints of one run in a folder, in the order of their steps.

    checkpoints/step-00000040/ step-00000080/ …      birdie train
    output/checkpoint-500/ checkpoint-1000/ …        Trainer of transformers
    step_100.safetensors, ckpt-200.pt, …             files

The number after a word such as "step" or "checkpoint" in a name is the step.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from birdie.artifact.file_parts import FileParts, split
from birdie.artifact.folder_scan import TORCH
from birdie.artifact.kept_files import MOST_FILES
from birdie.artifact.links import SUFFIX, digest_of
from birdie.errors import ConfigError, WeightsError
from birdie.runtime.names import is_name

_WORDS = ("step", "iter", "checkpoint", "ckpt", "chkpt", "epoch")  # the first of these that is in a name counts
_STEP = [re.compile(rf"{word}[a-z]*[-_=. ]?([0-9]{{1,19}})(?![0-9])", re.IGNORECASE) for word in _WORDS]
_LAST_NUMBER = re.compile(r"([0-9]{1,19})[^0-9]*$")
_LOGS = {"runs", "logs", "tensorboard", "wandb", "lightning_logs"}  # folders beside checkpoints that hold none


def step_of(name: str, *, any_number: bool = False) -> int | None:
    """Return the step of a checkpoint, from its name; None if it has none.

    Args:
        name: of the file or folder.
        any_number: take the last number of a name without such a word.
    """
    match = next((match for word in _STEP if (match := word.search(name))), None)
    if match is None and any_number:
        match = _LAST_NUMBER.search(_stem(name))
    return None if match is None else int(match[1])


def is_series(folder: Path, least: int = 2) -> bool:
    """Return whether a folder holds at least so many checkpoints of a run, and no other weights."""
    entries = _entries(folder)
    others = [path for path in entries if not _is_candidate(path) or step_of(path.name) is None]
    weights = any((path.is_dir() and path.name not in _LOGS) or _is_weights(path) for path in others)
    return not weights and len(entries) - len(others) >= least


def series(folder: Path) -> dict[int, Path]:
    """Return step → checkpoint of the run in a folder, in the order of the steps.

    Raises:
        ConfigError: there are none, or two of one step.
    """
    entries = [path for path in _entries(folder) if _is_candidate(path)]
    steps = {path: step for path in entries if (step := step_of(path.name)) is not None}
    steps = steps or {path: step for path in entries if (step := step_of(path.name, any_number=True)) is not None}
    if not steps:
        raise ConfigError(
            f"{folder} holds no checkpoints of a run, such as step-100/, checkpoint-500/ or step_100.safetensors; give "
            "the folder that has them"
        )
    checkpoints: dict[int, Path] = {}
    for path in sorted(steps, key=lambda path: (steps[path], path.name)):
        if steps[path] in checkpoints:
            raise ConfigError(
                f"{checkpoints[steps[path]]} and {path.name} are both of step {steps[path]}; move one of them elsewhere"
            )
        checkpoints[steps[path]] = path
    return checkpoints


def beside(folder: Path, checkpoints: Mapping[int, Path]) -> list[str]:
    """Return the names of what is in the folder of a run beside its checkpoints; hidden files and chains do not count.

    Args:
        folder: of the run.
        checkpoints: what `series` returned.
    """
    return [path.name for path in _entries(folder) if path not in checkpoints.values()]


def name_of_link(checkpoint: str) -> str:
    """Return the file name of the link of a checkpoint, from the name of its file or folder."""
    return _stem(checkpoint) + SUFFIX


def split_checkpoint(path: Path) -> "CheckpointParts":
    """Return all files of a checkpoint in parts; tensors are mapped.

    Raises:
        WeightsError: a file cannot be read, is none (a link, a named pipe), or has a name that not every system has.
    """
    if not path.is_dir():
        return CheckpointParts(path, False, {path.name: split(path)})
    files = {file.relative_to(path).as_posix(): file for file in _files(path)}
    if not files:
        raise WeightsError(f"checkpoint {path} holds no file; remove it")
    if len(files) > MOST_FILES:
        raise WeightsError(f"checkpoint {path} has {len(files):,} files, more than {MOST_FILES:,}; join them")
    for name, file in files.items():
        if not is_name(name):
            raise WeightsError(f"{file} has a name that not every system has; rename it")
        if file.is_symlink() or not file.is_file():
            raise WeightsError(
                f"{file} is a symbolic link or no regular file, which a chain does not keep; replace it by a copy"
            )
    return CheckpointParts(path, True, {name: split(files[name]) for name in sorted(files)})


class CheckpointParts:
    """A checkpoint, all of whose files are in parts.

    Args:
        path: of its folder or file.
        is_folder: which of the two.
        files: name → parts of each file.

    Attributes:
        tensors: name → tensor, tied ones under each of their names; in a folder the name of the file precedes it.
        digest: of all files (birdie.artifact.links).
        bytes: of all files.
    """

    def __init__(self, path: Path, is_folder: bool, files: Mapping[str, FileParts]) -> None:
        self.path, self.is_folder, self.files = path, is_folder, files
        self.tensors: dict[str, Tensor] = {}
        for file, parts in files.items():
            tied = {name: parts.tensors[first] for name, first in parts.ties.items()}
            for name, tensor in (parts.tensors | tied).items():
                self.tensors[f"{file}/{name}" if is_folder else name] = tensor
        self.digest = digest_of({name: (parts.size, parts.sha256) for name, parts in files.items()})
        self.bytes = sum(parts.size for parts in files.values())

    @property
    def paths(self) -> list[Path]:
        """The files, which are mapped."""
        return [self.path / name for name in self.files] if self.is_folder else [self.path]

    def order(self, file: str) -> list[int]:
        """Return the rank of each tensor of a file, as they lie in it, among their sorted names."""
        parts = self.files[file]
        ranks = {name: rank for rank, name in enumerate(sorted([*parts.tensors, *parts.ties]))}
        return [ranks[name] for name in parts.tensors]


def _entries(folder: Path) -> list[Path]:
    """Return what is in a folder, but hidden files and chains."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.suffix != SUFFIX)


def _is_candidate(path: Path) -> bool:
    return next(_files(path), None) is not None if path.is_dir() else _is_weights(path)


def _is_weights(path: Path) -> bool:
    return path.is_file() and path.name.lower().endswith((*TORCH, ".safetensors"))


def _files(folder: Path) -> Iterator[Path]:
    """Yield what is no folder below a folder; links to folders count."""
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent) / name for name in files)
        yield from (path for name in folders if (path := Path(parent) / name).is_symlink())


def _stem(name: str) -> str:
    """Return a name without the suffix of a file of weights."""
    suffix = next((suffix for suffix in (*TORCH, ".safetensors") if name.lower().endswith(suffix)), "")
    return name.removesuffix(name[len(name) - len(suffix) :]) if suffix and len(name) > len(suffix) else name
