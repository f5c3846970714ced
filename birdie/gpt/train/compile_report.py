"""torch.compile in a run: a report of what was compiled before and inside the clock.

    eager pass ─► warm-up compiles every graph ─► the clock starts ─► no more graphs?

Compiled graphs are kept between runs by torch itself, in Inductor's folder (`TORCHINDUCTOR_CACHE_DIR`).
"""

import sys
from typing import Any

import torch
from torch import nn

from birdie.system.callbacks import Notify


def compiled_graphs() -> int:
    """Return the number of graphs compiled so far in this process, without importing the compiler."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0
    graphs: int = sys.modules["torch._dynamo.utils"].counters["stats"]["unique_graphs"]
    return graphs


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
        warmup_graphs: number of graphs compiled by warm-up.
        late_graphs: number of graphs compiled after it, inside the clock.
    """

    def __init__(self, notify: Notify) -> None:
        self._notify = notify
        self.warmup_graphs = self.late_graphs = 0
        self._graphs = compiled_graphs()

    def end_warmup(self) -> None:
        """Report warm-up; call it after it."""
        self.warmup_graphs = compiled_graphs() - self._graphs
        self._graphs += self.warmup_graphs
        self._notify(f"torch.compile: {_graphs(self.warmup_graphs)} compiled before the clock")

    def end_run(self) -> None:
        """Report whether graphs were compiled inside the clock; call it after the last step."""
        self.late_graphs = compiled_graphs() - self._graphs
        if self.late_graphs:
            self._notify(
                f"torch.compile: {_graphs(self.late_graphs)} compiled inside the clock; more warmup_steps would "
                "compile them before it"
            )
        else:
            self._notify("active: torch.compile: no graph compiled inside the clock")


def _graphs(count: int) -> str:
    return f"{count} graph{'s'[: count != 1]}"
