"""The challenge's record stack, reimplemented: the compression of the record submissions, as birdie's main rival.

    float weights ─► Hessians from training data ─► GPTQ on SDClip grids ─► int8 symbols ─► lrzip -z per group
                     step of a matrix row = a · σ(row), of an embedding row = b · σ(row), stored in fp16

Full-Hessian GPTQ (Frantar et al. 2022) as in the records: Hessians of the float model, activation order, 1 % damping,
blocks of 128 columns; SDClip from parameter-golf#1394, with the embedding quantized by the Hessian of the tied head's
inputs. Everything else is fp16. Groups, orders and streams as in parameter-golf#1855: one stream for each kind of
matrix, by rows or by columns, or all matrices in one stream, whichever is smallest; the rest is compressed with brotli.
All bytes count. The code shares nothing with birdie's own quantization. (Numbers are pull requests of
github.com/openai/parameter-golf.) The two factors a and b are tuned for a target KL:

    sweep of a alone, sweep of b alone ─► KL(a, b) ≈ KL(a) + KL(b) ─► for each ratio of the two the least-entropy pair
        ─► measured KL of the pairs around it ─► the best pair ─► slightly finer and coarser files, decoded and measured

Sweeps and pairs are compared by entropy and by the quality of the dequantized symbols on a quarter of the data that the
result is measured on, which favors the record stack. The search is deterministic: its grids are fixed.
"""

import json
import math
import re
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.processes import run_command
from benchmarks.rivals import COMPRESSORS, LRZIP, ORDERS, NotInstalledError, Order, join, separate
from benchmarks.subjects import Batch, Quality, Subject

DAMPING, BLOCK = 0.01, 128
TOP = 32_767  # symbols are not clipped to int8: larger ones are escaped
SMALL = 1024  # tensors with fewer elements stay fp16; the records, whose matrices are larger, use 65,536
Hessians = Mapping[str, Tensor]
Layout = list[tuple[list[str], Order]]
MATRIX_STEPS = (0.15, 0.22, 0.32, 0.46, 0.65, 0.95)
EMBEDDING_STEPS = (0.015, 0.025, 0.04, 0.065, 0.1, 0.16)
NEIGHBORS = (0.8, 1.0, 1.25)  # factors of the best embedding step; the matrix step is computed for each
SAMPLE = 4  # the search uses the first quarter of the held-out batches
SPREAD = 1.06  # files are written with steps finer and coarser by this factor, to interpolate between them


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantized matrix: `symbols` int8 or int16 (rows, columns), `scales` fp16 (rows,), and the original shape."""

    symbols: Tensor
    scales: Tensor
    shape: tuple[int, ...]

    def dequantized(self) -> Tensor:
        """Return the decoded tensor, float32."""
        return (self.symbols.float() * self.scales.float()[:, None]).reshape(self.shape)


def is_embedding(name: str) -> bool:
    """Return whether a tensor is an embedding or head, to which the finer factor b applies."""
    return "emb" in name or "head" in name


def quantized_names(state: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that are quantized; the others are fp16."""
    return [name for name, weight in state.items() if weight.ndim >= 2 and weight.numel() >= SMALL]


@torch.no_grad()
def hessians(module: nn.Module, batches: Iterable[Batch], names: Sequence[str]) -> dict[str, Tensor]:
    """Return Σ x xᵀ (columns, columns) float64 of the inputs of each named weight, over all batches.

    The inputs of a tied embedding are those of the output head, which multiplies with it. The columns of one that is
    only looked up do not correlate: it is rounded.
    """
    layers = {f"{owner}.weight": layer for owner, layer in module.named_modules() if f"{owner}.weight" in names}
    sums: dict[str, Tensor] = {}

    def gather(name: str, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1]).float()
        product = (rows.T @ rows).double()
        sums[name] = sums[name] + product if name in sums else product

    def hook(name: str, layer: nn.Module) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def linear(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            gather(name, inputs[0])

        def convolution(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            assert isinstance(layer, nn.Conv2d)
            assert not isinstance(layer.padding, str)
            patches = F.unfold(inputs[0], layer.kernel_size, layer.dilation, layer.padding, layer.stride)
            gather(name, patches.transpose(1, 2))

        return convolution if isinstance(layer, nn.Conv2d) else linear

    handles = [
        layer.register_forward_pre_hook(hook(name, layer))
        for name, layer in layers.items()
        if isinstance(layer, nn.Linear | nn.Conv2d)
    ]
    tied = [name for name, layer in layers.items() if isinstance(layer, nn.Embedding)]
    original = F.linear

    def observed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        for name in tied:
            if weight.data_ptr() == layers[name].weight.data_ptr():
                gather(name, x)
        return original(x, weight, bias)

    try:
        with mock.patch.object(F, "linear", observed_linear):
            for inputs, _ in batches:
                module(inputs)
    finally:
        for handle in handles:
            handle.remove()
    looked_up = {name: layers[name].weight.shape[1] for name in tied if name not in sums}
    return sums | {name: torch.eye(columns, dtype=torch.float64) for name, columns in looked_up.items()}


def factor(hessian: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (order, dead, U): columns by falling diagonal, mask of unused ones, upper Cholesky factor of H⁻¹."""
    h = hessian.clone()
    diagonal = h.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1
    order = diagonal.argsort(descending=True, stable=True)
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h[order][:, order]))
    return order, dead, torch.linalg.cholesky(inverse, upper=True)


def gptq(weight: Tensor, step: float, factored: tuple[Tensor, Tensor, Tensor]) -> Quantized:
    """Quantize column by column; the following columns compensate for the error of each column.

    Args:
        weight: tensor of any shape, rows first.
        step: grid step in standard deviations of the row.
        factored: `factor` of the Hessian of its inputs.
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
    """Return the kind of a matrix: its name without the layer index."""
    return re.sub(r"\d+(\.\d+)?\.", "", name)


def entropy_bytes(parts: Iterable[Quantized]) -> float:
    """Return the order-0 entropy of all matrices in bytes: close to lrzip's size, and a thousand times faster."""
    total = 0.0
    for part in parts:
        counts = torch.unique(part.symbols, return_counts=True)[1].double()
        total += float(counts.sum() * counts.sum().log2() - (counts * counts.log2()).sum()) / 8
    return total


def layout_of(parts: Mapping[str, Quantized]) -> Layout:
    """Return the matrices and the scan order of each stream: one stream per kind, or one for all if that is smaller."""
    groups: dict[str, list[str]] = {}
    for name in parts:
        groups.setdefault(group_of(name), []).append(name)
    separate = [_best_order(parts, names) for names in groups.values()]
    joint = _best_order(parts, list(parts))
    best = separate if sum(size for size, _ in separate) <= joint[0] else [joint]
    return [group for _, group in best]


def _best_order(parts: Mapping[str, Quantized], names: list[str]) -> tuple[int, tuple[list[str], Order]]:
    """Return (bytes of the stream, (names, order)) of the smaller scan order."""
    return min((len(lrzip(_joined(parts, names, order))), (names, order)) for order in ORDERS)


def pack(parts: Mapping[str, Quantized], rest: Mapping[str, Tensor], layout: Layout) -> bytes:
    """Return the file: quantized matrices in the streams of `layout`, scales and all other tensors in fp16.

    The file has the number of pieces and their lengths, 32 bits each; then, under brotli, names, shapes and orders as
    JSON, scales and the other tensors; then the streams.
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
    """Invert `pack`, in float32."""
    (count,) = struct.unpack_from("<I", data)
    lengths = struct.unpack_from(f"<{count}I", data, 4)
    offset, pieces = 4 + 4 * count, []
    for length in lengths:
        pieces.append(data[offset : offset + length])
        offset += length
    plain = COMPRESSORS["brotli"].decompress(pieces[0], 1 << 30)
    (length,) = struct.unpack_from("<I", plain)
    head = json.loads(plain[4 : 4 + length])
    halves = np.frombuffer(plain, "<f2", offset=4 + length).copy()
    state: dict[str, Tensor] = {}

    def take(number: int) -> Tensor:
        nonlocal halves
        values, halves = halves[:number], halves[number:]
        return torch.from_numpy(values)

    for (order, members), stream in zip(head["groups"], pieces[1:], strict=True):
        dtypes = {name: torch.int16 if wide else torch.int8 for name, _, wide in members}
        like = {name: torch.empty(shape[0], math.prod(shape[1:]), dtype=dtypes[name]) for name, shape, _ in members}
        symbols = separate(lrunzip(stream), like, order)
        for name, shape, _ in members:
            state[name] = Quantized(symbols[name], take(shape[0]), tuple(shape)).dequantized()
    for name, shape in head["rest"]:
        state[name] = take(math.prod(shape)).float().reshape(shape)
    return state


def _joined(parts: Mapping[str, Quantized], names: Sequence[str], order: Order) -> bytes:
    """Return the symbols of the matrices one after another, each by rows or by columns, as bytes."""
    return join({name: parts[name].symbols for name in names}, order)


@lru_cache(maxsize=256)
def lrzip(data: bytes) -> bytes:
    """Return `data` compressed with lrzip -z -L 9."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "x").write_bytes(data)
        run_command([LRZIP.name, *LRZIP.encode], Path(folder))
        return (Path(folder) / LRZIP.archive).read_bytes()


@lru_cache(maxsize=256)
def lrunzip(stream: bytes) -> bytes:
    """Return the data that `lrzip` compressed to `stream`."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / LRZIP.archive).write_bytes(stream)
        run_command([LRZIP.name, *LRZIP.decode], Path(folder))
        return (Path(folder) / LRZIP.output).read_bytes()


def version() -> str:
    """Return the version of lrzip.

    Raises:
        NotInstalledError: it is not installed.
    """
    if shutil.which(LRZIP.name) is None:
        raise NotInstalledError(f"not installed: apt install {LRZIP.name}")
    process = subprocess.run([LRZIP.name, "-V"], capture_output=True, text=True, timeout=60, check=False)
    return f"lrzip {(process.stdout + process.stderr).split()[-1]}"


@dataclass(frozen=True, slots=True)
class Sweep:
    """Sweep of one factor alone: steps, with the KL in nats and the entropy in bytes of each."""

    steps: Sequence[float]
    kl: Sequence[float]
    bytes: Sequence[float]

    def kl_at(self, step: float) -> float:
        """Return the KL at `step`, linear in logarithms, extrapolated beyond the ends."""
        return math.exp(_line(math.log(step), np.log(self.steps), np.log(self.kl)))

    def bytes_at(self, step: float) -> float:
        """Return the bytes at `step`, linear in its logarithm."""
        return _line(math.log(step), np.log(self.steps), np.asarray(self.bytes))

    def step_for(self, kl: float) -> float:
        """Return the step whose KL is `kl`."""
        return math.exp(_line(math.log(kl), np.log(self.kl), np.log(self.steps)))


def _line(x: float, xs: NDArray[np.float64], ys: NDArray[np.float64]) -> float:
    index = int(np.clip(np.searchsorted(xs, x) - 1, 0, len(xs) - 2))
    slope = (ys[index + 1] - ys[index]) / (xs[index + 1] - xs[index])
    return float(ys[index] + slope * (x - xs[index]))


class Tuner:
    """Search over pairs of step factors for one subject, with the Hessians of its calibration data."""

    def __init__(self, subject: Subject, hessians: Mapping[str, Tensor], notify: Callable[[str], None]) -> None:
        self.subject, self.notify = subject, notify
        self.sample = replace(
            subject, held_out=subject.held_out[: -(-len(subject.held_out) // SAMPLE)], logits={}, bits=None
        )
        # a parameter that multiplies no input of its own, such as gains of skips, stays fp16
        self.names = [name for name in quantized_names(subject.state) if name in hessians]
        self.factored = {name: factor(hessians[name]) for name in self.names}
        self.chosen: Layout | None = None
        self.cache: dict[tuple[str, float], Quantized] = {}

    @property
    def has_embeddings(self) -> bool:
        """True if the subject has embeddings, to which the second factor applies."""
        return any(map(is_embedding, self.names))

    def parts(self, a: float | None, b: float | None) -> dict[str, Quantized]:
        """Return the matrices quantized with factor `a` and the embeddings with `b`; None leaves that kind out."""
        steps = {name: b if is_embedding(name) else a for name in self.names}
        parts = {}
        for name, step in steps.items():
            if step is not None:
                if (name, step) not in self.cache:
                    self.cache[name, step] = gptq(self.subject.state[name], step, self.factored[name])
                parts[name] = self.cache[name, step]
        return parts

    def judge(self, a: float | None, b: float | None) -> tuple[float, float]:
        """Return (KL, entropy in bytes); a kind that is left out stays float and has no entropy."""
        parts = self.parts(a, b)
        state = {**self.subject.state, **{name: part.dequantized() for name, part in parts.items()}}
        return self.sample.measure(state).kl, entropy_bytes(parts.values())

    def layout(self, parts: Mapping[str, Quantized]) -> Layout:
        """Return the layout of the files, chosen for the first one: it codes everything four times."""
        if self.chosen is None:
            self.chosen = layout_of(parts)
        return self.chosen

    @cached_property
    def matrices(self) -> Sweep:
        """Sweep of the matrix factor `a`."""
        return self._sweep(MATRIX_STEPS, lambda step: self.judge(step, None))

    @cached_property
    def embeddings(self) -> Sweep:
        """Sweep of the embedding factor `b`."""
        return self._sweep(EMBEDDING_STEPS, lambda step: self.judge(None, step))

    def _sweep(self, steps: Sequence[float], judge: Callable[[float], tuple[float, float]]) -> Sweep:
        points = []
        for step in steps:
            points.append(judge(step))
            self.notify(f"record stack: step {step} σ, KL {points[-1][0]:.5f}, entropy {points[-1][1]:,.0f} bytes")
        return Sweep(steps, [kl for kl, _ in points], [size for _, size in points])

    def tune(self, target: float) -> tuple[float, float | None]:
        """Return the pair of factors with the fewest bytes at KL `target`."""
        if not self.has_embeddings:
            return self.matrices.step_for(target), None
        shares = np.linspace(0.02, 0.98, 97)  # of the KL that embeddings cause
        pairs = [
            (self.matrices.step_for((1 - share) * target), self.embeddings.step_for(share * target)) for share in shares
        ]
        _, middle = min(pairs, key=lambda pair: self.matrices.bytes_at(pair[0]) + self.embeddings.bytes_at(pair[1]))
        tried = []
        for factor in NEIGHBORS:
            b = round(middle * factor, 4)
            left = target - self.embeddings.kl_at(b)
            if left <= 0:
                continue
            a = round(self.matrices.step_for(left), 4)
            kl, size = self.judge(a, b)
            # Doubling the KL saves half a bit per weight: correct the size to the target KL.
            size += math.log2(kl / target) / 2 / 8 * sum(self.subject.state[name].numel() for name in self.names)
            tried.append((size, a, b))
            self.notify(f"record stack: {a} σ, embedding {b} σ: KL {kl:.5f}, {size:,.0f} bytes of entropy at {target}")
        _, a, b = min(tried)
        kl, _ = self.judge(a, b)
        scale = (target / kl) ** 0.5
        return round(a * scale, 4), round(b * scale, 4)


@dataclass(frozen=True, slots=True)
class Measured:
    """A file of the record stack: its factors, its bytes, the quality of its decoded tensors, and the encoding time."""

    a: float
    b: float | None
    bytes: int
    quality: Quality
    encode_s: float


def measure_files(tuner: Tuner, target: float) -> Iterator[Measured]:
    """Yield files around the best pair of factors for `target`, decoded and measured."""
    a, b = tuner.tune(target)
    rest = {name: weight for name, weight in tuner.subject.state.items() if name not in tuner.names}
    for spread in (1 / SPREAD, SPREAD):
        start = time.perf_counter()
        factors = round(a * spread, 4), None if b is None else round(b * spread, 4)
        parts = tuner.parts(*factors)
        data = pack(parts, rest, tuner.layout(parts))
        seconds = time.perf_counter() - start
        file = Measured(*factors, len(data), tuner.subject.measure(unpack(data)), seconds)
        tuner.notify(f"record stack: {factors} σ: {file.bytes:,} bytes, KL {file.quality.kl:.5f}")
        yield file
