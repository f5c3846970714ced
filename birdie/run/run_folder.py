"""Files that every run leaves in its folder, so that a paid run is never lost and runs can be compared.

environment.json     versions, commit, machine, device, ranks, seed, command, times of the starts, path of the log
metrics.jsonl        one JSON object a line for each logged step: {"step", "train_ms", "loss", "lr_multiplier"}
float.safetensors    the weights before the export, with the last validation: export and scoring can be repeated
"""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from birdie.errors import WeightsError
from birdie.run.events import Validated
from birdie.runtime import provenance
from birdie.runtime.distributed import World
from birdie.runtime.files import atomic_path, write_bytes
from birdie.score.accumulator import Score
from birdie.train.loop import Step

ENVIRONMENT, METRICS, FLOAT, RECIPE = "environment.json", "metrics.jsonl", "float.safetensors", "recipe.toml"


def write_environment(
    folder: Path,
    digest: str,
    seed: int,
    device: torch.device,
    world: World,
    *,
    resumed_at: int | None,
    changes: Sequence[tuple[str, Any, Any]] = (),
    log: Path | None,
) -> None:
    """Write where and how a run was started; a resumed run keeps the times and the changes of its earlier starts.

    Args:
        digest: of the recipe.
        resumed_at: step from which the run goes on; None: it starts.
        changes: (setting, value up to that step, value from now on) of each setting of training that differs.
        log: of the run, if it is not `log.txt` in the folder.

    Raises:
        OutputError: the file cannot be written.
    """
    path, earlier = folder / ENVIRONMENT, dict[str, Any]()
    if resumed_at is not None:
        with suppress(OSError, ValueError, TypeError):
            earlier = dict(json.loads(path.read_text(encoding="utf-8")))
    lists = (earlier.get(key) for key in ("starts", "changed"))
    starts, changed = (list(value) if isinstance(value, list) else [] for value in lists)
    changed += [{"after_step": resumed_at, "setting": name, "from": old, "to": new} for name, old, new in changes]
    values = {
        "starts": [*starts, datetime.now(UTC).isoformat(timespec="seconds")],
        "command": sys.argv,
        **({"changed": changed} if changed else {}),
        "recipe_digest": digest,
        "seed": seed,
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "machine": provenance.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "ranks": world.size,
        "log": None if log is None else str(log.resolve()),
    }
    write_bytes(path, json.dumps(values, indent=1).encode() + b"\n")


class Metrics:
    """The file of metrics of a run.

    Args:
        folder: of the run.
        step: lines of later steps are dropped; a run that does not resume gives -1.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._path = folder / METRICS
        lines = [json.dumps(line) + "\n" for line in read_metrics(folder) if line["step"] <= step]
        write_bytes(self._path, "".join(lines).encode())

    def record(self, step: Step) -> None:
        """Append the line of `step`."""
        values = {name: getattr(step, name) for name in ("train_ms", "loss", "lr_multiplier")}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step.number, **values}) + "\n")


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of a run by step; lines that a killed process left unfinished are left out."""
    lines = []
    try:
        text = (folder / METRICS).read_text(encoding="utf-8")
    except OSError:
        return []
    for line in text.splitlines():
        try:
            values = json.loads(line)
            lines.append({"step": int(values["step"]), **{name: float(values[name]) for name in values}})
        except (ValueError, KeyError, TypeError):
            continue
    return lines


def save_float(folder: Path, state: Mapping[str, Tensor], last: Validated | None, steps: int, weights: str) -> None:
    """Write the weights of a trained model, with its last validation.

    Args:
        weights: name of the weights: the last ones, or their average.

    Raises:
        OutputError: the file cannot be written.
    """
    about: dict[str, Any] = {"steps": steps, "weights": weights}
    if last is not None:
        about |= {"train_ms": last.train_ms, "score": asdict(last.score)}
    with atomic_path(folder / FLOAT) as path:
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
        save_file(tensors, path, {"birdie": json.dumps(about)})


def length_of(folder: Path) -> tuple[int, float] | None:
    """Return steps and milliseconds of the finished run in `folder`; None if no run finished there."""
    try:
        with safe_open(folder / FLOAT, "pt") as file:
            about = json.loads(file.metadata()["birdie"])
            return int(about["steps"]), float(about.get("train_ms", 0.0))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None


def load_float(folder: Path) -> tuple[dict[str, Tensor], int, str, Validated | None]:
    """Return state, steps, name of the weights, and the last validation, as `save_float` took them.

    Raises:
        WeightsError: there is no such file, or it is damaged.
    """
    path = folder / FLOAT
    try:
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["birdie"])
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        steps, weights = int(about["steps"]), str(about["weights"])
        score = about.get("score")
        last = None if score is None else Validated(steps, float(about["train_ms"]), Score(**score), weights)
    except FileNotFoundError as error:
        raise WeightsError(f"{path} does not exist: the run has not finished training; finish it first") from error
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{path} cannot be read ({error}); train again, or resume from a checkpoint") from error
    return state, steps, weights, last
