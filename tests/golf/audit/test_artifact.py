"""Artifacts and scripts are audited: copies of the text in them, files that they read and that do not ship."""

from pathlib import Path

import numpy as np
import pytest

from birdie.errors import DataError
from birdie.golf.audit import rules
from birdie.golf.audit.folder_audit import audit
from birdie.golf.audit.rules import BYTES, CAUSAL, OVERLAP, RUNS, VALIDATION, Finding, Result
from birdie.golf.audit.shipped import STAT_BYTES, Shipped, check_size, listed_bytes, script_and_model, shipped
from birdie.gpt.data.shards import read_shard, write_shard
from birdie.gpt.data.tokenizer import train_caseops, train_sentencepiece
from birdie.gpt.run.recipe_settings import DataSettings
from birdie.lab.logs import TrainingLog, parse_log
from tests.golf.audit.audited_logs import baseline
from tests.golf.audit.submissions import ROOT, save_artifact
from tests.golf.scripts import script_of


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


def ships(root: Path, **files: str | bytes) -> Shipped:
    """Write files, with __ for the dot in their names, and return what the folder ships."""
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (root / name.replace("__", ".")).write_bytes(data)
    script, model = script_and_model(root)
    assert script is not None
    return shipped(script, model)


def size(root: Path, *logs: TrainingLog) -> Finding:
    return check_size(ships(root), logs, root)


def test_what_the_script_reads_ships(tmp_path: Path) -> None:
    folder = ships(
        tmp_path,
        train_gpt__py='import os, caps\nfrom tilt import hint\nsource = open("kernel.cpp").read()\n',
        caps__py="from . import deeper\n",
        deeper__py="x = 1\n",
        tilt__py="def hint(): ...\n",
        kernel__cpp="int main() {}\n",
        prepare_data__py="y" * 1000,
        tokenizer__model="z" * 1000,
        **{"final_model.int8.ptz": b"w" * 500},
    )
    assert [path.name for path in folder.code] == ["caps.py", "deeper.py", "kernel.cpp", "tilt.py", "train_gpt.py"]
    assert folder.code_bytes == sum(len(path.read_bytes()) for path in folder.code)
    finding = size(tmp_path)
    assert finding.result == "pass"
    assert f"{folder.code_bytes + 500:,} of 16,000,000 bytes" in finding.evidence
    assert "4 helper files" in finding.evidence


def test_the_size_is_that_of_the_files(tmp_path: Path) -> None:
    ships(tmp_path, train_gpt__py="# a comment\nx = 1\n", model__birdie=b"m" * 16_000_000)
    log = parse_log(baseline(), "train.log")
    finding = size(tmp_path, log)
    assert (finding.result, "18 more than" in finding.evidence) == ("fail", True)
    (tmp_path / "model.birdie").unlink()
    assert "15,815,847" in size(tmp_path, log).evidence
    assert size(tmp_path).result == "unknown"


@pytest.mark.parametrize("hide", ["targets", "names", "deep"])
def test_data_in_names_and_targets_of_links_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hide: str) -> None:
    ships(tmp_path, train_gpt__py="x = 1\n", model__birdie=b"m" * 5000)
    monkeypatch.setattr(rules, "CAP_BYTES", 10_000)
    finding = size(tmp_path)
    assert (finding.result, "5,006 of 10,000 bytes" in finding.evidence) == ("pass", True)  # a few names are free
    inner = tmp_path.joinpath(*"abcdefgh") if hide == "deep" else tmp_path
    inner.mkdir(parents=True, exist_ok=True)
    for number in range(30):
        if hide == "names":
            (inner / f"{number:0>200}").touch()
        else:
            (inner / f"{number}").symlink_to("x" * 200)
    finding = size(tmp_path)
    assert (finding.result, "names, sizes and targets" in finding.evidence) == ("fail", True)


def test_what_is_read_without_opening_a_file_counts(tmp_path: Path) -> None:
    """Names and sizes of files and folders, and targets of links; not those of hidden folders and of Python."""
    folder = tmp_path / "submission"
    for name in ("folder", "__pycache__", ".git", "venv"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file.bin").touch()
    (folder / "venv" / "pyvenv.cfg").touch()
    (folder / "é").symlink_to("nowhere" * 10)
    (folder / "again.bin").hardlink_to(folder / "folder" / "file.bin")
    expected = sum(len(name) + STAT_BYTES for name in ("folder", "file.bin", "again.bin")) + len("é".encode()) + 70
    assert listed_bytes(folder) == expected
    (tmp_path / "link").symlink_to(folder)
    assert listed_bytes(tmp_path / "link") == expected


def test_birdies_sources_count_where_the_script_loads_them(tmp_path: Path) -> None:
    folder = ships(tmp_path, train_gpt__py="from birdie.artifact.container import Reader\n")
    assert folder.package_bytes > 10_000
    assert folder.code_bytes == folder.package_bytes + (tmp_path / "train_gpt.py").stat().st_size


def test_files_that_modules_of_a_packed_script_read_ship(tmp_path: Path) -> None:
    helper = 'source = open("kernel.cu").read()\n'
    folder = ships(tmp_path, train_gpt__py=script_of(["pass", "a.py", "x = 1", "b.py", helper]), kernel__cu="int x;")
    assert [path.name for path in folder.code] == ["kernel.cu", "train_gpt.py"]
    assert folder.code_bytes == sum(path.stat().st_size for path in folder.code)
