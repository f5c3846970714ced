"""Lossy coders of weights that birdie is compared with: each turns a state dict into a file and back.

The record stack is in `record_stack`. A coder that is not installed raises `NotInstalledError`.
"""

import io
import json
import struct
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.rivals import COMPRESSORS, HERE, run_in_environment
from birdie.golf import int8_zlib as baseline

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


def naive(bits: int) -> LossyCoder:
    """Return a coder of what many do by hand: integers up to the maximum of each channel, zstd -22.

    Scales, vectors and tensors below 1,024 elements are float16. The file has a header of names and shapes; of one
    stream and one stream for each of header, integers, scales and the rest, it takes the smaller. Four bits and fewer
    may be packed two to a byte.
    """
    top, packer = 2 ** (bits - 1) - 1, COMPRESSORS["zstd"]

    def quantized(weight: Tensor) -> bool:
        return weight.ndim >= 2 and weight.numel() >= 1024 and weight.is_floating_point()

    def encode(state: State) -> bytes:
        header = json.dumps([[name, list(weight.shape), str(weight.dtype)[6:]] for name, weight in state.items()])
        symbols, scales, rest = [], [], []
        for weight in state.values():
            if not quantized(weight):
                rest.append((weight.half() if weight.is_floating_point() else weight).numpy().tobytes())
                continue
            rows = weight.float().flatten(1)
            scale = (rows.abs().amax(1) / top).half()
            scale[scale == 0] = 1
            symbols.append((rows / scale.float()[:, None]).round().clamp(-top, top).to(torch.int8).reshape(-1).numpy())
            scales.append(scale.numpy().tobytes())
        numbers = np.concatenate(symbols) if symbols else np.zeros(0, np.int8)
        padded = np.append(numbers, np.zeros(len(numbers) % 2, np.int8)).view(np.uint8) & 15
        tail = [b"".join(scales), b"".join(rest)]
        forms = [numbers.tobytes()] + ([(padded[::2] | padded[1::2] << 4).tobytes()] if bits <= 4 else [])
        files = []
        for packed, form in enumerate(forms):
            parts = [header.encode(), form, *tail]
            lengths = [len(part) for part in parts]
            one = packer.compress(b"".join(parts))
            several = [packer.compress(part) for part in parts]
            files.append(struct.pack("<BB4I", packed, 1, *lengths) + one)
            files.append(struct.pack("<BB4I", packed, 4, *(len(part) for part in several)) + b"".join(several))
        return min(files, key=len)

    def decode(data: bytes) -> dict[str, Tensor]:
        packed, streams, *lengths = struct.unpack_from("<BB4I", data)
        body = data[struct.calcsize("<BB4I") :]
        if streams == 1:
            body = unpacked(body)
        parts = []
        for length in lengths:
            parts.append(body[:length] if streams == 1 else unpacked(body[:length]))
            body = body[length:]
        numbers = np.frombuffer(parts[1], np.int8)
        if packed:
            nibbles = np.stack([numbers.view(np.uint8) & 15, numbers.view(np.uint8) >> 4], 1).reshape(-1)
            numbers = (nibbles ^ 8).astype(np.int8) - 8
        scales, rest = np.frombuffer(parts[2], np.float16), parts[3]
        state: dict[str, Tensor] = {}
        for name, shape, kind in json.loads(parts[0]):
            dtype = getattr(torch, kind)
            empty = torch.empty(shape, dtype=dtype)
            if not quantized(empty):
                stored = torch.float16 if empty.is_floating_point() else dtype
                size = empty.numel() * stored.itemsize
                values = (
                    torch.frombuffer(bytearray(rest[:size]), dtype=stored) if size else torch.empty(0, dtype=stored)
                )
                state[name], rest = values.reshape(shape).to(dtype), rest[size:]
                continue
            rows = empty.flatten(1).shape
            scale, scales = scales[: rows[0]].astype(np.float32), scales[rows[0] :]
            values = torch.from_numpy(numbers[: empty.numel()].reshape(rows) * scale[:, None])
            state[name], numbers = values.reshape(shape).to(dtype), numbers[empty.numel() :]
        return state

    def unpacked(data: bytes) -> bytes:
        return packer.decompress(data, LIMIT)

    return LossyCoder(f"int{bits} per channel + {packer.name}", packer.version, encode, decode)


def challenge_int8() -> LossyCoder:
    """Return the challenge's own export (birdie.golf.int8_zlib): tensors up to 65,536 elements stay fp16."""
    return LossyCoder(
        "int8 + zlib (the challenge's)",
        f"zlib {zlib.ZLIB_RUNTIME_VERSION}",
        lambda state: baseline.pack(state).blob,
        lambda data: baseline.unpack(data, LIMIT),
    )


def nncodec(qp: int) -> LossyCoder:
    """Return NNCodec with its trellis at one step size; separate processes encode and decode."""

    def run(*arguments: str | Path) -> None:
        run_in_environment([str(HERE / "rival_worker.py"), *map(str, arguments)], "NNCodec")

    def encode(state: State) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            np.savez(
                work / "in.npz", allow_pickle=False, **{name: weight.float().numpy() for name, weight in state.items()}
            )
            run("encode", work / "in.npz", work / "file", str(qp))
            return (work / "file").read_bytes()

    def decode(data: bytes) -> dict[str, Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            (work / "file").write_bytes(data)
            run("decode", work / "file", work / "out.npz")
            with np.load(work / "out.npz") as archive:
                return {name: torch.from_numpy(archive[name]) for name in archive.files}

    code = "from importlib import metadata; print(metadata.version('nncodec'))"
    return LossyCoder(f"NNCodec qp {qp}", run_in_environment(["-c", code], "NNCodec").strip(), encode, decode)
