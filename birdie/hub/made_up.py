"""Calibration of a Hugging Face folder without data: made-up inputs of the kind that the model takes.

    main_input_name of the class ──► random tokens, noise images, features or sounds ──► CalibrationResult

See `birdie.compress.calibration.synthetic` for what made-up inputs are worth.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from birdie.compress.calibration.result import CalibrationResult, held_out_batches
from birdie.compress.calibration.sensitivity import MAX_COLUMNS
from birdie.compress.calibration.synthetic import (
    BATCHES,
    IMAGES,
    LENGTH,
    SAMPLES,
    SOUNDS,
    TOKENS,
    Inputs,
    calibrate_on_inputs,
    noise_images,
    noise_sounds,
    with_statistics,
)
from birdie.compress.small_tensors import is_matrix
from birdie.compress.stacks import is_stack
from birdie.errors import ConfigError
from birdie.hub.calibration import LENGTHS
from birdie.hub.loading import load_part, require_transformers
from birdie.hub.names_on_disk import NamesOnDisk
from birdie.runtime.callbacks import Progress

_WORK = 1 << 42  # weights times tokens: large models take fewer tokens, so that minutes are enough
_LEAST_TOKENS = 4096
_PIXELS = IMAGES * 32 * 32  # of all images: large images are fewer
_LEAST = 2 * BATCHES  # images or sounds
_FRAMES = SOUNDS * SAMPLES[0]  # samples, or features of all channels, of all sounds
_DECODED = 64  # tokens that the decoder of an encoder-decoder takes
_BYTES, _HESSIAN_BYTES = 12, 8  # of memory for a weight (float32, its copy and a batch), and for an entry of a Hessian


def calibrate_on_made_up_inputs(
    folder: Path,
    state: Mapping[str, Tensor],
    *,
    device: torch.device | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> CalibrationResult:
    """Calibrate the model of a folder in float32, on inputs that are made up.

    Args:
        folder: with configuration and weights.
        state: its tensors, by their names on disk.
        device: to compute on; None is the CPU.
        seed: of the inputs.
        progress: called with (done, total) in batches of inputs.

    Raises:
        ConfigError: transformers cannot load the model, inputs of its kind cannot be made up, or it is too large for
            the memory of this machine.
        WeightsError: the model's parameters are not the tensors on disk.
    """
    require_transformers()
    _require_memory(state)
    config = load_part(folder, "AutoConfig", "configuration")
    names = getattr(config, "architectures", None) or [""]
    if not hasattr(import_module("transformers"), str(names[0])):
        raise ConfigError(f"transformers has no class {str(names[0])!r}, which {folder / 'config.json'} names")
    model = load_part(folder, str(names[0]), "model", dtype=torch.float32).eval().to(device)
    module = NamesOnDisk(model, state, folder)
    generator = torch.Generator().manual_seed(seed)
    batches = made_up_inputs(model, generator)
    if model.main_input_name == "pixel_values":
        batches = [
            Inputs(keywords={"pixel_values": with_statistics(module, *one.keywords.values())}) for one in batches
        ]
    total = len(batches) - held_out_batches(len(batches))

    def report(done: int) -> None:
        if progress is not None:
            progress(done, total)

    # the names on disk have no module of their own, so nothing is known of the order of units
    result = calibrate_on_inputs(module, batches, made_up=True, symmetries=False, seed=seed, progress=report)
    if result.held_out is not None:
        result.held_out({})  # what cannot be measured fails before the file is begun, not after
    return replace(result, state=dict(state))  # in the dtypes of the file


def made_up_inputs(model: Any, generator: torch.Generator) -> list[Inputs]:
    """Return batches of the inputs that a model of transformers takes, on its device.

    Args:
        model: of transformers.
        generator: of the inputs.

    Raises:
        ConfigError: nothing is known of such inputs.
    """
    kind, config = str(model.main_input_name), model.config
    weights = sum(weight.numel() for weight in model.parameters())
    tokens = min(TOKENS, max(_LEAST_TOKENS, _WORK // max(1, weights)))
    text = config.get_text_config(decoder=True) if config.is_encoder_decoder else config.get_text_config()
    keywords: dict[str, Tensor] = {}
    if kind == "input_ids":
        length = min([LENGTH, *(value for name in LENGTHS if isinstance(value := getattr(text, name, None), int))])
        count = max(BATCHES, tokens // length)
        keywords[kind] = _tokens(text, (count, length), generator)
    elif kind == "pixel_values":
        size = _image_size(config)
        count = min(IMAGES, max(_LEAST, _PIXELS // (size[0] * size[1])))
        keywords[kind] = noise_images(int(getattr(config, "num_channels", 3)), count, generator, size)
    elif kind == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        channels, length = int(config.num_mel_bins), 2 * int(config.max_source_positions)
        count = min(SOUNDS, max(_LEAST, _FRAMES // (channels * length)))
        keywords[kind] = noise_sounds(channels, length, count, generator)
    elif kind == "input_values":
        sounds = noise_sounds(1, SAMPLES[0], SOUNDS, generator)[:, 0]
        keywords[kind] = sounds / sounds.std(1, keepdim=True)
    else:
        raise ConfigError(f"inputs of {type(model).__name__}, {kind}, cannot be made up")
    if config.is_encoder_decoder:
        keywords["decoder_input_ids"] = _tokens(text, (len(keywords[kind]), _DECODED), generator)
    parts = {name: tensor.to(model.device).tensor_split(BATCHES) for name, tensor in keywords.items()}
    return [Inputs(keywords={name: part[index] for name, part in parts.items()}) for index in range(BATCHES)]


def _tokens(config: Any, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(0, int(config.vocab_size), shape, generator=generator, device="cpu")


def _image_size(config: Any) -> tuple[int, int]:
    size = getattr(config, "image_size", None)
    if isinstance(size, Sequence) and len(size) == 2:
        return int(size[0]), int(size[1])
    return (int(size), int(size)) if isinstance(size, int) else (224, 224)


def _require_memory(state: Mapping[str, Tensor]) -> None:
    """Raise ConfigError if a calibration of the complete model needs more than the memory that is free."""
    free = _free_memory()
    needed = sum(tensor.numel() for tensor in state.values()) * _BYTES
    columns = [
        tensor[0].numel() for tensor in state.values() if is_matrix(tensor) and not is_stack(tuple(tensor.shape))
    ]
    needed += sum(count * min(count, MAX_COLUMNS) for count in columns) * _HESSIAN_BYTES
    if free is not None and needed > free:
        raise ConfigError(
            f"the complete model needs {needed / 1e9:.1f} GB of memory, of {free / 1e9:.1f} GB that are free; "
            "--calibrate TEXT --blockwise needs less"
        )


def _free_memory() -> int | None:
    """Return the bytes of memory that a process may still take, None where the system does not tell."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
