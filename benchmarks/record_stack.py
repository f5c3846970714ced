"""The challenge's record stack, written plainly: what birdie's curve has to beat, and shares no code with.

    float weights ─► Hessians from training data ─► GPTQ on SDClip grids ─► int8 symbols ─► lrzip -z, one stream a group
                     step of a matrix's row = a · σ(row), of an embedding's row = b · σ(row), kept in fp16

Full-Hessian GPTQ (Frantar et al. 2022) as the records run it: Hessians of the float model, activation order, 1 %
damping, blocks of 128 columns; SDClip from PR 1394, with the embedding quantized by the Hessian of what the tied head
reads.
Everything else is fp16. Groups, orders and streams as in PR 1855: one stream for each kind of matrix, by rows or by
columns, whichever is smaller, or all in one where that is smaller still; the rest under brotli. All of it is counted.
"""

import json
import math
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import streams
from benchmarks.rivals import LRZIP, run
from benchmarks.streams import ORDERS, Order
from birdie.entropy.general_purpose import COMPRESSORS

DAMPING, BLOCK = 0.01, 128
TOP = 32_767  # symbols are not clipped: what is beyond int8 is escaped
SMALL = 1024  # elements below which a tensor stays fp16; the records, whose matrices are larger, say 65,536
Hessians = Mapping[str, Tensor]
Batch = tuple[Tensor, Tensor]
Layout = list[tuple[list[str], Order]]


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix on its grid: `symbols` int8 or int16 (rows, columns), `scales` fp16 (rows,), and the shape it had."""

    symbols: Tensor
    scales: Tensor
    shape: tuple[int, ...]

    def dequantized(self) -> Tensor:
        """What a decoder makes of it, float32."""
        return (self.symbols.float() * self.scales.float()[:, None]).reshape(self.shape)


def is_embedding(name: str) -> bool:
    """Whether the finer step factor applies."""
    return "emb" in name or "head" in name


def quantized_names(state: Mapping[str, Tensor]) -> list[str]:
    """The tensors that are quantized; the rest is fp16."""
    return [name for name, weight in state.items() if weight.ndim >= 2 and weight.numel() >= SMALL]


@torch.no_grad()
def hessians(module: nn.Module, batches: Iterable[Batch], names: Sequence[str]) -> dict[str, Tensor]:
    """Σ x xᵀ (columns, columns) float64 of the inputs of each named weight, over all batches.

    A tied embedding is read as the output head, so its inputs are what the head's product is given.
    """
    wanted = {f"{owner}.weight": layer for owner, layer in module.named_modules() if f"{owner}.weight" in names}
    sums: dict[str, Tensor] = {}

    def gather(name: str, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1]).float()
        found = (rows.T @ rows).double()
        sums[name] = sums[name] + found if name in sums else found

    def hook(name: str, layer: nn.Module) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def linear(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            gather(name, given[0])

        def convolution(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            assert isinstance(layer, nn.Conv2d)
            assert not isinstance(layer.padding, str)
            patches = F.unfold(given[0], layer.kernel_size, layer.dilation, layer.padding, layer.stride)
            gather(name, patches.transpose(1, 2))

        return convolution if isinstance(layer, nn.Conv2d) else linear

    handles = [
        layer.register_forward_pre_hook(hook(name, layer))
        for name, layer in wanted.items()
        if isinstance(layer, nn.Linear | nn.Conv2d)
    ]
    tied = [name for name, layer in wanted.items() if isinstance(layer, nn.Embedding)]
    original = F.linear

    def watching(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        for name in tied:
            if weight.data_ptr() == wanted[name].weight.data_ptr():
                gather(name, x)
        return original(x, weight, bias)

    try:
        with mock.patch.object(F, "linear", watching):
            for inputs, _ in batches:
                module(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return sums


def factor(hessian: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(order, dead, U): columns by falling diagonal, those dead, the upper Cholesky factor of H⁻¹ so ordered."""
    h = hessian.clone()
    diagonal = h.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1
    order = diagonal.argsort(descending=True, stable=True)
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h[order][:, order]))
    return order, dead, torch.linalg.cholesky(inverse, upper=True)


def gptq(weight: Tensor, step: float, factored: tuple[Tensor, Tensor, Tensor]) -> Quantized:
    """Quantize column by column, each column's error taken over by those that follow.

    Args:
        weight: of any shape, rows first.
        step: of the grid, in standard deviations of the row.
        factored: of the Hessian of its inputs, by `factor`.
    """
    order, dead, upper = factored
    rows = weight.detach().double().reshape(weight.shape[0], -1).clone()
    scales = (step * rows.std(1, correction=0)).half()
    scales[scales == 0] = 1
    s = scales.double()
    rows[:, dead] = 0
    rows = rows[:, order]
    symbols = torch.zeros_like(rows)
    width = rows.shape[1]
    for start in range(0, width, BLOCK):
        end = min(start + BLOCK, width)
        errors = torch.zeros(len(rows), end - start, dtype=torch.float64)
        for j in range(start, end):
            symbols[:, j] = (rows[:, j] / s).round().clamp(-TOP, TOP)
            error = (rows[:, j] - symbols[:, j] * s) / upper[j, j]
            rows[:, j:end] -= error[:, None] * upper[j, j:end]
            errors[:, j - start] = error
        rows[:, end:] -= errors @ upper[start:end, end:]
    out = torch.empty_like(symbols)
    out[:, order] = symbols
    fits = int(out.abs().max()) <= 127
    return Quantized(out.to(torch.int8 if fits else torch.int16), scales, tuple(weight.shape))


def group_of(name: str) -> str:
    """The kind of matrix: its name without the layer."""
    return re.sub(r"\d+(\.\d+)?\.", "", name)


def entropy_bytes(parts: Iterable[Quantized]) -> float:
    """Order-0 entropy of each matrix in bytes: follows what lrzip makes of them closely, a thousand times faster."""
    total = 0.0
    for part in parts:
        counts = torch.unique(part.symbols, return_counts=True)[1].double()
        total += float(counts.sum() * counts.sum().log2() - (counts * counts.log2()).sum()) / 8
    return total


def layout_of(parts: Mapping[str, Quantized]) -> Layout:
    """Which matrices share a stream and in what order: by kind, by rows or by columns, or all in one if smaller."""
    groups: dict[str, list[str]] = {}
    for name in parts:
        groups.setdefault(group_of(name), []).append(name)
    apart = [_ordered(parts, names) for names in groups.values()]
    whole = _ordered(parts, list(parts))
    best = apart if sum(size for size, _ in apart) <= whole[0] else [whole]
    return [group for _, group in best]


def _ordered(parts: Mapping[str, Quantized], names: list[str]) -> tuple[int, tuple[list[str], Order]]:
    """(bytes of the stream, (names, order)) in the smaller order."""
    return min((len(lrzip(_joined(parts, names, order))), (names, order)) for order in ORDERS)


def pack(parts: Mapping[str, Quantized], rest: Mapping[str, Tensor], layout: Layout) -> bytes:
    """The file: quantized matrices in the streams of `layout`, scales and all other tensors in fp16.

    The number of pieces and their lengths in 32 bits each; brotli of names, shapes and orders as JSON followed by
    scales and the rest; the streams.
    """
    head = {
        "groups": [
            [order, [[name, list(parts[name].shape), int(parts[name].symbols.dtype is torch.int16)] for name in names]]
            for names, order in layout
        ],
        "rest": [[name, list(weight.shape)] for name, weight in rest.items()],
    }
    halves = [parts[name].scales for names, _ in layout for name in names] + [
        w.half().reshape(-1) for w in rest.values()
    ]
    text = json.dumps(head, separators=(",", ":")).encode()
    plain = struct.pack("<I", len(text)) + text + torch.cat(halves).numpy().tobytes()
    pieces = [COMPRESSORS["brotli"].compress(plain), *(lrzip(_joined(parts, names, order)) for names, order in layout)]
    return struct.pack(f"<{len(pieces) + 1}I", len(pieces), *map(len, pieces)) + b"".join(pieces)


def unpack(data: bytes) -> dict[str, Tensor]:
    """Undo `pack`, in float32."""
    (count,) = struct.unpack_from("<I", data)
    lengths = struct.unpack_from(f"<{count}I", data, 4)
    at, pieces = 4 + 4 * count, []
    for length in lengths:
        pieces.append(data[at : at + length])
        at += length
    plain = COMPRESSORS["brotli"].decompress(pieces[0], 1 << 30)
    (length,) = struct.unpack_from("<I", plain)
    head = json.loads(plain[4 : 4 + length])
    halves = np.frombuffer(plain, "<f2", offset=4 + length).copy()
    state: dict[str, Tensor] = {}

    def take(number: int) -> Tensor:
        nonlocal halves
        taken, halves = halves[:number], halves[number:]
        return torch.from_numpy(taken)

    for (order, members), stream in zip(head["groups"], pieces[1:], strict=True):
        dtypes = {name: torch.int16 if wide else torch.int8 for name, _, wide in members}
        like = {name: torch.empty(shape[0], math.prod(shape[1:]), dtype=dtypes[name]) for name, shape, _ in members}
        symbols = streams.part(lrunzip(stream), like, order)
        for name, shape, _ in members:
            state[name] = Quantized(symbols[name], take(shape[0]), tuple(shape)).dequantized()
    for name, shape in head["rest"]:
        state[name] = take(math.prod(shape)).float().reshape(shape)
    return state


def _joined(parts: Mapping[str, Quantized], names: Sequence[str], order: Order) -> bytes:
    """The symbols of matrices one after another, each by rows or by columns, as bytes."""
    return streams.join({name: parts[name].symbols for name in names}, order)


@lru_cache(maxsize=256)
def lrzip(data: bytes) -> bytes:
    """`data` under lrzip -z -L 9."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "x").write_bytes(data)
        run([LRZIP.name, *LRZIP.encode], Path(folder))
        return (Path(folder) / LRZIP.archive).read_bytes()


@lru_cache(maxsize=256)
def lrunzip(stream: bytes) -> bytes:
    """Undo `lrzip`."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / LRZIP.archive).write_bytes(stream)
        run([LRZIP.name, *LRZIP.decode], Path(folder))
        return (Path(folder) / LRZIP.output).read_bytes()


def version() -> str:
    """Of lrzip."""
    said = subprocess.run([LRZIP.name, "-V"], capture_output=True, text=True, timeout=60, check=False)
    return f"lrzip {(said.stdout + said.stderr).split()[-1]}"
