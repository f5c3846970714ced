"""The byte sidecar: how many bytes of text each validation token stands for, where ids alone do not tell.

    fineweb_val_000000.bin         BOS  TITLE  hello  ▁  ALLCAPS  nasa
    fineweb_val_bytes_000000.bin    0     0      5    1     0       4

A file beside each validation shard and in the same format, with a count for every token. CaseOps data come with it
(openai/parameter-golf #1729): their tokens spell other text than the one that is scored. A sidecar could say anything,
so its sum is held against the tokens before it is believed.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from birdie.data.byte_accounting import TOLERANCE, ByteTable, Tokens
from birdie.data.shards import read_shard
from birdie.data.tokenizer import Tokenizer
from birdie.errors import DataError

_CHUNK = 1 << 22  # tokens counted at a time


def sidecar_of(shard: Path) -> Path:
    """Where the sidecar of a validation shard lies; the shard itself when it is not named as one."""
    return shard.with_name(shard.name.replace("_val_", "_val_bytes_", 1))


def is_sidecar(path: Path) -> bool:
    """Whether a file is named as a sidecar: patterns for validation shards match those too."""
    return "_val_bytes_" in path.name


def read_sidecar(shard: Path) -> Tokens:
    """Bytes of each token (N,) of a validation shard, as a read-only memory map.

    Raises:
        DataError: there is no sidecar, it is damaged, or it has another length than the shard.
    """
    path = sidecar_of(shard)
    if path == shard or not path.exists():
        name = "fineweb_val_bytes_*.bin" if path == shard else path.name
        raise DataError(
            f"{shard} has no byte sidecar ({name}) beside it, by which CaseOps data are scored; "
            "get it from where the shard is from, or prepare the data again"
        )
    counts, tokens = read_shard(path), len(read_shard(shard))
    if len(counts) != tokens:
        raise DataError(
            f"the byte sidecar {path} counts {len(counts):,} tokens, but its shard has {tokens:,}; "
            "get both from one place, or prepare the data again"
        )
    return counts


def byte_counts(shards: Sequence[Path], tokenizer: Tokenizer, tokens: Tokens, vocab_size: int) -> ByteTable | Tokens:
    """What a score counts bytes by: the tokenizer's table or, for CaseOps, the bytes (N,) that sidecars say.

    Args:
        shards: the validation shards in stream order.
        tokenizer: made them.
        tokens: their stream, or the head of it that is scored (N,).
        vocab_size: rows of the table at least.

    Raises:
        DataError: a sidecar is missing, damaged, of another length, or untrue.
    """
    table = tokenizer.byte_table(vocab_size)
    if tokenizer.kind != "caseops":
        return table
    parts = [read_sidecar(shard) for shard in shards]
    counts = (parts[0] if len(parts) == 1 else np.concatenate(parts))[: len(tokens)]
    _require_true(counts, tokens, table, tokenizer.bos_id, sidecar_of(shards[0]))
    return counts


def _require_true(counts: Tokens, tokens: Tokens, table: ByteTable, bos_id: int, name: Path) -> None:
    """Hold the sum against what the tokens stand for."""
    said = true = 0
    for start in range(0, len(tokens), _CHUNK):
        part, bytes_ = tokens[start : start + _CHUNK], counts[start : start + _CHUNK]
        if bytes_[part == bos_id].any():
            raise DataError(f"the byte sidecar {name} counts bytes for BOS, which has none; prepare the data again")
        said += int(bytes_.sum(dtype=np.int64))
        true += int(table.count_document(part, bos_id).sum())
    if abs(said - true) > TOLERANCE * true:
        raise DataError(
            f"the byte sidecar {name} counts {said:,} bytes of text, but its tokens stand for {true:,}; "
            "bits per byte would be wrong, so prepare the data again"
        )
