"""What the settings of an evaluation mean for a stream: which targets, in which windows or parts, and the way there.

    settings, tokens ─► plan: the same targets whatever the settings ─► score: windows, or a stream ─► Score

The targets are those of windows end to end, as the challenge counts them, of the training length or of longer ones if
those are asked for, so that scores of different covers compare; a stream too short for one such window is scored whole.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.distributed import World
from birdie.errors import ConfigError
from birdie.model.gpt import GPT
from birdie.score.adapt import SGDSettings
from birdie.score.bpb import whole_windows
from birdie.score.chunks import Adapted, Keeping, score_adapting
from birdie.score.forward import LanguageModel, Progress, Sink, score_windows
from birdie.score.lean import Lean
from birdie.score.lora import LoraSettings
from birdie.score.ngram import TiltSettings
from birdie.score.phased import PhasedSettings, score_documents
from birdie.score.settings import DOCUMENTWISE, EvaluationSettings
from birdie.score.stream import restarts, score_stream, segments
from birdie.score.tally import BytesPerToken, Score, Tally
from birdie.score.windows import Windows, blocks, documents, sliding


@dataclass(frozen=True, slots=True)
class Plan:
    """What is scored, and how.

    Attributes:
        tokens: (N + 1,): the N targets that count, and the token before the first.
        windows: what each pass sees and scores; of a stream, its parts.
        length: of windows, or the context of a stream.
        says: the way, in a few words.
    """

    tokens: NDArray[np.uint16]
    windows: Windows
    length: int
    says: str


def plan(settings: EvaluationSettings, tokens: NDArray[np.uint16], train_len: int, bos_id: int, isolated: bool) -> Plan:
    """The plan for a stream.

    Args:
        settings: of the evaluation.
        tokens: (at least 2,).
        train_len: length of training's sequences.
        bos_id: what documents begin with.
        isolated: whether the model keeps documents apart.

    Raises:
        ConfigError: the stride, or the chunk, is longer than the windows.
        DataError: there is not one window.
    """
    length = settings.seq_len or train_len
    check_lengths(settings, length)
    if not (settings.stride or settings.stream or settings.documents or settings.adapt in DOCUMENTWISE):
        whole_windows(len(tokens), length)  # as the challenge has it, there must be one
    whole = blocks(len(tokens) - 1, max(length, train_len)).scored
    tokens = tokens[: (whole or max(1, len(tokens) - 1)) + 1]
    targets = len(tokens) - 1
    begins = np.flatnonzero(np.asarray(tokens) == bos_id) if settings.documents else np.empty(0, np.int64)
    says = f" at temperature {settings.temperature:g}" if settings.temperature != 1.0 else ""
    if settings.stream and settings.exact:
        parts = restarts(tokens, bos_id if isolated or settings.documents else None, length)
        return Plan(tokens, parts, length, f"exact stream, context {length:,}{says}")
    if settings.stream:
        parts = segments(targets, settings.segments, length)
        side = f" in {len(parts)} segments" if len(parts) > 1 else ""
        if settings.documents:
            parts, side = documents(begins, targets, max(1, targets), max(1, targets)), " in each document"
        sinks = f" and {settings.sinks} sinks" if settings.sinks else ""
        kept = f", keys and values in {settings.kv_bits} bits" if settings.kv_bits else ""
        moves = f"moving on by {min(settings.chunk, length):,} tokens"
        return Plan(tokens, parts, length, f"stream{side}, context {length:,}{sinks}, {moves}{kept}{says}")
    stride = settings.stride or length
    if settings.documents:
        cover = documents(begins, targets, length, stride)
        return Plan(tokens, cover, length, f"windows of {length:,} in each document, stride {stride:,}{says}")
    way = f", stride {stride:,}" if settings.stride else " end to end"
    return Plan(tokens, sliding(targets, length, stride), length, f"windows of {length:,}{way}{says}")


def check_lengths(settings: EvaluationSettings, length: int) -> None:
    """Refuse a stride or chunk that does not fit windows of `length`."""
    if settings.stride > length:
        raise ConfigError(f"stride {settings.stride} is longer than windows of {length}; give 1 to {length}")
    if settings.stream and settings.sinks > max(0, length - settings.chunk):
        raise ConfigError(
            f"{settings.sinks} sinks do not fit a context of {length} that moves on by {settings.chunk}; "
            f"give 0 to {max(0, length - settings.chunk)}, or smaller chunks"
        )


def score(
    made: Plan,
    settings: EvaluationSettings,
    model: GPT,
    table: BytesPerToken | NDArray[np.uint16],
    *,
    batch_tokens: int,
    bos_id: int,
    device: torch.device,
    tilt: TiltSettings | None = None,
    by: LanguageModel | None = None,
    world: World | None = None,
    progress: Progress | None = None,
) -> Score:
    """Score `model` by the plan; all ranks get the answer.

    Args:
        made: the plan.
        settings: that it was made by.
        model: in evaluation mode.
        table: bytes per token, or the bytes of every token of the stream the plan was made for.
        batch_tokens: inputs at a time over all ranks, unless the settings say how many windows.
        bos_id: what documents begin with.
        device: of the model.
        tilt: whether, and how, predictions lean on what the text said before; None: they do not.
        by: what windows pass through in place of the model, such as its package.
        world: ranks that share the work.
        progress: called with (done, in all) of this rank, in places.

    Raises:
        RuleError: a target was scored twice, or never.
        DataError: the loss is not finite.
    """
    world = world or World()
    tally = _tally(made, table, bos_id)
    lean = Lean(made.tokens, tilt) if tilt is not None and tilt.enabled else None
    sink: Sink = lean or tally
    batch = settings.batch_seqs * made.length or batch_tokens
    if settings.stream:
        seconds = score_stream(
            model,
            made.tokens,
            made.windows,
            sink,
            context=made.length,
            chunk=settings.chunk,
            sinks=settings.sinks,
            kv_bits=settings.kv_bits,
            device=device,
            rows=max(1, settings.batch_seqs // world.size) if settings.batch_seqs else 0,
            temperature=settings.temperature,
            world=world,
            progress=progress,
        )
    else:
        seconds = score_windows(
            model if by is None else by,
            made.tokens,
            made.windows,
            sink,
            batch_tokens=batch,
            device=device,
            temperature=settings.temperature,
            world=world,
            progress=progress,
        )
    if lean is not None:
        began = time.perf_counter()
        lean.close(tally, world, device)
        seconds += time.perf_counter() - began
    return tally.score(made.windows.scored, seconds, world, device)


def score_learning(
    made: Plan,
    settings: EvaluationSettings,
    sgd: SGDSettings,
    model: GPT,
    table: BytesPerToken | NDArray[np.uint16],
    *,
    batch_tokens: int,
    bos_id: int,
    device: torch.device,
    tilt: TiltSettings | None = None,
    world: World | None = None,
    progress: Progress | None = None,
    keeping: Keeping | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Score, Adapted]:
    """As `score`, by windows, learning from each chunk after it is scored; the model gets its weights back.

    Args:
        made, settings, model, table, batch_tokens, bos_id, device, tilt, world, progress: as `score` has them.
        sgd: how it learns.
        keeping, stop: as `chunks.score_adapting` has them.

    Raises:
        KeyboardInterrupt: it was stopped; the state is in the file, if there is one.
        RuleError: a target was scored twice or never, or would be learned from before.
        DataError: the loss is not finite.
        ConfigError: a setting does not fit the model, or the gradient is not finite.
        WeightsError: there is nothing to go on from, or it is the state of another scoring.
    """
    world = world or World()
    tally = _tally(made, table, bos_id)
    lean = Lean(made.tokens, tilt) if tilt is not None and tilt.enabled else None
    adapted = score_adapting(
        model,
        made.tokens,
        made.windows,
        lean or tally,
        sgd,
        length=made.length,
        batch_tokens=settings.batch_seqs * made.length or batch_tokens,
        device=device,
        temperature=settings.temperature,
        world=world,
        progress=progress,
        keeping=keeping,
        stop=stop,
    )
    if lean is not None:
        began = time.perf_counter()
        lean.close(tally, world, device)
        adapted = replace(adapted, score_seconds=adapted.score_seconds + time.perf_counter() - began)
    return tally.score(made.windows.scored, adapted.score_seconds + adapted.adapt_seconds, world, device), adapted


def score_by_documents(
    made: Plan,
    lora: LoraSettings,
    phased: PhasedSettings | None,
    model: GPT,
    table: BytesPerToken | NDArray[np.uint16],
    *,
    batch_tokens: int = 0,  # documents are counted instead  # noqa: ARG001
    bos_id: int,
    device: torch.device,
    tilt: TiltSettings | None = None,
    world: World | None = None,
    progress: Progress | None = None,
    keeping: Keeping | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Score, Adapted]:
    """As `score`, by documents, adapters learning each as it is scored; the model gets its weights back.

    Args:
        made: the plan, whose windows are left aside.
        lora: of the adapters.
        phased: how the model itself learns between documents; None: it does not.
        model, table, bos_id, device, world, progress: as `score` has them.
        batch_tokens: not used.
        tilt: must not be on.
        keeping, stop: as `phased.score_documents` has them.

    Raises:
        KeyboardInterrupt: it was stopped; the state is in the file, if there is one.
        RuleError: a target was scored twice or never, or would be learned from before.
        DataError: the loss is not finite.
        ConfigError: a setting does not fit the model or the ranks, or a tilt was asked for.
        WeightsError: there is nothing to go on from, or it is the state of another scoring.
    """
    if tilt is not None and tilt.enabled:
        raise ConfigError(
            "hints come in the order of the text, documents by length; leave out the tilt or the adapters"
        )
    tally = _tally(made, table, bos_id)
    adapted = score_documents(
        model,
        made.tokens,
        tally,
        lora,
        context=lora.context or made.length,
        bos_id=bos_id,
        device=device,
        phased=phased,
        world=world,
        progress=progress,
        keeping=keeping,
        stop=stop,
    )
    seconds = adapted.score_seconds + adapted.adapt_seconds
    return tally.score(len(made.tokens) - 1, seconds, world, device), adapted


def _tally(made: Plan, table: BytesPerToken | NDArray[np.uint16], bos_id: int) -> Tally:
    return Tally(made.tokens, table[: len(made.tokens)] if isinstance(table, np.ndarray) else table, bos_id)
