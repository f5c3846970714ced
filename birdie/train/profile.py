"""Profile of a training step: its time by named part, and a trace.

    fit ─► rehearse: steps that are undone ─► 3 unobserved ─► 5 recorded ─► table.json, table.txt
                                                           └► 2 traced   ─► trace.json.gz (torch.profiler)

Steps are rehearsed after warm-up, so a profile changes neither weights nor clock. They are recorded without
torch.profiler, whose overhead at every operation would distort the figures; the trace comes afterwards. Time is that of
the device: the clock of this process on a CPU, events in the stream on a GPU. CPU work that overlaps with the GPU does
not show; where the stream runs dry, it shows in the part that is running.

Layers are told apart by hooks that exist only during profiling, and not in a compiled graph, which has no layers.

For external profilers (`nsys profile --capture-range=cudaProfilerApi …`) `Capture` marks ten real steps.
"""

import dataclasses
import gzip
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor, nn

from birdie.runtime.device import synchronize
from birdie.runtime.files import write_bytes
from birdie.runtime.nvtx import next_range, next_range_on_gradient, profiler_attached, recording

STEP = "step"
UNOBSERVED, RECORDED, TRACED = 3, 5, 2
FRACTION = 0.5  # of the run that profiled steps pretend: techniques that are on for at least half of it are included

Events = Sequence[tuple[str | None, float]]
"""(name, time) where a range begins and (None, time) where one ends, in order."""


class Rehearsing(Protocol):
    """Interface of the run to profile: `birdie.train.loop.Fit`."""

    facts: dict[str, Any]

    def rehearse(self, steps: int, fraction: float) -> Iterator[None]:
        """Take steps that are undone at the end; yield before each and after the last, or end early."""
        ...


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


def account(events: Events) -> Profile:
    """Return the mean time of every part, without the parts inside it, over the steps in `events` (milliseconds)."""
    times: dict[str, float] = {}
    open_: list[str] = []
    steps, total, last = 0, 0.0, 0.0
    for name, now in events:
        if STEP in open_:
            times[open_[-1]] = times.get(open_[-1], 0.0) + now - last
            total += now - last
        if name is not None:
            open_.append(name)
            if STEP in open_:
                times.setdefault(name, 0.0)  # keeps the order in which parts begin
        elif open_.pop() == STEP:
            steps += 1
        last = now
    if not steps or open_:
        raise ValueError("no complete step was recorded")
    unattributed = times.pop(STEP)
    parts = tuple(Part(name, ms / steps) for name, ms in times.items())
    return Profile(steps, total / steps, parts, unattributed / steps)


class Timeline:
    """A recorder that stores a time stamp where each range begins and ends.

    Args:
        stamp: returns the time, in any form.
        milliseconds: (stamp, later stamp) → difference; called after all steps.
    """

    def __init__(self, stamp: Callable[[], Any], milliseconds: Callable[[Any, Any], float]) -> None:
        self._stamp, self._milliseconds = stamp, milliseconds
        self._stamps: list[tuple[str | None, Any]] = []

    def begin(self, name: str) -> None:
        """Record the beginning of range `name`."""
        self._stamps.append((name, self._stamp()))

    def end(self) -> None:
        """Record the end of the innermost range."""
        self._stamps.append((None, self._stamp()))

    def events(self) -> list[tuple[str | None, float]]:
        """Return all events, in milliseconds from the first stamp."""
        return [(name, self._milliseconds(self._stamps[0][1], at)) for name, at in self._stamps]


def timeline(device: torch.device) -> Timeline:
    """Return a timeline by the clock of the device on CUDA, by that of this process elsewhere."""
    if device.type == "cuda":
        return Timeline(_cuda_stamp, lambda first, later: first.elapsed_time(later))
    return Timeline(time.perf_counter_ns, lambda first, later: (later - first) / 1e6)


def _cuda_stamp() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


@contextmanager
def layer_ranges(model: Any, enabled: bool) -> Iterator[None]:
    """Add ranges for embedding, attention and MLP of each layer, and head, until the end of the block, if `enabled`.

    The loss counts as part of the head; in backward, both come before the first layer. Works for models whose `blocks`
    have `attn` and `mlp`; in others forward and backward are one part each. Use it in eager mode only: a graph that is
    compiled meanwhile would contain the hooks.
    """
    with ExitStack() as hooks:

        def on_entry(module: nn.Module, hook: Callable[..., None]) -> None:
            hooks.callback(module.register_forward_pre_hook(hook).remove)

        def on_exit(module: nn.Module, hook: Callable[..., None]) -> None:
            hooks.callback(module.register_forward_hook(hook).remove)

        blocks = getattr(model, "blocks", None)
        if enabled and isinstance(blocks, nn.ModuleList):
            if isinstance(table := getattr(model, "tok_emb", None), nn.Module):
                on_entry(table, lambda *_: next_range("forward/embedding"))
            for index, block in enumerate(cast(Iterable[Any], blocks)):
                attention, mlp = f"layer {index}/attention", f"layer {index}/mlp"
                if index == 0:
                    on_entry(block, lambda _block, args: next_range_on_gradient(args[0], "backward/embedding"))
                on_entry(block, lambda *_, to=attention: next_range(f"forward/{to}"))
                on_entry(
                    block.attn, lambda *_, to=attention: next_range(f"forward/{to}")
                )  # for models that call attention without its block
                on_exit(block.attn, lambda _m, _a, out, to=mlp, of=attention: _leave(to, out, of))
                following = "head" if index == len(blocks) - 1 else mlp
                on_exit(block.mlp, lambda _m, _a, out, to=following, of=mlp: _leave(to, out, of))
        yield


def _leave(to: str, output: Tensor | tuple[Tensor, ...], of: str) -> None:
    """Begin range `to` in forward; in backward, begin range `of` with the gradient of its output."""
    next_range_on_gradient(output[0] if isinstance(output, tuple) else output, f"backward/{of}")
    next_range(f"forward/{to}")


def profile(
    run: Rehearsing, model: nn.Module, device: torch.device, folder: Path | None, *, recorded: int = RECORDED
) -> Profile | None:
    """Profile `run`, which trains `model`, without changing it. Every rank must call it.

    Args:
        run: after warm-up.
        model: whose layers are told apart, unless it is compiled.
        device: where it trains.
        folder: for `table.json`, `table.txt` and `trace.json.gz`; None: nothing is written.
        recorded: number of recorded steps.

    Returns:
        The profile, or None if a stop was requested meanwhile.
    """
    compiled = bool(run.facts.get("compiled"))
    recorder, unobserved, since = timeline(device), list[float](), 0.0
    traces = torch.profiler.profile(activities=_activities(device))
    end = UNOBSERVED + recorded + TRACED
    with ExitStack() as observers:
        done = 0
        for done, _ in enumerate(run.rehearse(end, FRACTION)):
            synchronize(device)
            if 0 < done <= UNOBSERVED:
                unobserved.append(1000 * (time.perf_counter() - since))
            if done == UNOBSERVED:
                observers.enter_context(layer_ranges(model, not compiled))
                recorders = observers.enter_context(ExitStack())
                recorders.enter_context(recording(recorder))
            elif done == UNOBSERVED + recorded:
                recorders.close()
                observers.enter_context(traces)
            elif done == end:
                observers.close()
            since = time.perf_counter()
        if done < end:
            return None
    result = dataclasses.replace(
        account(recorder.events()), unobserved_ms=statistics.median(unobserved), device=str(device), compiled=compiled
    )
    if folder is not None:
        write_bytes(folder / "table.json", json.dumps(result.to_dict(), indent=1).encode() + b"\n")
        write_bytes(folder / "table.txt", result.text().encode())
        write_bytes(folder / "trace.json.gz", _chrome_trace(traces))
    return result


def _activities(device: torch.device) -> list[torch.profiler.ProfilerActivity]:
    cpu, cuda = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA
    return [cpu, cuda] if device.type == "cuda" else [cpu]


def _chrome_trace(traces: torch.profiler.profile) -> bytes:
    """Return the gzipped trace for chrome://tracing and Perfetto."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        traces.export_chrome_trace(str(path))
        return gzip.compress(path.read_bytes(), 6, mtime=0)


class Capture:
    """Range of steps for an attached profiler to capture, marked by the CUDA profiler's start and stop.

    Does nothing without an attached profiler or without CUDA. By default Nsight Systems ends the program with the
    range; `--capture-range-end=stop` lets training continue.
    """

    FIRST, COUNT = 4, 10  # of the steps of this process

    def __init__(self) -> None:
        self._step, self._running = 0, False
        self._enabled = profiler_attached() and torch.cuda.is_available()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def before_step(self) -> None:
        """Start or stop the capture where it is due; call it before each step."""
        self._step += 1
        if self._enabled and self._step == self.FIRST:
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            self._running = True
        elif self._step == self.FIRST + self.COUNT:
            self.close()

    def close(self) -> None:
        """Stop the capture if it is running."""
        if self._running:
            self._running = False
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
