"""Bytes of a score: by the table of the tokenizer, or by the sidecar of the shards."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from birdie.errors import DataError
from birdie.gpt.data.byte_accounting import check_bytes, split_documents
from birdie.gpt.data.byte_sidecar import byte_counts, read_sidecar, sidecar_of
from birdie.gpt.data.dataset import open_dataset
from birdie.gpt.data.shards import read_shard, write_shard
from birdie.gpt.data.tokenizer import ByteTokenizer, CaseOpsTokenizer, load_tokenizer, train_caseops


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


TEXT = "The NASA of McX, and some more words: Hello World, hello world. " * 9


@cache
def tokenizer() -> CaseOpsTokenizer:
    return train_caseops([TEXT], 300)


@cache
def tokens_and_counts() -> tuple[np.ndarray, np.ndarray]:
    """Tokens of two documents, and the bytes of each token."""
    tokens = np.concatenate([[1], tokenizer().encode(TEXT)] * 2).astype(np.uint16)
    return tokens, tokenizer().byte_table().count_document(tokens, 1)


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Two validation shards with their sidecars."""
    paths = [tmp_path / f"fineweb_val_{i:06d}.bin" for i in range(2)]
    for path, tokens, counts in zip(paths, *(np.array_split(part, 2) for part in tokens_and_counts()), strict=True):
        write_shard(path, tokens)
        write_shard(sidecar_of(path), counts)
    return paths


def test_caseops_scores_use_the_sidecars(shards: list[Path]) -> None:
    tokens, expected = tokens_and_counts()
    counts = byte_counts(shards, tokenizer(), tokens, 300)
    assert isinstance(counts, np.ndarray)
    assert np.array_equal(counts, expected)
    assert counts.sum() == 2 * len(TEXT.encode())
    first_counts = byte_counts(shards, tokenizer(), tokens[:50], 300)
    assert isinstance(first_counts, np.ndarray)
    assert np.array_equal(first_counts, expected[:50])


def test_patterns_for_shards_ignore_sidecars(shards: list[Path]) -> None:
    folder = shards[0].parent
    write_shard(folder / "fineweb_train_000000.bin", tokens_and_counts()[0])
    for data in (open_dataset(folder), open_dataset(val=folder / "*_val_*.bin")):
        assert list(data.val) == shards
    with pytest.raises(DataError, match="matches no shard"):
        open_dataset(val=sidecar_of(shards[0]))


def assert_refused(shards: list[Path], message: str) -> None:
    with pytest.raises(DataError, match=message):
        byte_counts(shards, tokenizer(), tokens_and_counts()[0], 300)


def test_a_missing_sidecar_is_an_error(shards: list[Path], tmp_path: Path) -> None:
    sidecar_of(shards[1]).unlink()
    assert_refused(shards, r"fineweb_val_000001.bin has no byte sidecar \(fineweb_val_bytes_000001.bin\) beside")
    write_shard(tmp_path / "other.bin", tokens_and_counts()[0])
    assert_refused([tmp_path / "other.bin"], r"other.bin has no byte sidecar \(\*_val_bytes_\*.bin\)")


def test_an_inconsistent_sidecar_is_an_error(shards: list[Path]) -> None:
    counts = np.array(read_sidecar(shards[0]))
    write_shard(sidecar_of(shards[0]), counts * 2)
    assert_refused(shards, r"counts 1,7\d\d bytes of text, but its tokens stand for 1,1\d\d")
    counts[0] = 1
    write_shard(sidecar_of(shards[0]), counts)
    assert_refused(shards, "counts bytes for BOS")
