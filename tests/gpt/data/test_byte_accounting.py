"""Byte accounting: documents are split at BOS, and a wrong byte table is detected by decoding."""

from pathlib import Path

import numpy as np

from birdie.gpt.data.byte_accounting import check_bytes, split_documents
from birdie.gpt.data.shards import read_shard
from birdie.gpt.data.tokenizer import ByteTokenizer, load_tokenizer


def test_documents_are_split_at_bos() -> None:
    def split(*ids: int) -> list[list[int]]:
        return [part.tolist() for part in split_documents(np.array(ids, np.uint16), 1)]

    assert split() == []
    assert split(1, 5, 6, 1, 1, 7) == [[5, 6], [], [7]]
    assert split(5, 1, 6) == [[5], [6]]
    assert split(5, 6) == [[5, 6]]


def test_a_wrong_byte_table_is_detected() -> None:
    class CountsPieceNames(ByteTokenizer):
        def byte_table(self, vocab_size: int | None = None):  # type: ignore[no-untyped-def]
            table = super().byte_table(vocab_size)
            table.base_bytes[4:] = 6
            return table

    check = check_bytes(CountsPieceNames(), np.array([1, 70, 71, 1, 72], np.uint16))
    assert (check.documents, len(check.wrong), check.table_bytes, check.text_bytes) == (2, 2, 18, 3)


def test_the_byte_table_is_exact_on_the_challenges_shards(shared_data: Path) -> None:
    tokenizer = load_tokenizer(shared_data / "tokenizers/fineweb_1024_bpe.model")
    tokens = read_shard(shared_data / "text/fineweb/fineweb_val_head_sp1024.bin")
    check = check_bytes(tokenizer, tokens)  # the last document ends within a character
    assert check.exact
    assert check.documents == 234
    assert 2.43 < check.table_bytes / check.tokens < 2.45
