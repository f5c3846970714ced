"""The byte sidecar is read from beside its shard, and only used if it is consistent with the tokens."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from birdie.errors import DataError
from birdie.gpt.data.byte_accounting import ByteTable
from birdie.gpt.data.byte_sidecar import byte_counts, is_sidecar, read_sidecar, sidecar_of
from birdie.gpt.data.dataset import check_tokenizer, open_dataset, roundtrip_share
from birdie.gpt.data.shards import write_shard
from birdie.gpt.data.tokenizer import ByteTokenizer, CaseOpsTokenizer, train_caseops

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


def test_a_sidecar_has_val_bytes_in_its_name() -> None:
    assert sidecar_of(Path("a_val_x/fineweb_val_000003.bin")) == Path("a_val_x/fineweb_val_bytes_000003.bin")
    assert is_sidecar(Path("fineweb_val_bytes_000000.bin"))
    assert not is_sidecar(Path("a_val_bytes_b/fineweb_val_000000_byte260.bin"))


def test_caseops_scores_use_the_sidecars(shards: list[Path]) -> None:
    tokens, expected = tokens_and_counts()
    counts = byte_counts(shards, tokenizer(), tokens, 300)
    assert isinstance(counts, np.ndarray)
    assert np.array_equal(counts, expected)
    assert counts.sum() == 2 * len(TEXT.strip().encode())
    first_counts = byte_counts(shards, tokenizer(), tokens[:50], 300)
    assert isinstance(first_counts, np.ndarray)
    assert np.array_equal(first_counts, expected[:50])


def test_tokenizers_with_an_exact_byte_table_need_no_sidecar(tmp_path: Path) -> None:
    write_shard(tmp_path / "fineweb_val_000000.bin", np.array([1, 70]))
    table = byte_counts([tmp_path / "fineweb_val_000000.bin"], ByteTokenizer(), np.array([1, 70], np.uint16), 300)
    assert isinstance(table, ByteTable)
    assert len(table) == 300


def test_shards_without_dataset_json_are_checked_by_decoding(shards: list[Path]) -> None:
    assert roundtrip_share(tokens_and_counts()[0], tokenizer()) == 1
    assert len(check_tokenizer(open_dataset(val=shards), tokenizer())) == 1


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
    assert_refused([tmp_path / "other.bin"], r"other.bin has no byte sidecar \(fineweb_val_bytes_\*.bin\)")


@pytest.mark.parametrize("size", [0, 1023, 1024, 1100])
def test_a_damaged_sidecar_is_an_error(shards: list[Path], size: int) -> None:
    path = sidecar_of(shards[0])
    path.write_bytes(path.read_bytes()[:size])
    assert_refused(shards, rf"fineweb_val_bytes_000000.bin has {size:,} bytes")


def test_a_sidecar_of_another_length_is_an_error(shards: list[Path]) -> None:
    write_shard(sidecar_of(shards[0]), np.ones(7, np.uint16))
    assert_refused(shards, "has 7 tokens")


def test_an_inconsistent_sidecar_is_an_error(shards: list[Path]) -> None:
    counts = np.array(read_sidecar(shards[0]))
    write_shard(sidecar_of(shards[0]), counts * 2)
    assert_refused(shards, r"counts 1,7\d\d bytes of text, but its tokens stand for 1,1\d\d")
    counts[0] = 1
    write_shard(sidecar_of(shards[0]), counts)
    assert_refused(shards, "counts bytes for BOS")
