"""Downloads from the Hub: a file at its final path is the published file, whatever the server or the disk does."""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from birdie.cli import build_app
from birdie.cli.console import run
from birdie.errors import ConfigError, DataError, OutputError
from birdie.gpt.data.corpus import file_corpus
from birdie.gpt.data.dataset import DatasetInfo, check_tokenizer, open_dataset
from birdie.gpt.data.download import DownloadedDataset, Source, download
from birdie.gpt.data.preparation import PreparedDataset, prepare
from birdie.gpt.data.shards import write_shard
from birdie.gpt.data.tokenizer import load_tokenizer
from tests.gpt.data.random_text import random_lines
from tests.hub.server import Fault, Hub, running, send, status

pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed")

REPO = "golf/shards"
ROOT = "datasets/"  # of the repository
FOLDER = f"{ROOT}datasets/fineweb10B_sp400/"
MODEL = f"{ROOT}tokenizers/fineweb_400_bpe.model"
MANIFEST = f"{ROOT}manifest.json"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreparedDataset]:
    """Data sets that birdie prepares from 400 lines, by variant: four training shards, one validation shard."""
    root = tmp_path_factory.mktemp("published")
    text = root / "text.txt"
    text.write_text(random_lines(400), encoding="utf-8")
    corpus = file_corpus([text], validation_fraction=0.1)
    datasets = {}
    for name, tokenizer, size in (("sp400", 400, 6_000), ("byte260", "bytes", 30_000)):
        *_, last = prepare(corpus, tokenizer, root / "data", shard_tokens=size)
        assert isinstance(last, PreparedDataset)
        datasets[name] = last
    return datasets


@pytest.fixture
def hub(prepared: dict[str, PreparedDataset], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A Hub with these data sets in the challenge's layout."""
    with running(monkeypatch, tmp_path) as server:
        files = server.repositories[f"datasets/{REPO}"] = {"README.md": b"shards"}
        datasets, tokenizers = [], []
        for name, result in prepared.items():
            for path in sorted(result.folder.glob("*.bin")):
                files[f"{ROOT}datasets/fineweb10B_{name}/{path.name}"] = path.read_bytes()
            stats = {"files_train": len(list(result.folder.glob("*_train_*.bin"))), "files_val": 1}
            entry = {"name": f"fineweb10B_{name}", "tokenizer_name": name}
            datasets.append({**entry, "stats": {**stats, "tokens_val": result.info.val.tokens}})
            model = {"model_path": MODEL.removeprefix(ROOT)} if name == "sp400" else {}
            tokenizers.append({"name": name, **model})
        files[MODEL] = Path(prepared["sp400"].tokenizer).read_bytes()
        files[MANIFEST] = json.dumps({"datasets": datasets, "tokenizers": tokenizers}).encode()
        yield server


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def shard(number: int, split: str = "train") -> str:
    return f"fineweb_{split}_{number:06d}.bin"


def published(hub: Hub) -> dict[str, bytes]:
    return hub.repositories[f"datasets/{REPO}"]


def get(hub: Hub, data: Path, train_shards: int = 2, variant: str = "sp400", **settings: Any) -> DownloadedDataset:
    return download(variant, train_shards, data, source=Source(REPO, endpoint=hub.endpoint), **settings)


def files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def shards_in(data: Path) -> list[str]:
    """Return the names of the shards in the data set, which appear when all of them are checked."""
    return sorted(path.name for path in (data / "datasets/fineweb10B_sp400").glob("*.bin"))


def change_manifest(hub: Hub, **stats: object) -> None:
    manifest = json.loads(published(hub)[MANIFEST])
    manifest["datasets"][0]["stats"] |= stats
    published(hub)[MANIFEST] = json.dumps(manifest).encode()


@pytest.mark.parametrize("variant", ["sp400", "byte260"])
def test_a_complete_download_equals_what_prepare_published(
    hub: Hub, data: Path, prepared: dict[str, PreparedDataset], variant: str
) -> None:
    """The shards have the same bytes, dataset.json the same totals, and the tokenizer passes the check."""
    source = prepared[variant]
    result = get(hub, data, len(list(source.folder.glob("*_train_*.bin"))), variant)
    for path in source.folder.glob("*.bin"):
        assert (result.folder / path.name).read_bytes() == path.read_bytes()
    commit = hub.commit(f"datasets/{REPO}")
    splits = {split: replace(totals, source_bytes=totals.bytes) for split, totals in totals_of(source.info)}
    assert result.info == replace(source.info, corpus=f"{REPO}@{commit[:12]}", **splits)
    dataset = open_dataset(result.folder)
    assert dataset.info == result.info
    assert check_tokenizer(dataset, load_tokenizer(result.tokenizer)) == []
    model = {"tokenizers/fineweb_400_bpe.model"} if variant == "sp400" else set()
    names = {f"datasets/fineweb10B_{variant}/{path.name}" for path in source.folder.iterdir()}
    assert set(files(data)) == names | model
    assert result.notes == ()
    assert result.commit == commit


def totals_of(info: DatasetInfo) -> list[tuple[str, Any]]:
    return [("train", info.train), ("val", info.val)]


def test_the_same_call_again_requests_the_listing_and_downloads_nothing(hub: Hub, data: Path) -> None:
    first, snapshot = get(hub, data), files(data)
    hub.requests.clear()
    second = get(hub, data)
    assert hub.downloads() == [MANIFEST]
    assert files(data) == snapshot
    assert (second.downloaded, second.bytes, second.info) == ((), 0, first.info)
    assert second.kept == (shard(0, "val"), shard(0), shard(1))


def test_added_shards_are_counted_as_if_downloaded_together(hub: Hub, data: Path, tmp_path: Path) -> None:
    get(hub, data, 1)
    hub.requests.clear()
    more = get(hub, data, 4)
    assert [path.removeprefix(FOLDER) for path in hub.downloads(FOLDER)] == [shard(1), shard(2), shard(3)]
    assert more.info == get(hub, tmp_path / "at-once", 4).info
    assert get(hub, data, 1).info == more.info, "shards that already exist are counted"


@pytest.mark.parametrize(
    ("damage", "name"),
    [("flip", shard(0)), ("truncate", shard(1)), ("delete", shard(0, "val")), ("flip", shard(0, "val"))],
)
def test_only_missing_and_damaged_files_are_downloaded_again(hub: Hub, data: Path, damage: str, name: str) -> None:
    result, snapshot = get(hub, data), files(data)
    path = result.folder / name
    content = bytearray(path.read_bytes())
    content[3_000] ^= 1
    path.write_bytes(content if damage == "flip" else content[:-100])
    if damage == "delete":
        path.unlink()
    hub.requests.clear()
    repaired = get(hub, data)
    assert hub.downloads(FOLDER) == [FOLDER + name]
    assert (repaired.downloaded, repaired.info) == ((name,), result.info)
    assert files(data) == snapshot


def test_a_file_with_a_wrong_checksum_never_reaches_its_final_path(hub: Hub, data: Path) -> None:
    path = FOLDER + shard(1)
    hub.faults[path] = [send(published(hub)[path][:-2] + b"\0\0")]
    with pytest.raises(DataError, match=r"fineweb_train_000001\.bin of golf/shards"):
        get(hub, data)
    assert not shards_in(data)
    hub.requests.clear()
    assert shard(1) in get(hub, data).downloaded
    assert hub.downloads(FOLDER) == [path], "the others were kept"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (status(404, X_Error_Code="RepoNotFound"), "check the name"),
        (status(401), "HF_TOKEN"),
        (status(403, X_Error_Code="GatedRepo"), "is gated"),
        (status(403), "HF_TOKEN"),
        (status(418), "418"),
        (status(503), "answered 503"),
        (send(b"<html>Log in to this network"), "check the connection"),
        (send(b'{"id": "x/y"}'), "names no commit"),
    ],
)
def test_a_refused_request_is_one_clear_sentence(hub: Hub, data: Path, fault: Fault, message: str) -> None:
    hub.faults["api"] = [fault] * 9
    with pytest.raises(DataError, match=f"{REPO} at {hub.endpoint}.*{message}") as caught:
        get(hub, data)
    assert "\n" not in str(caught.value)
    assert not data.exists()


@pytest.mark.parametrize("size", [1 << 50, -1, "7", None, 10.0])
@pytest.mark.parametrize("path", [MANIFEST, MODEL, FOLDER + shard(0)])
def test_an_impossible_listed_size_is_refused_before_the_download(
    hub: Hub, data: Path, size: object, path: str
) -> None:
    def claim(answer: dict[str, Any]) -> None:
        next(entry for entry in answer["siblings"] if entry["rfilename"] == path)["size"] = size

    hub.edit_listing = claim
    with pytest.raises(DataError, match="nothing was downloaded"):
        get(hub, data)
    assert set(hub.downloads()) <= {MANIFEST}
    assert not data.exists()


def test_unknown_repositories_revisions_and_variants_are_refused(hub: Hub, data: Path) -> None:
    with pytest.raises(ConfigError, match="owner/name"):
        download("sp400", 1, data, source=Source("a/b/c", endpoint=hub.endpoint))
    with pytest.raises(DataError, match="no such revision"):
        download("sp400", 1, data, source=Source(REPO, "v9", endpoint=hub.endpoint))
    with pytest.raises(DataError, match=r"sp512; it has byte260 \(in datasets/\), sp400 \(in datasets/\)"):
        get(hub, data, variant="sp512")
    with pytest.raises(ConfigError, match="train_shards=-1"):
        get(hub, data, -1)
    assert not data.exists()


def test_a_path_that_leads_out_of_the_repository_is_refused(hub: Hub, data: Path) -> None:
    manifest = json.loads(published(hub)[MANIFEST])
    manifest["tokenizers"][0]["model_path"] = "../../x"
    published(hub)[MANIFEST] = json.dumps(manifest).encode()
    with pytest.raises(DataError, match=r"'\.\./\.\./x'"):
        get(hub, data)
    hub.edit_listing = lambda answer: answer["siblings"][0].update(rfilename=f"../datasets/fineweb10B_sp400/{shard(0)}")
    with pytest.raises(DataError, match="leads out of it"):
        get(hub, data)
    assert not data.exists()


@pytest.mark.parametrize("name", [shard(0), shard(0, "val"), shard(77)])
def test_shards_of_another_data_set_are_never_replaced(hub: Hub, data: Path, name: str) -> None:
    path = data / "datasets/fineweb10B_sp400" / name
    path.parent.mkdir(parents=True)
    write_shard(path, np.arange(9))
    snapshot = files(data)
    with pytest.raises(OutputError, match="choose another root, or move it away"):
        get(hub, data)
    assert files(data) == snapshot
    path.write_bytes(path.read_bytes()[:-1])  # a partial shard may be replaced
    if name != shard(77):
        assert len(get(hub, data).downloaded) == 4


def test_a_tokenizer_that_does_not_match_the_shards_is_refused(hub: Hub, data: Path, tmp_path: Path) -> None:
    text = tmp_path / "other.txt"
    text.write_text(random_lines(300, seed=1), encoding="utf-8")
    corpus = file_corpus([text], validation_fraction=0.1)
    right = published(hub)[MODEL]
    for size, message in ((300, "has 300 pieces"), (400, "are reproduced when sp400")):
        *_, other = prepare(corpus, size, tmp_path / "other")
        assert isinstance(other, PreparedDataset)
        published(hub)[MODEL] = Path(other.tokenizer).read_bytes()
        with pytest.raises(DataError, match=message):
            get(hub, data)
        shutil.rmtree(data)
    published(hub)[MODEL] = right
    tokens = np.full(3_000, 400)
    write_shard(tmp_path / "large.bin", tokens)
    published(hub)[FOLDER + shard(1)] = (tmp_path / "large.bin").read_bytes()
    with pytest.raises(DataError, match="token id 400, but sp400 has 400 ids"):
        get(hub, data)


def run_command(capsys: pytest.CaptureFixture[str], *tokens: object) -> tuple[int, dict[str, Any], str]:
    code = run(build_app, ["prepare", *map(str, tokens), "--json"])
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    return code, json.loads(out), err


def test_the_command_downloads_and_reports(hub: Hub, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--variant", "sp400", "--train-shards", 2, "--repo", REPO, "--endpoint", hub.endpoint, "-o", data]
    change_manifest(hub, files_train=3)
    code, answer, err = run_command(capsys, "hub", *flags)
    assert code == 0
    assert answer["fetched"] == ["fineweb_400_bpe.model", shard(0, "val"), shard(0), shard(1)]
    assert (answer["commit"], answer["kept"]) == (hub.commit(f"datasets/{REPO}"), [])
    assert answer["train"]["tokens"] == open_dataset(answer["folder"]).train_tokens
    assert "note: the manifest counts 3" in err
    assert run(build_app, ["prepare", "hub", *map(str, flags)]) == 0
    assert "downloaded: 0 files, 0 bytes; 3 existed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["stdlib", "--variant", "sp400"], "--variant is for birdie prepare hub"),
        (["hub", "more.txt", "--train-shards", "1"], "--train-shards is for birdie prepare hub"),
        (["hub", "--vocab-size", "400"], "choose with --variant"),
        (["hub", "--variant", "gpt2"], "variant 'gpt2' is unknown"),
    ],
)
def test_flags_that_exclude_each_other_are_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    code, answer, _ = run_command(capsys, *flags)
    assert (code, answer["error"]["type"]) == (1, "ConfigError")
    assert message in answer["error"]["message"]


def test_without_the_library_the_command_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, data: Path
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    code, answer, _ = run_command(capsys, "hub", "-o", data)
    assert (code, answer["error"]["type"]) == (1, "ConfigError")
    assert "pip install 'birdie-compress[hub]'" in answer["error"]["message"]
    assert not data.exists()
