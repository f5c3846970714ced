"""Profile of a training step: its time by named part, and a trace; both are torch's profiler's.

    run ─► steps that are undone ─► 3 unobserved ─► 3 recorded by torch.profiler ─► table.json, table.txt, trace.json.gz

Steps are rehearsed after warm-up, so a profile changes neither weights nor clock. Parts are the ranges of
`birdie.system.ranges`. On a CPU their time is the clock's, with the overhead of the profiler at every operation, which
the step without it shows beside; on a GPU it is that of the device, and CPU work that overlaps with it does not show.
Layers are told apart by hooks that exist only during profiling, and not in a compiled graph, which has no layers.

For Nsight, `nsys profile --pytorch=autograd-nvtx` shows the same ranges.
"""

import dataclasses
import gzip
import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, record_function

from birdie.gpt.train.training import Training
from birdie.system.device import synchronize
from birdie.system.files import write_bytes

STEP = "step"
UNOBSERVED, RECORDED = 3, 3
FRACTION = 0.5  # of the run that profiled steps pretend: techniques that are on for at least half of it are included

Range = tuple[str, float, float]
"""(name, begin, end) of a range."""


@dataclass(frozen=True, slots=True)
class Part:
    """A named part of a step.

    Attributes:
        name: path of the range, "forward/layer 0/mlp".
        ms: in a step, without the parts inside it.
    """

    name: str
    ms: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Time of a mean step by part.

    Attributes:
        steps: number of recorded steps.
        step_ms: their mean; the sum of `parts` and `unattributed_ms`.
        parts: in the order in which they first began.
        unattributed_ms: outside any named part.
        unobserved_ms: median step without recording; the difference is the overhead of recording.
        device: name of the device.
        compiled: whether torch.compile made forward and backward one part each.
    """

    steps: int
    step_ms: float
    parts: tuple[Part, ...]
    unattributed_ms: float
    unobserved_ms: float | None = None
    device: str = "cpu"
    compiled: bool = False

    @property
    def attributed(self) -> float:
        """Fraction of the step that is in named parts."""
        return 1 - self.unattributed_ms / self.step_ms if self.step_ms else 0.0

    def rows(self) -> list[tuple[str, float]]:
        """Return (name, ms) rows: each group with everything inside it, then its members; all layers together.

        The time of a group outside of its members is called "self"; in backward it is that of head and loss.
        """
        groups: dict[str, dict[str, float]] = {}
        for part in self.parts:
            top = part.name.partition("/")[0]
            name = re.sub(r"/layer \d+", "/layers", part.name)
            members = groups.setdefault(top, {})
            members[name] = members.get(name, 0.0) + part.ms
        rows: list[tuple[str, float]] = []
        for top, members in groups.items():
            rows.append((top, sum(members.values())))
            if len(members) > 1:
                rows += [(f"{top}/self" if name == top else name, ms) for name, ms in members.items()]
        return [*rows, ("unattributed", self.unattributed_ms)]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with `parts` for each layer."""
        return {
            "device": self.device,
            "compiled": self.compiled,
            "steps": self.steps,
            "step_ms": self.step_ms,
            "unobserved_step_ms": self.unobserved_ms,
            "attributed": self.attributed,
            "unattributed_ms": self.unattributed_ms,
            "parts": [{"name": p.name, "ms": p.ms, "share": p.ms / self.step_ms} for p in self.parts],
        }

    def text(self) -> str:
        """Return the table in plain text."""
        lines = [f"{name.replace('/', ' / '):40}{ms:12.3f} ms{ms / self.step_ms:9.1%}" for name, ms in self.rows()]
        return "\n".join([self.title, "", *lines]) + "\n"

    @property
    def title(self) -> str:
        """Title of the table: step time, device and number of steps."""
        unobserved = "" if self.unobserved_ms is None else f", {self.unobserved_ms:.1f} ms unobserved"
        return (
            f"step of {self.step_ms:.1f} ms on {self.device} (mean of {self.steps}{unobserved}), "
            f"{self.attributed:.1%} of it attributed"
        )


def account(ranges: Iterable[Range]) -> Profile:
    """Return the mean time of every part, without the parts inside it, over the steps in `ranges` (milliseconds)."""
    times: dict[str, float] = {}
    open_: list[tuple[str, float]] = []
    steps, now = 0, 0.0

    def advance(to: float) -> None:
        """Give the time up to `to` to the innermost open range, ending those that end before it."""
        nonlocal now
        while open_:
            name, end = open_[-1]
            if open_[0][0] == STEP:
                times[name] = times.get(name, 0.0) + max(0.0, min(to, end) - now)
            now = max(now, min(to, end))
            if end > to:
                return
            open_.pop()
        now = to

    for name, begin, end in sorted(ranges, key=lambda part: (part[1], -part[2])):
        advance(begin)
        steps += name == STEP
        open_.append((name, min(end, open_[-1][1]) if open_ else end))  # a part ends with the one around it
        if open_[0][0] == STEP:
            times.setdefault(name, 0.0)  # keeps the order in which parts begin
    advance(float("inf"))
    if not steps:
        raise ValueError("no complete step was recorded")
    total = sum(times.values())
    unattributed = times.pop(STEP)
    parts = tuple(Part(name, ms / steps) for name, ms in times.items())
    return Profile(steps, total / steps, parts, unattributed / steps)


@contextmanager
def layer_ranges(model: Any, enabled: bool) -> Iterator[None]:
    """Add ranges for embedding, attention and MLP of each layer until the end of the block, if `enabled`.

    Norms and residuals of a layer count to the range around it, head and loss to "forward"; in backward, to the layer
    whose gradient comes next. Works for models whose `blocks` have `attn` and `mlp`; in others forward and backward are
    one part each. Use it in eager mode only: a graph that is compiled meanwhile would contain the hooks.
    """
    with ExitStack() as hooks:
        backward: list[record_function] = []  # the open part; each ends where the next begins, or with "backward"
        hooks.callback(lambda: _end(backward))

        def add(module: nn.Module, part: str) -> None:
            inside: list[record_function] = []

            def enter(_module: nn.Module, _args: tuple[Any, ...]) -> None:
                inside.append(record_function(f"forward/{part}"))
                inside[-1].__enter__()  # type: ignore[no-untyped-call]

            def leave(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
                inside.pop().__exit__(None, None, None)
                tensor: Tensor = output[0] if isinstance(output, tuple) else output
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: _begin(backward, f"backward/{part}"))  # type: ignore[no-untyped-call]

            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave).remove)

        blocks = getattr(model, "blocks", None)
        if enabled and isinstance(blocks, nn.ModuleList):
            if isinstance(table := getattr(model, "tok_emb", None), nn.Module):
                add(table, "embedding")
            for index, block in enumerate(cast(Iterable[Any], blocks)):
                add(block.attn, f"layer {index}/attention")
                add(block.mlp, f"layer {index}/mlp")
        yield


def _begin(parts: list[record_function], name: str) -> None:
    _end(parts)
    parts.append(record_function(name))
    parts[-1].__enter__()  # type: ignore[no-untyped-call]


def _end(parts: list[record_function]) -> None:
    while parts:
        parts.pop().__exit__(None, None, None)


def profile(run: Training, device: torch.device, folder: Path | None) -> Profile | None:
    """Profile `run` without changing it. Every rank must call it.

    Args:
        run: after warm-up.
        device: where it trains.
        folder: for `table.json`, `table.txt` and `trace.json.gz`; None: nothing is written.

    Returns:
        The profile, or None if a stop was requested meanwhile.
    """

    def step() -> float:
        start = time.perf_counter()
        run.timed(run.plan.rehearsal(FRACTION, run.number, run.clock.ms))
        return 1000 * (time.perf_counter() - start)

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    unobserved: list[float] = []
    with run.undone():
        for _ in range(UNOBSERVED):
            if not run.stopped:
                unobserved.append(step())
        with layer_ranges(run.model, not run.compiled), torch.profiler.profile(activities=activities) as recorded:
            for _ in range(RECORDED):
                if not run.stopped:
                    step()
            synchronize(device)
    if run.stopped:
        return None
    result = dataclasses.replace(
        account(named_ranges(recorded, device)),
        unobserved_ms=statistics.median(unobserved),
        device=str(device),
        compiled=run.compiled,
    )
    if folder is not None:
        write_bytes(folder / "table.json", json.dumps(result.to_dict(), indent=1).encode() + b"\n")
        write_bytes(folder / "table.txt", result.text().encode())
        write_bytes(folder / "trace.json.gz", _chrome_trace(recorded))
    return result


def named_ranges(recorded: torch.profiler.profile, device: torch.device) -> list[Range]:
    """Return the named ranges as the device saw them, in milliseconds."""
    # torch names its own ranges with a #, such as Optimizer.step#AdamW.step
    kind = "CUDA" if device.type == "cuda" else "CPU"
    events: Sequence[Any] = recorded.events() or ()  # type: ignore[no-untyped-call]
    return [
        (event.name, event.time_range.start / 1000, event.time_range.end / 1000)
        for event in events
        if event.is_user_annotation
        and event.device_type.name == kind
        and "#" not in event.name  # such as Optimizer.step#AdamW
    ]


def _chrome_trace(recorded: torch.profiler.profile) -> bytes:
    """Return the gzipped trace for chrome://tracing and Perfetto."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return gzip.compress(path.read_bytes(), 6, mtime=0)
