"""Catalog of a repository: the listing and the manifest select the files, and neither is trusted."""

import json
import subprocess
import sys
from typing import Any

import pytest

from birdie.errors import DataError
from birdie.gpt.data.published import RemoteFile, find_root, read_manifest, select_files

ROOT = "datasets/"


def listing(*paths: str, size: int = 2_048) -> dict[str, RemoteFile]:
    return {path: RemoteFile(path, size, "0" * 64) for path in paths}


def shards(train: int, val: int = 1, variant: str = "sp1024", root: str = ROOT) -> dict[str, RemoteFile]:
    """Listing of `train` and `val` shards and their tokenizer."""
    folder = f"{root}datasets/fineweb10B_{variant}/fineweb_"
    names = [f"{folder}{split}_{i:06d}.bin" for split, count in (("train", train), ("val", val)) for i in range(count)]
    return listing(*names, f"{root}tokenizers/fineweb_{variant.removeprefix('sp')}_bpe.model")


def manifest(train: Any = 3, val: Any = 1, tokens: Any = 512, **tokenizer: Any) -> bytes:
    entry = {
        "name": "fineweb10B_sp1024",
        "tokenizer_name": "sp_bpe_1024",
        "stats": {"files_train": train, "files_val": val, "tokens_val": tokens, "docs_val": 50_000},
    }
    return json.dumps({"datasets": [entry], "tokenizers": [{"name": "sp_bpe_1024", **tokenizer}], "new": []}).encode()


def test_the_manifest_determines_counts_and_tokenizer() -> None:
    path = "tokenizers/fineweb_1024_bpe.model"
    dataset = select_files(shards(3), ROOT, "sp1024", manifest(model_path=path))
    assert [file.name for file in dataset.train] == [f"fineweb_train_{i:06d}.bin" for i in range(3)]
    assert (len(dataset.val), dataset.val_tokens, dataset.notes) == (1, 512, ())
    assert dataset.model is not None
    assert dataset.model.path == ROOT + path


@pytest.mark.parametrize(
    ("data", "note"),
    [
        (None, "has none"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"7", "does not name fineweb10B_sp1024"),
        (b'{"datasets": {"name": "fineweb10B_sp1024"}}', "does not name"),
        (b'{"datasets": [null, {"name": "fineweb10B_sp4096"}]}', "does not name"),
        (b'{"datasets": [{"name": "fineweb10B_sp1024"}]}', "no files_train, no files_val, no tokens_val"),
        (b'{"datasets": [{"name": "fineweb10B_sp1024", "stats": 3}], "tokenizers": 1}', "no files_train"),
        (manifest(train="3"), "no files_train of"),
        (manifest(train=True, tokens=-1), "no files_train, no tokens_val"),
        (manifest(val=10**30), "no files_val of"),
    ],
)
def test_without_a_usable_manifest_the_file_names_decide_and_a_note_says_so(data: bytes | None, note: str) -> None:
    dataset = select_files(shards(3), ROOT, "sp1024", data)
    assert (len(dataset.train), len(dataset.val)) == (3, 1)
    assert len(dataset.notes) == 1
    assert note in dataset.notes[0]
    assert dataset.model is not None


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "..", "a\\x", "c:/x", "a//x", "./x", "", 7, ["a"]])
def test_a_tokenizer_outside_the_repository_is_refused(path: object) -> None:
    with pytest.raises(DataError, match="leads out of the repository"):
        read_manifest(manifest(model_path=path), "fineweb10B_sp1024")


@pytest.mark.parametrize("size", [0, 1_024, 1_027, 1 << 40])
def test_impossible_shard_sizes_are_refused(size: int) -> None:
    path = f"{ROOT}datasets/fineweb10B_sp1024/fineweb_train_000001.bin"
    with pytest.raises(DataError, match="which no shard has"):
        select_files(shards(3) | listing(path, size=size), ROOT, "sp1024", manifest())


def test_a_missing_or_huge_tokenizer_is_refused() -> None:
    path = f"{ROOT}tokenizers/fineweb_1024_bpe.model"
    with pytest.raises(DataError, match="1,000,000,000 bytes"):
        select_files(shards(1) | listing(path, size=10**9), ROOT, "sp1024", None)
    with pytest.raises(DataError, match=r"datasets/tokenizers/other\.model"):
        select_files(shards(1), ROOT, "sp1024", manifest(model_path="tokenizers/other.model"))
    assert select_files(shards(1, variant="byte260"), ROOT, "byte260", None).model is None


def test_the_error_for_a_missing_variant_lists_those_that_exist() -> None:
    files = shards(1) | shards(1, variant="byte260") | shards(1, variant="sp512", root="old/")
    available = r"it has byte260 \(in datasets/\), sp1024 \(in datasets/\), sp512 \(in old/\)"
    with pytest.raises(DataError, match=f"sp4096; {available}"):
        find_root(files, "sp4096")
    with pytest.raises(DataError, match="sp1024 in old/"):
        find_root(files, "sp1024", "old")
    with pytest.raises(DataError, match="it has none"):
        find_root(listing("README.md"), "sp1024")


def test_importing_the_command_does_not_import_huggingface_hub() -> None:
    code = "import sys, birdie.cli.prepare, birdie.gpt.data.download; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
