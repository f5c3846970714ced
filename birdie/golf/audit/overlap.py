"""Validation documents among training documents: by hash, over shards of any size.

    validation shards ──BOS──► documents ──► set of hashes (16 bytes each)
    training shards ───BOS──► documents ──► in the set?      a few MB at a time

A document is the tokens between two BOS. One that reaches the end of a shard goes on in the next. Only complete copies
are counted: the same text cut or tokenized in another way is another document.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from birdie.golf.audit.rules import OVERLAP, Finding
from birdie.gpt.data.byte_accounting import Tokens
from birdie.gpt.data.shards import read_shard
from birdie.system.callbacks import Progress, no_progress

MIN_TOKENS = 16
"""Shorter documents are not compared: they may be equal by chance."""
FEW = 1e-3
"""Share of the validation documents that may be copies within the source itself."""

_CHUNK = 1 << 22  # tokens read at a time
_LONGEST = 1 << 22  # tokens of a document; a longer stretch has no BOS where it should


class Copies(NamedTuple):
    """The documents that two sets of shards share.

    Attributes:
        val: validation documents of MIN_TOKENS or more.
        train: training documents.
        copied: validation documents that are training documents too.
        first: position of the first copy.
        unmarked: tokens in stretches too long for a document, which were skipped.
    """

    val: int
    train: int
    copied: int
    first: str = ""
    unmarked: int = 0


def copies(
    train: Sequence[Path], val: Sequence[Path] | Tokens, bos_id: int, *, progress: Progress = no_progress
) -> Copies:
    """Search the training documents for the validation documents.

    Args:
        train: training shards in stream order.
        val: validation shards in stream order, or their stream (N,).
        bos_id: the id that begins a document.
        progress: reports training tokens.
    """
    stream = [("the stream", val)] if isinstance(val, np.ndarray) else [(path.name, read_shard(path)) for path in val]
    unmarked = [0]
    hashes = dict.fromkeys(
        (_hash(doc) for _, doc in _documents(stream, bos_id, unmarked) if len(doc) >= MIN_TOKENS), False
    )
    count, first = 0, ""
    total = sum(len(read_shard(path)) for path in train)
    shards = ((path.name, read_shard(path)) for path in train)
    for name, document in _documents(shards, bos_id, unmarked, lambda done, _: progress(done, total)):
        count += 1
        if len(document) >= MIN_TOKENS and (digest := _hash(document)) in hashes:
            hashes[digest] = True
            first = first or f"document {count:,} of the training text, in {name}"
    return Copies(len(hashes), count, sum(hashes.values()), first, unmarked[0])


def _hash(document: Tokens) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(document, "<u2").tobytes(), digest_size=16).digest()


def _documents(
    shards: Iterable[tuple[str, Tokens]], bos_id: int, unmarked: list[int], progress: Progress = no_progress
) -> Iterator[tuple[str, Tokens]]:
    """Yield (name of the shard it ends in, tokens without BOS) of each document; add skipped tokens to `unmarked`."""
    parts: list[Tokens] = []  # of the document that goes on
    name, held, done = "", 0, 0
    for name, tokens in shards:
        for start in range(0, len(tokens), _CHUNK):
            chunk = np.asarray(tokens[start : start + _CHUNK])
            last = 0
            for begin in np.flatnonzero(chunk == bos_id).tolist():
                parts.append(chunk[last:begin])
                document = np.concatenate(parts) if len(parts) > 1 else parts[0]
                if len(document) and held <= _LONGEST:
                    yield name, document
                parts, held, last = [], 0, begin + 1
            held += len(chunk) - last
            if held > _LONGEST:
                unmarked[0] += len(chunk) - last
                parts = []
            else:
                parts.append(chunk[last:])
            done += len(chunk)
            progress(done, None)
    if held and held <= _LONGEST:
        yield name, np.concatenate(parts)


def check_overlap(
    train: Sequence[Path], val: Sequence[Path] | Tokens, bos_id: int, *, progress: Progress = no_progress
) -> Finding:
    """Return whether validation documents are trained on; arguments and errors are those of `copies`."""
    result = copies(train, val, bos_id, progress=progress)
    documents = f"{result.train:,} training documents in {len(train):,} shard{'s' * (len(train) != 1)}"
    if not result.val or not result.train:
        evidence = f"no documents to compare: {result.val:,} of validation, {documents}"
        return Finding(OVERLAP, "unknown", evidence, "documents")
    if result.copied:
        evidence = f"{result.copied:,} of {result.val:,} validation documents are among {documents}; {result.first}"
        return Finding(OVERLAP, "fail" if result.copied > FEW * result.val else "unknown", evidence, "documents")
    evidence = f"none of {result.val:,} validation documents is among {documents}"
    if result.unmarked:
        return Finding(OVERLAP, "unknown", f"{evidence}, but {result.unmarked:,} tokens have no BOS", "documents")
    return Finding(OVERLAP, "pass", evidence, "documents")
