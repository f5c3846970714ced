"""A plan carried out: the losses of its targets, by windows, by a stream, or by turns with learning, into one tally.

    plan ─┬─ windows ────────────────────────────┐
          ├─ stream ─────────────────────────────┼─► (tilt) ─► tally ─► Score
          └─ windows or documents, and learning ─┘

Whoever scores comes through `enter`: an evaluation, and the audit that looks at it.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.errors import ConfigError
from birdie.model.gpt import GPT
from birdie.runtime.callbacks import Progress
from birdie.runtime.distributed import World
from birdie.score.adapt import SGDSettings
from birdie.score.chunks import Adapted, Keeping, score_adapting
from birdie.score.forward import LanguageModel, score_windows
from birdie.score.lean import Lean
from birdie.score.lora import LoraSettings
from birdie.score.ngram import TiltSettings
from birdie.score.phased import PhasedSettings, score_documents
from birdie.score.plan import Plan
from birdie.score.settings import DOCUMENTWISE, EvaluationSettings
from birdie.score.stream import score_stream
from birdie.score.tally import BytesPerToken, Score, Tally


class Asked(Protocol):
    """How to score, as a `Recipe` says it."""

    @property
    def evaluation(self) -> EvaluationSettings:
        """The way."""
        ...

    @property
    def tilt(self) -> TiltSettings:
        """Whether, and how, predictions lean on what the text said before."""
        ...

    @property
    def sgd(self) -> SGDSettings:
        """How the whole model learns, chunk by chunk."""
        ...

    @property
    def lora(self) -> LoraSettings:
        """How adapters learn a document."""
        ...

    @property
    def phased(self) -> PhasedSettings:
        """How the whole model learns between documents."""
        ...


def score(
    made: Plan,
    asked: Asked,
    model: GPT,
    table: BytesPerToken | NDArray[np.uint16],
    *,
    batch_tokens: int,
    bos_id: int,
    device: torch.device,
    by: LanguageModel | None = None,
    world: World | None = None,
    progress: Progress | None = None,
    keeping: Keeping | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Score, Adapted | None]:
    """Score `model` by the plan; all ranks get the answer, and what was learned if anything was to be.

    Args:
        made: the plan, made by `asked.evaluation`.
        asked: how.
        model: in evaluation mode; it gets its weights back.
        table: bytes per token, or the bytes of every token of the stream the plan was made for.
        batch_tokens, bos_id, device, by, world, progress, keeping, stop: as `enter` has them.

    Raises:
        KeyboardInterrupt, RuleError, DataError, ConfigError, OutputError, WeightsError: as `enter`; and the loss is not
            finite, or a target was never scored.
    """
    world = world or World()
    tally = Tally(made.tokens, table[: len(made.tokens)] if isinstance(table, np.ndarray) else table, bos_id)
    seconds, adapted = enter(
        made,
        asked,
        model,
        tally,
        batch_tokens=batch_tokens,
        bos_id=bos_id,
        device=device,
        by=by,
        world=world,
        progress=progress,
        keeping=keeping,
        stop=stop,
    )
    return tally.score(len(made.tokens) - 1, seconds, world, device), adapted


def enter(
    made: Plan,
    asked: Asked,
    model: GPT,
    tally: Tally,
    *,
    batch_tokens: int,
    bos_id: int,
    device: torch.device,
    by: LanguageModel | None = None,
    world: World | None = None,
    progress: Progress | None = None,
    keeping: Keeping | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[float, Adapted | None]:
    """Enter the losses of this rank's share in `tally`; returns seconds, and what was learned if anything was to be.

    Args:
        made: the plan, made by `asked.evaluation`.
        asked: how.
        model: in evaluation mode; it gets its weights back.
        tally: of the plan's tokens, and new.
        batch_tokens: inputs at a time over all ranks, unless the settings say how many windows; not of documents.
        bos_id: what documents begin with.
        device: of the model.
        by: what windows pass through in place of the model, such as its package; not where it learns.
        world: ranks that share the work.
        progress: called with (done, in all) of this rank.
        keeping: a file for the state of an adaptation.
        stop: asked between the chunks of one.

    Raises:
        KeyboardInterrupt: an adaptation was stopped; its state is in the file, if there is one.
        RuleError: a target was scored twice, or would be learned from before it is scored.
        ConfigError: a setting does not fit the model or the ranks, or two of them each other.
        OutputError: the state cannot be written.
        WeightsError: there is nothing to go on from, or it is the state of another scoring.
    """
    world = world or World()
    settings, sink = asked.evaluation, _sink(made, asked, tally)
    shared: dict[str, Any] = {"device": device, "world": world, "progress": progress}
    windows: dict[str, Any] = {
        "batch_tokens": settings.batch_seqs * made.length or batch_tokens,
        "temperature": settings.temperature,
    }
    going: dict[str, Any] = {"keeping": keeping, "stop": stop}
    began, adapted = time.perf_counter(), None
    if settings.adapt in DOCUMENTWISE:
        phased = asked.phased if settings.adapt == "phased" else None
        context = asked.lora.context or made.length
        adapted = score_documents(
            model, made.tokens, tally, asked.lora, context=context, bos_id=bos_id, phased=phased, **shared, **going
        )
    elif settings.adapt == "sgd":
        adapted = score_adapting(
            model, made.tokens, made.windows, sink, asked.sgd, length=made.length, **windows, **shared, **going
        )
    elif settings.stream:
        score_stream(
            model,
            made.tokens,
            made.windows,
            sink,
            context=made.length,
            chunk=settings.chunk,
            sinks=settings.sinks,
            kv_bits=settings.kv_bits,
            rows=-(-settings.batch_seqs // world.size),
            temperature=settings.temperature,
            **shared,
        )
    else:
        score_windows(model if by is None else by, made.tokens, made.windows, sink, **windows, **shared)
    leaning = time.perf_counter()
    if isinstance(sink, Lean):
        sink.close(tally, world, device)
    ended = time.perf_counter()
    if adapted is None:
        return ended - began, None
    adapted = replace(adapted, score_seconds=adapted.score_seconds + ended - leaning)
    return adapted.score_seconds + adapted.adapt_seconds, adapted


def _sink(made: Plan, asked: Asked, tally: Tally) -> Tally | Lean:
    """Where losses go: the tally, or what leans them for it."""
    if not asked.tilt.enabled:
        return tally
    if asked.evaluation.adapt in DOCUMENTWISE:
        raise ConfigError(
            "hints come in the order of the text, documents by length; leave out the tilt or the adapters"
        )
    return Lean(made.tokens, asked.tilt)
