"""What the settings of an evaluation mean for a stream: which targets, in which windows or parts.

    settings, tokens ─► plan: the same targets whatever the settings ─► scoring

The targets are those of windows end to end, as the challenge counts them, of the training length or of longer ones if
those are asked for, so that scores of different covers compare; a stream too short for one such window is scored whole.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from birdie.errors import ConfigError
from birdie.score.bpb import whole_windows
from birdie.score.settings import DOCUMENTWISE, EvaluationSettings
from birdie.score.stream import restarts, segments
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
