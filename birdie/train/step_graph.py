"""A training step as two CUDA graphs, so that the processor has next to nothing to launch.

    batch, rates ──copy──► [ zero gradients ─ forward ─ backward ─ norm ─ clip ] ──► loss and norm ──► check
                           [ momentum ─ Newton–Schulz ─ Muon, AdamW             ] ◄────────────────────┘

There are two, because a step whose loss is not finite must leave the weights as they were, and the loop reads the loss
and the clock between steps anyway. The average of the weights is one launch and stays outside.

A graph repeats addresses and numbers: whatever changes between steps must be in a tensor that it reads. So learning
rates, decays and momentum are on the device (`Optimizers.hold_rates`), batches are copied into tensors of the graph,
and a captured step is trusted only after a check: from the same weights and batch, at rates other than those of the
capture, it must reach the weights that the eager step reaches. If anything fails, the run goes on in eager mode and
says why.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from birdie.runtime.callbacks import Notify
from birdie.runtime.nvtx import nvtx_range
from birdie.train.micro_batches import MicroBatch
from birdie.train.optimizers import Optimizers

T = TypeVar("T")
Key = tuple[tuple[torch.Size, float], ...]
"""Shapes and parts of the micro-batches of a step."""

LOSS_TOLERANCE, UPDATE_TOLERANCE = 1e-3, 0.1
"""Relative differences to the eager step, of the loss and of the change of all weights. Sums in another order, in
bfloat16 under Newton–Schulz, are some percent of the latter; a rate that a graph holds fixed is half of it."""


class GraphBackend(Protocol):
    """Records work on a device and repeats it."""

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Record `work` without running it; return the function that runs it, and its result, filled by each run."""
        ...


class CudaGraphs:
    """CUDA graphs in one memory pool."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Record `work`, as `GraphBackend`.

        Other threads, such as the loader's, may allocate pinned memory meanwhile: only this one must not.
        """
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = work()
        except BaseException:
            torch.cuda.set_stream(stream)  # ending a failed capture fails, too, and leaves its stream current
            raise
        self._pool = graph.pool()
        return graph.replay, result


def graph_backend(device: torch.device) -> GraphBackend | None:
    """Return the graphs of `device`; None if it has none."""
    return CudaGraphs() if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class Rates:
    """Factor on the learning rates, momentum of Muon and factor on the weight decays of a step."""

    lr: float
    momentum: float
    decay: float


@dataclass(frozen=True, slots=True)
class _Graph:
    """The two graphs of steps of one shape.

    Attributes:
        batches: whose tensors the gradient is computed from.
        gradient: runs the first graph.
        totals: [loss, norm], as it leaves them.
        update: runs the second graph.
    """

    batches: Sequence[MicroBatch]
    gradient: Callable[[], None]
    totals: Tensor
    update: Callable[[], None]


class StepGraphs:
    """Runs steps: the first of each shape eagerly, the second checked, and all others as graphs.

    Args:
        backend: of the device.
        optimizers: whose rates are held on the device from now on.
        gradient: leaves the gradient of micro-batches in the parameters, from zero; returns the loss.
        weights: returns the tensors that a step may change, without the optimizers' state.
        notify: called with the result of the check.
    """

    def __init__(
        self,
        backend: GraphBackend,
        optimizers: Optimizers,
        gradient: Callable[[Sequence[MicroBatch]], Tensor],
        weights: Callable[[], Sequence[Tensor]],
        device: torch.device,
        notify: Notify,
    ) -> None:
        self._backend, self._optimizers, self._notify = backend, optimizers, notify
        self._gradient, self._weights = gradient, weights
        self._seen: set[Key] = set()
        self._graphs: dict[Key, _Graph] = {}
        self._failed = False
        self.replayed = 0
        optimizers.hold_rates(device)

    def step(
        self, batches: Sequence[MicroBatch], rates: Rates, check: Callable[[float, float], None]
    ) -> tuple[float, float]:
        """Take a step; return the loss and the norm of the gradient before clipping.

        Args:
            batches: of the step; no arguments but ids and targets.
            rates: of the step.
            check: called with the result before any weight changes; may raise.
        """
        key = tuple((batch.ids.shape, batch.parts) for batch in batches)
        graph = self._graphs.get(key)
        if graph is None and key in self._seen and not self._failed:
            return self._first_replay(key, batches, rates, check)
        self._seen.add(key)
        return self._eager(batches, rates, check) if graph is None else self._replay(graph, batches, rates, check)

    def diagnostics(self) -> str:
        """Return a line about the number of replayed steps."""
        return f"CUDA graphs: {self.replayed:,} steps replayed, {len(self._graphs)} shapes"

    def _eager(
        self, batches: Sequence[MicroBatch], rates: Rates, check: Callable[[float, float], None]
    ) -> tuple[float, float]:
        self._optimizers.schedule(rates.lr, rates.momentum, rates.decay)
        loss, norm = self._totals(batches).tolist()
        check(loss, norm)
        with nvtx_range("optimizer"):
            self._optimizers.update()
        return loss, norm

    def _totals(self, batches: Sequence[MicroBatch]) -> Tensor:
        return self._optimizers.totals(self._gradient(batches))

    def _replay(
        self, graph: _Graph, batches: Sequence[MicroBatch], rates: Rates, check: Callable[[float, float], None]
    ) -> tuple[float, float]:
        self._optimizers.schedule(rates.lr, rates.momentum, rates.decay)
        with nvtx_range("transfer"):
            for held, batch in zip(graph.batches, batches, strict=True):
                held.ids.copy_(batch.ids)
                held.targets.copy_(batch.targets)
        with nvtx_range("graph/gradient"):
            graph.gradient()
            loss, norm = graph.totals.tolist()
        check(loss, norm)
        with nvtx_range("graph/update"):
            graph.update()
        self.replayed += 1
        return loss, norm

    def _first_replay(
        self, key: Key, batches: Sequence[MicroBatch], rates: Rates, check: Callable[[float, float], None]
    ) -> tuple[float, float]:
        """Take a step eagerly and then from the same state by new graphs; keep the graphs if both agree."""
        state = [*self._weights(), *self._optimizers.state_tensors()]
        saved = [tensor.clone() for tensor in state]
        eager = self._eager(batches, rates, check)
        after = [tensor.clone() for tensor in state]
        torch._foreach_copy_(state, saved)
        try:
            graph = self._captured(batches, rates)
            replayed = self._replay(graph, batches, rates, lambda _loss, _norm: None)  # compared below, NaN as well
        except (RuntimeError, AssertionError) as error:  # torch raises these for what cannot be captured
            reason: str | None = " ".join(str(error).split())[:160]
        else:
            count = len(self._weights())
            apart = _apart(state[:count], after[:count], saved[:count])
            reason = _disagreement(replayed[0], eager[0], apart)
        if reason is None:
            self._graphs[key] = graph
            tokens = sum(batch.ids.numel() for batch in batches)
            self._notify(f"CUDA graphs: steps of {tokens:,} tokens agree with eager ones ({apart:.2%} of the update)")
            return replayed
        self._failed = True
        self._notify(f"CUDA graphs: not used, steps stay eager: {reason}")
        torch._foreach_copy_(state, after)
        return eager

    def _captured(self, batches: Sequence[MicroBatch], rates: Rates) -> _Graph:
        """Capture graphs at other rates than the step's, so that one that holds them fixed fails the check."""
        held = [
            MicroBatch(torch.zeros_like(batch.ids), torch.zeros_like(batch.targets), batch.parts, {})
            for batch in batches
        ]
        self._optimizers.schedule(rates.lr / 2, rates.momentum / 2, rates.decay / 2)
        gradient, totals = self._backend.capture(lambda: self._totals(held))
        update, _ = self._backend.capture(self._optimizers.update)
        return _Graph(held, gradient, totals, update)


def _apart(tensors: Sequence[Tensor], reference: Sequence[Tensor], initial: Sequence[Tensor]) -> float:
    """‖tensors − reference‖ / ‖reference − initial‖."""

    def distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
        floats = [(x.float(), y.float()) for x, y in zip(a, b, strict=True) if x.is_floating_point()]
        # equal infinities, such as those of a causal mask, do not differ
        return math.sqrt(sum((x - y).masked_fill(x == y, 0.0).square().sum().item() for x, y in floats))

    moved, difference = distance(reference, initial), distance(tensors, reference)
    return difference / moved if moved else difference


def _disagreement(loss: float, eager: float, apart: float) -> str | None:
    """Return why a replayed step is not trusted; None if it is."""
    if not abs(loss - eager) <= LOSS_TOLERANCE * abs(eager):
        return f"a replayed step has the loss {loss:.6g} where the eager one has {eager:.6g}"
    if not apart <= UPDATE_TOLERANCE:
        return f"a replayed step changes the weights by {apart:.0%} of an update otherwise than the eager one"
    return None
