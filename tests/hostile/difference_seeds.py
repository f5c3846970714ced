"""Small sound files of differences for the fuzzer: to a base that is given, inside a file, and links of a chain."""

import json
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import Tensor

from birdie.artifact.saving import save
from birdie.chain.chain_folder import Chain
from birdie.chain.checkpoint_series import series
from birdie.compress import row_blocks
from tests.hostile.seeds import CHUNK, Seed, written

_STEPS = 3


def differences() -> list[Seed]:
    """Differences to a base in all forms, of blocks, and between the tensors of one file."""
    source = torch.Generator().manual_seed(8)
    base = {"a": torch.randn(24, 20, generator=source), "b": torch.randn(30, generator=source).bfloat16()}
    base |= {"same": torch.arange(60.0).reshape(6, 10), "wrapped.c": torch.randn(8, 9, generator=source).half()}
    near = {name: tensor + 1e-3 * torch.randn(tensor.shape, generator=source) for name, tensor in base.items()}
    state = {name: near[name].to(tensor.dtype) for name, tensor in base.items()}
    state = {"a": state["a"], "b": state["b"], "c": state["wrapped.c"], "new": torch.ones(3), "same": base["same"]}
    settings: list[dict[str, Any]] = [{"lossless": True}, {"lossless": True, "effort": "fast"}, {"scheme": "int4"}]
    out = [replace(written(partial(save, state, workers=1, base=base, **how)), base=base) for how in settings]
    weights = {f"{i}.weight": torch.randn(64, 128, generator=source) / 10 for i in range(2)}
    average = {name: weight + 1e-3 * torch.randn(64, 128, generator=source) for name, weight in weights.items()}
    inside = {f"model.{n}": w for n, w in weights.items()} | {f"ema.{n}": w for n, w in average.items()}
    out.append(written(partial(save, inside, workers=1, lossless=True)))
    with mock.patch.object(row_blocks, "LARGE", 300), mock.patch.object(row_blocks, "_BLOCK", CHUNK):
        out.append(replace(written(partial(save, state, workers=1, base=base, lossless=True)), base=base))
    return out


def links() -> list[Seed]:
    """Each link of a chain of folders, beside the others."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _write_run(root / "run")
        [*Chain(root / "run.birdie", full_every=9).extend(series(root / "run"))]
        files = {path.name: path.read_bytes() for path in sorted((root / "run.birdie").iterdir())}
    return [
        Seed(data, {}, name=name, beside={other: files[other] for other in files if other != name})
        for name, data in files.items()
    ]


def _write_run(folder: Path) -> None:
    """Write the checkpoints of a run."""
    source = torch.Generator().manual_seed(9)
    state: dict[str, Tensor] = {"a": torch.randn(20, 16, generator=source), "b": torch.randn(30, generator=source)}
    for step in range(1, _STEPS + 1):
        state["a"] += 1e-4 * torch.randn(20, 16, generator=source)
        path = folder / f"step-{step}"
        path.mkdir(parents=True)
        save_file(state, path / "model.safetensors")
        (path / "state.json").write_text(json.dumps({"step": step}))
        (path / "tokens.txt").write_text("a\n" * 9)
