"""Compressed weights on a GPU: checks "decoding on the device" and "compressed in device memory" of `benchmarks.gpu`.

    tensor   one matrix at about four bits: decoded and encoded by the CPU and by the kernels, beside a copy, and
             multiplied by few tokens, beside the product in bfloat16
    model    a Llama-like model of about a billion random weights: in bfloat16, decoded layer by layer, and multiplied
             without being decoded to memory

Rows are those of `benchmarks.gpu_checks`. EntroPack (PyPI `entropack`, the peer that decodes E8 lattices with rANS on a
GPU) is measured beside it where it is installed.
"""

import os
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.processes import median_seconds, take_turns
from birdie.artifact import container
from birdie.artifact.container import Reader
from birdie.artifact.device_file import load_compressed, products_of
from birdie.artifact.file import File
from birdie.artifact.loading import load
from birdie.artifact.saving import save
from birdie.compress import registry
from birdie.compress.device import device_encoding as encoding
from birdie.compress.device.compressed import CompressedTensor, compressed_linear, require_sound, works
from birdie.compress.schemes.trellis import Trellis
from birdie.compress.trellis import lanes
from birdie.entropy import coder
from birdie.entropy.hints import Hints
from birdie.system.device import synchronize

Row = dict[str, Any]


def line(what: str, figure: float | None = None, unit: str | None = None, **more: Any) -> Row:
    """Return a row of a check; `more` has target, met and note, as many as apply."""
    return {"what": what, "figure": figure, "unit": unit, **more}


SCHEME = Trellis(32, 0.26, along=False)  # about four bits a weight, with paths down the columns
NO_KERNELS = "skipped: no CUDA, or no kernels for it"


@dataclass(frozen=True, slots=True)
class Size:
    """WeightDensity of a Llama-like model."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int


BILLION = Size(16, 2048, 8192, 32, 8, 32_000)
TINY = Size(2, 64, 192, 4, 2, 100)


class Block(nn.Module):
    """Attention and a gated MLP, both behind RMSNorm, without positions, which cost neither weights nor time."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, kv_width = size.heads, size.width // size.heads * size.kv_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.q, self.o = (nn.Linear(size.width, size.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(size.width, kv_width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, D) of (B, T, D)."""
        hidden = self.attention_norm(x)
        q, k, v = (part(hidden).unflatten(-1, (-1, x.shape[-1] // self.heads)) for part in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        hidden = self.mlp_norm(x)
        y: Tensor = x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return y


class Llama(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.RMSNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of the last position, (B, V), of token ids (B, T)."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x[:, -1]))
        return logits


def model_of(size: Size) -> Llama:
    """Return the model in bfloat16, without memory."""
    with torch.device("meta"):
        return Llama(size).bfloat16()


def saved(path: Path, size: Size, device: torch.device) -> int:
    """Write a file of the model with random weights, of which one block is coded and the others repeat its bytes.

    Returns:
        Number of weights.
    """
    shapes = {name: weight.shape for name, weight in model_of(replace(size, layers=1)).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    state = {
        name: (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(device, torch.bfloat16)
        if len(shape) == 2
        else torch.ones(shape, dtype=torch.bfloat16)
        for name, shape in shapes.items()
    }
    save(state, path, scheme=SCHEME, effort="fast")
    with Reader(path) as reader:
        names = [part for name in reader.names for part in dict.fromkeys((name, *reader.blocks(name)))]
        entries, metadata = [reader.read(name) for name in names], bytes(reader.metadata)
    copies = {
        entry.name.replace("blocks.0.", f"blocks.{layer}."): entry for entry in entries for layer in range(size.layers)
    }
    container.write(path, [replace(entry, name=name) for name, entry in copies.items()], metadata)
    return sum(weight.numel() for weight in model_of(size).state_dict().values())


def tensor(device: torch.device, *, small: bool) -> Iterator[Row]:
    """Decode and encode one matrix on the CPU and on the device, in turns with a copy in bfloat16."""
    rows, columns = (2048, 64) if small else (8192, 7168)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    count, turns = weight.numel(), 3 if small else 9
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "matrix.birdie"
        save({"weight": weight}, path, scheme=SCHEME, effort="fast")
        with File(path, registry.decoder) as file:
            products = products_of(file, "weight")
            assert products is not None
            compressed = CompressedTensor.of((rows, columns), weight.dtype, products)
            assert compressed is not None
            yield line("bits a weight", 8 * path.stat().st_size / count, "bits")
            decode = partial(file.decode, "weight", os.cpu_count())
            expected = decode()
            yield speed("decode, CPU", count, median_seconds(decode, turns=turns), f"{os.cpu_count()} threads")
    yield from encoded_on_cpu(weight)
    if not works(device):
        yield line("decode and encode on the device", note=NO_KERNELS)
        return
    compressed = compressed.to(device)
    out, sound = compressed.decode()
    require_sound(sound)
    same = torch.equal(out.cpu().view(torch.int16), expected.view(torch.int16))
    target = torch.empty_like(out)
    ways = {"decode": lambda: compressed.decode(out, checked=False), "copy": lambda: target.copy_(out)}
    seconds = {name: statistics.median(times) for name, times in take_turns(ways, turns=turns, device=device).items()}
    note = f"{(compressed.nbytes + out.nbytes) / seconds['decode'] / 1e9:.0f} GB/s read and written"
    goal = 150e9 * seconds["decode"] <= count
    yield speed("decode, device", count, seconds["decode"], note) | {"target": "≥ 150 G weights/s", "met": goal}
    yield line("decoded weights", target="bits of the CPU", met=same)
    note = (
        f"{2 * out.nbytes / seconds['copy'] / 1e9:.0f} GB/s; decoding takes {seconds['decode'] / seconds['copy']:.1f} ×"
    )
    yield speed("copy in bfloat16, device", count, seconds["copy"], note)
    share = compressed.nbytes / out.nbytes
    yield line("device memory", share, "of bfloat16", target="≤ 0.3", met=share <= 0.3)
    yield from products_on_device(compressed, out, turns)
    yield from encoded_on_device(weight.to(device), turns)
    yield from entropack(weight.to(device), turns)


def products_on_device(compressed: CompressedTensor, weight: Tensor, turns: int) -> Iterator[Row]:
    """Multiply by few tokens, beside the product in bfloat16."""
    for tokens in (1, 8):
        x = torch.randn(tokens, weight.shape[1], device=weight.device, dtype=weight.dtype)
        ways = {"compressed": lambda x=x: compressed_linear(x, compressed), "plain": lambda x=x: F.linear(x, weight)}
        times = take_turns(ways, turns=turns, device=weight.device)
        seconds, plain = (statistics.median(times[name]) for name in ways)
        exact = F.linear(x.double(), weight.double())
        error = float((compressed_linear(x.float(), compressed) - exact).norm() / exact.norm())
        note = f"{plain / seconds:.2f} × the speed of bfloat16, {compressed.nbytes / seconds / 1e9:.0f} GB/s read"
        target = {"target": "error ≤ 1e-6", "met": error <= 1e-6}
        yield line(f"product, batch of {tokens}", 1e6 * seconds, "µs", note=f"{note}; error {error:.1g}", **target)


def speed(what: str, count: int, seconds: float, note: str | None = None) -> Row:
    """Return the row of a speed."""
    return line(what, count / seconds / 1e9, "G weights/s", note=note)


def factors_of(
    weight: Tensor,
) -> tuple[lanes.WeightDensity, lanes.FeedbackFactors, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return what a search of 32 states takes at four bits."""
    matrix = weight.float().cpu().numpy()
    shape = lanes.WeightDensity.of(matrix)
    scale = np.full(len(matrix), 0.26 * matrix.std(), np.float32)
    return shape, lanes.FeedbackFactors.of(shape, scale, np.ones(matrix.shape[1], np.float32), 32, 0.05), scale


def encoded_on_cpu(weight: Tensor) -> Iterator[Row]:
    """Quantize and code some rows of a matrix on one thread of the CPU."""
    some = weight[:1024]
    shape, _, scale = factors_of(some)
    ones = np.ones(some.shape[1], np.float32)
    matrix = some.float().numpy()
    numbers = lanes.quantize(matrix, shape, scale, ones, 32, 0.05)
    search = median_seconds(lambda: lanes.quantize(matrix, shape, scale, ones, 32, 0.05), turns=1)
    code = median_seconds(lambda: coder.encode(numbers, Hints(states=32), "fast"), turns=1)
    yield speed("encode, CPU", some.numel(), search + code, f"one thread; search {search / (search + code):.0%} of it")


def encoded_on_device(weight: Tensor, turns: int) -> Iterator[Row]:
    """Quantize a matrix on the device."""
    _, factors, _ = factors_of(weight)
    seconds = median_seconds(lambda: encoding.quantize(weight, factors), weight.device, turns)
    yield speed("encode, device: search of 32 states", weight.numel(), seconds)


def entropack(weight: Tensor, turns: int) -> Iterator[Row]:
    """Measure EntroPack at four bits on the same matrix."""
    try:
        import entropack as peer  # type: ignore[import-not-found]
    except ImportError:
        yield line("EntroPack", note="not installed (pip install entropack)")
        return
    config = peer.EntroPackLossyConfig(target_bpp=4.0)
    try:
        packed = peer.compress(weight, config)
        decode = median_seconds(lambda: peer.decompress(packed, config), weight.device, turns)
        encode = median_seconds(lambda: peer.compress(weight, config), weight.device, 1)
        note = f"{packed.actual_bpp:.3f} bits a weight"
    except Exception as error:  # another version, or a driver that it does not know
        yield line("EntroPack", note=" ".join(f"{type(error).__name__}: {error}".split())[:200])
        return
    yield speed("EntroPack, decode", weight.numel(), decode, note)
    yield speed("EntroPack, encode", weight.numel(), encode)


class CompressedLinear(nn.Module):
    """A linear layer whose weight stays compressed."""

    def __init__(self, weight: CompressedTensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """Return (…, out) of (…, in)."""
        return compressed_linear(x, self.weight)


def model(device: torch.device, *, small: bool) -> Iterator[Row]:
    """Run a model from bfloat16, from weights that stay compressed, and from products that write no weights."""
    size, tokens, steps = (TINY, 16, 2) if small else (BILLION, 2048, 16)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.birdie"
        count = saved(path, size, device)
        bits = 8 * path.stat().st_size / count
        yield line("weights", count, note=f"{bits:.2f} bits a weight in the file")
        ways = ["bfloat16", "compressed", *(["compressed_linear"] if works(device) else [])]
        outputs: dict[str, list[Tensor]] = {}
        goals = []
        for way in ways:
            rows, outputs[way] = run(path, size, device, tokens, steps, way)
            if way == "bfloat16":
                goals = [0.9 * rows[0]["figure"], 100.0]
            elif works(device):
                for row, goal in zip(rows, goals, strict=False):
                    row |= {"target": f"≥ {goal:,.0f}", "met": row["figure"] >= goal}
            for row in rows:
                yield row | {"what": f"{way}: {row['what']}"}
            pairs = list(zip(outputs[way], outputs["bfloat16"], strict=True))
            if way == "compressed_linear":  # float32 sums, where bfloat16 is multiplied otherwise
                error = max(float((y.float() - x.float()).norm() / x.float().norm()) for y, x in pairs)
                yield line(f"{way}: outputs", error, "error", target="≤ 0.02", met=error <= 0.02)
            else:
                same = all(torch.equal(*pair) for pair in pairs)
                yield line(f"{way}: outputs", target="those of bfloat16", met=same)
    if not works(device):
        yield line("decoding on the device", note=NO_KERNELS)


def run(
    path: Path, size: Size, device: torch.device, tokens: int, steps: int, way: str
) -> tuple[list[Row], list[Tensor]]:
    """Load the model in one way, and return rows of memory and of tokens per second, and outputs."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    idle = torch.cuda.memory_allocated(device) if on_gpu else 0
    module = model_of(size)
    if way == "compressed_linear":
        weights = load_compressed(path, device)
        for name, part in list(module.named_modules()):
            if isinstance(part, nn.Linear):
                parent, _, key = name.rpartition(".")
                setattr(module.get_submodule(parent), key, CompressedLinear(weights[f"{name}.weight"]))
        del weights
    if way != "compressed":
        module.to_empty(device=device)
    load(path, into=module, device=device, lazy=way == "compressed", names=list(module.state_dict()))
    module.eval()
    ids = torch.randint(size.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    inputs = {f"{tokens:,} tokens at a time": ids, "one token at a time": ids[:, :1]}
    rows, outputs = [], []
    with torch.inference_mode():
        for what, batch in inputs.items():
            for _ in range(2):  # the first one compiles kernels, and waits until tensors are known to be sound
                output = module(batch)
            outputs.append(output.cpu())
            synchronize(device)
            seconds = median_seconds(lambda batch=batch: module(batch), device, steps)  # type: ignore[misc]
            rows.append(line(what, round(batch.numel() / seconds, 1), "tokens/s"))
    if on_gpu:
        peak = (torch.cuda.max_memory_allocated(device) - idle) / 1e6
        rows.append(line("peak memory", round(peak), "MB"))
    return rows, outputs
