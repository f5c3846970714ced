"""What a recipe takes before anything of it runs: parameters, bytes, FLOPs, memory, communication, time.

    recipe ─► model on the meta device ─► work of a micro-step ─► load of a step on a rank ─► seconds on a machine
                     └─► parameters ─► Gaussian samples through scheme and coder ─► bytes of the artifact

Counts are exact, memory and bytes are derived, times rest on the speed of a machine: measured in half a second for this
CPU, three constants fitted to recorded runs for H100s. docs/estimate.md compares all of it with what was measured.
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from birdie.compress.rate.assignment import match, parse_rules
from birdie.compress.rate.size import parse_size
from birdie.compress.registry import decoder
from birdie.compress.scheme import Scheme
from birdie.compress.schemes.grid import Grid
from birdie.compress.small_tensors import can_quantize
from birdie.entropy import coder as entropy
from birdie.errors import ConfigError
from birdie.model.config import GPTConfig
from birdie.model.gpt import GPT
from birdie.model.work import Work, moved_bytes, work
from birdie.run.calibration_budget import less_reserve
from birdie.run.recipe import Recipe
from birdie.runtime.device import choose_dtype
from birdie.train.groups import split_parameters
from birdie.train.micro import micro_steps
from birdie.train.muon import WIDE
from birdie.train.parallel import shared_out
from birdie.train.settings import TrainSettings

PEAK = 989e12  # FLOP/s of an H100 SXM in bfloat16, dense; NVIDIA's data sheet
# Of what is kept and of one float32 copy of the logits, where torch.compile fuses and computes again: least squares of
# seven recorded peaks (`python -m benchmarks.estimate --part memory`).
COMPILED_KEEPS, COMPILED_LOGITS = 0.80, 0.18
GAUSSIAN_ERROR = (-0.2, 0.04)  # of bytes that weights decide: fifteen of sixteen small files (docs/estimate.md)
_SAMPLE = 1 << 16  # weights of a sample that is coded
_ENTRY = 40  # bytes of a file that a tensor takes beside its streams: name, shape, checksums


@dataclass(frozen=True, slots=True)
class Machine:
    """How fast devices are.

    Attributes:
        devices: ranks.
        matrix_rate: FLOP/s of products with weights, on one device.
        attention_rate: FLOP/s of attention, its causal half counted.
        bandwidth: bytes/s of what is not a product.
        kernel_s: seconds of an operation beside its work.
        micro_step_s: seconds of a micro-step that no count explains.
        link: bytes/s that a rank sends to its peers.
        compiled: whether activations are kept as torch.compile keeps them.
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
    """H100s with NVLink; shares of the peak and constant are those `python -m benchmarks.estimate` fits to records."""
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
    """What a step takes from one rank.

    Attributes:
        work: of one micro-step.
        micro_steps: of a step.
        update_flops: of Newton–Schulz, for the rank that owns most.
        reduced_bytes: summed over ranks: gradients of the banks in Newton–Schulz's dtype, of all else in float32.
            Nothing on one rank.
        sent_bytes: what a ring sends from each rank for that, and for updates or sums on their way back.
    """

    work: Work
    micro_steps: int
    update_flops: int
    reduced_bytes: int
    sent_bytes: int

    @property
    def flops(self) -> int:
        """Of a step on this rank, the optimizer's products included."""
        return self.micro_steps * self.work.flops + self.update_flops

    def seconds(self, machine: Machine) -> float:
        """Of a step."""
        each = self.work
        micro = each.matrix_flops / machine.matrix_rate + each.attention_flops / machine.attention_rate
        micro += each.moved_bytes / machine.bandwidth + each.kernels * machine.kernel_s + machine.micro_step_s
        return self.micro_steps * micro + self.update_flops / machine.matrix_rate + self.sent_bytes / machine.link


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device at the end of a forward pass, where training needs most.

    Attributes:
        weights: float32 masters.
        gradients: float32.
        optimizer: Muon's momentum of the matrices a rank owns, Adam's two moments of all else.
        buffers: what gradients and updates of the banks travel in, padding left out.
        activations: kept for the backward pass, logits left out.
        logits: two float32 copies kept and two of their gradients for a moment; less where they are fused.
        average: float32 copies that an average of the weights keeps.
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
        """All of it."""
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))


@dataclass(frozen=True, slots=True)
class Artifact:
    """The file that export writes.

    Attributes:
        bytes: expected; with a budget just under it.
        low, high: where it should lie.
        budget: that the recipe sets, or None.
        bits_per_weight: bytes over all parameters.
    """

    bytes: int
    low: int
    high: int
    budget: int | None
    bits_per_weight: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """A run on a machine.

    Attributes:
        step_s: seconds of a step before layers loop, if they ever do.
        looping_s: seconds of a step with loops.
        mean_s: seconds of a step over the run.
        steps: until the last or the cap.
        tokens: trained on.
        seconds: of training, as the cap counts it.
        priming_s: before it.
        flops: of all steps on all ranks.
        memory: on each device.
    """

    machine: Machine
    step_s: float
    looping_s: float
    mean_s: float
    steps: int
    tokens: int
    seconds: float
    priming_s: float
    flops: float
    memory: Memory


def parameters(recipe: Recipe) -> int:
    """Of the recipe's model, which is not built for that."""
    return sum(groups(recipe.model).values())


def groups(config: GPTConfig) -> dict[str, int]:
    """Parameters by the optimizer group that trains them: matrices, embedding, head, scalars."""
    members = split_parameters(_meta(config).named_parameters())
    return {group: sum(p.numel() for p in each.values()) for group, each in members.items()}


def load(recipe: Recipe, devices: int, dtype: torch.dtype, *, looping: bool) -> Load:
    """What a step of `recipe` takes from each of `devices` ranks.

    Raises:
        ConfigError: the ranks do not divide the batch.
    """
    train, config = recipe.train, recipe.model
    if train.accumulation % devices:
        raise ConfigError(f"{devices} ranks do not divide accumulation {train.accumulation}; choose a divisor")
    members = split_parameters(_meta(config).named_parameters())
    counts = Counter(p.shape for p in members.get("matrices", {}).values())
    banks = sorted((torch.Size((n, *shape)) for shape, n in counts.items()), key=lambda bank: -bank.numel())
    shares, steps = shared_out(banks, devices), recipe.optimizer.muon_backend_steps
    flops = [newton_schulz_flops(bank[1:], steps) for bank in banks]
    update = max(
        sum(len(share.own[rank]) * each for share, each in zip(shares, flops, strict=True)) for rank in range(devices)
    )
    others = sum(p.numel() for group, each in members.items() if group != "matrices" for p in each.values())
    padded = sum(devices * share.each * math.prod(bank[1:]) for share, bank in zip(shares, banks, strict=True))
    reduced = 4 * (others + 1) + dtype.itemsize * padded
    reduced = reduced if devices > 1 else 0
    return Load(
        work(config, at_once(train, devices) // train.train_seq_len, train.train_seq_len, dtype, looping=looping),
        micro_steps(train, devices, at_once(train, devices)),
        update,
        reduced,
        2 * (devices - 1) * reduced // devices,
    )


def at_once(train: TrainSettings, devices: int) -> int:
    """Tokens of a micro-batch: a span, unless the recipe gives a number."""
    asked = 0 if isinstance(train.micro_batch_tokens, str) else train.micro_batch_tokens
    return min(asked, train.train_batch_tokens // devices) or train.train_batch_tokens // train.accumulation


def newton_schulz_flops(shape: torch.Size, steps: int) -> int:
    """A = XXᵀ, A·A and B·X for X (m, n) with m ≤ n: 4m²n + 2m³ FLOPs an iteration; wide ones 4m²n + 10m³ for two."""
    m, n = min(shape), max(shape)
    alone, pairs = (steps % 2, steps // 2) if n >= WIDE * m else (steps, 0)
    return alone * (4 * m * m * n + 2 * m**3) + pairs * (4 * m * m * n + 10 * m**3)


def memory(recipe: Recipe, of: Load, machine: Machine) -> Memory:
    """What training needs on each device of `machine`."""
    each = groups(recipe.model)
    weights, matrices = 4 * sum(each.values()), each.get("matrices", 0)
    copy = 4 * at_once(recipe.train, machine.devices) * recipe.model.vocab_size
    keeps, copies = (COMPILED_KEEPS, COMPILED_LOGITS) if machine.compiled else (1.0, 4.0)
    return Memory(
        weights=weights,
        gradients=weights,
        optimizer=4 * -(-matrices // machine.devices) + 2 * (weights - 4 * matrices),
        buffers=machine.dtype.itemsize * (-(-matrices // machine.devices) + 2 * matrices * (machine.devices > 1)),
        activations=round(keeps * max(0, of.work.kept_bytes - 2 * copy)),
        logits=round(copies * copy),
        average=recipe.average.copies * weights,
    )


def schedule(recipe: Recipe, machine: Machine, train: TrainSettings | None = None) -> Schedule:
    """How a run of `recipe` goes on `machine`; `train`, if given, stands for the recipe's settings of training.

    Raises:
        ConfigError: the devices do not divide the batch, or calibration leaves no time.
    """
    train = train or training(recipe)
    cap = math.inf if train.cap_ms is None else train.cap_ms / 1000
    plain = load(recipe, machine.devices, machine.dtype, looping=False)
    looped = load(recipe, machine.devices, machine.dtype, looping=True) if recipe.model.num_loops else plain
    step_s, looping_s = plain.seconds(machine), looped.seconds(machine)
    begin = recipe.model.enable_looping_at if recipe.model.num_loops else 1.0
    before = min(_steps(begin * cap, step_s), math.ceil(begin * train.last_step))  # whichever share grows faster
    after = min(_steps(cap - before * step_s, looping_s), train.last_step - before)
    steps, seconds = before + after, before * step_s + after * looping_s
    return Schedule(
        machine=machine,
        step_s=step_s,
        looping_s=looping_s,
        mean_s=seconds / steps if steps else step_s,
        steps=steps,
        tokens=steps * train.train_batch_tokens,
        seconds=seconds,
        priming_s=train.warmup_steps * (step_s + looping_s) / 2,
        flops=float(machine.devices * (before * plain.flops + after * looped.flops)),
        memory=memory(recipe, looped, machine),
    )


def training(recipe: Recipe) -> TrainSettings:
    """The recipe's settings of training, with the cap less what calibration keeps of it, where the recipe says that.

    Raises:
        ConfigError: calibration leaves no time.
    """
    kept = recipe.calibration.reserve_seconds if recipe.calibration.data != "none" else None
    return less_reserve(recipe.train, kept or 0.0)


def on_this_cpu(recipe: Recipe, train: TrainSettings, ranks: int) -> Schedule:
    """How a run of `recipe` by `train` goes on this CPU, where each of `ranks` has the speed that one alone has now."""
    return schedule(recipe, dataclasses.replace(this_cpu(recipe), devices=ranks), train)


def artifact(recipe: Recipe) -> Artifact:
    """The bytes that export will write.

    With a budget that is what decides. Else rows of Gaussian weights are quantized by the scheme of each matrix and
    coded by the quick coder: weights of one row without structure, for which the thorough coder finds no more. What no
    grid takes is 16 bits a value.

    Raises:
        ConfigError: a pattern of the recipe matches no tensor.
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
    """Bits a weight, steps and scales included, of a matrix of independent Gaussians under `scheme`, by coding some."""
    columns = math.prod(shape[1:])
    rows = min(shape[0], max(64, _SAMPLE // columns))
    sample = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    encoded = scheme.encode("sample", sample)
    layouts = decoder(encoded.scheme).layout(encoded.shape, encoded.dtype, encoded.params)
    streams = zip(encoded.streams, layouts, strict=True)
    return 8 * sum(len(entropy.encode(each, layout.hints, "fast").payload) for each, layout in streams) / sample.numel()


def this_cpu(recipe: Recipe) -> Machine:
    """The speed of this CPU on products, attention and elementwise work of the recipe's sizes: half a second's work."""
    config, train = recipe.model, recipe.train
    dtype = choose_dtype(train.compute_dtype, torch.device("cpu"))
    tokens = min(train.train_batch_tokens // train.accumulation, 4096)
    dim, hidden, length = config.model_dim, config.mlp_hidden, min(train.train_seq_len, tokens)
    x, weight = torch.ones(tokens, dim, dtype=dtype), torch.ones(dim, hidden, dtype=dtype)
    product_s = _median(lambda: x @ weight)
    q = torch.ones(1, config.num_heads, length, config.head_dim, dtype=dtype, requires_grad=True)
    attention_s = _median(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward())  # type: ignore[no-untyped-call]
    some = max(1, min(tokens, (1 << 22) // config.vocab_size))  # beyond the caches, and no slower for being larger
    logits = torch.ones(some, config.vocab_size, requires_grad=True)
    targets = torch.zeros(some, dtype=torch.int64)

    def head() -> None:  # of small models what takes most of the time that products do not
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
_CHAIN_KERNELS = 4 * _CHAIN  # a product forward; two backward, and their sum


def _chain(x: Tensor) -> Tensor:
    y = x
    for _ in range(_CHAIN):
        y = y * x
    return y


def _median(run: Callable[[], object], seconds: float = 0.1) -> float:
    """The time `run` took, the median within `seconds`; the first one, which sets things up, does not count."""
    run()
    times, end = [time.perf_counter()], time.perf_counter() + seconds
    while len(times) < 4 or times[-1] < end:
        run()
        times.append(time.perf_counter())
    return statistics.median(done - began for began, done in itertools.pairwise(times))


def _steps(seconds: float, step_s: float) -> int:
    """Steps begun within `seconds`."""
    return math.ceil(seconds / step_s) if seconds < math.inf else 1 << 62


def _meta(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)
