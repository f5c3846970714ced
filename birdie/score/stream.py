"""Streaming: each token passes the model once, and its keys and values are kept for those that follow.

    stream   ═════════════════════════════════════════►   rolling: the context moves on by a chunk a call
    segments ═══════════►                                 side by side, each but the first after a context of its own
                   ┄┄┄┄┄═══════►                          (┄) that is not scored
    exact    ═════►═════►═════►═════►                     begun anew where the context is full, or with a document

What a place sees is what it sees in sliding windows of stride `chunk`. Recomputed windows make the keys and values of
deeper layers anew from what is in the window; a stream keeps them, made when more of the past was in sight. So the two
are equal, up to rounding, in the first `context` places, in documents kept apart that fit the context, with one layer,
and where all layers have windows of W and the context less the chunk holds layers · (W − 1) places; and an exact stream
equals windows end to end. Elsewhere they differ, and a stream is a scorer of its own right: causal, normalised, one
pass. Its work a token does not grow with context over stride, 16 for windows of 1,024 at stride 64.
"""

import time

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.model.cache import Cache
from birdie.model.gpt import GPT
from birdie.model.techniques.depth_recurrence import layer_order
from birdie.runtime.callbacks import Progress
from birdie.runtime.device import synchronize
from birdie.runtime.distributed import World
from birdie.score.forward import Sink, asked_at, at_once, check_temperature, read_off
from birdie.score.windows import Windows, documents, sliding

_ROOM = {"cpu": 2**30}
_ROOM_ELSEWHERE = 2**33
"""Most bytes of keys and values on a rank."""


def segments(targets: int, count: int, context: int) -> Windows:
    """`count` (or a few less) segments of one length, but for the last, that score all targets once.

    The first is scored whole, the others but for their first `context` places, or all they have before them.
    """
    context = min(context, max(0, targets - 1))
    stride = max(1, -(-(targets - context) // count))
    return sliding(targets, context + stride, stride)


def restarts(tokens: NDArray[np.uint16], bos_id: int | None, context: int) -> Windows:
    """Where an exact stream begins: every `context` places, and with each document if these are kept apart (bos_id)."""
    targets = len(tokens) - 1
    if bos_id is None:
        return sliding(targets, context, context)
    return documents(np.flatnonzero(np.asarray(tokens) == bos_id), targets, context, context)


def score_stream(
    model: GPT,
    tokens: NDArray[np.uint16],
    parts: Windows,
    sink: Sink,
    *,
    context: int,
    chunk: int,
    sinks: int = 0,
    kv_bits: int = 0,
    device: torch.device,
    rows: int = 0,
    temperature: float = 1.0,
    world: World | None = None,
    progress: Progress | None = None,
) -> float:
    """Enter what `parts` score in `sink`, each part a stream of its own; returns seconds.

    Args:
        model: in evaluation mode.
        tokens: (N + 1,).
        parts: segments or restarts over its N places; those of one shape pass side by side.
        sink: of the stream.
        context, chunk, sinks, kv_bits: as `birdie.model.cache.Cache` has them.
        device: of the model.
        rows: parts side by side, at most; 0: as many as is fast and have room for keys and values.
        temperature: divides the logits.
        world: ranks that share the parts; the score does not depend on them.
        progress: called with (places done, places in all) of this rank.

    Raises:
        RuleError: a part scores what was scored before.
        ConfigError: sizes do not fit.
    """
    check_temperature(temperature)
    world = world or World()
    started = time.perf_counter()
    mine = parts.share(world.rank, world.size)
    done, total = 0, mine.inputs
    if not total:
        return time.perf_counter() - started
    lengths = mine.stops - mine.begins
    fits = max(1, _ROOM.get(device.type, _ROOM_ELSEWHERE) // _row_bytes(model, context, chunk, int(lengths.max())))
    rows = min(rows or max(1, at_once(device) // chunk), fits)
    for batch in mine.sorted().groups(rows):
        length = int(batch.stops[0] - batch.begins[0])
        unscored = int(batch.firsts[0] - batch.begins[0])
        if length > context:
            cache = Cache(model, len(batch), context, chunk=min(chunk, context), sinks=sinks, kv_bits=kv_bits)
        else:  # nothing leaves the context, so there is nothing that sinks would bring back
            cache = Cache(model, len(batch), length, chunk=min(chunk, length), kv_bits=kv_bits)
        place = 0
        while place < length:
            n = min(chunk, cache.ahead, length - place)
            span = np.asarray(tokens)[batch.begins[:, None] + np.arange(place, place + n + 1)].astype(np.int64)
            ids, targets = (torch.from_numpy(each).to(device) for each in (span[:, :-1], span[:, 1:]))
            with torch.inference_mode(), model.rotary.base_for_length(context):
                logits = cache(ids)
                if place + n > unscored:
                    new = max(0, unscored - place)
                    firsts = batch.begins + place + new
                    asked = asked_at(sink.asked, firsts, n - new)
                    sink.add(firsts, *read_off(logits[:, new:] / temperature, targets[:, new:], asked))
            place += n
            done += n * len(batch)
            if progress is not None:
                progress(done, total)
    synchronize(device)
    return time.perf_counter() - started


def _row_bytes(model: GPT, context: int, chunk: int, length: int) -> int:
    """About what one part of this length keeps; in few bits it is less."""
    config = model.config
    layers = sum(map(len, layer_order(config, model.depth_recurrence)))
    places = min(length, context + max(chunk, context // 2))
    return layers * 2 * config.num_kv_heads * config.head_dim * places * model.compute_dtype.itemsize
