"""Inputs made up for an ONNX model, by the types and sizes that its graph declares for them.

images of 1 or 3 channels ─► noise whose amplitude falls with frequency     integers ─► random, small
long rows of numbers ──────► noise like sound                               booleans ─► true
other numbers ─────────────► normal noise

A size that is left open is tried at several values, the same for all inputs, until the model runs.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.compress.calibration.synthetic import noise_images, noise_sounds
from birdie.errors import ConfigError

Array = NDArray[Any]
_OPEN = (64, 224, 32, 128, 16, 320, 1, 512)  # values of sizes that are open, beyond the first axis
_LONG = 1 << 10  # elements of a row from which numbers are taken for sound
_INTEGERS = (1000, 100, 2)  # random integers are below, the first that the model takes
_TYPES = {"tensor(float16)": np.float16, "tensor(double)": np.float64, "tensor(int32)": np.int32}


def made_up(session: Any, count: int) -> list[Mapping[str, Array]]:
    """Return inputs of so many samples that a session runs on.

    Raises:
        ConfigError: it runs on none of those that were tried.
    """
    reason = "it takes none of the sizes that were tried"
    for size, top in _attempts(session):
        seeds = range(count)
        samples: list[Mapping[str, Array]] = [
            _sample(session, size, top, torch.Generator().manual_seed(seed)) for seed in seeds
        ]
        try:
            session.run(None, samples[0])
        except Exception as error:  # classes of the runtime's errors are its own
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            continue
        return samples
    raise ConfigError(f"inputs cannot be made up ({reason}); give some: --calibrate inputs.npz")


def _attempts(session: Any) -> Iterator[tuple[int, int]]:
    """Yield (value of open sizes, integers are below) to try."""
    inputs = session.get_inputs()
    is_open = any(not isinstance(size, int) for one in inputs for size in one.shape[1:])
    has_integers = any("int" in one.type for one in inputs)
    for size in _OPEN if is_open else _OPEN[:1]:
        for top in _INTEGERS if has_integers else _INTEGERS[:1]:
            yield size, top


def _sample(session: Any, size: int, top: int, generator: torch.Generator) -> dict[str, Array]:
    return {one.name: _array(one.type, _shape(one.shape, size), top, generator) for one in session.get_inputs()}


def _shape(declared: list[Any], size: int) -> tuple[int, ...]:
    return tuple(
        one if isinstance(one, int) and one > 0 else (size if axis else 1) for axis, one in enumerate(declared)
    )


def _array(kind: str, shape: tuple[int, ...], top: int, generator: torch.Generator) -> Array:
    if kind == "tensor(bool)":
        return np.ones(shape, bool)
    if "int" in kind:
        values = torch.randint(0, top, shape, generator=generator).numpy()
        return np.asarray(values, _TYPES.get(kind, np.dtype(kind[len("tensor(") : -1])))
    if "float" not in kind and kind != "tensor(double)":
        raise ConfigError(f"inputs of {kind} cannot be made up; give some: --calibrate inputs.npz")
    return np.asarray(_numbers(shape, generator).numpy(), _TYPES.get(kind, np.float32))


def _numbers(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 4 and shape[1] in (1, 3) and min(shape[2:]) > 1:
        return noise_images(max(shape[1], 3), shape[0], generator, shape[2:])[:, : shape[1]]
    if shape and shape[-1] >= _LONG:
        return noise_sounds(1, shape[-1], int(np.prod(shape[:-1])), generator).reshape(shape)
    return torch.randn(shape, generator=generator)
