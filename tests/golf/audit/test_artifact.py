"""The audit of a .birdie file: model, bytes, split and copied documents."""

from pathlib import Path

import numpy as np
import pytest

from birdie.errors import DataError
from birdie.golf.audit.folder_audit import audit
from birdie.golf.audit.rules import BYTES, CAUSAL, OVERLAP, RUNS, VALIDATION, Result
from birdie.gpt.data.shards import read_shard, write_shard
from birdie.gpt.data.tokenizer import train_caseops, train_sentencepiece
from birdie.gpt.run.recipe_settings import DataSettings
from tests.golf.audit.submissions import ROOT, save_artifact


def test_copied_documents_fail(run_folder: Path, data: Path, tmp_path: Path) -> None:
    val, train = next(data.glob("*_val_*.bin")), next(data.glob("*_train_*.bin"))
    report = audit(run_folder / "model.birdie", train=[str(train), str(val)], tokens=8)
    assert report.result(OVERLAP) == "fail"
    other = tmp_path / "x_val_000000.bin"
    write_shard(other, np.array(read_shard(val)))
    alone = audit(run_folder / "model.birdie", data=str(other), tokens=8)
    assert (alone.result(OVERLAP), alone.result(BYTES)) == ("unknown", "pass")
    with pytest.raises(DataError, match=r"none\.bin"):
        audit(run_folder / "model.birdie", data=str(tmp_path / "none.bin"))


def test_an_artifact_without_its_text_is_probed(tmp_path: Path) -> None:
    text = DataSettings(path=str(tmp_path / "none"), tokenizer="bytes")
    report = audit(save_artifact(tmp_path / "model.birdie", text), tokens=8)
    assert (report.result(BYTES), report.result(CAUSAL)) == ("unknown", "pass")
    assert any("--data" in finding.evidence for finding in report.of(BYTES))


def test_a_damaged_artifact_fails(run_folder: Path, tmp_path: Path) -> None:
    blob = bytearray((run_folder / "model.birdie").read_bytes())
    blob[len(blob) // 2] ^= 0xFF
    (tmp_path / "model.birdie").write_bytes(blob)
    assert audit(tmp_path / "model.birdie").result(RUNS) == "fail"


def test_a_recipe_that_trains_on_validation_fails(run_folder: Path, data: Path, tmp_path: Path) -> None:
    val = (str(next(data.glob("*_val_*.bin"))),)
    text = DataSettings(train=val, val=val, tokenizer="bytes")
    assert audit(save_artifact(tmp_path / "model.birdie", text), tokens=8).result(VALIDATION) == "fail"
    assert audit(run_folder / "model.birdie", tokens=8).result(VALIDATION) == "unknown"


def test_another_tokenizer_than_that_of_training_fails(run_folder: Path, tmp_path: Path) -> None:
    vocabulary = train_sentencepiece(["some words to learn from, and more of them"] * 30, 300)
    (tmp_path / "other.model").write_bytes(vocabulary.model_bytes)
    report = audit(run_folder / "model.birdie", tokenizer=str(tmp_path / "other.model"), tokens=8)
    assert report.result(BYTES) == "fail"


def test_shards_that_may_not_be_those_of_training_prove_nothing(data: Path, tmp_path: Path) -> None:
    text = DataSettings(path="elsewhere", tokenizer="bytes")
    path = save_artifact(tmp_path / "model.birdie", text)
    assert audit(path, data=str(data), tokens=8).result(OVERLAP) == "unknown"
    train = str(next(data.glob("*_train_*.bin")))
    assert audit(path, data=str(data), train=[train], tokens=8).result(OVERLAP) == "pass"


@pytest.mark.parametrize(("excess", "result"), [(0, "pass"), (1, "fail"), (200, "fail")])
def test_a_sidecar_is_compared_with_the_text(tmp_path: Path, excess: int, result: Result) -> None:
    """200 bytes too many are refused at once; one in some thousands is only seen by decoding."""
    texts = [f"{line} Some NASA Words" for line in (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")[:9]]
    tokenizer = train_caseops(texts * 3, 400, tmp_path / "caseops.model")
    stream = np.concatenate([np.insert(ids, 0, tokenizer.bos_id) for ids in tokenizer.encode_batch(texts)])
    counts = tokenizer.byte_table().count_document(stream, tokenizer.bos_id)
    counted = np.flatnonzero(counts)
    counts[counted[-min(excess, len(counted)) :][:excess]] += 1
    write_shard(tmp_path / "fineweb_val_000000.bin", stream)
    write_shard(tmp_path / "fineweb_val_bytes_000000.bin", counts)
    text = DataSettings(path=str(tmp_path), tokenizer=str(tmp_path / "caseops.model"))
    report = audit(save_artifact(tmp_path / "model.birdie", text, tokenizer), tokens=8)
    assert report.result(BYTES) == result, report.of(BYTES)
    assert not [rule for rule in report.failed if rule != BYTES]
