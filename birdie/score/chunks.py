"""Score first, then learn: a stream in chunks, each scored by the weights that those before it have left.

    chunk 0      score ─► learn ─┐
    chunk 1                      └─► score ─► learn ─┐
    …                                                └─► …
    last chunk                                             score

A window belongs to the chunk that holds its first scored place, and is scored whole with it, so of a chunk's own places
all are scored when it ends. The last chunk is not learned from: nothing comes after it. Chunks come in order, so do the
steps within one, and nothing is drawn by chance: two runs on one machine do the same (on a CUDA device as far as its
kernels do; sums of embedding gradients there have no fixed order).

The state between two chunks can be kept in a file (`resume`), from which a scoring that was stopped goes on.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.errors import ConfigError
from birdie.model.gpt import GPT
from birdie.runtime.callbacks import Progress
from birdie.runtime.device import synchronize
from birdie.runtime.distributed import World
from birdie.runtime.files import require_file, require_writable
from birdie.score.adapt import Learner, SGDSettings, cosine
from birdie.score.forward import score_windows
from birdie.score.lean import Lean
from birdie.score.ledger import Ledger, Places
from birdie.score.resume import Midway, identity, load_midway, save_midway
from birdie.score.tally import Tally
from birdie.score.windows import Windows


@dataclass(frozen=True, slots=True)
class Keeping:
    """A file for the state between chunks.

    Attributes:
        path: of the file; written whole or not at all, and removed by nobody.
        every: chunks between two times it is written; 0: only when the scoring is stopped.
        resume: whether to go on from it.
    """

    path: Path
    every: int = 16
    resume: bool = False

    def check(self) -> None:
        """Prove, before any work, that a state can be written, and that no other file is lost to it.

        Raises:
            ConfigError: there is a file already that is not to be gone on from.
            OutputError: it cannot be written.
        """
        target = require_file(self.path)
        require_writable(target.parent)
        if target.exists() and not self.resume:
            raise ConfigError(
                f"{target} is there already; go on from it by resuming, or remove it, or name another file"
            )


@dataclass(frozen=True, slots=True)
class Adapted:
    """What a scoring by turns took.

    Attributes:
        score_seconds, adapt_seconds: of scoring and of learning, from the first chunk on, whenever that was.
        earlier_seconds: of these, before it went on from a state.
        chunks: of the stream.
        steps: of SGD.
        tokens: learned from, each as often as it was.
        evidence: a line for the log: what moved.
    """

    score_seconds: float
    adapt_seconds: float
    chunks: int
    steps: int
    tokens: int
    evidence: str
    earlier_seconds: float = 0.0


def chunked(windows: Windows, tokens: int) -> Iterator[tuple[Places, Windows]]:
    """The places of each chunk of so many, up to the last that is scored, and the windows that belong to it."""
    if not len(windows):
        return
    ordered = windows.by_place()
    end = int(windows.stops.max())
    tokens = min(tokens, end)
    edges = np.searchsorted(ordered.firsts, np.arange(0, end + tokens, tokens))
    for number, first in enumerate(range(0, end, tokens)):
        yield (first, min(first + tokens, end)), ordered.part(int(edges[number]), int(edges[number + 1]))


def score_adapting(
    model: GPT,
    tokens: NDArray[np.uint16],
    windows: Windows,
    sink: Tally | Lean,
    settings: SGDSettings,
    *,
    length: int,
    batch_tokens: int,
    device: torch.device,
    temperature: float = 1.0,
    world: World | None = None,
    progress: Progress | None = None,
    keeping: Keeping | None = None,
    stop: Callable[[], bool] = lambda: False,
    restore: bool = True,
) -> Adapted:
    """Enter `windows` in `sink`, learning from each chunk when it is scored.

    Args:
        model: in evaluation mode; all ranks hold the same weights.
        tokens: (N + 1,) of the stream.
        windows: over its N places, without gaps up to the last that is scored.
        sink: of the stream, and new.
        settings: of chunks and steps.
        length: tokens of the sequences that are learned from.
        batch_tokens, device, temperature: as `forward.score_windows` has them.
        world: ranks that share windows and steps.
        progress: called with (targets done, targets in all) of this rank; learning counts for nothing.
        keeping: a file for the state between chunks.
        stop: asked between chunks; if any rank says so, all stop.
        restore: whether the model gets its weights back, however this ends.

    Raises:
        KeyboardInterrupt: it was stopped; the state is in the file, if there is one.
        RuleError: a target would be scored a second time, or learned from before it is scored.
        ConfigError: a setting does not fit the model, the gradient is not finite, the sink is none that can be kept, or
            the state's file is there already.
        OutputError: the state cannot be written.
        WeightsError: there is nothing to go on from, or it is the state of another scoring.
    """
    world = world or World()
    learner = Learner(model, settings, world)
    plan = list(chunked(windows, settings.chunk_tokens))
    last = max((number for number, (_, part) in enumerate(plan) if len(part)), default=0)
    midway, tally = Midway(learner), sink if isinstance(sink, Tally) else None
    known: dict[str, str] = {}
    if keeping is not None:
        keeping.check()
        if tally is None:
            raise ConfigError("the state of a tilted scoring cannot be kept; leave out the state, or the tilt")
        known = identity(model, tokens, windows, settings, length=length, temperature=temperature, world=world)
    mine = [part.share(world.rank, world.size).scored for _, part in plan]
    try:
        if keeping is not None and keeping.resume and tally is not None:
            load_midway(keeping.path, known, midway, tally, world)
        earlier = midway.score_seconds + midway.adapt_seconds
        while midway.chunk < len(plan):
            own, part = plan[midway.chunk]
            midway.score_seconds += score_windows(
                model,
                tokens,
                part,
                sink,
                batch_tokens=batch_tokens,
                device=device,
                temperature=temperature,
                world=world,
                progress=_from(sum(mine[: midway.chunk]), sum(mine), progress),
            )
            began = time.perf_counter()
            _agree(sink.ledger, part, world, device)
            if midway.chunk < last:
                learner.learn(tokens, [own], sink.ledger, length=length, factor=cosine(midway.chunk, len(plan)))
                synchronize(device)
            midway.adapt_seconds += time.perf_counter() - began
            midway.chunk += 1
            if midway.chunk < len(plan):
                _between(midway, tally, keeping, known, world, world.any(stop(), device))
        return Adapted(
            midway.score_seconds,
            midway.adapt_seconds,
            len(plan),
            learner.steps,
            learner.tokens,
            learner.evidence(),
            earlier,
        )
    finally:
        if restore:
            learner.restore()


def _agree(ledger: Ledger, part: Windows, world: World, device: torch.device) -> None:
    """Let every rank know what the others scored of this chunk."""
    if len(part):
        ledger.agree(int(part.firsts.min()), int(part.stops.max()), world, device)


def _between(
    midway: Midway, tally: Tally | None, keeping: Keeping | None, known: dict[str, str], world: World, stopping: bool
) -> None:
    """Keep the state if it is time to; stop if that was asked for."""
    due = keeping is not None and (stopping or (keeping.every > 0 and midway.chunk % keeping.every == 0))
    if keeping is not None and tally is not None and due:
        save_midway(keeping.path, known, midway, tally, world)
    if stopping:
        raise KeyboardInterrupt


def _from(before: int, total: int, progress: Progress | None) -> Progress | None:
    """Progress of one chunk as that of all."""
    if progress is None:
        return None
    return lambda done, _: progress(before + done, total)
