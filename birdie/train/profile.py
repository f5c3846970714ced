"""Where a training step goes: its time by named part, and a trace of it to look at.

    fit ─► rehearse: steps that are undone ─► 3 unobserved ─► 5 recorded ─► table.json, table.txt
                                                           └► 2 traced   ─► trace.json.gz (torch.profiler)

Steps are rehearsed after priming, so that a profile changes neither weights nor clock. They are recorded without
torch.profiler, whose own work at every operation would be in the figures; the trace comes after. Time is the time of
the device that works: this process's clock on a CPU, the GPU's by events in its stream, which never wait for each
other: what the CPU does meanwhile costs nothing unless the stream runs dry, and stands where it does.

Layers are told apart by hooks that exist only while somebody looks, and not in a compiled graph, which has no layers.

For profilers that look from outside (`nsys profile --capture-range=cudaProfilerApi …`) `Capture` marks ten real steps.
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
SHARE = 0.5  # of the run that is taken to be done: what is on for half of it or more is in the profile

Events = Sequence[tuple[str | None, float]]
"""(name, time) of what begins, (None, time) of what ends, in order."""


class Rehearsing(Protocol):
    """What is profiled: `birdie.train.loop.Fit`."""

    facts: dict[str, Any]

    def rehearse(self, steps: int, share: float) -> Iterator[None]:
        """Steps that are undone at the end; yields before each and after the last, or ends early."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """A named part of a step.

    Attributes:
        name: its path, "forward/layer 0/mlp".
        ms: of a step, parts within it left out.
    """

    name: str
    ms: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time of a mean step went.

    Attributes:
        steps: recorded.
        step_ms: mean of these; the sum of `parts` and `unattributed_ms`.
        parts: by name, in the order in which they first came.
        unattributed_ms: in no named part.
        unobserved_ms: median step while nothing was recorded: what looking costs is the difference.
        device: it ran on.
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
        """Share of the step that has a name."""
        return 1 - self.unattributed_ms / self.step_ms if self.step_ms else 0.0

    def rows(self) -> list[tuple[str, float]]:
        """(name, ms) to show: each group with all that is in it, then its members; layers of a model as one.

        What a group with members spends outside of them is called "own": of backward it is head and loss.
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
                rows += [(f"{top}/own" if name == top else name, ms) for name, ms in members.items()]
        return [*rows, ("unattributed", self.unattributed_ms)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; `parts` to the layer."""
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
        """The table in plain text."""
        lines = [f"{name.replace('/', ' / '):40}{ms:12.3f} ms{ms / self.step_ms:9.1%}" for name, ms in self.rows()]
        return "\n".join([self.title, "", *lines]) + "\n"

    @property
    def title(self) -> str:
        """What the table is of."""
        beside = "" if self.unobserved_ms is None else f", {self.unobserved_ms:.1f} ms unobserved"
        return (
            f"step of {self.step_ms:.1f} ms on {self.device} (mean of {self.steps}{beside}), "
            f"{self.attributed:.1%} of it attributed"
        )


def account(events: Events) -> Profile:
    """Own time of every part over the steps in `events`, as means; times in milliseconds.

    Raises:
        ValueError: there is no whole step in them.
    """
    own: dict[str, float] = {}
    open_: list[str] = []
    steps, total, last = 0, 0.0, 0.0
    for name, now in events:
        if STEP in open_:
            own[open_[-1]] = own.get(open_[-1], 0.0) + now - last
            total += now - last
        if name is not None:
            open_.append(name)
            if STEP in open_:
                own.setdefault(name, 0.0)  # in the order they come
        elif open_.pop() == STEP:
            steps += 1
        last = now
    if not steps or open_:
        raise ValueError("no whole step was recorded")
    unattributed = own.pop(STEP)
    parts = tuple(Part(name, ms / steps) for name, ms in own.items())
    return Profile(steps, total / steps, parts, unattributed / steps)


class Timeline:
    """A recorder that stamps what begins and ends.

    Args:
        stamp: the time, in whatever form.
        milliseconds: from one stamp to a later one, asked when all is over.
    """

    def __init__(self, stamp: Callable[[], Any], milliseconds: Callable[[Any, Any], float]) -> None:
        self._stamp, self._milliseconds = stamp, milliseconds
        self._stamps: list[tuple[str | None, Any]] = []

    def begin(self, name: str) -> None:
        """`name` begins."""
        self._stamps.append((name, self._stamp()))

    def end(self) -> None:
        """The last that began ends."""
        self._stamps.append((None, self._stamp()))

    def events(self) -> list[tuple[str | None, float]]:
        """All of it, in milliseconds from the first stamp."""
        return [(name, self._milliseconds(self._stamps[0][1], at)) for name, at in self._stamps]


def timeline(device: torch.device) -> Timeline:
    """Of a device: its own clock on CUDA, this process's elsewhere."""
    if device.type == "cuda":
        return Timeline(_cuda_stamp, lambda first, later: first.elapsed_time(later))
    return Timeline(time.perf_counter_ns, lambda first, later: (later - first) / 1e6)


def _cuda_stamp() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


@contextmanager
def layers(model: Any, wanted: bool) -> Iterator[None]:
    """Until the end of the block, if `wanted`, ranges for embedding, attention and MLP of each layer, and head.

    The loss counts to the head, and both are what backward does before it comes to a layer. For a model whose `blocks`
    have `attn` and `mlp`; any other has forward and backward as a whole. Only for eager use: a graph compiled meanwhile
    would have the hooks in it.
    """
    with ExitStack() as hooks:

        def before(module: nn.Module, hook: Callable[..., None]) -> None:
            hooks.callback(module.register_forward_pre_hook(hook).remove)

        def after(module: nn.Module, hook: Callable[..., None]) -> None:
            hooks.callback(module.register_forward_hook(hook).remove)

        blocks = getattr(model, "blocks", None)
        if wanted and isinstance(blocks, nn.ModuleList):
            if isinstance(table := getattr(model, "tok_emb", None), nn.Module):
                before(table, lambda *_: next_range("forward/embedding"))
            for index, block in enumerate(cast(Iterable[Any], blocks)):
                attention, mlp = f"layer {index}/attention", f"layer {index}/mlp"
                if index == 0:
                    before(block, lambda _block, args: next_range_on_gradient(args[0], "backward/embedding"))
                before(block, lambda *_, to=attention: next_range(f"forward/{to}"))
                before(block.attn, lambda *_, to=attention: next_range(f"forward/{to}"))  # a block may be passed by
                after(block.attn, lambda _m, _a, out, to=mlp, of=attention: _leave(to, out, of))
                following = "head" if index == len(blocks) - 1 else mlp
                after(block.mlp, lambda _m, _a, out, to=following, of=mlp: _leave(to, out, of))
        yield


def _leave(to: str, output: Tensor | tuple[Tensor, ...], of: str) -> None:
    """Forward goes on `to`; backward comes to `of` with the gradient of its output."""
    next_range_on_gradient(output[0] if isinstance(output, tuple) else output, f"backward/{of}")
    next_range(f"forward/{to}")


def profile(
    run: Rehearsing, model: nn.Module, device: torch.device, folder: Path | None, *, recorded: int = RECORDED
) -> Profile | None:
    """Profile `run`, which trains `model`; every rank must call it. Nothing of the run changes.

    Args:
        run: primed.
        model: whose layers are told apart, unless it is compiled.
        device: where it trains.
        folder: gets `table.json`, `table.txt` and `trace.json.gz`; None: nothing is written.
        recorded: steps that count.

    Returns:
        The profile, or None when the run was asked to stop meanwhile.

    Raises:
        OutputError: the folder cannot be written.
        ConfigError: as a step does.
    """
    compiled = bool(run.facts.get("compiled"))
    seen, unobserved, since = timeline(device), list[float](), 0.0
    traces = torch.profiler.profile(activities=_activities(device))
    end = UNOBSERVED + recorded + TRACED
    with ExitStack() as looking:
        place = 0
        for place, _ in enumerate(run.rehearse(end, SHARE)):
            synchronize(device)
            if 0 < place <= UNOBSERVED:
                unobserved.append(1000 * (time.perf_counter() - since))
            if place == UNOBSERVED:
                looking.enter_context(layers(model, not compiled))
                recorder = looking.enter_context(ExitStack())
                recorder.enter_context(recording(seen))
            elif place == UNOBSERVED + recorded:
                recorder.close()
                looking.enter_context(traces)
            elif place == end:
                looking.close()
            since = time.perf_counter()
        if place < end:
            return None
    found = dataclasses.replace(
        account(seen.events()), unobserved_ms=statistics.median(unobserved), device=str(device), compiled=compiled
    )
    if folder is not None:
        write_bytes(folder / "table.json", json.dumps(found.to_dict(), indent=1).encode() + b"\n")
        write_bytes(folder / "table.txt", found.text().encode())
        write_bytes(folder / "trace.json.gz", _chrome(traces))
    return found


def _activities(device: torch.device) -> list[torch.profiler.ProfilerActivity]:
    cpu, cuda = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA
    return [cpu, cuda] if device.type == "cuda" else [cpu]


def _chrome(traces: torch.profiler.profile) -> bytes:
    """The trace as chrome://tracing and Perfetto read it, packed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        traces.export_chrome_trace(str(path))
        return gzip.compress(path.read_bytes(), 6, mtime=0)


class Capture:
    """The range of steps that an attached profiler shall capture, by the CUDA profiler's start and stop.

    Nothing happens where no profiler is attached or there is no CUDA. By default Nsight Systems ends the program when
    the range does; `--capture-range-end=stop` lets it train on.
    """

    FIRST, COUNT = 4, 10  # of the steps of this process

    def __init__(self) -> None:
        self._step, self._running = 0, False
        self._wanted = profiler_attached() and torch.cuda.is_available()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def before_step(self) -> None:
        """Told before each step."""
        self._step += 1
        if self._wanted and self._step == self.FIRST:
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            self._running = True
        elif self._step == self.FIRST + self.COUNT:
            self.close()

    def close(self) -> None:
        """No more steps."""
        if self._running:
            self._running = False
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
