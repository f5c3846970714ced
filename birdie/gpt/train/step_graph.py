"""A training step as two CUDA graphs, so that the processor has next to nothing to launch.

    batch, rates ──copy──► [ zero gradients ─ forward ─ backward ─ norm ─ clip ] ──► loss and norm ──► check
                           [ momentum ─ Newton–Schulz ─ Muon, AdamW             ] ◄────────────────────┘

There are two, because a step whose loss is not finite must leave the weights as they were, and the loop reads the loss
and the clock between steps anyway. The average of the weights is one launch and stays outside.

A graph repeats addresses and numbers: whatever changes between steps must be in a tensor that it reads. So learning
rates, decays and momentum are on the device (`HeldRates`), batches are copied into tensors of the graph,
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

from birdie.gpt.train.loop import Trainer
from birdie.gpt.train.micro_batches import MicroBatch
from birdie.gpt.train.optimizers import Optimizers
from birdie.gpt.train.plan import StepPlan
from birdie.system.callbacks import Notify, StepHook
from birdie.system.ranges import named_range

T = TypeVar("T")
Key = tuple[tuple[torch.Size, float], ...]
"""Shapes and parts of the micro-batches of a step."""
Check = Callable[[float, float], None]
"""(loss, gradient norm): raises where they are no numbers."""

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


class HeldRates:
    """Learning rates, decays and momentum of the optimizers on the device, where a CUDA graph reads them."""

    def __init__(self, optimizers: Optimizers, device: torch.device) -> None:
        self._optimizers, groups = optimizers, optimizers.torch_groups()
        self._values = torch.zeros(2 * len(groups) + 1, device=device)  # lr and decay of each, then the momentum
        self._decays: list[tuple[dict[str, Any], Tensor]] = []
        for number, (name, group) in enumerate(groups):
            group["lr"], decay = self._values[2 * number], self._values[2 * number + 1]
            if name == "matrices":
                group["weight_decay"], group["momentum"] = decay, self._values[-1]
            else:  # torch's kernel takes no tensor for the decay: `update` applies it
                group["weight_decay"], group["capturable"] = 0.0, device.type == "cuda"
                self._decays.append((group, decay))

    def set(self, rate: float, momentum: float, decay: float) -> None:
        """Set the rates of the next step; nothing else transfers anything."""
        optimizers = self._optimizers
        names = [name for name, _ in optimizers.torch_groups()]
        pairs = [(optimizers.rates[name] * rate, optimizers.decays[name] * decay) for name in names]
        self._values.copy_(torch.tensor([*(value for pair in pairs for value in pair), momentum]))

    @torch.no_grad()
    def update(self) -> None:
        """Update every parameter at these rates from the gradient that `Optimizers.totals` left."""
        for group, decay in self._decays:
            decayed: list[Tensor] = [p for p in group["params"] if p.grad is not None]
            torch._foreach_mul_(decayed, 1 - group["lr"] * decay)
        self._optimizers.update()


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
        trainer: whose optimizers have their rates on the device from now on.
        notify: called with the result of the check.
    """

    def __init__(self, backend: GraphBackend, trainer: Trainer, notify: Notify) -> None:
        self._backend, self._trainer, self._notify = backend, trainer, notify
        self._rates = HeldRates(trainer.optimizers, trainer.device)
        self._seen: set[Key] = set()
        self._graphs: dict[Key, _Graph] = {}
        self._failed = False
        self.replayed = 0

    def step(self, batches: Sequence[MicroBatch], plan: StepPlan, check: Check) -> tuple[float, float]:
        """Take a step; return the loss and the norm of the gradient before clipping.

        Args:
            batches: of the step; no arguments but ids and targets.
            plan: rates of the step.
            check: called with the result before any weight changes; may raise.
        """
        key = tuple((batch.ids.shape, batch.parts) for batch in batches)
        graph = self._graphs.get(key)
        if graph is None and key in self._seen and not self._failed:
            return self._first_replay(key, batches, plan, check)
        self._seen.add(key)
        return self._eager(batches, plan, check) if graph is None else self._replay(graph, batches, plan, check)

    def diagnostics(self) -> str:
        """Return a line about the number of replayed steps."""
        return f"CUDA graphs: {self.replayed:,} steps replayed, {len(self._graphs)} shapes"

    def _eager(self, batches: Sequence[MicroBatch], plan: StepPlan, check: Check) -> tuple[float, float]:
        self._rates.set(plan.rate, plan.momentum, plan.decay)
        loss, norm = self._totals(batches).tolist()
        check(loss, norm)
        with named_range("optimizer"):
            self._rates.update()
        return loss, norm

    def _totals(self, batches: Sequence[MicroBatch]) -> Tensor:
        return self._trainer.optimizers.totals(self._trainer.accumulate(batches))

    def _replay(
        self, graph: _Graph, batches: Sequence[MicroBatch], plan: StepPlan, check: Check
    ) -> tuple[float, float]:
        self._rates.set(plan.rate, plan.momentum, plan.decay)
        with named_range("transfer"):
            for held, batch in zip(graph.batches, batches, strict=True):
                held.ids.copy_(batch.ids)
                held.targets.copy_(batch.targets)
        with named_range("graph/gradient"):
            graph.gradient()
            loss, norm = graph.totals.tolist()
        check(loss, norm)
        with named_range("graph/update"):
            graph.update()
        self.replayed += 1
        return loss, norm

    def _first_replay(
        self, key: Key, batches: Sequence[MicroBatch], plan: StepPlan, check: Check
    ) -> tuple[float, float]:
        """Take a step eagerly and then from the same state by new graphs; keep the graphs if both agree."""
        weights, optimizers = list(self._trainer.tensors().values()), self._trainer.optimizers
        states = [o.state for o in (optimizers.muon, optimizers.adam) if o is not None]
        state = [*weights, *(tensor for o in states for of in o.values() for tensor in of.values())]
        saved = [tensor.clone() for tensor in state]
        eager = self._eager(batches, plan, check)
        after = [tensor.clone() for tensor in state]
        torch._foreach_copy_(state, saved)
        try:
            graph = self._captured(batches, plan)
            replayed = self._replay(graph, batches, plan, lambda _loss, _norm: None)  # compared below, NaN as well
        except (RuntimeError, AssertionError) as error:  # torch raises these for what cannot be captured
            reason: str | None = " ".join(str(error).split())[:160]
        else:
            count = len(weights)
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

    def _captured(self, batches: Sequence[MicroBatch], plan: StepPlan) -> _Graph:
        """Capture graphs at other rates than the step's, so that one that holds them fixed fails the check."""
        held = [
            MicroBatch(torch.zeros_like(batch.ids), torch.zeros_like(batch.targets), batch.parts, {})
            for batch in batches
        ]
        self._rates.set(plan.rate / 2, plan.momentum / 2, plan.decay / 2)
        gradient, totals = self._backend.capture(lambda: self._totals(held))
        update, _ = self._backend.capture(self._rates.update)
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


def step_graphs(trainer: Trainer, hooks: Sequence[StepHook], notify: Notify) -> StepGraphs | None:
    """Return what runs the steps of `trainer` as graphs, unless something is in the way, which the log then names."""
    backend = graph_backend(trainer.device)
    reasons = {
        f"they need CUDA, and this is {trainer.device.type}": backend is None,
        "they run on one rank only": trainer.world.size > 1,
        "the bounds of documents differ in number from step to step": trainer.documents is not None,
        "techniques act between steps": bool(hooks),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None or backend is None:
        notify(f"CUDA graphs: not used, {reason}")
        return None
    return StepGraphs(backend, trainer, notify)
