"""Files loaded by the kernels under Triton's interpreter, whose device is the CPU: prints one JSON object.

TRITON_INTERPRET=1 python -m tests.artifact.on_device_interpreted     # as test_device does
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import birdie
from birdie.artifact import container, device
from birdie.artifact.container import Reader, Stream
from birdie.artifact.load import decoders_of
from birdie.compress.device.compressed import CompressedTensor
from birdie.compress.schemes.trellis import Trellis
from birdie.entropy import coder, static
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
        self.head = nn.Linear(64, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.down(self.norm(self.up(self.embedding(ids)).relu())))
        return logits


def in_lanes() -> Any:
    """Code small tensors as if they were large."""
    return mock.patch.multiple(static, _LEAST_IN_LANES=1 << 10, _BYTES_PER_LANE=1, _STEPS=4, _MOST_LANES=16)


def saved(folder: Path, **settings: Any) -> Path:
    torch.manual_seed(0)
    path = folder / "model.birdie"
    with in_lanes():
        birdie.save(Net(), path, workers=1, coder="fast", **settings)
    return path


def on_cpu(load: Callable[[], Any]) -> Any:
    """Load as if the CPU were a GPU on which the kernels work; fail if they decode nothing."""
    decoded: list[Any] = []
    decode = CompressedTensor.decode
    with (
        mock.patch.object(device, "works", return_value=True),
        mock.patch.object(device, "target_of", return_value=CPU),
        mock.patch.object(CompressedTensor, "decode", lambda *args: decoded.append(0) or decode(*args)),
    ):
        result = load()
    return result, len(decoded)


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
    index = next(i for i, entry in enumerate(entries) if entry.streams and entry.streams[0].coder == coder.LANES)
    payload = bytearray(entries[index].streams[0].payload)
    payload[-3] ^= 8
    streams = (Stream(coder.LANES, bytes(payload)), *entries[index].streams[1:])
    entries[index] = replace(entries[index], streams=streams)
    data: Any = container.to_bytes(entries, bytes(metadata))
    errors = []
    for load in (birdie.load, lambda data: on_cpu(lambda: birdie.load(data))):
        try:
            load(data)
        except ArtifactError as error:
            errors.append(entries[index].name in str(error))
    return {"same": errors == [True, True]}


def coders(path: Path) -> dict[str, Any]:
    with Reader(path) as reader:
        stored = [name for name in reader.names if reader.entry(name).target is None]
        known = {name: device.compressed_entry(reader, name, decoders_of(reader)) for name in stored}
    return {"compressed": sorted(name for name, tensor in known.items() if tensor is not None)}


def main(folder: Path) -> Results:
    results: Results = {}
    for name, settings in (("int4", {"scheme": "int4"}), ("trellis", {"scheme": Trellis(8, along=False)})):
        path = saved(folder, **settings)
        results[name] = loaded(path) | coders(path)
        results[f"{name}, cast"] = loaded(path, dtype=torch.float16)
        results[f"{name}, into a module"] = filled(path)
        results[f"{name}, damaged"] = damaged(path)
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        results = main(Path(name))
    sys.stdout.write(json.dumps(results))
