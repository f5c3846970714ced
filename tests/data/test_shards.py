"""Shards: what is written is read back, byte for byte as the challenge lays it out, and nothing else is accepted.

Also: a folder of shards holds one vocabulary, and a wrong tokenizer for it is found out.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from birdie.data.dataset import Dataset, DatasetInfo, SplitTotals, check_tokenizer, open_dataset, reproduced
from birdie.data.shards import ShardWriter, read_shard, write_shard
from birdie.data.tokenizer import ByteTokenizer, load_tokenizer
from birdie.errors import ConfigError, DataError

TOKENS = np.arange(1, 101, dtype=np.uint16)


def fill(folder: Path, *names: str, tokens: np.ndarray = TOKENS) -> Path:
    for name in names:
        write_shard(folder / name, tokens)
    return folder


@settings(deadline=None)  # each shard waits for the disk
@given(arrays(np.uint16, st.integers(1, 300)))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, tokens: np.ndarray) -> None:
    path = tmp_path_factory.mktemp("shard") / "a.bin"
    write_shard(path, tokens)
    assert np.array_equal(read_shard(path), tokens)


def test_layout_is_the_challenges(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", np.array([1, 515]))
    data = (tmp_path / "a.bin").read_bytes()
    assert data[:12] == (20240520).to_bytes(4, "little") + (1).to_bytes(4, "little") + (2).to_bytes(4, "little")
    assert data[12:1024] == bytes(1012)
    assert data[1024:] == b"\x01\x00\x03\x02"


@pytest.mark.parametrize(
    ("offset", "replacement", "message"),
    [
        (0, b"\0\0\0\0", "begins with 0, a shard with 20240520"),
        (4, b"\2\0\0\0", "version 2; only version 1"),
        (8, b"\0\0\0\0", "says 0 tokens"),
        (8, b"\xff\xff\xff\xff", "says -1 tokens"),
        (8, b"\xff\xff\xff\x7f", "1,224 bytes, but 2,147,483,647 tokens take 4,294,968,318"),
        (1224, b"\0", "1,225 bytes, but 100 tokens take 1,224"),
    ],
)
def test_hostile_headers_are_refused(tmp_path: Path, offset: int, replacement: bytes, message: str) -> None:
    path = tmp_path / "a.bin"
    write_shard(path, TOKENS)
    data = bytearray(path.read_bytes())
    data[offset : offset + 4] = replacement
    path.write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        read_shard(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("size", [0, 11, 1023, 1024, 1223])
def test_cut_files_are_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.bin"
    write_shard(path, TOKENS)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=f"{size:,} bytes"):
        read_shard(path)


def test_missing_files_and_folders_are_data_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_shard(tmp_path / "a.bin")
    with pytest.raises(DataError, match="is a directory"):
        read_shard(tmp_path)


def test_ids_above_16_bits_and_empty_shards_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="do not fit 16 bits"):
        write_shard(tmp_path / "a.bin", np.array([65_536]))
    with pytest.raises(DataError, match="not 0"):
        write_shard(tmp_path / "a.bin", np.array([], np.uint16))
    assert not list(tmp_path.iterdir())


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 40), max_size=4), st.integers(9, 60))
def test_the_writer_cuts_one_stream(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], shard: int) -> None:
    stream = np.arange(sum(sizes), dtype=np.uint16)
    folder = tmp_path_factory.mktemp("shards")
    with ShardWriter(folder, "train", shard) as writer:
        for part in np.split(stream, np.cumsum(sizes)[:-1] if sizes else []):
            writer.write(part)
    read = [np.asarray(read_shard(path)) for path in sorted(folder.iterdir())]
    assert sorted(folder.iterdir()) == writer.paths
    assert all(len(part) == shard for part in read[:-1])
    assert np.array_equal(np.concatenate([np.zeros(0, np.uint16), *read]), stream)


def test_an_interrupted_writer_drops_the_shard_under_way(tmp_path: Path) -> None:
    def interrupted() -> None:
        with ShardWriter(tmp_path, "val", 60) as writer:
            writer.write(TOKENS)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["fineweb_val_000000.bin"]


def test_a_folder_is_one_data_set(tmp_path: Path) -> None:
    fill(tmp_path, "fineweb_train_000001.bin", "fineweb_train_000000.bin", "fineweb_val_000000.bin")
    data = open_dataset(tmp_path)
    assert [path.name for path in data.train] == ["fineweb_train_000000.bin", "fineweb_train_000001.bin"]
    assert (data.train_tokens, data.val_tokens, data.info) == (200, 100, None)
    assert isinstance(data.validation_tokens(), np.memmap)


def test_validation_shards_are_one_stream(tmp_path: Path) -> None:
    fill(tmp_path, "fineweb_val_000000.bin", "fineweb_val_000001.bin")
    data = open_dataset(val=str(tmp_path / "*_val_*.bin"))
    assert np.array_equal(data.validation_tokens(), np.tile(TOKENS, 2))


def test_incomplete_or_missing_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        open_dataset(tmp_path / "none")
    with pytest.raises(DataError, match="no training"):
        open_dataset(tmp_path)
    with pytest.raises(DataError, match="no validation"):
        open_dataset(fill(tmp_path, "fineweb_train_000000.bin"))
    with pytest.raises(DataError, match="matches no shard"):
        open_dataset(train=tmp_path / "*_none_*.bin")
    with pytest.raises(ConfigError, match="either"):
        open_dataset()
    with pytest.raises(DataError, match="no validation shards"):
        open_dataset(train=tmp_path / "fineweb_train_000000.bin").validation_tokens()


def test_a_split_that_is_not_asked_for_need_not_be_there(tmp_path: Path) -> None:
    """To score, validation shards suffice, beside a `dataset.json` that counts both splits too."""
    fill(tmp_path, "fineweb_val_000000.bin")
    info().write(tmp_path)
    data = open_dataset(tmp_path, splits=("val",))
    assert (data.train, data.train_tokens, data.val_tokens) == ((), 0, 100)
    assert check_tokenizer(data, ByteTokenizer()) == []
    info(101).write(tmp_path)
    with pytest.raises(DataError, match="counts 101 validation"):
        open_dataset(tmp_path, splits=("val",))


def test_without_training_shards_a_tokenizer_is_checked_on_validation_alone(tmp_path: Path) -> None:
    fill(tmp_path, "fineweb_val_000000.bin", tokens=np.concatenate(([1], ByteTokenizer().encode("some text"))))
    (tmp_path / "fineweb_train_000000.bin").write_bytes(b"damaged")
    assert len(check_tokenizer(open_dataset(tmp_path, splits=("val",)), ByteTokenizer())) == 1


def test_mixed_vocabularies_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, "fineweb_train_000000_sp1024.bin", "fineweb_train_000000_sp4096.bin", "fineweb_val_head_sp1024.bin")
    with pytest.raises(DataError, match=r"mix vocabularies: sp1024 \(.*\), sp4096 \(.*\)"):
        open_dataset(tmp_path)
    assert len(open_dataset(train=tmp_path / "*train*_sp1024.bin", val=tmp_path / "*val*").train) == 1


def test_caseops_is_another_vocabulary(tmp_path: Path) -> None:
    fill(tmp_path, "fineweb_train_000000_sp1024_caseops.bin", "fineweb_val_000000_sp1024.bin")
    with pytest.raises(DataError, match=r"mix vocabularies: sp1024 \(.*\), sp1024_caseops \(.*\)"):
        open_dataset(tmp_path)


def info(tokens: int = 100, **changes: object) -> DatasetInfo:
    totals = SplitTotals(1, tokens, 99, 99)
    fields = {"tokenizer_kind": "bytes", "tokenizer_sha256": ByteTokenizer.digest, "vocab_size": 260, **changes}
    return DatasetInfo("test", train=totals, val=totals, **fields)  # type: ignore[arg-type]


def test_dataset_json_round_trips_and_must_count_the_shards(tmp_path: Path) -> None:
    fill(tmp_path, "fineweb_train_000000.bin", "fineweb_val_000000.bin")
    info().write(tmp_path)
    assert open_dataset(tmp_path).info == info()
    info(101).write(tmp_path)
    with pytest.raises(DataError, match="counts 101 training"):
        open_dataset(tmp_path)


def test_dataset_json_of_another_vocabulary_than_the_file_names_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, "fineweb_train_000000_sp1024.bin", "fineweb_val_000000.bin")
    info().write(tmp_path)
    with pytest.raises(DataError, match=r"byte260 \(dataset.json\)"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 2}', "\x00"])
def test_damaged_dataset_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "dataset.json").write_text(text)
    with pytest.raises(DataError, match=r"dataset.json is damaged"):
        DatasetInfo.read(tmp_path)


def test_dataset_json_with_a_field_of_another_type_is_refused(tmp_path: Path) -> None:
    info().write(tmp_path)
    fields = json.loads((tmp_path / "dataset.json").read_text())
    (tmp_path / "dataset.json").write_text(json.dumps({**fields, "vocab_size": "260"}))
    with pytest.raises(DataError, match=r"dataset.json is damaged"):
        DatasetInfo.read(tmp_path)


def test_the_hash_decides_when_there_is_a_dataset_json() -> None:
    assert check_tokenizer(Dataset((), (), info()), ByteTokenizer()) == []
    with pytest.raises(DataError, match=r"were made with sentencepiece tokenizer sha256 00.* but byte260"):
        check_tokenizer(Dataset((), (), info(tokenizer_kind="sentencepiece", tokenizer_sha256="00")), ByteTokenizer())


def test_ids_beyond_the_vocabulary_give_a_wrong_tokenizer_away(tmp_path: Path) -> None:
    fill(tmp_path, "fineweb_val_000000.bin", tokens=np.array([1, 260]))
    with pytest.raises(DataError, match="token id 260, but byte260 has 260 ids"):
        check_tokenizer(open_dataset(val=tmp_path / "fineweb_val_000000.bin"), ByteTokenizer())


def test_foreign_shards_pass_with_a_warning(tmp_path: Path) -> None:
    text = ByteTokenizer().encode("some text")
    fill(tmp_path, "fineweb_val_000000.bin", tokens=np.concatenate(([1], text)))
    assert len(check_tokenizer(open_dataset(val=tmp_path / "fineweb_val_000000.bin"), ByteTokenizer())) == 1
    fill(tmp_path, "fineweb_val_000000.bin", tokens=text)
    warnings = check_tokenizer(open_dataset(val=tmp_path / "fineweb_val_000000.bin"), ByteTokenizer())
    assert "no BOS" in warnings[1]


def test_decoding_tells_tokenizers_apart_on_real_text(shared_data: Path) -> None:
    val = open_dataset(val=shared_data / "text/fineweb/fineweb_val_head_sp1024.bin")
    right = load_tokenizer(shared_data / "tokenizers/fineweb_1024_bpe.model")
    wrong = load_tokenizer(shared_data / "tokenizers/fineweb_4096_bpe.coder2011.model")
    assert len(check_tokenizer(val, right)) == 1
    assert reproduced(val.validation_tokens()[:65_536], right) == 1
    with pytest.raises(DataError, match=r"only 7\d% of the tokens in .* come back"):
        check_tokenizer(val, wrong)


def test_the_shared_folder_of_two_vocabularies_is_refused(shared_data: Path) -> None:
    with pytest.raises(DataError, match="mix vocabularies"):
        open_dataset(shared_data / "text/fineweb")
