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

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.model.cache import Cache
from birdie.model.gpt import GPT
from birdie.model.techniques.depth_recurrence import layer_order
from birdie.runtime.device import synchronize
from birdie.score.mode import Scoring
from birdie.score.windows import (
    Windows,
    document_begins,
    hints_at,
    ids_and_targets,
    losses_of_logits,
    max_inputs,
    per_document,
    sliding,
)

if TYPE_CHECKING:
    from birdie.score.modes import StreamingMode

_CACHE_BYTES = {"cpu": 2**30}
_CACHE_BYTES_GPU = 2**33
"""Most bytes of keys and values on a rank."""


def score_stream(scoring: Scoring, mode: "StreamingMode") -> None:
    """Record the loss of every target of this rank's segments in the sink."""
    model, device, context = scoring.model, scoring.device, scoring.length
    share = segments_of(scoring, mode).share(scoring.world.rank, scoring.world.size)
    done, total = 0, share.inputs
    for batch in share.by_shape().groups(_rows(scoring, mode, share)):
        length = int(batch.stops[0] - batch.begins[0])
        unscored = int(batch.firsts[0] - batch.begins[0])
        if length > context:
            chunk = min(mode.chunk, context)
            cache = Cache(model, len(batch), context, chunk=chunk, sinks=mode.sinks, kv_bits=mode.kv_bits)
        else:  # nothing leaves the context, so there is nothing that sinks would bring back
            cache = Cache(model, len(batch), length, chunk=min(mode.chunk, length), kv_bits=mode.kv_bits)
        position = 0
        while position < length:
            n = min(mode.chunk, cache.ahead, length - position)
            ids, targets = ids_and_targets(scoring.tokens, batch.begins + position, n, device)
            with torch.inference_mode(), model.rotary.base_for_length(context):
                logits = cache(ids)
                if position + n > unscored:
                    skip = max(0, unscored - position)
                    firsts = batch.begins + position + skip
                    hints = hints_at(scoring.sink.hint_tokens, firsts, n - skip)
                    logits = logits[:, skip:] / scoring.settings.temperature
                    scoring.sink.add(firsts, *losses_of_logits(logits, targets[:, skip:], hints))
            position += n
            done += n * len(batch)
            if scoring.progress is not None:
                scoring.progress(done, total)
    synchronize(device)


def segments_of(scoring: Scoring, mode: "StreamingMode") -> Windows:
    """Return the parts of the stream that have a cache of their own; they score every target once."""
    tokens, targets, documents = scoring.tokens, len(scoring.tokens) - 1, scoring.settings.documents
    if mode.exact:
        isolated = documents or scoring.model.config.isolate_documents
        return restarts(tokens, scoring.bos_id if isolated else None, scoring.length)
    if documents:
        longest = max(1, targets)
        return per_document(document_begins(tokens, scoring.bos_id), targets, longest, longest)
    return segments(targets, mode.segments, scoring.length)


def _rows(scoring: Scoring, mode: "StreamingMode", share: Windows) -> int:
    """Return how many segments are scored side by side: as requested, or as many as are fast; no more than fit."""
    if not len(share):
        return 1
    requested = -(-scoring.settings.batch_seqs // scoring.world.size)
    longest = int((share.stops - share.begins).max())
    room = _CACHE_BYTES.get(scoring.device.type, _CACHE_BYTES_GPU)
    fitting = max(1, room // _row_bytes(scoring.model, mode.chunk, scoring.length, longest))
    return min(requested or max(1, max_inputs(scoring.device) // mode.chunk), fitting)


def _row_bytes(model: GPT, chunk: int, context: int, length: int) -> int:
    """Estimate the bytes of keys and values of one segment of this length; a quantized cache needs fewer."""
    config = model.config
    layers = sum(map(len, layer_order(config, model.depth_recurrence)))
    positions = min(length, context + max(chunk, context // 2))
    return layers * 2 * config.num_kv_heads * config.head_dim * positions * model.compute_dtype.itemsize


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
