"""Checkpoints: everything that a run needs to resume bit for bit.

    FOLDER/
    ├── latest                  name of the newest complete checkpoint
    └── step-00000120/
        ├── model.safetensors       weights by name
        ├── optimizer.safetensors   state by "parameter/tensor", Muon's momentum gathered from all ranks
        ├── rng.safetensors         states of the random generators
        ├── average.safetensors     average of the weights, if the run has one
        └── state.json              step, clock, position of the loader, settings, the caller's notes, versions

A checkpoint is completely written under a new name before `latest` points to it, and only then are older ones removed:
a process that is killed at any moment leaves one that loads.
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
    """State of a run between two steps; a loaded one is on the CPU.

    Attributes:
        step: finished steps.
        clock_ms: training time so far.
        weights: parameters and buffers of the model by name.
        optimizer: optimizer tensors by "parameter/tensor".
        rng: states of the random generators, from `rng_state`.
        loader: `state_dict` of the loader, as JSON can hold it.
        settings: of the run, with every "auto" resolved.
        about: notes of the caller of `fit`, as JSON can hold them.
        versions: of the software that wrote it.
        average: state of the average of the weights.
        bandit: state of the learning-rate bandit, as JSON can hold it; empty without one.
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


def require_same_checkpoint(checkpoint: Checkpoint | None, folder: Path, world: World) -> None:
    """Check that all ranks resume from the same checkpoint. Every rank must call it.

    Raises:
        ConfigError: they see different checkpoints, as nodes without a shared disk do.
    """
    local = "none" if checkpoint is None else f"one of step {checkpoint.step} at {checkpoint.clock_ms:.3f} ms"
    for rank, other in enumerate(world.all_gather_strings(local)):
        if other != local:
            raise ConfigError(
                f"rank {world.rank} finds {local} as the checkpoint in {folder}, rank {rank} {other}; put the run "
                "folder where all nodes see it, or copy the checkpoint to each"
            )


def save_checkpoint(folder: str | os.PathLike[str], checkpoint: Checkpoint) -> Path:
    """Write `checkpoint` into `folder`, make it the latest and remove older ones; return its path.

    Raises:
        OutputError: it could not be written; the previous checkpoint is untouched.
    """
    folder = Path(folder)
    target = _unused_path(folder / f"step-{checkpoint.step:08d}")
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
    """Return the latest checkpoint in `folder`.

    Raises:
        WeightsError: there is none, or it cannot be read.
    """
    folder = Path(folder)
    try:
        name = (folder / POINTER).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WeightsError(f"there is no checkpoint in {folder}; its file {POINTER!r} cannot be read") from error
    if Path(name).name != name or not name.startswith("step-"):
        raise WeightsError(f"{folder / POINTER} does not name a checkpoint; restore the file or start a new run")
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
        raise WeightsError(f"checkpoint {source} cannot be read ({error}); resume from another one") from error


def rng_state() -> dict[str, Tensor]:
    """Return the states of torch's random generators: "cpu", and "cuda" where CUDA is available."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_state(states: Mapping[str, Tensor]) -> None:
    """Restore states from `rng_state`; states of a generator that this machine lacks are ignored."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _save_tensors(tensors: Mapping[str, Tensor], path: Path, target: Path) -> None:
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise OutputError(f"cannot write {target}: {error}; nothing was changed there") from error


def _unused_path(path: Path) -> Path:
    """Return `path`, with a number appended if it exists: a complete checkpoint is never overwritten."""
    candidate, number = path, 1
    while candidate.exists():
        candidate = path.with_name(f"{path.name}-{number}")
        number += 1
    return candidate
