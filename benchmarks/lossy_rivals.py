"""Lossy coders of weights that birdie is compared with: each turns a state dict into a file and back.

The record stack is in `record_stack`, its tuning in `record_search`. A coder that is not installed raises
`NotInstalledError`.
"""

import io
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.rivals import HERE, run_in_environment
from birdie.artifact import int8_zlib as baseline
from birdie.entropy.general_purpose import COMPRESSORS

State = Mapping[str, Tensor]
LIMIT = 1 << 30
TRELLIS_QPS = (-38, -32, -26)


@dataclass(frozen=True, slots=True)
class LossyCoder:
    """One setting of one coder.

    Attributes:
        scheme: name in the rows.
        version: version of the compressor.
        encode: float tensors → file.
        decode: file → all tensors.
    """

    scheme: str
    version: str
    encode: Callable[[State], bytes]
    decode: Callable[[bytes], dict[str, Tensor]]


def row_maximum(bits: int, compressor: str) -> LossyCoder:
    """Return a coder with per-row grids up to the row's maximum; scales and small tensors in fp16; torch.save."""
    top = 2 ** (bits - 1) - 1
    packer = COMPRESSORS[compressor]

    def encode(state: State) -> bytes:
        content: dict[str, dict[str, Tensor]] = {"symbols": {}, "scales": {}, "rest": {}}
        for name, weight in state.items():
            if weight.ndim < 2 or weight.numel() < 1024:
                content["rest"][name] = weight.half() if weight.is_floating_point() else weight
                continue
            rows = weight.float().flatten(1)
            scales = (rows.abs().amax(1) / top).half()
            scales[scales == 0] = 1
            symbols = (rows / scales.float()[:, None]).round().clamp(-top, top)
            content["symbols"][name], content["scales"][name] = symbols.to(torch.int8).view_as(weight), scales
        buffer = io.BytesIO()
        torch.save(content, buffer)
        return packer.compress(buffer.getvalue())

    def decode(data: bytes) -> dict[str, Tensor]:
        content = torch.load(io.BytesIO(packer.decompress(data, LIMIT)), weights_only=True)
        state = {
            name: weight.float() if weight.dtype is torch.float16 else weight
            for name, weight in content["rest"].items()
        }
        for name, symbols in content["symbols"].items():
            scales = content["scales"][name].float()
            state[name] = (symbols.flatten(1).float() * scales[:, None]).view_as(symbols)
        return state

    return LossyCoder(f"int{bits} row maximum + torch.save + {packer.name}", packer.version, encode, decode)


def challenge_int8() -> LossyCoder:
    """Return the challenge's own export (birdie.artifact.int8_zlib): tensors up to 65,536 elements stay fp16."""
    return LossyCoder(
        "int8 + zlib (the challenge's)",
        f"zlib {zlib.ZLIB_RUNTIME_VERSION}",
        lambda state: baseline.pack(state).blob,
        lambda data: baseline.unpack(data, LIMIT),
    )


def nncodec(qp: int) -> LossyCoder:
    """Return NNCodec with its trellis at one step size; separate processes encode and decode."""

    def encode(state: State) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            np.savez(
                work / "in.npz", allow_pickle=False, **{name: weight.float().numpy() for name, weight in state.items()}
            )
            _worker("encode", work / "in.npz", work / "stream", str(qp))
            return (work / "stream").read_bytes()

    def decode(data: bytes) -> dict[str, Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            (work / "stream").write_bytes(data)
            _worker("decode", work / "stream", work / "out.npz")
            with np.load(work / "out.npz") as archive:
                return {name: torch.from_numpy(archive[name]) for name in archive.files}

    return LossyCoder(f"NNCodec qp {qp}", _nncodec_version(), encode, decode)


def _worker(*arguments: str | Path) -> None:
    run_in_environment([str(HERE / "lossy_worker.py"), *map(str, arguments)], "NNCodec")


def _nncodec_version() -> str:
    code = "from importlib import metadata; print(metadata.version('nncodec'))"
    return run_in_environment(["-c", code], "NNCodec").strip()
