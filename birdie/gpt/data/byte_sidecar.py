"""Byte sidecar: the UTF-8 bytes of each validation token, for tokenizers whose ids alone do not determine them.

    fineweb_val_000000.bin         BOS  TITLE  hello  ▁  ALLCAPS  nasa
    fineweb_val_bytes_000000.bin    0     0      5    1     0       4

It is a file beside each validation shard, in the shard format, with one count per token. CaseOps data have sidecars
(parameter-golf#1729, github.com/openai/parameter-golf/pull/1729), because their tokens spell another text than the one
that is scored. A wrong sidecar would give a wrong score, so its sum is compared with the tokens before it is used.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from birdie.errors import DataError
from birdie.gpt.data.byte_accounting import TOLERANCE, ByteTable, Tokens
from birdie.gpt.data.shards import read_shard
from birdie.gpt.data.tokenizer import Tokenizer

_BLOCK_TOKENS = 1 << 22  # tokens counted at a time


def sidecar_of(shard: Path) -> Path:
    """Return the path of a validation shard's sidecar; the shard's own path if its name has no "_val_"."""
    return shard.with_name(shard.name.replace("_val_", "_val_bytes_", 1))


def is_sidecar(path: Path) -> bool:
    """Return whether a file is named as a sidecar: patterns for validation shards match sidecars as well."""
    return "_val_bytes_" in path.name


def read_sidecar(shard: Path) -> Tokens:
    """Return the bytes of each token (N,) of a validation shard as a read-only memory map."""
    path = sidecar_of(shard)
    if path == shard or not path.exists():
        name = "*_val_bytes_*.bin" if path == shard else path.name
        raise DataError(
            f"{shard} has no byte sidecar ({name}) beside it, which scoring CaseOps data needs; "
            "download it from the source of the shard, or prepare the data again"
        )
    counts, tokens = read_shard(path), len(read_shard(shard))
    if len(counts) != tokens:
        raise DataError(
            f"the byte sidecar {path} has {len(counts):,} tokens, but its shard has {tokens:,}; "
            "download both from one source, or prepare the data again"
        )
    return counts


def byte_counts(shards: Sequence[Path], tokenizer: Tokenizer, tokens: Tokens, vocab_size: int) -> ByteTable | Tokens:
    """Return the byte counts that scoring uses: the tokenizer's table, or for CaseOps the sidecars' counts (N,).

    Args:
        shards: validation shards in order.
        tokens: their tokens, or the first N of them that are scored (N,).
        vocab_size: minimum number of rows of the table.
    """
    table = tokenizer.byte_table(vocab_size)
    if tokenizer.kind != "caseops":
        return table
    parts = [read_sidecar(shard) for shard in shards]
    counts = (parts[0] if len(parts) == 1 else np.concatenate(parts))[: len(tokens)]
    _require_consistent(counts, tokens, table, tokenizer.bos_id, sidecar_of(shards[0]))
    return counts


def _require_consistent(counts: Tokens, tokens: Tokens, table: ByteTable, bos_id: int, name: Path) -> None:
    """Compare the sum of `counts` with the bytes of `tokens` by the table."""
    sidecar_bytes = token_bytes = 0
    for start in range(0, len(tokens), _BLOCK_TOKENS):
        part, part_bytes = tokens[start : start + _BLOCK_TOKENS], counts[start : start + _BLOCK_TOKENS]
        if part_bytes[part == bos_id].any():
            raise DataError(f"the byte sidecar {name} counts bytes for BOS, which has none; prepare the data again")
        sidecar_bytes += int(part_bytes.sum(dtype=np.int64))
        token_bytes += int(table.count_document(part, bos_id).sum())
    if abs(sidecar_bytes - token_bytes) > TOLERANCE * token_bytes:
        raise DataError(
            f"the byte sidecar {name} counts {sidecar_bytes:,} bytes of text, but its tokens stand for "
            f"{token_bytes:,}; bits per byte would be wrong, so prepare the data again"
        )
