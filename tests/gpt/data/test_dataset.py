"""Data sets: a folder of shards has one vocabulary and exact totals, and a wrong tokenizer is detected."""

from pathlib import Path

import numpy as np
import pytest

from birdie.errors import ConfigError, DataError
from birdie.gpt.data.dataset import Dataset, DatasetInfo, SplitTotals, check_tokenizer, open_dataset, roundtrip_share
from birdie.gpt.data.shards import write_shard
from birdie.gpt.data.tokenizer import ByteTokenizer, load_tokenizer

TOKENS = np.arange(1, 101, dtype=np.uint16)


def fill(folder: Path, *names: str, tokens: np.ndarray = TOKENS) -> Path:
    for name in names:
        write_shard(folder / name, tokens)
    return folder


def test_a_folder_is_one_data_set(tmp_path: Path) -> None:
    fill(tmp_path, "fineweb_train_000001.bin", "fineweb_train_000000.bin", "fineweb_val_000000.bin")
    data = open_dataset(tmp_path)
    assert [path.name for path in data.train] == ["fineweb_train_000000.bin", "fineweb_train_000001.bin"]
    assert (data.train_tokens, data.val_tokens, data.info) == (200, 100, None)


def test_incomplete_or_missing_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none does not exist"):
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


def test_a_split_that_is_not_opened_may_be_missing(tmp_path: Path) -> None:
    """Scoring needs validation shards only, also beside a `dataset.json` that counts both splits."""
    fill(tmp_path, "fineweb_val_000000.bin")
    info().write(tmp_path)
    data = open_dataset(tmp_path, splits=["val"])
    assert (data.train, data.train_tokens, data.val_tokens) == ((), 0, 100)
    assert check_tokenizer(data, ByteTokenizer()) == []
    info(101).write(tmp_path)
    with pytest.raises(DataError, match="counts 101 validation"):
        open_dataset(tmp_path, splits=["val"])


def test_mixed_vocabularies_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, "fineweb_train_000000_sp1024.bin", "fineweb_train_000000_sp4096.bin", "fineweb_val_head_sp1024.bin")
    with pytest.raises(DataError, match=r"mix vocabularies: sp1024 \(.*\), sp4096 \(.*\)"):
        open_dataset(tmp_path)
    assert len(open_dataset(train=tmp_path / "*train*_sp1024.bin", val=tmp_path / "*val*").train) == 1


def info(tokens: int = 100, **changes: object) -> DatasetInfo:
    totals = SplitTotals(1, tokens, 99, 99)
    fields = {"tokenizer_kind": "bytes", "tokenizer_sha256": ByteTokenizer.digest, "vocab_size": 260, **changes}
    return DatasetInfo("test", train=totals, val=totals, **fields)  # type: ignore[arg-type]


def test_dataset_json_round_trips_and_must_match_the_shards(tmp_path: Path) -> None:
    fill(tmp_path, "fineweb_train_000000.bin", "fineweb_val_000000.bin")
    info().write(tmp_path)
    assert open_dataset(tmp_path).info == info()
    info(101).write(tmp_path)
    with pytest.raises(DataError, match="counts 101 training"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 2}', "\x00"])
def test_damaged_dataset_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "dataset.json").write_text(text)
    with pytest.raises(DataError, match=r"dataset.json is damaged"):
        DatasetInfo.read(tmp_path)


def test_with_a_dataset_json_the_tokenizers_hash_decides() -> None:
    assert check_tokenizer(Dataset((), (), info()), ByteTokenizer()) == []
    with pytest.raises(DataError, match=r"sentencepiece tokenizer sha256 00.* byte260"):
        check_tokenizer(Dataset((), (), info(tokenizer_kind="sentencepiece", tokenizer_sha256="00")), ByteTokenizer())


def test_shards_without_a_dataset_json_pass_with_a_warning(tmp_path: Path) -> None:
    text = ByteTokenizer().encode("some text")
    fill(tmp_path, "fineweb_val_000000.bin", tokens=np.concatenate(([1], text)))
    assert len(check_tokenizer(open_dataset(val=tmp_path / "fineweb_val_000000.bin"), ByteTokenizer())) == 1
    fill(tmp_path, "fineweb_val_000000.bin", tokens=text)
    warnings = check_tokenizer(open_dataset(val=tmp_path / "fineweb_val_000000.bin"), ByteTokenizer())
    assert "no BOS" in warnings[1]


def test_decoding_and_encoding_reveals_a_wrong_tokenizer_on_real_text(shared_data: Path) -> None:
    val = open_dataset(val=shared_data / "text/fineweb/fineweb_val_head_sp1024.bin")
    right = load_tokenizer(shared_data / "tokenizers/fineweb_1024_bpe.model")
    wrong = load_tokenizer(shared_data / "tokenizers/fineweb_4096_bpe.coder2011.model")
    assert len(check_tokenizer(val, right)) == 1
    assert roundtrip_share(val.validation_tokens()[:65_536], right) == 1
    with pytest.raises(DataError, match=r"only 7\d% of the tokens"):
        check_tokenizer(val, wrong)
