"""Estimate of a recipe before anything of it runs: parameters, bytes, FLOPs, memory, and time on H100s.

    recipe ─► model on the meta device ─► cost of a micro-step ─► load of a step on a rank ─► seconds on H100s
                     └─► parameters ─► Gaussian samples through scheme and coder ─► bytes of the artifact

Counts are exact, memory and bytes are derived, times follow three constants fitted to recorded runs. docs/recipes.md
compares all of them with measurements.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import torch

from birdie.compress import Grid, Scheme, can_quantize, decoder, match, parse_rules, parse_size
from birdie.entropy import encode
from birdie.gpt.model.config import GPTConfig
from birdie.gpt.model.cost import ModelCost, training_cost
from birdie.gpt.model.gpt import GPT
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.train.muon import WIDE
from birdie.gpt.train.optimizers import split_parameters
from birdie.gpt.train.parallel_muon import shard_banks
from birdie.gpt.train.plan import micro_steps, require_divisible
from birdie.gpt.train.settings import TrainSettings

PEAK = 989e12  # FLOP/s of an H100 SXM in bfloat16, dense; NVIDIA's data sheet
# Fractions of the peak for products with weights and for attention (its causal half), and seconds of a micro-step that
# no count explains: fitted by `python -m benchmarks.estimate`. LINK is NVLink's bytes/s.
PRODUCTS, ATTENTION, MICRO_STEP_S, LINK = 0.456, 0.228, 19.8e-3, 450e9
# Fractions of the kept bytes and of a float32 copy of the logits where torch.compile fuses and recomputes: least
# squares over seven recorded peaks (`python -m benchmarks.estimate --part memory`).
COMPILED_KEEPS, COMPILED_LOGITS = 0.80, 0.18
GAUSSIAN_ERROR = (-0.2, 0.04)  # relative error of the coded bytes for fifteen of sixteen small files (docs/recipes.md)
_SAMPLE = 1 << 16  # weights of the Gaussian sample that is coded
_ENTRY = 40  # bytes per tensor of a file besides its streams: name, shape, checksums


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Load of a training step on one rank.

    Attributes:
        update_flops: of Newton–Schulz, on the rank with the most matrices.
        reduced_bytes: reduced over ranks: gradients of the banks in the dtype of Newton–Schulz, of all else in float32.
            0 on one rank.
        sent_bytes: sent by each rank in a ring, for that reduction and for the gathered updates or sums.
    """

    cost: ModelCost
    micro_steps: int
    update_flops: int
    reduced_bytes: int
    sent_bytes: int

    @property
    def flops(self) -> int:
        """FLOPs per step on this rank, including the optimizer's matrix products."""
        return self.micro_steps * self.cost.flops + self.update_flops

    @property
    def seconds(self) -> float:
        """Seconds of a step on an H100 SXM under torch.compile."""
        products, attention = PRODUCTS * PEAK, ATTENTION * PEAK
        micro = self.cost.matrix_flops / products + self.cost.attention_flops / attention + MICRO_STEP_S
        return self.micro_steps * micro + self.update_flops / products + self.sent_bytes / LINK


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device at the end of a forward pass, the peak of training.

    Attributes:
        fixed: float32 weights, gradients and averages, moments of the optimizer, and the banks that are sent. Exact.
        activations: kept for the backward pass, with the logits: two float32 copies and, briefly, their gradients; less
            where they are fused. An estimate.
    """

    fixed: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of both."""
        return self.fixed + self.activations


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
    """Course of a run on H100s.

    Attributes:
        step_s: seconds of a mean step of the run.
        steps: until the last step or the cap.
        tokens: trained on.
        seconds: of training, as the cap counts it.
        flops: of all steps on all ranks.
    """

    step_s: float
    steps: int
    tokens: int
    seconds: float
    flops: float
    memory: Memory


def parameters(recipe: Recipe) -> int:
    """Return the number of parameters of the recipe's model, without building it."""
    return sum(groups(recipe.model).values())


def groups(config: GPTConfig) -> dict[str, int]:
    """Return the number of parameters of each optimizer group: matrices, embedding, head, scalars."""
    members = split_parameters(_meta(config))
    return {group: sum(p.numel() for p in parameters.values()) for group, parameters in members.items()}


def load(recipe: Recipe, devices: int, dtype: torch.dtype, *, depth_recurrence: bool) -> StepLoad:
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
    return StepLoad(
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


def memory(recipe: Recipe, of: StepLoad, devices: int, dtype: torch.dtype, *, compiled: bool) -> Memory:
    """Return the memory that training needs on each of `devices`, with activations of `dtype`."""
    counts = groups(recipe.model)
    weights, matrices = 4 * sum(counts.values()), counts.get("matrices", 0)
    share = -(-matrices // devices)  # of the matrices whose momentum a rank has
    optimizer = 4 * share + 2 * (weights - 4 * matrices)  # Muon's momentum, Adam's two moments of all else
    sent = dtype.itemsize * (share + 2 * matrices * (devices > 1))  # gradients and updates of the banks
    copy = 4 * micro_batch_tokens(recipe.train, devices) * recipe.model.vocab_size
    keeps, copies = (COMPILED_KEEPS, COMPILED_LOGITS) if compiled else (1.0, 4.0)
    activations = round(keeps * max(0, of.cost.kept_bytes - 2 * copy)) + round(copies * copy)
    return Memory((2 + recipe.average.copies) * weights + optimizer + sent, activations)


def schedule(recipe: Recipe, devices: int) -> Schedule:
    """Return the course of a run of `recipe` on so many H100s with NVLink."""
    train = recipe.training
    cap = math.inf if train.cap_ms is None else train.cap_ms / 1000
    recurs, dtype = recipe.model.num_loops > 0, torch.bfloat16
    plain = load(recipe, devices, dtype, depth_recurrence=False)
    recurrent = load(recipe, devices, dtype, depth_recurrence=True) if recurs else plain
    step_s, recurrent_s = plain.seconds, recurrent.seconds
    begin = recipe.model.enable_looping_at if recurs else 1.0
    # recurrence begins by steps or by time, whichever fraction grows faster
    plain_steps = min(_steps(begin * cap, step_s), math.ceil(begin * train.last_step))
    recurrent_steps = min(_steps(cap - plain_steps * step_s, recurrent_s), train.last_step - plain_steps)
    steps, seconds = plain_steps + recurrent_steps, plain_steps * step_s + recurrent_steps * recurrent_s
    return Schedule(
        step_s=seconds / steps if steps else step_s,
        steps=steps,
        tokens=steps * train.train_batch_tokens,
        seconds=seconds,
        flops=float(devices * (plain_steps * plain.flops + recurrent_steps * recurrent.flops)),
        memory=memory(recipe, recurrent, devices, dtype, compiled=True),
    )


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
    payloads = (encode(symbols, layout.hints, "fast").payload for symbols, layout in streams)
    return 8 * sum(map(len, payloads)) / sample.numel()


def _steps(seconds: float, step_s: float) -> int:
    """Return the number of steps that begin within `seconds`."""
    return math.ceil(seconds / step_s) if seconds < math.inf else 1 << 62


@lru_cache(maxsize=8)
def _meta(config: GPTConfig) -> GPT:  # a run asks for it at each of its checks
    with torch.device("meta"):
        return GPT(config)
