"""Files loaded by the kernels under Triton's interpreter, whose device is the CPU: prints one JSON object.

TRITON_INTERPRET=1 python -m tests.artifact.on_device_interpreted     # as test_device does
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import birdie
from birdie.artifact import container
from birdie.artifact import device_file as device
from birdie.artifact import loading as load_module
from birdie.artifact.container import Reader, Stream
from birdie.artifact.file import File
from birdie.compress import registry, row_blocks
from birdie.compress.device.compressed import Matrices, compressed_linear
from birdie.compress.schemes.trellis import Trellis
from birdie.entropy import coder, tiles
from birdie.entropy import trellis_states as trellis
from birdie.errors import ArtifactError
from tests.artifact.states import same_bits

CPU = torch.device("cpu")
Results = dict[str, dict[str, Any]]


class Net(nn.Module):
    """Layers that kernels decode, and some that they do not: a bias, a norm, a tied head, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 64)
        self.up, self.norm, self.down = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64, bias=False)
        for layer in (self.up, self.down):
            nn.init.normal_(layer.weight)
        self.head = nn.Linear(64, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.down(self.norm(self.up(self.embedding(ids)).relu())))
        return logits


@contextmanager
def in_tiles() -> Iterator[None]:
    """Code small tensors as if they were large."""
    with mock.patch.multiple(tiles, _LEAST=1, _MOST_SHARE=1), mock.patch.dict(coder._TRY_NUMBERS, fast=0):
        yield


@contextmanager
def in_blocks() -> Iterator[None]:
    """Encode the layers in two blocks of rows, each of one small chunk."""
    chunk = 32 * 64
    with mock.patch.object(trellis, "CHUNK", chunk), mock.patch.multiple(row_blocks, LARGE=chunk, _BLOCK=chunk):
        yield


def saved(folder: Path, **settings: Any) -> Path:
    torch.manual_seed(0)
    path = folder / "model.birdie"
    with in_tiles():
        birdie.save(Net(), path, workers=1, **{"effort": "fast"} | settings)
    return path


def on_cpu(load: Callable[[], Any]) -> Any:
    """Load as if the CPU were a GPU on which the kernel works; count its launches."""
    launches: list[Any] = []
    launch = Matrices.launch
    with (
        mock.patch.object(device, "works", return_value=True),
        mock.patch.object(device, "target_of", return_value=CPU),
        mock.patch.object(Matrices, "launch", lambda *args, **more: launches.append(0) or launch(*args, **more)),
    ):
        result = load()
    return result, len(launches)


def loaded(path: Path, **settings: Any) -> dict[str, Any]:
    state, by_kernels = on_cpu(lambda: birdie.load(path, **settings))
    expected = birdie.load(path, **settings)
    same = list(state) == list(expected) and all(same_bits(state[name], expected[name]) for name in expected)
    return {"same": same, "tied": state["head.weight"] is state["embedding.weight"], "kernels": by_kernels}


def filled(path: Path) -> dict[str, Any]:
    module, by_kernels = on_cpu(lambda: birdie.load(path, into=Net(), device="cpu", dtype=torch.bfloat16))
    expected = birdie.load(path, into=Net(), dtype=torch.bfloat16).state_dict()
    state = module.state_dict()
    return {"same": all(same_bits(state[name], expected[name]) for name in expected), "kernels": by_kernels}


def damaged(path: Path) -> dict[str, Any]:
    """Change a word of a tensor and let the checksum agree again."""
    with Reader(path) as reader:
        entries, metadata = [reader.read(name) for name in reader.names], reader.metadata
    index = next(i for i, entry in enumerate(entries) if entry.streams and entry.streams[0].coder == coder.TILES)
    payload = bytearray(entries[index].streams[0].payload)
    payload[-3] ^= 8
    streams = (Stream(coder.TILES, bytes(payload)), *entries[index].streams[1:])
    entries[index] = replace(entries[index], streams=streams)
    data: Any = container.to_bytes(entries, bytes(metadata))
    errors = []
    for load in (birdie.load, lambda data: on_cpu(lambda: birdie.load(data))):
        try:
            load(data)
        except ArtifactError as error:
            errors.append(entries[index].name in str(error))
    return {"same": errors == [True, True]}


def lazy(path: Path, **settings: Any) -> dict[str, Any]:
    """Run a lazily loaded module twice, and compare it with an eager one."""
    expected = birdie.load(path, into=Net()).eval()
    ids = torch.arange(12).view(3, 4)

    def outputs() -> list[Tensor]:
        module = birdie.load(path, into=Net(), lazy=True, device="cpu", **settings)
        with torch.no_grad():
            return [module(ids) for _ in range(2)]

    with (
        mock.patch.object(load_module, "works", return_value=True),
        mock.patch.object(load_module, "target_of", return_value=CPU),
    ):
        computed, by_kernels = on_cpu(outputs)
    return {"same": all(torch.equal(output, expected(ids)) for output in computed), "kernels": by_kernels}


def coders(path: Path) -> dict[str, Any]:
    with File(path, registry.decoder) as file:
        names = [name for names in device._groups(file) for name in names]
        return {"compressed": sorted(name for name in names if device.products_of(file, name) is not None)}


def products(path: Path) -> dict[str, Any]:
    """Multiply by the tensors of a file that stay compressed."""
    (weights, _), state = on_cpu(lambda: birdie.load_compressed(path)), birdie.load(path)
    x = torch.randn(2, 3, 64)
    close = [
        torch.allclose(compressed_linear(x, weight), x @ state[name].T, atol=1e-5) for name, weight in weights.items()
    ]
    return {"names": sorted(weights), "same": all(close)}


def main(folder: Path) -> Results:
    path = saved(folder, scheme="sigma:0.3")
    results = {"damaged": damaged(path)}
    with in_blocks():
        path = saved(folder, scheme="sigma:0.3")
        results["blocks"] = loaded(path)
        results["blocks, lazy"] = lazy(path)
    path = saved(folder, scheme=Trellis(8, along=False))
    results["state"] = loaded(path) | coders(path)
    results["into a module, cast"] = filled(path)
    results["products"] = products(path)
    results["lazy, all cached"] = lazy(path, cache_bytes=1 << 20)
    path = saved(folder, scheme=Trellis(8, along=False), effort="max")
    with mock.patch.object(device, "_LEAST_RECODED", 64 * 64), File(path, registry.decoder) as file:
        assert not any(map(device.may_decode, map(file.entry, file.names)))
        results["context mixing"] = coders(path) | lazy(path)
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        results = main(Path(name))
    sys.stdout.write(json.dumps(results))
