"""Estimate of a recipe before anything of it runs: parameters, bytes, FLOPs, memory, communication, time.

    recipe ─► model on the meta device ─► cost of a micro-step ─► load of a step on a rank ─► seconds on a machine
                     └─► parameters ─► Gaussian samples through scheme and coder ─► bytes of the artifact

Counts are exact, memory and bytes are derived, times need the speed of a machine: measured in half a second for this
CPU, three constants fitted to recorded runs for H100s. docs/recipes.md compares all of them with measurements.
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from birdie.compress.rate.assignment import match, parse_rules
from birdie.compress.rate.target import parse_size
from birdie.compress.registry import decoder
from birdie.compress.scheme import Scheme
from birdie.compress.schemes.grid import Grid
from birdie.compress.small_tensors import can_quantize
from birdie.entropy import coder as entropy
from birdie.gpt.model.config import GPTConfig
from birdie.gpt.model.cost import Cost, moved_bytes, training_cost
from birdie.gpt.model.gpt import GPT
from birdie.gpt.run.recipe import Recipe
from birdie.gpt.train.muon import WIDE
from birdie.gpt.train.optimizers import split_parameters
from birdie.gpt.train.parallel_muon import shard_banks
from birdie.gpt.train.plan import micro_steps, require_divisible
from birdie.gpt.train.settings import TrainSettings
from birdie.system.device import choose_dtype

PEAK = 989e12  # FLOP/s of an H100 SXM in bfloat16, dense; NVIDIA's data sheet
# Fractions of the kept bytes and of a float32 copy of the logits where torch.compile fuses and recomputes: least
# squares over seven recorded peaks (`python -m benchmarks.estimate --part memory`).
COMPILED_KEEPS, COMPILED_LOGITS = 0.80, 0.18
GAUSSIAN_ERROR = (-0.2, 0.04)  # relative error of the coded bytes for fifteen of sixteen small files (docs/recipes.md)
_SAMPLE = 1 << 16  # weights of the Gaussian sample that is coded
_ENTRY = 40  # bytes per tensor of a file besides its streams: name, shape, checksums


@dataclass(frozen=True, slots=True)
class Machine:
    """Speed of the devices of a machine.

    Attributes:
        name: for tables.
        devices: number of ranks.
        matrix_rate: FLOP/s of products with weights, on one device.
        attention_rate: FLOP/s of attention, its causal half counted.
        bandwidth: bytes/s of operations other than products.
        kernel_s: overhead of an operation, in seconds.
        micro_step_s: seconds of a micro-step that no count explains.
        link: bytes/s that a rank sends to its peers.
        compiled: whether torch.compile decides which activations are kept.
        dtype: of activations.
    """

    name: str
    devices: int
    matrix_rate: float
    attention_rate: float
    bandwidth: float = math.inf
    kernel_s: float = 0.0
    micro_step_s: float = 0.0
    link: float = math.inf
    compiled: bool = False
    dtype: torch.dtype = torch.float32


def h100(devices: int) -> Machine:
    """Return H100s with NVLink; `python -m benchmarks.estimate` fits the fractions of the peak and the constant."""
    return Machine(
        f"{devices} × H100",
        devices,
        matrix_rate=0.456 * PEAK,
        attention_rate=0.228 * PEAK,
        micro_step_s=19.8e-3,
        link=450e9,
        compiled=True,
        dtype=torch.bfloat16,
    )


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a training step on one rank.

    Attributes:
        cost: of one micro-step.
        micro_steps: of a step.
        update_flops: of Newton–Schulz, on the rank with the most matrices.
        reduced_bytes: reduced over ranks: gradients of the banks in the dtype of Newton–Schulz, of all else in float32.
            0 on one rank.
        sent_bytes: sent by each rank in a ring, for that reduction and for the gathered updates or sums.
    """

    cost: Cost
    micro_steps: int
    update_flops: int
    reduced_bytes: int
    sent_bytes: int

    @property
    def flops(self) -> int:
        """FLOPs per step on this rank, including the optimizer's matrix products."""
        return self.micro_steps * self.cost.flops + self.update_flops

    def seconds(self, machine: Machine) -> float:
        """Return the seconds of a step on `machine`."""
        cost = self.cost
        micro = cost.matrix_flops / machine.matrix_rate + cost.attention_flops / machine.attention_rate
        micro += cost.moved_bytes / machine.bandwidth + cost.kernels * machine.kernel_s + machine.micro_step_s
        return self.micro_steps * micro + self.update_flops / machine.matrix_rate + self.sent_bytes / machine.link


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device at the end of a forward pass, the peak of training.

    Attributes:
        weights: float32 masters.
        gradients: float32.
        optimizer: Muon's momentum of the rank's matrices, Adam's two moments of all else.
        buffers: of the gradients and updates of the banks that are sent, without padding.
        activations: kept for the backward pass, without the logits.
        logits: two float32 copies that are kept and, briefly, two of their gradients; less where they are fused.
        average: float32 copies for an average of the weights.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    logits: int
    average: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))


@dataclass(frozen=True, slots=True)
class Artifact:
    """Size of the file that export writes.

    Attributes:
        bytes: expected size; with a budget, just below it.
        low, high: range of the expected size.
        budget: of the recipe, or None.
        bits_per_weight: bytes over all parameters.
    """

    bytes: int
    low: int
    high: int
    budget: int | None
    bits_per_weight: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """Course of a run on a machine.

    Attributes:
        machine: the machine.
        step_s: seconds of a step without depth recurrence.
        recurrent_s: seconds of a step with depth recurrence, if the recipe has it.
        mean_s: seconds of a mean step of the run.
        steps: until the last step or the cap.
        tokens: trained on.
        seconds: of training, as the cap counts it.
        warmup_s: seconds of warm-up before it.
        flops: of all steps on all ranks.
        memory: on each device.
    """

    machine: Machine
    step_s: float
    recurrent_s: float
    mean_s: float
    steps: int
    tokens: int
    seconds: float
    warmup_s: float
    flops: float
    memory: Memory


def parameters(recipe: Recipe) -> int:
    """Return the number of parameters of the recipe's model, without building it."""
    return sum(groups(recipe.model).values())


def groups(config: GPTConfig) -> dict[str, int]:
    """Return the number of parameters of each optimizer group: matrices, embedding, head, scalars."""
    members = split_parameters(_meta(config))
    return {group: sum(p.numel() for p in parameters.values()) for group, parameters in members.items()}


def load(recipe: Recipe, devices: int, dtype: torch.dtype, *, depth_recurrence: bool) -> Load:
    """Return the load of a step of `recipe` on each of `devices` ranks."""
    train, config = recipe.train, recipe.model
    require_divisible(train, devices)
    members = split_parameters(_meta(config))
    counts = Counter(p.shape for p in members.get("matrices", {}).values())
    banks = sorted((torch.Size((n, *shape)) for shape, n in counts.items()), key=lambda bank: -bank.numel())
    shardings, steps = shard_banks(banks, devices), recipe.optimizer.muon_backend_steps
    flops = [newton_schulz_flops(bank[1:], steps) for bank in banks]
    update = max(
        sum(len(sharding.ranges[rank]) * cost for sharding, cost in zip(shardings, flops, strict=True))
        for rank in range(devices)
    )
    others = sum(p.numel() for group, of_group in members.items() if group != "matrices" for p in of_group.values())
    padded = sum(devices * s.padded * math.prod(bank[1:]) for s, bank in zip(shardings, banks, strict=True))
    reduced = 4 * (others + 1) + dtype.itemsize * padded
    reduced = reduced if devices > 1 else 0
    return Load(
        training_cost(
            config,
            micro_batch_tokens(train, devices) // train.train_seq_len,
            train.train_seq_len,
            dtype,
            depth_recurrence=depth_recurrence,
        ),
        micro_steps(train, devices, micro_batch_tokens(train, devices)),
        update,
        reduced,
        2 * (devices - 1) * reduced // devices,
    )


def micro_batch_tokens(train: TrainSettings, devices: int) -> int:
    """Return the tokens of a micro-batch: a gradient-accumulation chunk, unless the recipe sets a number."""
    tokens = 0 if isinstance(train.micro_batch_tokens, str) else train.micro_batch_tokens
    return min(tokens, train.train_batch_tokens // devices) or train.chunk_tokens


def newton_schulz_flops(shape: torch.Size, steps: int) -> int:
    """Return the FLOPs of Newton–Schulz on X (m, n), m ≤ n: 4m²n + 2m³ a step; for wide X 4m²n + 10m³ per two steps.

    The products are A = XXᵀ, A·A and B·X.
    """
    m, n = min(shape), max(shape)
    single, pairs = (steps % 2, steps // 2) if n >= WIDE * m else (steps, 0)
    return single * (4 * m * m * n + 2 * m**3) + pairs * (4 * m * m * n + 10 * m**3)


def memory(recipe: Recipe, of: Load, machine: Machine) -> Memory:
    """Return the memory that training needs on each device of `machine`."""
    counts = groups(recipe.model)
    weights, matrices = 4 * sum(counts.values()), counts.get("matrices", 0)
    copy = 4 * micro_batch_tokens(recipe.train, machine.devices) * recipe.model.vocab_size
    keeps, copies = (COMPILED_KEEPS, COMPILED_LOGITS) if machine.compiled else (1.0, 4.0)
    return Memory(
        weights=weights,
        gradients=weights,
        optimizer=4 * -(-matrices // machine.devices) + 2 * (weights - 4 * matrices),
        buffers=machine.dtype.itemsize * (-(-matrices // machine.devices) + 2 * matrices * (machine.devices > 1)),
        activations=round(keeps * max(0, of.cost.kept_bytes - 2 * copy)),
        logits=round(copies * copy),
        average=recipe.average.copies * weights,
    )


def schedule(recipe: Recipe, machine: Machine) -> Schedule:
    """Return the course of a run of `recipe` on `machine`."""
    train = recipe.training
    cap = math.inf if train.cap_ms is None else train.cap_ms / 1000
    recurs = recipe.model.num_loops > 0
    plain = load(recipe, machine.devices, machine.dtype, depth_recurrence=False)
    recurrent = load(recipe, machine.devices, machine.dtype, depth_recurrence=True) if recurs else plain
    step_s, recurrent_s = plain.seconds(machine), recurrent.seconds(machine)
    begin = recipe.model.enable_looping_at if recurs else 1.0
    # recurrence begins by steps or by time, whichever fraction grows faster
    plain_steps = min(_steps(begin * cap, step_s), math.ceil(begin * train.last_step))
    recurrent_steps = min(_steps(cap - plain_steps * step_s, recurrent_s), train.last_step - plain_steps)
    steps, seconds = plain_steps + recurrent_steps, plain_steps * step_s + recurrent_steps * recurrent_s
    return Schedule(
        machine=machine,
        step_s=step_s,
        recurrent_s=recurrent_s,
        mean_s=seconds / steps if steps else step_s,
        steps=steps,
        tokens=steps * train.train_batch_tokens,
        seconds=seconds,
        warmup_s=train.warmup_steps * (step_s + recurrent_s) / 2,
        flops=float(machine.devices * (plain_steps * plain.flops + recurrent_steps * recurrent.flops)),
        memory=memory(recipe, recurrent, machine),
    )


def on_this_cpu(recipe: Recipe, ranks: int) -> Schedule:
    """Return the course of a run of `recipe` on this CPU, if each rank has the speed of one rank alone."""
    return schedule(recipe, dataclasses.replace(this_cpu(recipe), devices=ranks))


def artifact(recipe: Recipe) -> Artifact:
    """Return the size of the file that export will write.

    A budget decides it. Otherwise rows of Gaussian weights are quantized by the scheme of each matrix and coded by the
    fast coder; they have no structure in which the maximal coder would find more. Tensors without a grid take 16 bits
    per value.
    """
    state = {name: p.detach() for name, p in _meta(recipe.model).named_parameters()}
    count = sum(weight.numel() for weight in state.values())
    if recipe.export.budget is not None:
        budget = parse_size(recipe.export.budget)
        size = min(budget, 4 * count)
        return Artifact(size, round(0.999 * size), size, budget, 8 * size / count)
    pinned = match(state, parse_rules(recipe.export.schemes())[1])
    bits: dict[tuple[Scheme, tuple[int, ...]], float] = {}
    coded = fixed = 0.0
    for name, weight in state.items():
        fixed += _ENTRY
        if not can_quantize(weight):
            fixed += 2 * weight.numel()
            continue
        key = (pinned.get(name, Grid()), tuple(weight.shape))
        if key not in bits:
            bits[key] = gaussian_bits(*key)
        coded += bits[key] * weight.numel() / 8
    low, high = (round(fixed + (1 + error) * coded) for error in GAUSSIAN_ERROR)
    size = round(fixed + coded)
    return Artifact(size, low, high, None, 8 * size / count)


def gaussian_bits(scheme: Scheme, shape: tuple[int, ...]) -> float:
    """Return the bits per weight, scales included, of a Gaussian matrix under `scheme`, from a coded sample."""
    columns = math.prod(shape[1:])
    rows = min(shape[0], max(64, _SAMPLE // columns))
    sample = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    encoded = scheme.encode("sample", sample)
    layouts = decoder(encoded.scheme).layout(encoded.shape, encoded.dtype, encoded.params)
    streams = zip(encoded.streams, layouts, strict=True)
    payloads = (entropy.encode(symbols, layout.hints, "fast").payload for symbols, layout in streams)
    return 8 * sum(map(len, payloads)) / sample.numel()


def this_cpu(recipe: Recipe) -> Machine:
    """Measure the speed of this CPU on products, attention and elementwise work of the recipe's sizes (0.5 s)."""
    config, train = recipe.model, recipe.train
    dtype = choose_dtype(train.compute_dtype, torch.device("cpu"))
    tokens = min(train.chunk_tokens, 4096)
    dim, hidden, length = config.model_dim, config.mlp_hidden, min(train.train_seq_len, tokens)
    x, weight = torch.ones(tokens, dim, dtype=dtype), torch.ones(dim, hidden, dtype=dtype)
    product_s = _median(lambda: x @ weight)
    q = torch.ones(1, config.num_heads, length, config.head_dim, dtype=dtype, requires_grad=True)
    attention_s = _median(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward())  # type: ignore[no-untyped-call]
    rows = max(1, min(tokens, (1 << 22) // config.vocab_size))  # larger than the caches; more would not be slower
    logits = torch.ones(rows, config.vocab_size, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.int64)

    def head() -> None:  # in small models, most of the time outside products
        F.cross_entropy(30 * torch.tanh(logits / 30), targets).backward()  # type: ignore[no-untyped-call]

    moved_s = _median(head, 0.3)
    tiny = torch.ones(1, requires_grad=True)
    chain_s = _median(lambda: _chain(tiny).backward())  # type: ignore[no-untyped-call]
    return Machine(
        "this CPU",
        1,
        matrix_rate=2 * tokens * dim * hidden / product_s,
        attention_rate=6 * length * length * dim / attention_s,
        bandwidth=moved_bytes(head) / moved_s,
        kernel_s=chain_s / _CHAIN_KERNELS,
        dtype=dtype,
    )


_CHAIN = 32
_CHAIN_KERNELS = 4 * _CHAIN  # one product forward, two backward, and their sum


def _chain(x: Tensor) -> Tensor:
    y = x
    for _ in range(_CHAIN):
        y = y * x
    return y


def _median(run: Callable[[], object], seconds: float = 0.1) -> float:
    """Return the median time of `run`, repeated for `seconds`; the first call, which initializes, does not count."""
    run()
    times, end = [time.perf_counter()], time.perf_counter() + seconds
    while len(times) < 4 or times[-1] < end:
        run()
        times.append(time.perf_counter())
    return statistics.median(end - start for start, end in itertools.pairwise(times))


def _steps(seconds: float, step_s: float) -> int:
    """Return the number of steps that begin within `seconds`."""
    return math.ceil(seconds / step_s) if seconds < math.inf else 1 << 62


@lru_cache(maxsize=8)
def _meta(config: GPTConfig) -> GPT:  # a run asks for it at each of its checks
    with torch.device("meta"):
        return GPT(config)
