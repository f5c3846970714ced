"""The weights of a finished run before the export, with its last validation: export and scoring can be repeated.

A paid run is never lost: `float.safetensors` is written before anything that could fail.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from birdie.errors import DataError, WeightsError
from birdie.gpt.score.accumulator import Score
from birdie.system.files import atomic_path
from birdie.system.parsing import parse_object, to_json
from birdie.system.regular import require_regular
from birdie.system.structured import is_number
from birdie.system.tensor_files import write_tensors

FLOAT = "float.safetensors"


@dataclass(frozen=True, slots=True)
class Trained:
    """Facts about the weights of a finished run.

    Attributes:
        weights: their name: the last ones, or their average.
        train_ms: training time when they were validated.
        score: of that validation; None: they were never validated.
        never_began: a sentence for each technique that no step has had; not kept in the file.
    """

    steps: int = 0
    weights: str = "the last weights"
    train_ms: float = 0.0
    score: Score | None = None
    never_began: tuple[str, ...] = ()


def save_float(folder: Path, state: Mapping[str, Tensor], trained: Trained) -> None:
    """Write the weights of a trained model, with facts about them."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    about: dict[str, Any] = {"steps": trained.steps, "weights": trained.weights, "sha256": _digest(tensors)}
    if trained.score is not None:
        about |= {"train_ms": trained.train_ms, "score": asdict(trained.score)}
    with atomic_path(folder / FLOAT) as path:
        write_tensors(path, tensors, {"birdie": to_json(about)}, target=folder / FLOAT)


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of names, kinds and values of tensors on the CPU."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def length_of(folder: Path) -> tuple[int, float] | None:
    """Return steps and milliseconds of the finished run in `folder`; None if no run finished there."""
    try:
        require_regular(folder / FLOAT)
        with safe_open(folder / FLOAT, "pt") as file:
            about = parse_object(file.metadata()["birdie"])
            return int(about["steps"]), float(about.get("train_ms", 0.0))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, DataError):
        return None


def load_float(folder: Path, model: nn.Module) -> Trained:
    """Put the weights that `save_float` wrote into a model, and return the facts about them."""
    path = folder / FLOAT
    try:
        require_regular(path)
        with safe_open(path, "pt") as file:
            about = parse_object(file.metadata()["birdie"])
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        if about["sha256"] != _digest(state):
            raise ValueError("its weights are not those that were written")
        steps, weights = int(about["steps"]), str(about["weights"])
        score = about.get("score")
        if score is not None:  # null is NaN, the interval of a single document
            score = {name: math.nan if value is None else value for name, value in score.items()}
        if not all(isinstance(value, float) or is_number(value) for value in (score or {}).values()):
            raise ValueError("its score is no number")
        train_ms = 0.0 if score is None else float(about["train_ms"])
        last = None if score is None else Score(**score)
    except FileNotFoundError as error:
        raise WeightsError(f"{path} does not exist: the run has not finished training; finish it first") from error
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise WeightsError(f"{path} cannot be read ({error}); train again, or resume from a checkpoint") from error
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise WeightsError(
            f"the weights in {folder} are of another model than the recipe's; leave [model] as it was trained"
        ) from error
    return Trained(steps, weights, train_ms, last)
