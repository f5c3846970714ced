"""Scoring mode `streaming`: each token passes the model once, and its keys and values stay in a KV cache.

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

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from cyclopts import Parameter

from birdie.errors import ConfigError
from birdie.gpt.score.mode import Losses, Scoring, ScoringMode, ScoringSettings, TrainingReport
from birdie.gpt.score.modes.windows import describe_temperature

if TYPE_CHECKING:
    from birdie.gpt.score.window_losses import Windows

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

    def score(self, scoring: Scoring) -> Generator[Losses, None, TrainingReport | None]:
        import torch

        from birdie.gpt.model.cache import Cache
        from birdie.gpt.score.window_losses import hints_at, ids_and_targets, losses_of_logits

        model, context = scoring.model, scoring.length
        share = self._segments(scoring).share(scoring.world.rank, scoring.world.size)
        for batch in share.by_shape().groups(self._rows(scoring, share)):
            length = int(batch.stops[0] - batch.begins[0])
            unscored = int(batch.firsts[0] - batch.begins[0])
            if length > context:
                chunk = min(self.chunk, context)
                cache = Cache(model, len(batch), context, chunk=chunk, sinks=self.sinks, kv_bits=self.kv_bits)
            else:  # nothing leaves the context, so there is nothing that sinks would bring back
                cache = Cache(model, len(batch), length, chunk=min(self.chunk, length), kv_bits=self.kv_bits)
            position = 0
            while position < length:
                n = min(self.chunk, cache.ahead, length - position)
                ids, targets = ids_and_targets(scoring.tokens, batch.begins + position, n, scoring.device)
                skip = max(0, unscored - position)
                with torch.inference_mode(), model.rotary.base_for_length(context):
                    logits = cache(ids)
                    if skip < n:
                        firsts = batch.begins + position + skip
                        hints = hints_at(scoring.hint_tokens, firsts, n - skip)
                        logits = logits[:, skip:] / scoring.settings.temperature
                        losses = Losses(firsts, *losses_of_logits(logits, targets[:, skip:], hints))
                if skip < n:  # outside of inference mode, which would hold for whoever takes the losses
                    yield losses
                position += n
        return None

    def describe(self, scoring: Scoring) -> str:
        temperature, length = describe_temperature(scoring.settings), f"{scoring.length:,}"
        if self.exact:
            return f"exact streaming, context {length}{temperature}"
        count = 1 if scoring.settings.documents else len(self._segments(scoring))
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

    def _segments(self, scoring: Scoring) -> "Windows":
        """Return the parts of the stream that have a cache of their own; they score every target once."""
        from birdie.gpt.score.window_losses import document_begins, per_document, segments, sliding

        targets, context, documents = len(scoring.tokens) - 1, scoring.length, scoring.settings.documents
        begins = document_begins(scoring.tokens, scoring.bos_id)
        if self.exact and (documents or scoring.model.config.isolate_documents):
            return per_document(begins, targets, context, context)
        if self.exact:
            return sliding(targets, context, context)
        if documents:
            return per_document(begins, targets, targets, targets)
        return segments(targets, self.segments, context)

    def _rows(self, scoring: Scoring, share: "Windows") -> int:
        """Return how many segments are scored side by side: as requested, or as many as are fast; no more than fit."""
        from birdie.gpt.model.techniques.depth_recurrence import layer_order
        from birdie.gpt.score.window_losses import max_inputs

        if not len(share):
            return 1
        model, config = scoring.model, scoring.model.config
        requested = -(-scoring.settings.batch_seqs // scoring.world.size)
        longest = int((share.stops - share.begins).max())
        positions = min(longest, scoring.length + max(self.chunk, scoring.length // 2))
        layers = sum(map(len, layer_order(config, model.depth_recurrence)))
        # keys and values of one segment; a quantized cache needs fewer bytes
        bytes_ = layers * 2 * config.num_kv_heads * config.head_dim * positions * model.compute_dtype.itemsize
        fitting = max(1, _CACHE_BYTES.get(scoring.device.type, _CACHE_BYTES_GPU) // bytes_)
        return min(requested or max(1, max_inputs(scoring.device) // self.chunk), fitting)
