"""Kernels compiled ahead: write and read small files of every kind, train spectral weights, score with an n-gram bias.

An image of a container or an installation for many users runs this once (`birdie kernels`), and processes compile
nothing afterwards. A test compares the kernels with those that files of every kind call.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from birdie.artifact.load import load
from birdie.artifact.save import save
from birdie.compress.registry import words
from birdie.compress.tensors import FORMATS
from birdie.entropy import warm_up
from birdie.entropy.hints import Effort
from birdie.gpt.score import ngram
from birdie.gpt.score.mode import NgramSettings
from birdie.small.spectral.wrap import quantization_loss, spectral


def compile_kernels() -> None:
    """Compile every kernel that the cache does not have. The random numbers of the caller are not touched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        warm_up.compile_kernels()
        with TemporaryDirectory() as folder:
            for state, settings in _files():
                path = Path(folder) / "warm_up.birdie"
                save(state, path, **settings)
                load(path)
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8))
        spectral(model)
        quantization_loss(model).backward()  # type: ignore[no-untyped-call]
        _score()


def _files() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield models and settings of `save`."""
    floats = [dtype for dtype in FORMATS if dtype.is_floating_point and dtype.itemsize > 1]
    weights = {str(dtype): torch.randn(48, 40).to(dtype) for dtype in floats}
    for effort in get_args(Effort):
        for word in words().values():
            for spec in word.kernels:
                yield weights, {"scheme": [("*", spec)], "coder": effort}  # a rule counts for small tensors, too
        yield _every_dtype(), {"lossless": True, "coder": effort}
        model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(16 * 36, 24), nn.ReLU(), nn.Linear(24, 10))
        images, labels = torch.randn(8, 3, 8, 8), torch.randint(10, (8,))
        batches = [(images[i : i + 2], labels[i : i + 2]) for i in range(0, 8, 2)]
        for bits in (2.5, 4, 7):  # coarse and fine grids have searches of their own
            yield model, {"bits": bits, "coder": effort}
            yield {"a": torch.randn(128, 64), "b": torch.randn(96, 64)}, {"bits": bits, "coder": effort}
        yield model, {"bits": 4, "coder": effort, "calibration": (model, batches, _loss)}


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _every_dtype() -> dict[str, Tensor]:
    """Return words of each dtype: any, few different ones, and far apart."""
    generator = np.random.default_rng(0)
    state = {}
    for dtype in FORMATS:
        if dtype.is_complex:  # coded as its real and imaginary parts
            continue
        high = 2 if dtype is torch.bool else 256
        words = torch.from_numpy(generator.integers(0, high, 4096 * dtype.itemsize, np.uint8))
        state[f"{dtype}"] = words.view(dtype).reshape(64, 64)
        state[f"{dtype} few"] = words[: 4 * dtype.itemsize].view(dtype).repeat(512).reshape(64, 32)
    small = torch.from_numpy(generator.integers(0, 9, 4096)).reshape(64, 64)
    for dtype in (torch.int16, torch.int32, torch.int64):
        state[f"{dtype} small"] = small.to(dtype)
        state[f"{dtype} rising"] = torch.arange(4096, dtype=dtype).reshape(64, 64)
    return state


def _score() -> None:
    """Score random tokens with an n-gram bias, at once and token by token."""
    tokens = np.random.default_rng(0).integers(0, 4, 65).astype(np.uint16)
    settings = NgramSettings(enabled=True, table_bits=8)
    hints = ngram.hints(tokens[:-1], settings)
    nats = np.ones(64, np.float32)
    ngram.apply_bias(nats, -nats, hints, tokens[1:].astype(np.int64), settings)
    tables = ngram.HintTables(settings)
    for token in tokens.tolist():
        tables.reveal(token)
