"""torch.compile in a run: its cache between runs, and a report of what was compiled before and inside the clock.

    load cache ─► eager pass ─► warm-up compiles every graph ─► save cache ─► the clock starts ─► no more graphs?

Compiled graphs are code and pickles: whoever can write them can run anything as the user who reads them. They are
therefore read from a folder of the user's own only (`read_trusted`), never from a run folder or an artifact. torch
keeps the graphs of inductor and autograd and, on CUDA, Triton's binaries. Kernels that the C++ compiler built for a CPU
stay in inductor's own folder (`TORCHINDUCTOR_CACHE_DIR`), which the same machine keeps anyway.
"""

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from birdie.runtime.callbacks import Notify
from birdie.runtime.distributed import World
from birdie.runtime.files import read_trusted, user_cache, write_trusted
from birdie.train.protocols import Trainable

KEPT = 16  # newest files of a cache folder
_SUFFIX = ".compiled"
# settings that do not change what is compiled
_LENGTHS = ("iterations", "warmdown_iters", "warmdown_fraction", "warmup_steps", "max_wallclock_seconds", "seed")


@dataclass(frozen=True, slots=True)
class CompileCounts:
    """Counts of torch.compile in this process.

    Attributes:
        graphs: compiled.
        cache_hits: parts of them from a cache.
        cache_misses: parts that were not in a cache.
        fallbacks: frames of code that torch.compile gave up on; they run eagerly.
    """

    graphs: int
    cache_hits: int
    cache_misses: int
    fallbacks: int = 0

    def since(self, earlier: "CompileCounts") -> "CompileCounts":
        """Return the difference to `earlier` counts."""
        return CompileCounts(
            self.graphs - earlier.graphs,
            self.cache_hits - earlier.cache_hits,
            self.cache_misses - earlier.cache_misses,
            self.fallbacks - earlier.fallbacks,
        )

    def line(self) -> str:
        """Return the counts in words."""
        parts = self.cache_hits + self.cache_misses
        cached = f", {self.cache_hits} of {parts} parts from the cache" if parts else ""
        eager = f", {self.fallbacks} fallbacks to eager mode" if self.fallbacks else ""
        return f"{self.graphs} graph{'s'[: self.graphs != 1]} compiled{cached}{eager}"


def compile_counts() -> CompileCounts:
    """Return the counts so far; zeros where nothing was compiled, without importing the compiler."""
    if "torch._dynamo.utils" not in sys.modules:
        return CompileCounts(0, 0, 0)
    counters = sys.modules["torch._dynamo.utils"].counters
    inductor, frames = counters["inductor"], counters["frames"]
    return CompileCounts(
        counters["stats"]["unique_graphs"],
        inductor["fxgraph_cache_hit"],
        inductor["fxgraph_cache_miss"],
        frames["total"] - frames["ok"],
    )


def eager_pass(model: Trainable, length: int, device: torch.device) -> None:
    """Run one eager pass of the longest sequence, which builds what is built at first use (rotary tables).

    A graph traced before would contain that construction, and the next step would need another graph without it.
    """
    ids = torch.zeros(1, length, dtype=torch.int64, device=device)
    with torch.no_grad():
        model.loss(ids, ids)


class CompileCache:
    """File in the user's cache folder with the compiled graphs of one kind of run.

    Args:
        folder: created for the user alone if it does not exist.
        settings: all that decides what is compiled, in plain values; torch, Python and device are added.
        device: that the graphs are for.

    Attributes:
        path: of the file.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], device: torch.device) -> None:
        identity = {
            "settings": settings,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "index": device.index,  # torch's own keys of graphs contain it
        }
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder / f"{key}{_SUFFIX}"

    def load(self) -> str | None:
        """Pass the graphs of an earlier run to torch, before anything is compiled; return a warning if that fails.

        A file that is damaged, or that another user could have written, is not used.
        """
        if not self.path.exists():
            return None
        try:
            content = read_trusted(self.path)
        except OSError as error:
            reason = error.strerror or str(error)
            return f"compiled graphs in {self.path} are not used ({reason.lower()}); compiling anew"
        digest, payload = content[:32], content[32:]
        if hashlib.sha256(payload).digest() != digest:
            return f"compiled graphs in {self.path} are damaged; compiling anew"
        try:
            loaded = torch.compiler.load_cache_artifacts(payload)
        except Exception as error:  # torch raises many types here, and a cache is not worth a failed run
            return f"compiled graphs in {self.path} are not used ({type(error).__name__}); compiling anew"
        return None if loaded else f"torch does not accept the compiled graphs in {self.path}; compiling anew"

    def save(self) -> str | None:
        """Write the graphs that this process has compiled; return a warning if that fails."""
        try:
            artifacts = torch.compiler.save_cache_artifacts()
            if artifacts is None:
                return None
            payload = artifacts[0]
            write_trusted(self.path, hashlib.sha256(payload).digest() + payload)
            files = self.path.parent.glob(f"*{_SUFFIX}")
            for old in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)[KEPT:]:
                old.unlink(missing_ok=True)
        except (OSError, RuntimeError, AssertionError) as error:
            return f"compiled graphs are not saved ({' '.join(str(error).split())[:120]})"
        return None


class CompileReport:
    """Loads and saves the cache around warm-up, and reports what a run compiles.

    Args:
        cache: None: no cache.
        notify: called with a line after warm-up and one at the end.

    Attributes:
        warmup: counts of warm-up.
        late_graphs: number of graphs compiled after it, inside the clock.
    """

    def __init__(self, cache: CompileCache | None, notify: Notify) -> None:
        self._cache, self._notify = cache, notify
        self.warmup, self.late_graphs = CompileCounts(0, 0, 0), 0
        self._before_warmup = self._after_warmup = compile_counts()

    def begin_warmup(self) -> None:
        """Load the cache; call it before warm-up."""
        self._warn(None if self._cache is None else self._cache.load())
        self._before_warmup = compile_counts()

    def end_warmup(self, *, save: bool) -> None:
        """Report warm-up and, if `save`, write graphs to the cache that were not in it; call it after warm-up."""
        self._after_warmup = compile_counts()
        self.warmup = self._after_warmup.since(self._before_warmup)
        self._notify(f"torch.compile: {self.warmup.line()} before the clock")
        if save and self._cache is not None and (self.warmup.cache_misses or not self._cache.path.exists()):
            self._warn(self._cache.save())

    def end_run(self) -> None:
        """Report whether graphs were compiled inside the clock; call it after the last step."""
        self.late_graphs = compile_counts().since(self._after_warmup).graphs
        if self.late_graphs:
            self._notify(
                f"torch.compile: {self.late_graphs} graph{'s'[: self.late_graphs != 1]} compiled inside the clock; "
                "more warmup_steps would compile them before it"
            )
        else:
            self._notify("active: torch.compile: no graph compiled inside the clock")

    def _warn(self, warning: str | None) -> None:
        if warning is not None:
            self._notify(warning)


def cache_folder(name: str) -> Path | None:
    """Return the folder that `auto` (in the user's cache folder), `none` or a path stands for."""
    if name == "none":
        return None
    if name != "auto":
        return Path(name).expanduser()
    return user_cache() / "compiled"


def compile_cache(recipe: Mapping[str, Any], rank: int, ranks: int, device: torch.device) -> CompileCache | None:
    """Return the cache of ranks that compile the same: model, batch, lengths, precision and quantization.

    Args:
        recipe: in plain values, by table; its `run.compile_cache` names the folder.
        rank: of this process.
        ranks: number of processes.
        device: of this rank.
    """
    folder = cache_folder(recipe["run"]["compile_cache"])
    if folder is None:
        return None
    train = {name: value for name, value in recipe["train"].items() if name not in _LENGTHS}
    kind = rank % distinct_ranks(recipe)
    settings = {"model": recipe["model"], "train": train, "qat": recipe["qat"], "ranks": ranks, "of": kind}
    return CompileCache(folder, settings, device)


def saves_graphs(recipe: Mapping[str, Any], world: World, device: torch.device) -> bool:
    """Return whether this rank writes its graphs for later runs: one of those with the same `compile_cache`.

    On CUDA graphs belong to one GPU, and every rank of the first node writes.
    """
    return world.rank == world.local_rank if device.type == "cuda" else world.rank < distinct_ranks(recipe)


def distinct_ranks(recipe: Mapping[str, Any]) -> int:
    """Return the number of ranks that compile different graphs: those with different sequence lengths."""
    return max(1, len(recipe["train"].get("mixed_seq_lens", ())))
