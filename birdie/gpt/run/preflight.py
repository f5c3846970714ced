"""Preflight: checks of memory, disk, ranks, data and coder before a run starts.

    facts of this machine ─► checks ─► one log line each; a failure ends the run before its clock starts

A check fails if the run cannot end well, and warns if it may not. Records lost paid runs to each of these causes.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from birdie.artifact import load as load_file
from birdie.artifact import save
from birdie.errors import BirdieError, ConfigError
from birdie.gpt.run import run_estimate as estimate
from birdie.gpt.run.effect import no_effect
from birdie.gpt.run.events import PreflightCheck
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.run.work import Work
from birdie.gpt.train.plan import require_divisible
from birdie.system import platform
from birdie.system.context import Context
from birdie.system.device import choose_dtype

EXPORT_BYTES = 6  # per weight, at most, of the files that a run writes besides its checkpoints


@dataclass(frozen=True, slots=True)
class PreflightFacts:
    """Facts that one rank knows about its machine, its data and the recipe's kernels.

    Attributes:
        local_ranks: number of ranks on this machine.
        cores: number of CPU cores that this process may use.
        memory: free bytes of the rank's device; None if unknown.
        disk: free bytes in the run folder.
        train_tokens: number of training tokens.
        compiles: whether the run uses torch.compile.
        coder_s: seconds to encode and decode a small tensor; None if that failed.
    """

    device: str
    ranks: int
    local_ranks: int
    cores: int
    memory: int | None
    disk: int
    train_tokens: int
    compiles: bool
    coder_s: float | None


def checked(work: Work, folder: Path, origins: Mapping[str, str] | None = None) -> list[PreflightCheck]:
    """Return the results of all checks of a run in `folder`; a failure on any rank ends the run on all ranks.

    Args:
        origins: as of `run_checks`.
    """
    context = work.context
    facts = collect_facts(work.recipe, folder, work.data.dataset.train_tokens, context)
    checks = run_checks(work.recipe, facts, origins)
    if context.world.any(any(check.state == "fail" for check in checks), context.device):
        require_no_failure(checks)
        raise ConfigError("the preflight check of another rank failed; see the message of that rank")
    return checks


def run_checks(recipe: Recipe, facts: PreflightFacts, origins: Mapping[str, str] | None = None) -> list[PreflightCheck]:
    """Return the results of all checks of `recipe` against `facts`.

    Args:
        origins: settings that somebody chose, as TABLE.SETTING → flag, variable or key; None: those unlike their
            defaults.
    """
    checks = [_ranks(recipe, facts)]
    if checks[0].state != "fail":  # an estimate of memory needs ranks that divide the batch
        memory = _memory_estimate(recipe, facts)
        checks += [_memory(memory, facts), _disk(recipe, facts)]
    checks += [_text(recipe, facts), _coder(facts)]
    return [*checks, *(PreflightCheck("settings", "warn", line) for line in no_effect(recipe, origins))]


def require_no_failure(checks: Sequence[PreflightCheck]) -> None:
    """Raise an error that lists all failures, if there are any."""
    failures = [check.says for check in checks if check.state == "fail"]
    if failures:
        raise ConfigError("; ".join(failures))


def _memory_estimate(recipe: Recipe, facts: PreflightFacts) -> estimate.Memory:
    dtype = choose_dtype(recipe.train.compute_dtype, torch.device(facts.device))
    load = estimate.load(recipe, facts.ranks, dtype, depth_recurrence=recipe.model.num_loops > 0)
    return estimate.memory(recipe, load, facts.ranks, dtype, compiled=facts.compiles)


def _ranks(recipe: Recipe, facts: PreflightFacts) -> PreflightCheck:
    accumulation = recipe.train.accumulation
    try:
        require_divisible(recipe.train, facts.ranks)
    except ConfigError as error:
        return PreflightCheck("ranks", "fail", str(error))
    says = f"{facts.ranks} rank(s) × {accumulation // facts.ranks} accumulation chunk(s) per step on {facts.device}"
    if facts.device == "cpu" and facts.local_ranks > facts.cores:
        return PreflightCheck("ranks", "warn", f"{says}, but only {facts.cores} core(s): ranks wait for one another")
    return PreflightCheck("ranks", "pass", says)


def _memory(memory: estimate.Memory, facts: PreflightFacts) -> PreflightCheck:
    """Compare the memory with the estimate: exact counts can fail, the estimate of activations only warns."""
    if facts.memory is None:
        return PreflightCheck(
            "memory", "pass", f"about {_size(memory.total)} per rank needed; the free memory is not known"
        )
    free = f"{_size(facts.memory)} per rank free"
    if memory.fixed > facts.memory:
        says = (
            f"weights, gradients and optimizer take {_size(memory.fixed)}, {free}; choose a smaller model or more ranks"
        )
        return PreflightCheck("memory", "fail", says)
    says = f"about {_size(memory.total)} needed, {free}"
    if memory.total > facts.memory:
        return PreflightCheck("memory", "warn", f"{says}; smaller micro-batches (a larger accumulation) need less")
    return PreflightCheck("memory", "pass", says)


def _disk(recipe: Recipe, facts: PreflightFacts) -> PreflightCheck:
    """Compare the free disk space with the checkpoints: an old one is deleted only after the new one is complete."""
    count = estimate.parameters(recipe)
    checkpoint = 4 * (3 + recipe.average.copies) * count  # Adam has two moments per weight, Muon one
    kept = recipe.run.keep_checkpoints + 1
    needed = kept * checkpoint + 4 * count + EXPORT_BYTES * count
    says = (
        f"{kept} checkpoints, the float weights and the export take up to {_size(needed)}, {_size(facts.disk)} are free"
    )
    if needed > facts.disk:
        return PreflightCheck("disk", "fail", f"{says} in the run folder; free some, or choose another --folder")
    if recipe.run.checkpoint_deltas:
        every = recipe.run.checkpoint_every
        links = 1 + (recipe.train.last_step // every if every else 0)
        says += f"; {links:,} checkpoints that differences keep take up to {_size(links * checkpoint)} more"
        if needed + links * checkpoint > facts.disk:
            return PreflightCheck("disk", "warn", says)
    return PreflightCheck("disk", "pass", says)


def _text(recipe: Recipe, facts: PreflightFacts) -> PreflightCheck:
    train, planned = recipe.train, recipe.train.last_step
    epoch_steps = facts.train_tokens / train.train_batch_tokens
    says = f"{facts.train_tokens:,} training tokens last for {epoch_steps:,.0f} steps"
    if planned > epoch_steps:
        if train.cap_ms is not None:
            return PreflightCheck(
                "text", "pass", f"{says}; at most {planned:,} are planned, fewer if the time cap comes first"
            )
        return PreflightCheck("text", "warn", f"{says}, {planned:,} are planned: {planned / epoch_steps:.1f} epochs")
    return PreflightCheck("text", "pass", f"{says}, at most {planned:,} are planned")


def _coder(facts: PreflightFacts) -> PreflightCheck:
    if facts.coder_s is None:
        return PreflightCheck(
            "coder", "fail", "the coder cannot encode and decode on this machine, so no artifact could be exported"
        )
    return PreflightCheck("coder", "pass", f"kernels are compiled ({facts.coder_s:.1f} s)")


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def collect_facts(recipe: Recipe, folder: Path, train_tokens: int, context: Context) -> PreflightFacts:
    """Return the facts of this machine for one rank; rank 0 compiles the coder's kernels on the way."""
    device, world = context.device, context.world
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    return PreflightFacts(
        device=device.type,
        ranks=world.size,
        local_ranks=local,
        cores=platform.cores(),
        memory=free_memory(device, local),
        disk=shutil.disk_usage(folder if folder.exists() else Path.cwd()).free,
        train_tokens=train_tokens,
        compiles=device.type == "cuda" if recipe.train.compile is None else recipe.train.compile,
        coder_s=warm_up_coder(recipe) if world.is_main else 0.0,
    )


def free_memory(device: torch.device, local_ranks: int) -> int | None:
    """Return the free bytes of a rank's device, or None if unknown; the ranks of a machine share its CPU memory."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    if device.type != "cpu":
        return None
    memory = platform.free_memory()
    return None if memory is None else min(memory, _control_group_memory(memory)) // local_ranks


def _control_group_memory(default: int, group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the free bytes under a container's limit, or `default`; the page cache counts as free."""
    try:
        limit, used = (int((group / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        pairs = (line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        return limit - used + sum(int(count) for name, count in pairs if name in ("active_file", "inactive_file"))
    except (OSError, ValueError):  # no limit, or "max"
        return default


def warm_up_coder(recipe: Recipe) -> float | None:
    """Encode and decode a small tensor with the coder of the export; return the seconds, or None if it fails.

    This compiles the coder's kernels before the training clock starts.
    """
    start = time.perf_counter()
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "small.birdie"
            save({"weight": weight}, path, scheme="int8", effort=recipe.export.effort)
            decoded = load_file(path)["weight"]
    except (BirdieError, OSError, ImportError, RuntimeError):
        return None
    return time.perf_counter() - start if float((decoded - weight).abs().max()) < 0.1 else None
