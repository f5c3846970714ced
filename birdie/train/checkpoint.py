"""Checkpoints: all that training needs to go on as if it had never stopped.

    FOLDER/
    ├── latest                  name of the newest whole checkpoint
    └── step-00000120/
        ├── model.safetensors       weights by name
        ├── optimizer.safetensors   "parameter/tensor", Muon's momentum gathered from all ranks
        ├── rng.safetensors         states of the random generators
        ├── average.safetensors     of the weights, if the run has one
        └── state.json              step, clock, position of the loader, settings, what the caller noted, versions

A checkpoint is written whole under a new name before `latest` points to it, and only then are older ones removed: a
process killed at any moment leaves one that loads.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from birdie.errors import ConfigError, OutputError, WeightsError
from birdie.runtime.distributed import World
from birdie.runtime.files import atomic_folder, write_bytes

FORMAT = 1
POINTER = "latest"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a run between two steps; a loaded one is on the CPU.

    Attributes:
        step: finished steps.
        clock_ms: training time so far.
        weights: parameters and buffers of the model by name.
        optimizer: optimizer tensors by "parameter/tensor".
        rng: states of the random generators, as `rng_state` gives them.
        loader: what the loader's `state_dict` gave; must survive JSON.
        settings: the settings of the run, with every "auto" resolved.
        about: what the caller of `fit` wants remembered; must survive JSON.
        versions: of the software that wrote it.
        average: what the average of weights holds, as its `state` gives it.
        bandit: what the learning-rate bandit remembers; must survive JSON.
    """

    step: int
    clock_ms: float
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    rng: dict[str, Tensor]
    loader: dict[str, Any]
    settings: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=lambda: {"torch": torch.__version__})
    average: dict[str, Tensor] = field(default_factory=dict)
    bandit: dict[str, Any] = field(default_factory=dict)


def require_alike(checkpoint: Checkpoint | None, folder: Path, world: World) -> None:
    """Refuse ranks that would go on from different places; every rank must call it.

    Raises:
        ConfigError: they see different checkpoints, as nodes do that share no disk.
    """
    own = "none" if checkpoint is None else f"one of step {checkpoint.step} at {checkpoint.clock_ms:.3f} ms"
    for rank, seen in enumerate(world.all_gather_strings(own)):
        if seen != own:
            raise ConfigError(
                f"rank {world.rank} finds {own} as the checkpoint in {folder}, rank {rank} {seen}; put the run folder "
                "where all nodes see it, or copy the checkpoint to each"
            )


def save_checkpoint(folder: str | os.PathLike[str], checkpoint: Checkpoint) -> Path:
    """Write `checkpoint` into `folder`, make it the latest, remove older ones; returns where it lies.

    Raises:
        OutputError: it could not be written; the one before it is untouched.
    """
    folder = Path(folder)
    target = _unused(folder / f"step-{checkpoint.step:08d}")
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
            _save_tensors(tensors, temporary / f"{name}.safetensors", target)
        (temporary / "state.json").write_text(json.dumps(state, indent=1, sort_keys=True), encoding="utf-8")
    write_bytes(folder / POINTER, target.name.encode())
    for old in (*folder.glob("step-*"), *folder.glob(".step-*")):
        if old.name != target.name:
            shutil.rmtree(old, ignore_errors=True)
    return target


def load_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """The latest checkpoint in `folder`.

    Raises:
        WeightsError: there is none, or it cannot be read.
    """
    folder = Path(folder)
    try:
        name = (folder / POINTER).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WeightsError(f"there is no checkpoint in {folder}; its file {POINTER!r} cannot be read") from error
    if Path(name).name != name or not name.startswith("step-"):
        raise WeightsError(f"{folder / POINTER} does not name a checkpoint; restore it or start a new run")
    source = folder / name
    try:
        state = json.loads((source / "state.json").read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise WeightsError(f"{source} has checkpoint format {state['format']!r}; this version reads {FORMAT}")
        return Checkpoint(
            step=int(state["step"]),
            clock_ms=float(state["clock_ms"]),
            weights=load_file(source / "model.safetensors"),
            optimizer=load_file(source / "optimizer.safetensors"),
            rng=load_file(source / "rng.safetensors"),
            loader=dict(state["loader"]),
            settings=dict(state["settings"]),
            about=dict(state.get("about", {})),
            versions=dict(state["versions"]),
            average=load_file(source / "average.safetensors") if state.get("averaged") else {},
            bandit=dict(state.get("bandit", {})),
        )
    except WeightsError:
        raise
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"checkpoint {source} cannot be read ({error}); start from another") from error


def rng_state() -> dict[str, Tensor]:
    """States of torch's generators: "cpu", and "cuda" where CUDA is in use."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_state(states: Mapping[str, Tensor]) -> None:
    """Put back what `rng_state` gave; a generator that this machine lacks is passed over."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _save_tensors(tensors: Mapping[str, Tensor], path: Path, target: Path) -> None:
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise OutputError(f"cannot write {target}: {error}; nothing was changed there") from error


def _unused(path: Path) -> Path:
    """`path`, or with a number behind it if that name is taken: a whole checkpoint is never written over."""
    candidate, number = path, 1
    while candidate.exists():
        candidate = path.with_name(f"{path.name}-{number}")
        number += 1
    return candidate
