"""torch.compile in a run: a report of what was compiled before and inside the clock.

    eager pass ─► warm-up compiles every graph ─► the clock starts ─► no more graphs?

Compiled graphs are kept between runs by torch itself, in Inductor's folder (`TORCHINDUCTOR_CACHE_DIR`).
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from birdie.system.callbacks import Notify


@dataclass(frozen=True, slots=True)
class CompileCounts:
    """Counts of torch.compile in this process.

    Attributes:
        graphs: compiled.
        cache_hits: parts of them from a cache.
        cache_misses: parts that were not in a cache.
        fallbacks: frames of code that torch.compile gave up on; they run eagerly.
        without_graph: parts that compile_mode = "reduce-overhead" does not run as CUDA graphs.
    """

    graphs: int
    cache_hits: int
    cache_misses: int
    fallbacks: int = 0
    without_graph: int = 0

    def since(self, earlier: "CompileCounts") -> "CompileCounts":
        """Return the difference to `earlier` counts."""
        return CompileCounts(
            self.graphs - earlier.graphs,
            self.cache_hits - earlier.cache_hits,
            self.cache_misses - earlier.cache_misses,
            self.fallbacks - earlier.fallbacks,
            self.without_graph - earlier.without_graph,
        )

    def line(self) -> str:
        """Return the counts in words."""
        parts = self.cache_hits + self.cache_misses
        cached = f", {self.cache_hits} of {parts} parts from the cache" if parts else ""
        eager = f", {self.fallbacks} fallbacks to eager mode" if self.fallbacks else ""
        skipped = f", {self.without_graph} without CUDA graphs" if self.without_graph else ""
        return f"{self.graphs} graph{'s'[: self.graphs != 1]} compiled{cached}{eager}{skipped}"


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
        inductor["cudagraph_skips"],
    )


def eager_pass(model: nn.Module, length: int, device: torch.device) -> None:
    """Run one eager pass of the longest sequence, which builds what is built at first use (rotary tables).

    A graph traced before would contain that construction, and the next step would need another graph without it.
    """
    gpt: Any = model
    ids = torch.zeros(1, length, dtype=torch.int64, device=device)
    with torch.no_grad():
        gpt.loss(ids, ids)


class CompileReport:
    """Report of what a run compiles; it begins where it is made, before warm-up.

    Args:
        notify: called with a line after warm-up and one at the end.

    Attributes:
        warmup: counts of warm-up.
        late_graphs: number of graphs compiled after it, inside the clock.
    """

    def __init__(self, notify: Notify) -> None:
        self._notify = notify
        self.warmup, self.late_graphs = CompileCounts(0, 0, 0), 0
        self._begin = self._after_warmup = compile_counts()

    def end_warmup(self) -> None:
        """Report warm-up; call it after it."""
        self._after_warmup = compile_counts()
        self.warmup = self._after_warmup.since(self._begin)
        self._notify(f"torch.compile: {self.warmup.line()} before the clock")

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
