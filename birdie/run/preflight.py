"""What can be known before a run to go wrong in it: memory, disk, ranks, text, attention, compiler, coder.

    facts of this machine ─► checks ─► a line each; a failure ends the run before any time is spent

A check fails where the run cannot end well, and warns where it may. Records lost paid runs to each of these.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.nn.attention import SDPBackend

from birdie.artifact.load import load as load_file
from birdie.artifact.save import save
from birdie.data.shards import read_shard
from birdie.errors import BirdieError, ConfigError
from birdie.model.attention_kernels import best_kernels
from birdie.run import estimate
from birdie.run.recipe import Recipe
from birdie.runtime import provenance
from birdie.runtime.device import choose_dtype
from birdie.runtime.distributed import World

OLDEST_TORCH = (2, 9)
EXPORT_BYTES = 6  # of a weight, at most, in the files that a run leaves beside its checkpoints

State = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at: what it is called, how it is, and why in a sentence."""

    name: str
    state: State
    says: str

    @property
    def line(self) -> str:
        """For a log."""
        return f"preflight {self.state}: {self.name}: {self.says}"


@dataclass(frozen=True, slots=True)
class Facts:
    """What there is, for one rank.

    Attributes:
        device: its type.
        ranks: in all; local_ranks: on this machine.
        cores: of this machine, that may be used.
        memory: bytes free to this rank on its device; None where that is not known.
        disk: bytes free in the run folder.
        train_tokens: of the training text.
        unread: training shards whose last token cannot be read, and why.
        kernel: what attention of this recipe's shapes runs by, as torch names it; None where it does not say.
        compiles: whether the run uses torch.compile.
        compiler: whether there is a C++ compiler.
        idle_gpu: whether there is an NVIDIA GPU that this torch cannot use.
        coder_s: seconds it took to code and decode a little; None where it failed.
        torch: its version; cuda: the one it is built for.
        environment: variables.
    """

    device: str
    ranks: int
    local_ranks: int
    cores: int
    memory: int | None
    disk: int
    train_tokens: int
    unread: tuple[str, ...]
    kernel: str | None
    compiles: bool
    compiler: bool
    idle_gpu: bool
    coder_s: float | None
    torch: str
    cuda: str | None
    environment: tuple[tuple[str, str], ...] = ()


def checks(recipe: Recipe, facts: Facts) -> list[Check]:
    """All checks of `recipe` on what `facts` say there is."""
    found = [_ranks(recipe, facts)]
    if found[0].state != "fail":
        memory = _needed(recipe, facts)
        found += [_memory(memory, facts), _disk(recipe, memory, facts)]
    found += [_text(recipe, facts), _attention(recipe, facts), _coder(facts), _versions(facts)]
    if facts.compiles and facts.device == "cpu":
        found.append(_compiler(facts))
    return [*found, *_network(facts)]


def require(found: Sequence[Check]) -> None:
    """Go on only if nothing failed.

    Raises:
        ConfigError: something did; all of it in one sentence.
    """
    failed = [check.says for check in found if check.state == "fail"]
    if failed:
        raise ConfigError("; ".join(failed))


def _needed(recipe: Recipe, facts: Facts) -> estimate.Memory:
    dtype = choose_dtype(recipe.train.compute_dtype, torch.device(facts.device))
    machine = estimate.Machine("this one", facts.ranks, 1.0, 1.0, compiled=facts.compiles, dtype=dtype)
    load = estimate.load(recipe, facts.ranks, dtype, depth_recurrence=recipe.model.num_loops > 0)
    return estimate.memory(recipe, load, machine)


def _ranks(recipe: Recipe, facts: Facts) -> Check:
    accumulation = recipe.train.accumulation
    if accumulation % facts.ranks:
        return Check(
            "ranks", "fail", f"{facts.ranks} ranks do not divide accumulation {accumulation}; choose a divisor"
        )
    says = f"{facts.ranks} rank(s) × {accumulation // facts.ranks} span(s) of a step on {facts.device}"
    if facts.device == "cpu" and facts.local_ranks > facts.cores:
        return Check("ranks", "warn", f"{says}, but {facts.cores} core(s): ranks wait for one another")
    return Check("ranks", "pass", says)


def _memory(memory: estimate.Memory, facts: Facts) -> Check:
    """Weights and what goes with them are exact; activations are estimated, so they only warn."""
    if facts.memory is None:
        return Check("memory", "pass", f"about {_size(memory.total)} a rank; how much there is, is not known")
    fixed = memory.total - memory.activations - memory.logits
    there = f"a rank has {_size(facts.memory)}"
    if fixed > facts.memory:
        says = f"weights, gradients and optimizer take {_size(fixed)} and {there}; choose a smaller model or more ranks"
        return Check("memory", "fail", says)
    says = f"about {_size(memory.total)} needed, {there}"
    if memory.total > facts.memory:
        return Check("memory", "warn", f"{says}; smaller micro-batches (a larger accumulation) need less")
    return Check("memory", "pass", says)


def _disk(recipe: Recipe, memory: estimate.Memory, facts: Facts) -> Check:
    """The checkpoint before is removed only when the new one is there."""
    count = estimate.parameters(recipe)
    checkpoint = 3 * memory.weights + memory.average  # moments of Adam are two, Muon's momentum is one
    needed = 2 * checkpoint + EXPORT_BYTES * count
    says = f"two checkpoints and the export take up to {_size(needed)}, {_size(facts.disk)} are free"
    if needed > facts.disk:
        return Check("disk", "fail", f"{says} in the run folder; free some, or choose another --folder")
    return Check("disk", "pass", says)


def _text(recipe: Recipe, facts: Facts) -> Check:
    if facts.unread:
        return Check("text", "fail", f"{facts.unread[0]}; get it again")
    train, planned = recipe.train, recipe.train.last_step
    lasts = facts.train_tokens / train.train_batch_tokens
    says = f"{facts.train_tokens:,} training tokens last for {lasts:,.0f} steps"
    if planned > lasts:
        if train.cap_ms is not None:
            return Check("text", "pass", f"{says}; {planned:,} are planned at most, and the clock may end them before")
        return Check("text", "warn", f"{says}, {planned:,} are planned: text is seen {planned / lasts:.1f} times")
    return Check("text", "pass", f"{says}, {planned:,} are planned at most")


def _attention(recipe: Recipe, facts: Facts) -> Check:
    if recipe.model.attention != "softmax":
        return Check("attention", "pass", f"{recipe.model.attention}, as the recipe names it")
    if facts.kernel is None:
        return Check("attention", "pass", "torch does not say which kernel it takes")
    says = f"kernel {facts.kernel.lower().replace('_', ' ')}"
    if facts.kernel == SDPBackend.MATH.name:
        return Check(
            "attention", "warn", f"{says}: no fused kernel takes these shapes, dtype and mask; it will be slow"
        )
    return Check("attention", "pass", says)


def _coder(facts: Facts) -> Check:
    if facts.coder_s is None:
        return Check(
            "coder", "fail", "the coder cannot code and decode on this machine, so no artifact would come of it"
        )
    return Check("coder", "pass", f"kernels are ready ({facts.coder_s:.1f} s)")


def _versions(facts: Facts) -> Check:
    says = f"torch {facts.torch}" + (f", CUDA {facts.cuda}" if facts.cuda else "")
    if _version(facts.torch) < OLDEST_TORCH:
        return Check(
            "versions", "warn", f"{says} is older than {'.'.join(map(str, OLDEST_TORCH))}, which birdie is for"
        )
    if facts.idle_gpu:
        return Check("versions", "warn", f"{says} cannot use the NVIDIA GPU that is here; install a build for CUDA")
    return Check("versions", "pass", says)


def _compiler(facts: Facts) -> Check:
    if facts.compiler:
        return Check("compiler", "pass", "there is a C++ compiler for torch.compile")
    return Check("compiler", "warn", "torch.compile finds no C++ compiler, so training will be eager; install g++")


def _network(facts: Facts) -> Iterator[Check]:
    if facts.ranks > 1 and facts.device == "cuda" and dict(facts.environment).get("NCCL_IB_DISABLE") == "1":
        yield Check(
            "network", "warn", "NCCL_IB_DISABLE is 1, which slows steps down where there is InfiniBand; unset it"
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def facts_here(
    recipe: Recipe, folder: Path, shards: Sequence[Path], train_tokens: int, device: torch.device, world: World
) -> Facts:
    """What there is on this machine for one rank; readies the coder's kernels on the way, on rank 0."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    return Facts(
        device=device.type,
        ranks=world.size,
        local_ranks=local,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=free_memory(device, local),
        disk=shutil.disk_usage(folder if folder.exists() else Path.cwd()).free,
        train_tokens=train_tokens,
        unread=tuple(_unread(shards)),
        kernel=attention_kernel(recipe, device),
        compiles=device.type == "cuda" if recipe.train.compile is None else recipe.train.compile,
        compiler=any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++", "cl")),
        idle_gpu=device.type == "cpu" and not torch.cuda.is_available() and Path("/proc/driver/nvidia/gpus").is_dir(),
        coder_s=ready_coder(recipe) if world.is_main else 0.0,
        torch=provenance.versions()["torch"],
        cuda=torch.version.cuda,
        environment=tuple(os.environ.items()),
    )


def free_memory(device: torch.device, local_ranks: int) -> int | None:
    """Bytes that a rank may still take on its device; ranks of a machine share what a CPU has."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    return min(free, _control_group(free)) // local_ranks


def _control_group(otherwise: int, group: Path = Path("/sys/fs/cgroup")) -> int:
    """What a container's limit leaves; pages of files, which the kernel gives back when asked, count as free."""
    try:
        limit, used = (int((group / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        pairs = (line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        return limit - used + sum(int(count) for name, count in pairs if name in ("active_file", "inactive_file"))
    except (OSError, ValueError):  # no such limit, or "max"
        return otherwise


def _unread(shards: Sequence[Path]) -> Iterator[str]:
    for path in shards:
        try:
            np.asarray(read_shard(path)[-1:]).sum()
        except (BirdieError, OSError) as error:
            yield f"{path} cannot be read ({error})"


def attention_kernel(recipe: Recipe, device: torch.device) -> str | None:
    """What takes a sequence of this recipe, forward and backward: a kernel beside torch's, or the one torch takes."""
    model, length = recipe.model, recipe.train.train_seq_len
    dtype = choose_dtype(recipe.train.compute_dtype, device)
    kernels = best_kernels(device, dtype)
    if (kernels.varlen if model.isolate_documents else kernels.plain) is not None:
        return kernels.name
    q, k = (
        torch.zeros(1, heads, length, model.head_dim, dtype=dtype, device=device, requires_grad=True)
        for heads in (model.num_heads, model.num_kv_heads)
    )
    masked = model.isolate_documents
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device) if masked else None
    try:
        choice = torch._fused_sdp_choice(
            q, k, k, mask, 0.0, not masked, enable_gqa=model.num_heads != model.num_kv_heads
        )
        return SDPBackend(choice).name
    except (AttributeError, RuntimeError, NotImplementedError, ValueError):
        return None


def ready_coder(recipe: Recipe) -> float | None:
    """Code and decode a little as the export will, so that kernels are compiled before the clock; seconds, or None."""
    began = time.perf_counter()
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "little.birdie"
            save({"weight": weight}, path, scheme="int8", coder=recipe.export.coder)
            back = load_file(path)["weight"]
    except (BirdieError, OSError, ImportError, RuntimeError):
        return None
    return time.perf_counter() - began if float((back - weight).abs().max()) < 0.1 else None
