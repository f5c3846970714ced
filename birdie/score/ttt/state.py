"""State of test-time training in a file: all that an interrupted evaluation needs to continue as if uninterrupted.

    FILE   one safetensors file: weights, momenta, sums by document, which targets were scored, their losses if kept;
           its metadata hold the progress, and the identity of the evaluation it belongs to

On one rank the continuation is equal to the bit. On several, the sums by document are those of all ranks and are added
in another order.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from birdie.errors import WeightsError
from birdie.runtime.files import atomic_path
from birdie.runtime.tensor_files import write_tensors
from birdie.score.accumulator import Accumulator
from birdie.score.mode import Scoring
from birdie.score.windows import Windows

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FORMAT = "2"
_ACCUMULATOR = "accumulator/"


def identity(
    scoring: Scoring, windows: Windows, settings: "DataclassInstance", *, length: int, temperature: float = 1.0
) -> dict[str, str]:
    """Return the properties that two evaluations must share to continue each other; before the model is trained.

    Args:
        scoring: the evaluation.
        windows: that it scores.
        settings: of training.
        length: of the sequences that are trained on.
        temperature: of the predictions.
    """
    ranges = hashlib.sha256()
    for positions in (windows.begins, windows.firsts, windows.stops):
        ranges.update(np.ascontiguousarray(positions).tobytes())
    weights = hashlib.sha256()
    for name, p in scoring.model.named_parameters():
        weights.update(name.encode() + p.detach().cpu().numpy().tobytes())
    return {
        "weights": weights.hexdigest()[:16],
        "tokens": f"{len(scoring.tokens):,}",
        "text": hashlib.sha256(np.ascontiguousarray(scoring.tokens).tobytes()).hexdigest()[:16],
        "windows": ranges.hexdigest()[:16],
        "sequence length": str(length),
        "temperature": str(temperature),
        "dtype": str(scoring.model.compute_dtype).removeprefix("torch."),
        "ranks": str(scoring.world.size),
        **{name: str(value) for name, value in dataclasses.asdict(settings).items()},
    }


def save_state(
    scoring: Scoring, identity: Mapping[str, str], tensors: Mapping[str, Tensor], progress: Mapping[str, Any]
) -> None:
    """Write the state and that of the accumulator; rank 0 writes, every rank must call it.

    Args:
        scoring: names the file.
        identity: of the evaluation.
        tensors: of the trainer, on any device, equal on all ranks.
        progress: plain values.
    """
    assert scoring.state is not None
    accumulator, path = scoring.accumulator, scoring.state.path
    sums = {_ACCUMULATOR + name: tensor for name, tensor in accumulator.state(scoring.world, scoring.device).items()}
    if scoring.world.is_main:
        ledger = {"learned": accumulator.ledger.learned, "steps": accumulator.ledger.steps}
        metadata = {
            "format": FORMAT,
            "identity": json.dumps(dict(identity)),
            "progress": json.dumps(dict(progress)),
            "ledger": json.dumps(ledger),
        }
        with atomic_path(path) as temporary:
            write_tensors(temporary, {**tensors, **sums}, metadata, target=path)
    scoring.world.barrier()  # a rank that ended, or resumed, before the file exists would start without it


@contextmanager
def loaded_state(scoring: Scoring, identity: Mapping[str, str]) -> Iterator[tuple[dict[str, Tensor], dict[str, Any]]]:
    """Restore the accumulator, which must be new, and yield the tensors and the progress of the trainer.

    Every rank must call it and can read the file. Errors inside the block are errors of the file, too.
    """
    assert scoring.state is not None
    path = scoring.state.path
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise WeightsError(f"{path} is not a state that this version can read; start without resuming")
            _check_same(path, json.loads(metadata["identity"]), identity)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        _restore(scoring.accumulator, tensors, json.loads(metadata["ledger"]), scoring)
        yield tensors, json.loads(metadata["progress"])
    except WeightsError:
        raise
    except FileNotFoundError as error:
        raise WeightsError(f"there is no state {path} to resume from; start without resuming") from error
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise WeightsError(f"the state in {path} cannot be read ({error}); start without resuming") from error


def _restore(
    accumulator: Accumulator, tensors: Mapping[str, Tensor], ledger: Mapping[str, int], scoring: Scoring
) -> None:
    sums = {name.removeprefix(_ACCUMULATOR): t for name, t in tensors.items() if name.startswith(_ACCUMULATOR)}
    accumulator.load_state(sums, scoring.world)
    accumulator.ledger.learned, accumulator.ledger.steps = ledger["learned"], ledger["steps"]


def _check_same(path: Path, saved: Mapping[str, str], current: Mapping[str, str]) -> None:
    """Raise WeightsError where the state is of another evaluation."""
    differing = [name for name in {**saved, **current} if saved.get(name) != current.get(name)]
    if differing:
        pairs = ", ".join(f"{name} {saved.get(name)} and not {current.get(name)}" for name in differing)
        raise WeightsError(
            f"{path} is the state of another evaluation: {pairs}; use the settings it was started with, or start anew"
        )
