"""Checkpoints of one run in a folder, in the order of their steps.

    checkpoints/step-00000040/ step-00000080/ …      birdie train
    output/checkpoint-500/ checkpoint-1000/ …        Trainer of transformers
    step_100.safetensors, ckpt-200.pt, …             files

The number after a word such as "step" or "checkpoint" in a name is the step. A checkpoint without one (last.ckpt,
best.pt, model_final.pth) tells its step by what is in it (birdie.checkpoints.checkpoint_facts).
"""

import functools
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from torch import Tensor

from birdie.artifact.kept_files import MOST_FILES
from birdie.artifact.links import SUFFIX, digest_of
from birdie.chain.file_parts import FileParts, split
from birdie.chain.settled import is_twin
from birdie.checkpoints.checkpoint_facts import facts_of, step_inside, step_key
from birdie.checkpoints.folder_scan import TORCH, foreign_folder
from birdie.checkpoints.stored_order import Json, order_of
from birdie.errors import ConfigError, WeightsError
from birdie.system.names import is_name

_WORDS = ("step", "iter", "checkpoint", "ckpt", "chkpt", "epoch")  # the first of these that is in a name counts
_STEP = [re.compile(rf"{word}[a-z]*[-_=. ]?([0-9]{{1,19}})(?![0-9])", re.IGNORECASE) for word in _WORDS]
_LAST_NUMBER = re.compile(r"([0-9]{1,19})[^0-9]*$")
_LOGS = {"runs", "logs", "tensorboard", "wandb", "lightning_logs"}  # folders beside checkpoints that hold none


def step_of(name: str, *, any_number: bool = False) -> int | None:
    """Return the step of a checkpoint, from its name; None if it has none.

    Args:
        any_number: take the last number of a name without such a word.
    """
    match = next((match for word in _STEP if (match := word.search(name))), None)
    if match is None and any_number:
        match = _LAST_NUMBER.search(_stem(name))
    return None if match is None else int(match[1])


def is_series(folder: Path, least: int = 2) -> bool:
    """Return whether a folder holds at least so many checkpoints of a run, and is not that of one model.

    Names tell it where all weights have a number; else what the files hold: several with one network are checkpoints.
    """
    entries = _entries(folder)
    steps = {path: step for path in entries if _is_candidate(path) and (step := step_of(path.name)) is not None}
    others = [path for path in entries if path not in steps]
    weights = [path for path in others if (path.is_dir() and path.name not in _LOGS) or _is_weights(path)]
    if not weights:
        return len(steps) >= least
    if not all(map(_is_left_out, weights)):  # a model, whose folder may have its checkpoints in it as well
        steps = {path: step for path, step in steps.items() if not _is_left_out(path)}
    facts = functools.cache(facts_of)
    if not steps:
        steps = _numbers(weights)
        if not steps or step_key({step: facts(path).numbers for path, step in steps.items()}) is None:
            return False
        if any(facts(path).has_copies for path in steps):  # fold_0/best.pth and final.pth: of trainings, no steps
            return False
    first, *numbered = steps
    return any(facts(first).is_same_network(facts(path)) for path in (*numbered, *weights) if path != first)


def series(folder: Path, skip: Sequence[str] = ()) -> dict[int, Path]:
    """Return step → checkpoint of the run in a folder, in the order of the steps, of those with a number.

    Args:
        folder: of the run.
        skip: patterns of names to leave out.

    Raises:
        ConfigError: there are none, or two of one step, or nothing has the name of a pattern.
    """
    entries = [path for path in _entries(folder) if _is_candidate(path)]
    for pattern in skip:
        if not any(fnmatchcase(path.name, pattern) for path in entries):
            raise ConfigError(
                f"no checkpoint in {folder} matches {pattern!r}; give a pattern of names, for example '*.pt'"
            )
    entries = [path for path in entries if not _is_skipped(path, skip)]
    _require_here(entries)
    steps = {path: step for path in entries if (step := step_of(path.name)) is not None} or _numbers(entries)
    if not steps:
        raise ConfigError(
            f"{folder} holds no checkpoints of a run, such as step-100/, checkpoint-500/ or step_100.safetensors; give "
            "the folder that has them"
        )
    checkpoints: dict[int, Path] = {}
    for path in sorted(steps, key=lambda path: (steps[path], path.name)):
        if (other := checkpoints.get(steps[path])) and is_twin(path.name, other.name):
            continue
        if other and not is_twin(other.name, path.name):
            raise ConfigError(
                f"{other} and {path.name} are both of step {steps[path]}; move one of them, "
                f"or leave it out with --skip {path.name}"
            )
        checkpoints[steps[path]] = path
    return checkpoints


def unnumbered(folder: Path, numbered: Collection[Path], skip: Sequence[str] = ()) -> list[Path]:
    """Return what may be checkpoints of the run in a folder, and has no number in its name, as last.ckpt and best.pt.

    Args:
        folder: of the run.
        numbered: checkpoints with a number, as `series` returned them.
        skip: patterns of names to leave out.

    Raises:
        ConfigError: one is a link to something elsewhere.
    """
    names = {path.name for path in numbered}
    paths = [
        path
        for path in _entries(folder)
        if _is_candidate(path)
        and path.name not in names | _LOGS
        and not _is_skipped(path, skip)
        and not any(is_twin(path.name, name) for name in names)
    ]
    _require_here(paths)
    return paths


def without_number(
    folder: Path,
    checkpoints: Mapping[int, Path],
    skip: Sequence[str] = (),
    *,
    strict: bool = True,
    waiting: Collection[Path] = (),
) -> dict[Path, int]:
    """Return checkpoint → step of those of the run that have no number in their names, as last.ckpt and best.pt.

    Args:
        folder: of the run.
        checkpoints: those with a number, as `series` returned them.
        skip: patterns of names to leave out.
        strict: refuse a folder with other weights as well.
        waiting: those that are not complete (birdie.chain.settled).

    Raises:
        ConfigError: one does not tell its step, or holds another network.
    """
    facts = functools.cache(facts_of)
    steps: dict[Path, int] = {}
    for path in unnumbered(folder, [*checkpoints.values(), *waiting], skip):
        known = next(iter(checkpoints.values()))
        advice = f"leave it out with --skip {path.name}, or move it elsewhere"
        if facts(path).problem:
            raise ConfigError(f"{path} does not tell its step, as it cannot be read ({facts(path).problem}); {advice}")
        if not facts(path).networks:
            continue
        if not facts(known).is_same_network(facts(path)):
            if strict and facts(known).networks:
                raise ConfigError(f"{path} holds another network than {known.name}, a checkpoint beside it; {advice}")
            continue
        step = step_inside(path, checkpoints, facts)
        if step is None:
            raise ConfigError(
                f"{path} holds the network of {known.name} and does not tell its step; put the step into its name "
                f"(…-step-300{path.suffix}), {advice}"
            )
        steps[path] = step
    return dict(sorted(steps.items(), key=lambda item: (item[1], item[0].name)))


def beside(folder: Path, checkpoints: Mapping[int, Path], named: Collection[Path] = ()) -> list[str]:
    """Return the names of what is in the folder of a run beside its checkpoints; hidden files and chains do not count.

    Args:
        folder: of the run.
        checkpoints: what `series` returned.
        named: what `without_number` returned.
    """
    return [path.name for path in _entries(folder) if path not in (*checkpoints.values(), *named)]


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

    def order(self, file: str) -> Json:
        """Return the order of the tensors of a file as they lie in it, then of further names of them."""
        parts, prefix = self.files[file], f"{file}/" if self.is_folder else ""
        return order_of([prefix + name for name in (*parts.tensors, *parts.ties)])


def _numbers(paths: Sequence[Path]) -> dict[Path, int]:
    """Return path → last number in its name, of those that have one."""
    return {path: number for path in paths if (number := step_of(path.name, any_number=True)) is not None}


def _is_left_out(path: Path) -> bool:
    """Return whether the folder of a model leaves a folder out."""
    return path.is_dir() and foreign_folder(f"{path.name}/") is not None


def _require_here(paths: Collection[Path]) -> None:
    """Check that none of some entries of a folder is a link to something elsewhere; best.pt may be one to step_10.pt.

    Raises:
        ConfigError: one is.
    """
    for path in paths:
        if path.is_symlink() and path.resolve().parent != path.parent.resolve():
            raise ConfigError(
                f"{path} is a link to {path.resolve()}, and a chain keeps what is in {path.parent}; put a copy there, "
                f"or leave it out with --skip {path.name}"
            )


def _is_skipped(path: Path, skip: Sequence[str]) -> bool:
    return any(fnmatchcase(path.name, pattern) for pattern in skip)


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
