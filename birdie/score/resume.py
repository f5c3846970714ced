"""A scoring that learns, kept between two chunks: all that it needs to go on as if it had never stopped.

    FILE   one safetensors file: weights, momenta, sums by document, which targets were scored, their losses if kept;
           in its metadata how far it came, and what it is a scoring of (`identity`)

On one rank what comes after is equal to the bit to what would have come; on several, sums by document are those of all
ranks and are added up in another order.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from birdie.errors import OutputError, WeightsError
from birdie.model.gpt import GPT
from birdie.runtime.distributed import World
from birdie.runtime.files import atomic_path
from birdie.score.adapt import Learner
from birdie.score.tally import Tally
from birdie.score.windows import Windows

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FORMAT = "1"
_TALLY = "tally/"


@dataclass(slots=True)
class Midway:
    """Where a scoring by turns stands.

    Attributes:
        learner: of the model.
        chunk: chunks that are done.
        score_seconds, adapt_seconds: they took.
    """

    learner: Learner
    chunk: int = 0
    score_seconds: float = 0.0
    adapt_seconds: float = 0.0


def identity(
    model: GPT,
    tokens: NDArray[np.uint16],
    windows: Windows,
    settings: "DataclassInstance",
    *,
    length: int,
    temperature: float,
    world: World,
) -> dict[str, str]:
    """What a scoring is of, by name: two are the same if all of it is. `model` as it is before anything is learned."""
    cover = hashlib.sha256()
    for places in (windows.begins, windows.firsts, windows.stops):
        cover.update(np.ascontiguousarray(places).tobytes())
    weights = hashlib.sha256()
    for name, p in model.named_parameters():
        weights.update(name.encode() + p.detach().cpu().numpy().tobytes())
    return {
        "weights": weights.hexdigest()[:16],
        "tokens": f"{len(tokens):,}",
        "text": hashlib.sha256(np.ascontiguousarray(tokens).tobytes()).hexdigest()[:16],
        "windows": cover.hexdigest()[:16],
        "sequence length": str(length),
        "temperature": str(temperature),
        "dtype": str(model.compute_dtype).removeprefix("torch."),
        "ranks": str(world.size),
        **{name: str(value) for name, value in dataclasses.asdict(settings).items()},
    }


def save_midway(
    path: str | os.PathLike[str], known: Mapping[str, str], midway: Midway, tally: Tally, world: World
) -> None:
    """Write the state; rank 0 does, every rank must call it.

    Raises:
        OutputError: it could not be written; what was there before is untouched.
    """
    tensors = {**midway.learner.state(), **_prefixed(tally.state(world, midway.learner.device))}
    ledger = tally.ledger
    progress = {
        "chunk": midway.chunk,
        "score_seconds": midway.score_seconds,
        "adapt_seconds": midway.adapt_seconds,
        "steps": midway.learner.steps,
        "tokens": midway.learner.tokens,
        "ledger": [ledger.learned, ledger.steps],
    }
    if world.is_main:
        write_state(path, known, tensors, progress)
    world.barrier()  # a rank that ended, or resumed, before the file is there would take it from the others


def load_midway(
    path: str | os.PathLike[str], known: Mapping[str, str], midway: Midway, tally: Tally, world: World
) -> None:
    """Put what `path` holds into a `midway` and a `tally` that are new. Every rank must call it and can read the file.

    Raises:
        WeightsError: there is no such file, it cannot be read, or it is of another scoring than `known`.
    """
    with reading(path):
        tensors, progress = read_state(path, known)
        midway.learner.load_state(tensors)
        tally.load_state(
            {name.removeprefix(_TALLY): each for name, each in tensors.items() if name.startswith(_TALLY)}, world
        )
        midway.chunk = int(progress["chunk"])
        midway.score_seconds, midway.adapt_seconds = progress["score_seconds"], progress["adapt_seconds"]
        midway.learner.steps, midway.learner.tokens = progress["steps"], progress["tokens"]
        tally.ledger.learned, tally.ledger.steps = progress["ledger"]


def write_state(
    path: str | os.PathLike[str], known: Mapping[str, str], tensors: Mapping[str, Tensor], progress: Mapping[str, Any]
) -> None:
    """Write a state, whole or not at all.

    Args:
        path: of the file.
        known: what it is of.
        tensors: on any device.
        progress: what JSON can say.

    Raises:
        OutputError: it could not be written; what was there before is untouched.
    """
    metadata = {"format": FORMAT, "identity": json.dumps(dict(known)), "progress": json.dumps(dict(progress))}
    with atomic_path(path) as temporary:
        try:
            save_file({name: each.cpu().contiguous() for name, each in tensors.items()}, temporary, metadata)
        except SafetensorError as error:
            raise OutputError(f"cannot write {path}: {error}; nothing was changed there") from error


def read_state(path: str | os.PathLike[str], known: Mapping[str, str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and progress of a state; within `reading`.

    Raises:
        WeightsError: it is of another scoring than `known`, or of another version.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise WeightsError(f"{path} is no state of a scoring that this version can read; start anew")
        _check_same(path, json.loads(metadata["identity"]), known)
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(metadata["progress"])  # noqa: SIM118


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what goes wrong with a state's file into a WeightsError that says so."""
    try:
        yield
    except WeightsError:
        raise
    except FileNotFoundError as error:
        raise WeightsError(f"there is no {Path(path)} to go on from; start without resuming") from error
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise WeightsError(f"the state in {path} cannot be read ({error}); start anew") from error


def _check_same(path: str | os.PathLike[str], held: Mapping[str, str], known: Mapping[str, str]) -> None:
    """Refuse a state of another scoring."""
    differing = [name for name in {**held, **known} if held.get(name) != known.get(name)]
    if differing:
        told = ", ".join(f"{name} {held.get(name)} and not {known.get(name)}" for name in differing)
        raise WeightsError(f"{path} is of another scoring: {told}; give what it was begun with, or start anew")


def _prefixed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_TALLY + name: each for name, each in tensors.items()}
