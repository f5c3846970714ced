"""Files beside the tensors: they come back as they were, count against a budget, and damage is one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import birdie
from birdie.artifact import container, kept_files
from birdie.artifact import metadata as file_metadata
from birdie.artifact.container import Reader
from birdie.artifact.options import SaveOptions
from birdie.artifact.saving import write_model
from birdie.errors import ArtifactError, ConfigError

FILES = {"config.json": b'{"hidden_size": 64}', "tokenizer/vocab.json": b"a" * 5000, "LICENSE": "Lizenz ü".encode()}


def state() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(0))}


def read(path: Path) -> dict[str, bytes]:
    with Reader(path) as reader:
        return kept_files.read(reader)


def test_files_come_back_and_tensors_do_not_change(tmp_path: Path) -> None:
    plain, kept = tmp_path / "plain.birdie", tmp_path / "kept.birdie"
    birdie.save(state(), plain)
    summary = write_model(state(), kept, files=FILES)
    assert read(kept) == FILES
    assert read(plain) == {}
    assert torch.equal(birdie.load(kept)["w"], birdie.load(plain)["w"])
    assert list(birdie.load(kept)) == ["w"]
    assert summary.files == {name: len(content) for name, content in FILES.items()}
    assert birdie.inspect(plain).files == {}
    with Reader(kept) as reader:
        assert sum(reader.table().values()) + reader.header_bytes == reader.size
    assert 0 < summary.file_bytes < 200


@given(
    files=st.dictionaries(st.from_regex(r"(d[a-z]{0,8}/)?f[a-z.]{0,8}[a-z]", fullmatch=True), st.binary(max_size=300))
)
@settings(max_examples=10)
def test_any_files_come_back_and_the_order_does_not_matter(files: dict[str, bytes]) -> None:
    def data(files: dict[str, bytes]) -> bytes:
        metadata = file_metadata.to_bytes(files=kept_files.sizes_of(files))
        return container.to_bytes([kept_files.entry_of(files)] if files else [], metadata)

    backwards = dict(reversed(files.items()))
    assert data(files) == data(backwards)
    with Reader(data(files)) as reader:
        assert kept_files.read(reader) == files


def test_they_count_against_a_budget(tmp_path: Path) -> None:
    noise = {"noise.txt": torch.randint(0, 256, (3000,), dtype=torch.uint8).numpy().tobytes()}
    summary = write_model(state(), tmp_path / "x.birdie", SaveOptions(budget=5000), files=noise)
    assert 4900 <= summary.bytes <= 5000
    assert summary.file_bytes >= 3000
    with pytest.raises(birdie.BudgetError):
        write_model(state(), tmp_path / "y.birdie", SaveOptions(budget=3000), files=noise)


def test_no_file_has_the_name_of_the_folder_of_another(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a/b/c"):
        write_model(state(), tmp_path / "x.birdie", files={"a/b": b"", "a/b/c": b""})
    with pytest.raises(ArtifactError, match="list of files"):
        kept_files.listed({"files": {"a": 0, "a/b": 0}}, "x")


@pytest.mark.parametrize(
    "files", [{"a": 5, "b": 3}, {"a": 7}, {"a": 1 << 40}, {"b": 6}, [], {"a": True}, {"b": 3, "a": 3}]
)
def test_a_damaged_list_is_refused(files: Any) -> None:
    entry = kept_files.entry_of({"a": b"abc", "b": b"def"})
    metadata = json.dumps({"files": files}).encode()
    with Reader(container.to_bytes([entry], metadata)) as reader:
        if files == {"b": 6}:
            assert kept_files.read(reader) == {"b": b"abcdef"}
            return
        with pytest.raises(ArtifactError):
            kept_files.read(reader)


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    entry = kept_files.entry_of({"a": bytes(1 << 20)})
    with Reader(container.to_bytes([entry], file_metadata.to_bytes(files={"a": 1 << 20}))) as reader:
        with pytest.raises(ArtifactError, match="--max-size"):
            kept_files.read(reader, 1 << 19)
        assert len(kept_files.read(reader)["a"]) == 1 << 20


def test_files_of_the_base_are_stored_once(tmp_path: Path) -> None:
    base, tuned = tmp_path / "base.birdie", tmp_path / "tuned.birdie"
    write_model(state(), base, SaveOptions(lossless=True), files=FILES)
    new = {**FILES, "LICENSE": b"other", "README.md": b"new"}
    options = SaveOptions(lossless=True, base=base)
    summary = write_model({"w": state()["w"] + 1e-4}, tuned, options, files=new)
    assert read(tuned) == {"LICENSE": b"other", "README.md": b"new"}
    assert set(summary.base_files) == {"config.json", "tokenizer/vocab.json"}
    assert summary.files == {name: len(content) for name, content in new.items()}
    assert birdie.files(tuned, base=base) == new
    birdie.load(tuned, base=state())  # tensors need tensors alone
    write_model(state(), tmp_path / "other.birdie", SaveOptions(lossless=True), files=FILES | {"config.json": b"{}"})
    for wrong in (None, state(), tmp_path / "other.birdie"):
        with pytest.raises(ArtifactError, match="base"):
            birdie.files(tuned, base=wrong)


@pytest.mark.parametrize(
    "about",
    [
        {"files": 1},
        {"files": {"LICENSE": 5}},  # kept, too
        {"files": {"../x": 1}},
        {"files": {"b": 1, "a": 1}},
        {"files": {"a": -1}},
        {"files": {"a": 1 << 49}},
        {"files": {"a/b": 1, "a": 1}},
        {"files": {f"{number:05}": 0 for number in range(kept_files.MOST_FILES + 1)}},
    ],
    ids=lambda about: str(about)[:40],
)
def test_a_damaged_list_of_files_of_the_base_is_refused(about: Any) -> None:
    files = {"LICENSE": b"other"}
    text = json.dumps({"files": kept_files.sizes_of(files), "base": about}).encode()
    data = container.to_bytes([kept_files.entry_of(files)], text)
    with pytest.raises(ArtifactError, match="damaged"):
        birdie.files(data)
    with pytest.raises(ArtifactError, match="damaged"):
        birdie.inspect(data)


@pytest.mark.parametrize("digest", [None, 5, "0" * 64])
def test_a_digest_of_files_that_lies_is_refused(digest: Any, tmp_path: Path) -> None:
    write_model(state(), tmp_path / "base.birdie", files={"a": b"x"})
    data = container.to_bytes([], json.dumps({"base": {"files": {"a": 1}, "sha256": digest}}).encode())
    with pytest.raises(ArtifactError, match="base"):
        birdie.files(data, base=tmp_path / "base.birdie")
