"""Validation documents among training documents: by hash, over shards of any size.

    validation shards ──BOS──► documents ──► set of hashes (16 bytes each)
    training shards ───BOS──► documents ──► in the set?      a few MB at a time

A document is the tokens between two BOS. One that runs over the end of a shard goes on in the next. Only whole copies
are found: the same text cut or tokenized otherwise is another document.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from birdie.data.byte_accounting import Tokens
from birdie.data.shards import read_shard
from birdie.golf.audit.rules import OVERLAP, Finding, Verdict
from birdie.runtime.callbacks import Progress

LEAST = 16
"""Tokens of a document that is looked for: shorter ones may be the same by chance."""

FEW = 1e-3
"""Of the validation documents: as few may be copies within the source itself."""

_CHUNK = 1 << 22  # tokens read at a time
_LONGEST = 1 << 22  # tokens of a document; what is longer has no BOS where it should


@dataclass(frozen=True, slots=True)
class Copies:
    """What two sets of shards have in common.

    Attributes:
        val: validation documents of LEAST tokens or more.
        train: training documents read.
        copied: validation documents that are training documents too.
        first: where the first copy was found.
        unmarked: tokens in stretches too long for a document, which were passed over.
    """

    val: int
    train: int
    copied: int
    first: str = ""
    unmarked: int = 0


def copies(
    train: Sequence[Path], val: Sequence[Path] | Tokens, bos_id: int, *, progress: Progress | None = None
) -> Copies:
    """Look for the validation documents among the training documents.

    Args:
        train: training shards in stream order.
        val: validation shards in stream order, or their stream (N,).
        bos_id: the id that begins a document.
        progress: called with (training tokens done, training tokens in all).

    Raises:
        DataError: a shard cannot be read.
    """
    held_out: dict[bytes, bool] = {}
    unmarked = [0]
    stream = [("the stream", val)] if isinstance(val, np.ndarray) else [(path.name, read_shard(path)) for path in val]
    for _, document in _documents(stream, bos_id, unmarked):
        if len(document) >= LEAST:
            held_out[_digest(document)] = False
    count, first = 0, ""
    total = sum(len(read_shard(path)) for path in train)
    shards = ((path.name, read_shard(path)) for path in train)
    for where, document in _documents(shards, bos_id, unmarked, _told(progress, total)):
        count += 1
        if len(document) >= LEAST and (digest := _digest(document)) in held_out:
            held_out[digest] = True
            first = first or f"document {count:,} of the training text, in {where}"
    return Copies(len(held_out), count, sum(held_out.values()), first, unmarked[0])


def _untold(_: int) -> None:
    return None


def _told(progress: Progress | None, total: int) -> Callable[[int], None]:
    return _untold if progress is None else (lambda done: progress(done, total))


def _digest(document: Tokens) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(document, "<u2").tobytes(), digest_size=16).digest()


def _documents(
    shards: Iterator[tuple[str, Tokens]] | Sequence[tuple[str, Tokens]],
    bos_id: int,
    unmarked: list[int],
    told: Callable[[int], None] = _untold,
) -> Iterator[tuple[str, Tokens]]:
    """(name of the shard it ends in, tokens without BOS) of each document of a stream."""
    open_: list[Tokens] = []  # of the document under way
    name, held, done = "", 0, 0
    for name, tokens in shards:
        for start in range(0, len(tokens), _CHUNK):
            part = np.asarray(tokens[start : start + _CHUNK])
            begins = np.flatnonzero(part == bos_id)
            last = 0
            for begin in begins.tolist():
                open_.append(part[last:begin])
                whole = np.concatenate(open_) if len(open_) > 1 else open_[0]
                if len(whole) and held <= _LONGEST:
                    yield name, whole
                open_, held, last = [], 0, begin + 1
            held += len(part) - last
            if held > _LONGEST:
                unmarked[0] += len(part) - last
                open_ = []
            else:
                open_.append(part[last:])
            done += len(part)
            told(done)
    if held and held <= _LONGEST:
        yield name, np.concatenate(open_)


def check_overlap(
    train: Sequence[Path], val: Sequence[Path] | Tokens, bos_id: int, *, progress: Progress | None = None
) -> tuple[Finding, ...]:
    """One finding: whether validation documents are trained on; arguments and errors are those of `copies`."""
    found = copies(train, val, bos_id, progress=progress)
    read = f"{found.train:,} training documents in {len(train):,} shard{'s' if len(train) != 1 else ''}"
    if not found.val or not found.train:
        said = f"no documents to compare: {found.val:,} of validation, {read}"
        return (Finding(OVERLAP, "unknown", said, "documents"),)
    if found.copied:
        verdict: Verdict = "fail" if found.copied > FEW * found.val else "unknown"
        said = f"{found.copied:,} of {found.val:,} validation documents are among {read}; {found.first}"
        return (Finding(OVERLAP, verdict, said, "documents"),)
    if found.unmarked:
        said = f"none of {found.val:,} validation documents is among {read}, but {found.unmarked:,} tokens have no BOS"
        return (Finding(OVERLAP, "unknown", said, "documents"),)
    said = f"none of {found.val:,} validation documents is among {read}"
    return (Finding(OVERLAP, "pass", said, "documents"),)
