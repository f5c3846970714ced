"""Streaming evaluation: each token passes the model once, and its keys and values stay in a KV cache.

    stream   ═════════════════════════════════════════►   rolling: the context moves on by a chunk a call
    segments ═══════════►                                 side by side, each but the first after a context of its own
                   ┄┄┄┄┄═══════►                          (┄) that is not scored
    exact    ═════►═════►═════►═════►                     the cache starts anew where it is full, or with a document

A position attends to what it attends to in sliding windows of stride `chunk`. A recomputed window computes the keys and
values of deeper layers from what is in the window; a cache keeps those computed when more of the past was in the
context. So the two are equal, up to rounding, in the first `context` positions, in isolated documents that fit the
context, with one layer, and where all layers have attention windows of W and the context less the chunk holds
layers · (W − 1) positions; and an exact stream equals non-overlapping windows. Elsewhere streaming is a scorer of its
own: causal, normalized, one pass. The compute per token does not grow with context / stride, which is 16 for windows of
1,024 at stride 64. `reference.StreamScorer` is the reference.
"""

import time
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from cyclopts import Parameter
from numpy.typing import NDArray

from birdie.errors import ConfigError
from birdie.model.cache import Cache
from birdie.model.gpt import GPT
from birdie.runtime.callbacks import Progress
from birdie.runtime.device import synchronize
from birdie.runtime.distributed import World
from birdie.score.accumulator import Sink
from birdie.score.mode import Scoring, ScoringMode, ScoringSettings, TrainingReport, check_temperature
from birdie.score.windows import (
    Windows,
    describe_temperature,
    document_begins,
    hints_at,
    ids_and_targets,
    losses_of_logits,
    max_inputs,
    per_document,
    sliding,
)

_CACHE_BYTES = {"cpu": 2**30}
_CACHE_BYTES_GPU = 2**33
"""Most bytes of keys and values on a rank."""


@dataclass(frozen=True, slots=True)
class StreamingMode(ScoringMode):
    """Score each token once through a rolling KV cache.

    Raises:
        ConfigError: a value is out of range or two contradict each other.
    """

    name: ClassVar[str] = "streaming"
    shared: ClassVar[tuple[str, ...]] = ("documents", "batch_seqs", "temperature")
    ngram_bias: ClassVar[bool] = True

    chunk: Annotated[int, Parameter(help="Tokens of a call; the context moves on by as many.")] = 256
    sinks: Annotated[int, Parameter(help="First tokens of the stream that stay visible (attention sinks).")] = 0
    kv_bits: Annotated[
        int, Parameter(help="Bits of a coordinate of cached keys and values: 2, 3, 4 or 8; 0: not quantized.")
    ] = 0
    segments: Annotated[
        int, Parameter(help="Segments of the stream that are scored side by side, each after a context of its own.")
    ] = 1
    exact: Annotated[bool, Parameter(help="Start the cache anew where it is full: equals non-overlapping windows.")] = (
        False
    )

    def __post_init__(self) -> None:
        for name, minimum in (("chunk", 1), ("segments", 1), ("sinks", 0)):
            if getattr(self, name) < minimum:
                raise ConfigError(f"streaming {name} is {getattr(self, name)}; it must be at least {minimum}")
        if self.kv_bits not in (0, 2, 3, 4, 8):
            raise ConfigError(f"streaming kv_bits is {self.kv_bits}; choose 2, 3, 4 or 8, or 0 for no quantization")
        if self.exact and (self.sinks or self.segments > 1 or self.kv_bits):
            raise ConfigError(
                "an exact stream equals windows, which have no sinks, segments or quantized cache; leave these out"
            )

    def score(self, scoring: Scoring) -> TrainingReport | None:
        score_stream(
            scoring.model,
            scoring.tokens,
            self.segments_of(scoring),
            scoring.sink,
            context=scoring.length,
            chunk=self.chunk,
            sinks=self.sinks,
            kv_bits=self.kv_bits,
            rows=-(-scoring.settings.batch_seqs // scoring.world.size),
            temperature=scoring.settings.temperature,
            device=scoring.device,
            world=scoring.world,
            progress=scoring.progress,
        )
        return None

    def segments_of(self, scoring: Scoring) -> Windows:
        """Return the parts of the stream that have a cache of their own; they score every target once."""
        tokens, targets, documents = scoring.tokens, len(scoring.tokens) - 1, scoring.settings.documents
        if self.exact:
            isolated = documents or scoring.model.config.isolate_documents
            return restarts(tokens, scoring.bos_id if isolated else None, scoring.length)
        if documents:
            longest = max(1, targets)
            return per_document(document_begins(tokens, scoring.bos_id), targets, longest, longest)
        return segments(targets, self.segments, scoring.length)

    def describe(self, scoring: Scoring) -> str:
        temperature, length = describe_temperature(scoring.settings), f"{scoring.length:,}"
        if self.exact:
            return f"exact streaming, context {length}{temperature}"
        count = 1 if scoring.settings.documents else len(self.segments_of(scoring))
        parts = " in each document" if scoring.settings.documents else f" in {count} segments" if count > 1 else ""
        sinks = f" and {self.sinks} sinks" if self.sinks else ""
        bits = f", keys and values in {self.kv_bits} bits" if self.kv_bits else ""
        chunk = min(self.chunk, scoring.length)
        return f"streaming{parts}, context {length}{sinks}, chunks of {chunk:,} tokens{bits}{temperature}"

    def check(self, settings: ScoringSettings, length: int) -> None:
        if settings.documents and self.segments > 1:
            raise ConfigError(
                "streaming in each document has no segments; leave one of documents and streaming segments out"
            )
        room = max(0, length - self.chunk)
        if self.sinks > room:
            raise ConfigError(
                f"{self.sinks} sinks do not fit a context of {length} that moves on by {self.chunk}; "
                f"give 0 to {room}, or smaller chunks"
            )


def segments(targets: int, count: int, context: int) -> Windows:
    """Return `count` (or a few fewer) segments of one length, but for the last, that score all targets once.

    The first scores all its targets; the others have `context` inputs that are not scored, or all there are before.
    """
    context = min(context, max(0, targets - 1))
    stride = max(1, -(-(targets - context) // count))
    return sliding(targets, context + stride, stride)


def restarts(tokens: NDArray[np.uint16], bos_id: int | None, context: int) -> Windows:
    """Return the parts of an exact stream: every `context` tokens, and per document unless bos_id is None."""
    targets = len(tokens) - 1
    if bos_id is None:
        return sliding(targets, context, context)
    return per_document(document_begins(tokens, bos_id), targets, context, context)


def score_stream(
    model: GPT,
    tokens: NDArray[np.uint16],
    parts: Windows,
    sink: Sink,
    *,
    context: int,
    chunk: int,
    device: torch.device,
    sinks: int = 0,
    kv_bits: int = 0,
    rows: int = 0,
    temperature: float = 1.0,
    world: World | None = None,
    progress: Progress | None = None,
) -> float:
    """Record the losses of this rank's share of `parts` in `sink`, each part with its own cache; return the seconds.

    Args:
        model: in evaluation mode.
        tokens: (N + 1,).
        parts: segments or restarts over its N positions; those of one shape are computed side by side.
        sink: of the stream.
        context, chunk, sinks, kv_bits: as `birdie.model.cache.Cache` has them.
        device: of the model.
        rows: most parts side by side; 0: as many as are fast and have room for keys and values.
        temperature: divides the logits.
        world: ranks that share the parts; the score does not depend on them.
        progress: called with (positions done, total) of this rank.

    Raises:
        RuleError: a part scores a target that was scored before.
        ConfigError: sizes do not fit.
    """
    check_temperature(temperature)
    world = world or World()
    started = time.perf_counter()
    share = parts.share(world.rank, world.size)
    done, total = 0, share.inputs
    if not total:
        return time.perf_counter() - started
    longest = int((share.stops - share.begins).max())
    room = _CACHE_BYTES.get(device.type, _CACHE_BYTES_GPU)
    rows = min(rows or max(1, max_inputs(device) // chunk), max(1, room // _row_bytes(model, context, chunk, longest)))
    for batch in share.by_shape().groups(rows):
        length = int(batch.stops[0] - batch.begins[0])
        unscored = int(batch.firsts[0] - batch.begins[0])
        if length > context:
            cache = Cache(model, len(batch), context, chunk=min(chunk, context), sinks=sinks, kv_bits=kv_bits)
        else:  # nothing leaves the context, so there is nothing that sinks would bring back
            cache = Cache(model, len(batch), length, chunk=min(chunk, length), kv_bits=kv_bits)
        position = 0
        while position < length:
            n = min(chunk, cache.ahead, length - position)
            ids, targets = ids_and_targets(tokens, batch.begins + position, n, device)
            with torch.inference_mode(), model.rotary.windows_of(context):
                logits = cache(ids)
                if position + n > unscored:
                    skip = max(0, unscored - position)
                    firsts = batch.begins + position + skip
                    hints = hints_at(sink.hint_tokens, firsts, n - skip)
                    sink.add(firsts, *losses_of_logits(logits[:, skip:] / temperature, targets[:, skip:], hints))
            position += n
            done += n * len(batch)
            if progress is not None:
                progress(done, total)
    synchronize(device)
    return time.perf_counter() - started


def _row_bytes(model: GPT, context: int, chunk: int, length: int) -> int:
    """Estimate the bytes of keys and values of one part of this length; a quantized cache needs fewer."""
    config = model.config
    layers = sum(map(len, config.layers(model.looping)))
    positions = min(length, context + max(chunk, context // 2))
    return layers * 2 * config.num_kv_heads * config.head_dim * positions * model.compute_dtype.itemsize
