"""A whole stream by documents, each adapted to (`lora`); in phases, if asked for, in which the model itself learns too.

    queue    [ batch ][ batch ]│[ batch ][ batch ]│[ batch ] …
    ranks      take batches    │                  │
               each by itself  └► all meet: SGD over the documents so far ─► adapters anew ─► on with the queue

Phase p of P ends with the batch that holds document ⌊D · (p + 1) / P⌋ of the queue, D the documents of the prefix; from
the first so many, and no more, the whole model learns, all of them again in each phase. What other ranks scored is told
to every ledger before, and the ledger refuses the rest. Between two meetings ranks do not wait for one another.

Which documents come first depends on their lengths, so with phases the order is not that of the stream: each document
is scored before it is learned from, but whether that is one pass from left to right was asked (openai/parameter-golf
#1536) and never ruled; records up to #1855 do it. Without phases no score depends on the order.

Source: openai/parameter-golf #1610 (one phase), #1626 (several).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import torch
from cyclopts import Parameter
from numpy.typing import NDArray
from torch import Tensor

from birdie.errors import ConfigError
from birdie.model.gpt import GPT
from birdie.runtime.callbacks import Progress
from birdie.runtime.device import synchronize
from birdie.runtime.distributed import SharedCounter, World
from birdie.score.adapt import SGDSettings, learn
from birdie.score.chunks import Adapted, Keeping
from birdie.score.lora import DocumentLearner, LoraSettings
from birdie.score.queue import Queue, dealt, queue
from birdie.score.resume import identity, read_state, reading, write_state
from birdie.score.tally import Tally
from birdie.score.windows import Windows

ROUND = 4  # batches of each rank between two meetings at which a scoring can be stopped or kept


@dataclass(frozen=True, slots=True)
class PhasedSettings:
    """Whole-model SGD between documents; the defaults are those of #1610 and #1626.

    Raises:
        ConfigError: a value is out of range.
    """

    prefix_docs: Annotated[
        int, Parameter(env_var="PHASED_TTT_PREFIX_DOCS", help="First documents of the queue that the model learns.")
    ] = 2000
    phases: Annotated[
        int, Parameter(env_var="PHASED_TTT_NUM_PHASES", help="Times it learns, each from all documents so far.")
    ] = 3
    lr: Annotated[
        float, Parameter(env_var="GLOBAL_TTT_LR", help="Learning rate of a phase's first chunk; falls as a cosine.")
    ] = 0.001
    epochs: Annotated[int, Parameter(env_var="GLOBAL_TTT_EPOCHS", help="Passes over a chunk.")] = 1
    chunk_tokens: Annotated[
        int, Parameter(env_var="GLOBAL_TTT_CHUNK_TOKENS", help="Tokens that share a learning rate.")
    ] = 32_768
    momentum: Annotated[
        float, Parameter(env_var="GLOBAL_TTT_MOMENTUM", help="Share of the sum of gradients that a step keeps.")
    ] = 0.9
    batch_seqs: Annotated[
        int, Parameter(env_var="GLOBAL_TTT_BATCH_SEQS", help="Sequences of a step over all ranks.")
    ] = 32
    grad_clip: Annotated[
        float, Parameter(env_var="GLOBAL_TTT_GRAD_CLIP", help="Largest norm of the whole gradient; 0: no limit.")
    ] = 1.0

    def __post_init__(self) -> None:
        for name in ("prefix_docs", "phases"):
            if getattr(self, name) < 1:
                raise ConfigError(f"phased {name} is {getattr(self, name)}; it must be at least 1")
        self.sgd()

    def sgd(self) -> SGDSettings:
        """Of the steps."""
        return SGDSettings(
            lr=self.lr,
            epochs=self.epochs,
            chunk_tokens=self.chunk_tokens,
            momentum=self.momentum,
            batch_seqs=self.batch_seqs,
            grad_clip=self.grad_clip,
        )

    def ends(self, documents: int) -> list[int]:
        """How many documents of the queue each phase learns from; phases that would learn nothing new are left out."""
        prefix = min(self.prefix_docs, documents)
        return sorted({prefix * (phase + 1) // self.phases for phase in range(self.phases)} - {0})


@dataclass(slots=True)
class _Standing:
    """How far a scoring came: batches and phases that are done, and what the phases took."""

    batch: int = 0
    phase: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    told: str = ""


def score_documents(
    model: GPT,
    tokens: NDArray[np.uint16],
    tally: Tally,
    settings: LoraSettings,
    *,
    context: int,
    bos_id: int,
    device: torch.device,
    phased: PhasedSettings | None = None,
    world: World | None = None,
    progress: Progress | None = None,
    keeping: Keeping | None = None,
    stop: Callable[[], bool] = lambda: False,
    restore: bool = True,
) -> Adapted:
    """Enter all of `tokens` in `tally`, adapting to each document.

    Args:
        model: in evaluation mode; all ranks hold the same weights.
        tokens: (N + 1,) of the stream.
        tally: of the stream; new, and of the same kind if `keeping` resumes.
        settings: of adapters and their steps.
        context: most inputs of a window, and tokens of the sequences that phases learn from.
        bos_id: what documents begin with.
        device: of the model.
        phased: of phases; None: there are none.
        world: ranks that share the batches, and the steps of phases.
        progress: called with (targets done, in all) of this rank; with order "claimed" its share is guessed.
        keeping: a file for the state, kept every so many batches of a rank.
        stop: asked when ranks meet; if any says so, all stop.
        restore: whether the model gets its weights back after phases, however this ends.

    Raises:
        KeyboardInterrupt: it was stopped; the state is in the file, if there is one.
        RuleError: a target would be scored a second time, or learned from before it is scored.
        ConfigError: a setting does not fit the model or the ranks, or a gradient is not finite.
        WeightsError: there is nothing to go on from, or it is the state of another scoring.
    """
    world = world or World()
    if keeping is not None:
        keeping.check()
    if keeping is not None and settings.warm_a and world.size > 1:
        raise ConfigError("with warm_a every rank has As of its own, which one file does not keep; use one rank")
    found = queue(tokens, bos_id, settings.batch_docs)
    learner = DocumentLearner(model, tokens, tally, settings, context, min(settings.batch_docs, len(found.begins)))
    ends = [] if phased is None else phased.ends(len(found.begins))
    before = [p.detach().clone() for p in model.parameters()] if ends else []
    standing = _Standing()
    known: dict[str, str] = {}
    if keeping is not None:
        spans = Windows(found.begins, found.begins, found.stops, context)
        known = identity(model, tokens, spans, settings, length=context, temperature=1.0, world=world)
        known["phases"] = str(phased)
        if keeping.resume:
            _load(keeping, known, learner, standing, world)
    earlier = learner.score_seconds + learner.adapt_seconds + standing.seconds
    kept, done, rounds = standing.batch, 0, list(_rounds(found, ends, standing.batch, world, keeping is not None))
    mine = _share(found, rounds, settings, context, world)
    try:
        for batches in rounds:
            for batch in _turns(batches, found, settings, context, world):
                learner.score(*found.batch(batch))
                done += found.places(batch)
                if progress is not None:
                    progress(min(done, mine), mine)
            standing.batch = batches.stop
            if standing.batch == len(found):
                break
            while (
                phased is not None and standing.phase < len(ends) and ends[standing.phase] <= batches.stop * found.size
            ):
                _phase(learner, found, ends[standing.phase], phased, standing, world)
            stopping = world.any(stop(), device)
            due = keeping is not None and keeping.every and standing.batch - kept >= keeping.every * world.size
            if keeping is not None and (stopping or due):
                _save(keeping, known, learner, standing, world)
                kept = standing.batch
            if stopping:
                raise KeyboardInterrupt
        learner.counts = _of_all(learner.counts, world, device)
        return Adapted(
            learner.score_seconds,
            learner.adapt_seconds + standing.seconds,
            len(found),
            learner.steps + standing.steps,
            learner.learned + standing.tokens,
            learner.evidence() + _told(phased, standing),
            earlier,
        )
    finally:
        if restore and before:
            with torch.no_grad():
                for p, old in zip(model.parameters(), before, strict=True):
                    p.copy_(old)


def _told(phased: PhasedSettings | None, standing: _Standing) -> str:
    """What phases did, as the rest of a line."""
    if phased is None:
        return ""
    if not standing.phase:
        return "; no phase, for no document came after the batch that one would have learned from"
    return f"; {standing.phase} phases, the last {standing.told}"


def _rounds(found: Queue, ends: Sequence[int], start: int, world: World, keeps: bool) -> Iterator[range]:
    """The batches from `start` on, cut where all ranks meet: where phases end, and where a scoring can be stopped."""
    edges = {-(-end // found.size) for end in ends} | {len(found)}
    if keeps or world.size == 1:
        edges |= set(range(start, len(found), ROUND * world.size if world.size > 1 else 1))
    first = start
    for edge in sorted(edges):
        if edge > first:
            yield range(first, edge)
            first = edge


def _turns(batches: range, found: Queue, settings: LoraSettings, context: int, world: World) -> Iterator[int]:
    """This rank's batches of a round."""
    if settings.order == "claimed":
        claims = SharedCounter(world)
        while (number := claims.next()) < len(batches):
            yield batches[number]
    else:
        costs = [found.cost(batch, settings.chunk, context) for batch in batches]
        yield from (batches[number] for number in dealt(costs, world.rank, world.size))


def _share(found: Queue, rounds: Sequence[range], settings: LoraSettings, context: int, world: World) -> int:
    """Places that this rank is going to score, or about so many."""
    if settings.order == "claimed":
        return sum(found.places(batch) for batches in rounds for batch in batches) // world.size
    return sum(found.places(batch) for batches in rounds for batch in _turns(batches, found, settings, context, world))


def _phase(
    learner: DocumentLearner, found: Queue, documents: int, phased: PhasedSettings, standing: _Standing, world: World
) -> None:
    """Have the model learn the first `documents` of the queue, and the adapters start anew."""
    began = time.perf_counter()
    ledger, device = learner.tally.ledger, learner.device
    ledger.agree(0, len(ledger), world, device)
    ranges = list(zip(found.begins[:documents].tolist(), found.stops[:documents].tolist(), strict=True))
    done = learn(learner.model, learner.tokens, ranges, phased.sgd(), ledger, length=learner.context, world=world)
    learner.adapters.reset()
    synchronize(device)
    standing.phase += 1
    standing.steps += done.steps
    standing.tokens += done.tokens
    standing.told = done.evidence()
    standing.seconds += time.perf_counter() - began


def _of_all(counts: Tensor, world: World, device: torch.device) -> Tensor:
    """Their sum over ranks, on the CPU."""
    return counts.clone() if world.size == 1 else world.sum_(counts.to(device, copy=True)).cpu()


def _save(
    keeping: Keeping, known: Mapping[str, str], learner: DocumentLearner, standing: _Standing, world: World
) -> None:
    """Write the state; rank 0 does, every rank must call it."""
    tensors = {f"tally/{name}": each for name, each in learner.tally.state(world, learner.device).items()}
    tensors["counts"] = _of_all(learner.counts, world, learner.device)
    if standing.phase:
        tensors |= {f"weight/{name}": p.detach() for name, p in learner.model.named_parameters()}
    if learner.settings.warm_a:
        tensors |= {f"a/{part}/{place}": a for (part, place), a in learner.adapters.down.items()}
    if world.is_main:
        ledger = learner.tally.ledger
        seconds = [learner.score_seconds, learner.adapt_seconds]
        progress = asdict(standing) | {"own seconds": seconds, "ledger": [ledger.learned, ledger.steps]}
        write_state(keeping.path, known, tensors, progress)
    world.barrier()  # as in `resume.save_midway`


def _load(
    keeping: Keeping, known: Mapping[str, str], learner: DocumentLearner, standing: _Standing, world: World
) -> None:
    """Go on from a state. Every rank must call it, and be able to read the file."""
    with reading(keeping.path):
        tensors, progress = read_state(keeping.path, known)
        learner.tally.load_state(
            {name.removeprefix("tally/"): each for name, each in tensors.items() if name.startswith("tally/")}, world
        )
        if world.is_main:
            learner.counts.copy_(tensors["counts"])
        learner.score_seconds, learner.adapt_seconds = progress.pop("own seconds")
        learner.tally.ledger.learned, learner.tally.ledger.steps = progress.pop("ledger")
        with torch.no_grad():
            for name, p in learner.model.named_parameters():
                if progress["phase"]:
                    p.copy_(tensors[f"weight/{name}"])
            for (part, place), a in learner.adapters.down.items():
                if learner.settings.warm_a:
                    a.copy_(tensors[f"a/{part}/{place}"])
        for name, value in progress.items():
            setattr(standing, name, value)
