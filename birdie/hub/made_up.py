"""Calibration of a Hugging Face folder without data: made-up inputs of the kind that the model takes.

    signature and configuration ──► random tokens, noise images, features or sounds ──► CalibrationResult

See `birdie.compress.calibration.synthetic` for what made-up inputs are worth.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from birdie.checkpoints.folder_scan import PIPELINE
from birdie.compress.calibration.held_out import Measure
from birdie.compress.calibration.result import CalibrationResult, held_out_batches
from birdie.compress.calibration.sensitivity import MAX_COLUMNS
from birdie.compress.calibration.synthetic import (
    BATCHES,
    IMAGES,
    SAMPLES,
    SOUNDS,
    STEPS,
    TOKENS,
    Inputs,
    calibrate_on_inputs,
    norms_with_statistics,
    with_statistics,
)
from birdie.compress.row_blocks import is_stack
from birdie.compress.small_tensors import is_matrix
from birdie.errors import BirdieError, ConfigError
from birdie.hub.arguments import TRIED, arguments, first_accepted
from birdie.hub.library_loading import load_model
from birdie.hub.names_on_disk import NamesOnDisk
from birdie.system.callbacks import Progress
from birdie.system.platform import free_memory

_TOKENS_TIMES_WEIGHTS = 1 << 42  # large models take fewer tokens, so that minutes are enough
_LEAST_TOKENS = 4096
_PIXELS = IMAGES * 32 * 32  # of all images: large images are fewer
_LEAST = 2 * BATCHES  # images or sounds, if the work allows
_FEWEST = 4  # samples of a model that computes for long
_FRAMES = SOUNDS * SAMPLES[0]  # samples, or features of all channels, of all sounds
# Work that is about as long as coding the weights, in FLOPs: of any model, and of each weight; those of a large model
# have a share of it, half of the tokens, since products of large matrices take longer than their coding.
_WORK, _WORK_OF_WEIGHT, _OF_LARGE = 1 << 33, 1 << 20, 1 / 4
_LARGE = 1 << 19  # weights
_PASSES = 8  # as long as gradients, Hessians and the error of two files
_PASSES_OF_STATISTICS = 3 * STEPS
_TOGETHER = 1 << 19  # values of images that are changed together
_BYTES, _HESSIAN_BYTES = 12, 8  # of memory for a weight (float32, its copy and a batch), and for an entry of a Hessian


def calibrate_without_data(
    folder: Path, state: Mapping[str, Tensor], *, device: torch.device | None = None, progress: Progress | None = None
) -> tuple[CalibrationResult, dict[str, str]]:
    """Calibrate a model or a pipeline on made-up inputs, and return the parts of it that are not calibrated, and why.

    Args:
        folder: of a model of transformers or diffusers, or of a pipeline of diffusers with a folder for each part.
        state: its tensors, by their names on disk: "conv_in.weight", in a pipeline "unet/conv_in.weight".
        device: to compute on; None is the CPU.
        progress: called with (done, total) in batches of inputs, or in parts of a pipeline.
    """
    if not (folder / PIPELINE).is_file():
        return _calibrate(folder, state, device, progress), {}
    parts = sorted({name.partition("/")[0] for name in state if "/" in name})
    results: dict[str, CalibrationResult] = {}
    reasons: dict[str, str] = {}
    for index, part in enumerate(parts):
        update = None if progress is None else partial(_report_part, progress, index, len(parts))
        try:
            results[part] = _calibrate(folder / part, _of_part(state, part), device, update)
        except Exception as error:  # of the model's own code, too
            reasons[part] = reason_of(error)
    if not results:
        listed = "; ".join(f"{part}: {reason}" for part, reason in reasons.items())
        raise ConfigError(f"no part of the pipeline can be calibrated: {listed or 'it has none'}")
    held_out = {part: result.held_out for part, result in results.items() if result.held_out is not None}
    return CalibrationResult(
        dict(state),
        {f"{part}/{name}": item for part, result in results.items() for name, item in result.sensitivities.items()},
        HeldOutParts(held_out) if held_out else None,
        synthetic=True,
        unreached=[f"{part}/{name}" for part, result in results.items() for name in result.unreached],
    ), reasons


def _of_part(state: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{part}/"): value for name, value in state.items() if name.startswith(f"{part}/")}


def _report_part(progress: Progress, index: int, parts: int, done: float, total: float | None) -> None:
    progress(index + done / total if total else index, parts)


def _calibrate(
    folder: Path, state: Mapping[str, Tensor], device: torch.device | None, progress: Progress | None
) -> CalibrationResult:
    """Calibrate the model of a folder in float32."""
    _require_memory(state)
    model = load_model(folder, len(state)).to(device)
    module = NamesOnDisk(model, state, folder)
    batches = made_up_inputs(model, torch.Generator().manual_seed(0))
    used, images = len(batches) - held_out_batches(len(batches)), batches[0].keywords.get("pixel_values")
    changed = len(batches) if images is not None and norms_with_statistics(model) else 0

    def report(done: int) -> None:
        if progress is not None:
            progress(done, changed + used)

    step = max(1, _TOGETHER // images.numel()) if images is not None and len(batches[0].keywords) == 1 else 1
    for start in range(0, changed, step):
        batches[start : start + step] = _with_statistics(module, batches[start : start + step])
        report(min(start + step, changed))
    # the names on disk have no module of their own, so nothing is known of the order of units
    result = calibrate_on_inputs(
        module, batches, made_up=True, symmetries=False, progress=lambda done: report(changed + done)
    )
    if result.held_out is not None:
        result.held_out({})  # what cannot be measured fails before the file is begun, not after
    return replace(result, state=dict(state))  # in the dtypes of the file


@dataclass(frozen=True, slots=True)
class HeldOutParts:
    """Mean of the distances of the parts of a pipeline; tensors have the name of their part before theirs."""

    parts: Mapping[str, Measure]

    def __call__(self, state: Mapping[str, Tensor]) -> float:
        """Return the mean distance."""
        distances = [held_out(_of_part(state, part)) for part, held_out in self.parts.items()]
        return sum(distances) / len(distances)


def reason_of(error: Exception) -> str:
    """Return one line about an error, with its class if the code of a model raised it."""
    if isinstance(error, BirdieError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def made_up_inputs(model: Any, generator: torch.Generator) -> list[Inputs]:
    """Return batches of the inputs that a model of transformers or diffusers takes, on its device.

    Args:
        model: of a library whose models have a configuration.
    """
    weights = sum(weight.numel() for weight in model.parameters())
    passes = _PASSES + (_PASSES_OF_STATISTICS if norms_with_statistics(model) else 0)
    limit = (_WORK + _WORK_OF_WEIGHT * (min(weights, _LARGE) + _OF_LARGE * max(0, weights - _LARGE))) / passes
    attempt, work = first_accepted(model, generator, TRIED * limit / BATCHES)
    example = arguments(model, attempt, TRIED, generator)
    most = min((_most(name, value, weights) for name, value in example.items()), default=IMAGES)
    affordable = int((limit - BATCHES * work.calls) / max(work.samples / TRIED, 1))
    count = max(_FEWEST, min(most, affordable))
    parts = min(BATCHES, count)
    sizes = [count // parts + (index < count % parts) for index in range(parts)]
    return [Inputs(keywords=arguments(model, attempt, size, generator)) for size in sizes]


def _most(name: str, value: Any, weights: int) -> int:
    """Return how many samples of an argument are enough, as its size and the size of the model tell."""
    if not isinstance(value, Tensor):
        return max(IMAGES, _LEAST)
    size = max(1, value[0].numel())
    if not value.is_floating_point():
        return max(BATCHES, min(TOKENS, max(_LEAST_TOKENS, _TOKENS_TIMES_WEIGHTS // max(1, weights))) // size)
    if name.startswith("input_"):  # sounds, or their features
        return min(SOUNDS, max(_LEAST, _FRAMES // size))
    return min(IMAGES, max(_LEAST, 3 * _PIXELS // size))


def _with_statistics(module: NamesOnDisk, batches: Sequence[Inputs]) -> list[Inputs]:
    """Return batches with other images; several batches, which take fewer calls together, have images alone."""

    def call(images: Tensor) -> Inputs:
        return Inputs(keywords={**batches[0].keywords, "pixel_values": images})

    parts = [inputs.keywords["pixel_values"] for inputs in batches]
    images = with_statistics(module, torch.cat(parts), call)
    ends = list(itertools.accumulate(len(part) for part in parts[:-1]))
    return [call(part) for part in images.tensor_split(ends)]


def _require_memory(state: Mapping[str, Tensor]) -> None:
    """Raise ConfigError if a calibration of the complete model needs more than the memory that is free."""
    free = free_memory()
    needed = sum(tensor.numel() for tensor in state.values()) * _BYTES
    columns = [
        tensor[0].numel() for tensor in state.values() if is_matrix(tensor) and not is_stack(tuple(tensor.shape))
    ]
    needed += sum(count * min(count, MAX_COLUMNS) for count in columns) * _HESSIAN_BYTES
    if free is not None and needed > free:
        raise ConfigError(
            f"the complete model needs {needed / 1e9:.1f} GB of memory, of {free / 1e9:.1f} GB that are free; "
            "--calibrate TEXT --offload needs less"
        )
