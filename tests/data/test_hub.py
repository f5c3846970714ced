"""Fetching from a hub: what arrives is what was published, or it does not take its place."""

import errno
import json
import os
import random
import shutil
import sys
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from birdie.cli import build_app
from birdie.cli.console import run
from birdie.data import fetch as fetching
from birdie.data import hub as transport
from birdie.data.corpus import file_corpus
from birdie.data.dataset import DatasetInfo, check_tokenizer, open_dataset
from birdie.data.fetch import Fetched, Source, fetch
from birdie.data.prepare import Prepared, prepare
from birdie.data.shards import HEADER_BYTES, write_shard
from birdie.data.tokenizer import load_tokenizer
from birdie.errors import BirdieError, ConfigError, DataError, OutputError
from tests.data.hub_server import COMMIT, REPO, Hub, cut, send, status

pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed")

ROOT = "datasets/"  # of the repository
FOLDER = f"{ROOT}datasets/fineweb10B_sp400/"
MODEL = f"{ROOT}tokenizers/fineweb_400_bpe.model"
MANIFEST = f"{ROOT}manifest.json"


def shard(number: int, split: str = "train") -> str:
    return f"fineweb_{split}_{number:06d}.bin"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Prepared]:
    """What birdie itself makes of 400 lines of made-up words: four training shards, one for validation."""
    root, draw = tmp_path_factory.mktemp("published"), random.Random(0)
    lexicon = ["".join(draw.choices("abcdeéstnrl", k=draw.randint(1, 8))) for _ in range(300)]
    text = root / "text.txt"
    text.write_text("\n".join(" ".join(draw.choices(lexicon, k=30)) for _ in range(400)), encoding="utf-8")
    corpus = file_corpus([text], validation_fraction=0.1)
    made = {}
    for name, tokenizer, size in (("sp400", 400, 6_000), ("byte260", "bytes", 30_000)):
        *_, last = prepare(corpus, tokenizer, root / "data", shard_tokens=size)  # type: ignore[arg-type]
        assert isinstance(last, Prepared)
        made[name] = last
    return made


@pytest.fixture
def hub(prepared: dict[str, Prepared], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub that publishes it as the challenge does; nobody's token and nobody's cache."""
    constants = "huggingface_hub.constants"
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(f"{constants}.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # noqa: ARG005
    server = Hub()
    datasets, tokenizers = [], []
    for name, result in prepared.items():
        for path in sorted(result.folder.glob("*.bin")):
            server.files[f"{ROOT}datasets/fineweb10B_{name}/{path.name}"] = path.read_bytes()
        stats = {"files_train": len(list(result.folder.glob("*_train_*.bin"))), "files_val": 1}
        entry = {"name": f"fineweb10B_{name}", "tokenizer_name": name}
        datasets.append({**entry, "stats": {**stats, "tokens_val": result.info.val.tokens}})
        tokenizers.append({"name": name, "model_path": MODEL.removeprefix(ROOT)} if name == "sp400" else {"name": name})
    server.files[MODEL] = Path(prepared["sp400"].tokenizer).read_bytes()
    server.files[MANIFEST] = json.dumps({"datasets": datasets, "tokenizers": tokenizers}).encode()
    server.files["README.md"] = b"shards"
    yield server
    import huggingface_hub

    huggingface_hub.close_session()
    server.close()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def get(hub: Hub, data: Path, train_shards: int = 2, variant: str = "sp400", **settings: Any) -> Fetched:
    return fetch(variant, train_shards, data, source=Source(REPO, endpoint=hub.endpoint), **settings)


def files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def change_manifest(hub: Hub, **stats: object) -> None:
    manifest = json.loads(hub.files[MANIFEST])
    manifest["datasets"][0]["stats"] |= stats
    hub.files[MANIFEST] = json.dumps(manifest).encode()


@pytest.mark.parametrize("variant", ["sp400", "byte260"])
def test_what_is_fetched_whole_is_what_prepare_made(
    hub: Hub, data: Path, prepared: dict[str, Prepared], variant: str
) -> None:
    """The same bytes, the same totals counted from them, accepted as if prepared here."""
    made = prepared[variant]
    result = get(hub, data, len(list(made.folder.glob("*_train_*.bin"))), variant)
    for path in made.folder.glob("*.bin"):
        assert (result.folder / path.name).read_bytes() == path.read_bytes()
    splits = {split: replace(totals, source_bytes=totals.bytes) for split, totals in vars_of(made.info)}
    assert result.info == replace(made.info, corpus=f"{REPO}@{COMMIT[:12]}", **splits)
    dataset = open_dataset(result.folder)
    assert dataset.info == result.info
    assert check_tokenizer(dataset, load_tokenizer(result.tokenizer)) == []
    model = {"tokenizers/fineweb_400_bpe.model"} if variant == "sp400" else set()
    names = {f"datasets/fineweb10B_{variant}/{path.name}" for path in made.folder.iterdir()}
    assert set(files(data)) == names | model
    assert result.notes == ()
    assert result.commit == COMMIT


def vars_of(info: DatasetInfo) -> list[tuple[str, Any]]:
    return [("train", info.train), ("val", info.val)]


def test_the_same_call_again_asks_anew_and_fetches_nothing(hub: Hub, data: Path) -> None:
    first, before = get(hub, data), files(data)
    hub.seen.clear()
    again = get(hub, data)
    assert hub.got() == [MANIFEST]
    assert files(data) == before
    assert (again.fetched, again.bytes, again.info) == ((), 0, first.info)
    assert again.kept == (shard(0, "val"), shard(0), shard(1))


def test_more_shards_are_added_and_counted_as_if_fetched_together(hub: Hub, data: Path, tmp_path: Path) -> None:
    get(hub, data, 1)
    hub.seen.clear()
    more = get(hub, data, 4)
    assert [path.removeprefix(FOLDER) for path in hub.got(FOLDER)] == [shard(1), shard(2), shard(3)]
    assert more.info == get(hub, tmp_path / "at-once", 4).info
    assert get(hub, data, 1).info == more.info, "shards that are there already count"


def test_no_training_shards_at_all(hub: Hub, data: Path) -> None:
    result = get(hub, data, 0)
    assert open_dataset(result.folder, splits=("val",)).val_tokens == result.info.val.tokens > 0
    assert result.info.train.tokens == 0


def test_a_broken_connection_is_taken_up_where_it_broke(hub: Hub, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1_000
    )  # 10 MB, and the pieces of that are lost
    hub.moods[FOLDER + shard(0)] = [cut(5_000)]
    get(hub, data)
    asked = [headers for method, path, headers in hub.seen if method == "GET" and path == FOLDER + shard(0)]
    assert [headers.get("Range") for headers in asked] == [None, "bytes=5000-"]
    assert (data / "datasets/fineweb10B_sp400" / shard(0)).read_bytes() == hub.files[FOLDER + shard(0)]


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
@pytest.mark.parametrize("name", [shard(0), shard(1), shard(0, "val")])
def test_only_what_is_missing_or_damaged_is_fetched_again(hub: Hub, data: Path, damage: str, name: str) -> None:
    result, before = get(hub, data), files(data)
    path = result.folder / name
    content = bytearray(path.read_bytes())
    content[3_000] ^= 1
    path.write_bytes(content if damage == "flip" else content[:-100])
    if damage == "gone":
        path.unlink()
    hub.seen.clear()
    again = get(hub, data)
    assert hub.got(FOLDER) == [FOLDER + name]
    assert (again.fetched, again.info) == ((name,), result.info)
    assert files(data) == before


def test_shards_that_are_there_without_a_dataset_json_are_taken_over(hub: Hub, data: Path) -> None:
    """As the challenge's own download leaves them."""
    result = get(hub, data)
    for text in (None, "{"):
        (result.folder / "dataset.json").unlink()
        if text is not None:
            (result.folder / "dataset.json").write_text(text)
        again = get(hub, data)
        assert (again.fetched, again.info) == ((), result.info)
        assert DatasetInfo.read(result.folder) == result.info


def test_ctrl_c_leaves_whole_shards_and_a_data_set_that_works(hub: Hub, data: Path) -> None:
    sizes = [len(hub.files[FOLDER + name]) for name in (shard(0, "val"), shard(0))]

    def stop(stage: str, done: int, total: int) -> None:  # noqa: ARG001
        if stage == "fetch" and done > sum(sizes):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(hub, data, 3, report=stop)
    folder = data / "datasets/fineweb10B_sp400"
    assert {path.name for path in folder.iterdir()} == {"dataset.json", shard(0, "val"), shard(0)}
    assert open_dataset(folder).train_tokens == (sizes[1] - HEADER_BYTES) // 2
    hub.seen.clear()
    get(hub, data, 3)
    assert hub.got(FOLDER) == [FOLDER + shard(1), FOLDER + shard(2)]


def test_a_wrong_checksum_takes_no_place(hub: Hub, data: Path) -> None:
    path = FOLDER + shard(1)
    wrong = hub.files[path][:-2] + b"\0\0"
    hub.moods[path] = [send(wrong), send(wrong)]
    with pytest.raises(DataError, match=r"fineweb_train_000001\.bin of golf/shards came twice with other bytes"):
        get(hub, data)
    folder = data / "datasets/fineweb10B_sp400"
    assert {path.name for path in folder.iterdir()} == {"dataset.json", shard(0, "val"), shard(0)}
    hub.moods[path] = [send(wrong)]
    assert get(hub, data).fetched == (shard(1),), "once wrong, it is asked for once more"


def test_a_shard_that_was_published_cut_takes_no_place(hub: Hub, data: Path) -> None:
    """Its checksum is right: it was cut before it was published."""
    hub.files[FOLDER + shard(0)] = hub.files[FOLDER + shard(0)][:-200]
    with pytest.raises(DataError, match="cut or damaged"):
        get(hub, data)
    assert not list(data.rglob("*_train_*"))


def test_the_manifest_is_never_an_old_one(hub: Hub, data: Path) -> None:
    change_manifest(hub, files_train=1)
    assert any("more that are there are left out" in note for note in get(hub, data, 1).notes)
    with pytest.raises(ConfigError, match="sp400 has 1 training shards in golf/shards, not 2; ask for fewer"):
        get(hub, data, 2)
    change_manifest(hub, files_train=4)
    assert get(hub, data, 2).fetched == (shard(1),)


def test_without_a_manifest_the_names_decide(hub: Hub, data: Path) -> None:
    del hub.files[MANIFEST]
    result = get(hub, data, 4)
    assert result.notes == ("manifest.json: there is none, so the names of the files decide",)
    assert result.info.train.documents > 0


def test_another_validation_split_than_the_manifest_counts_is_refused(hub: Hub, data: Path) -> None:
    change_manifest(hub, tokens_val=7)
    with pytest.raises(DataError, match="counts 7 validation tokens, the shards hold"):
        get(hub, data)
    assert not list(data.rglob("*.bin"))


@pytest.mark.parametrize(
    ("mood", "kind", "said"),
    [
        (status(404, X_Error_Code="RepoNotFound"), DataError, "is not there, or not for you: check --repo"),
        (status(401), DataError, "HF_TOKEN"),
        (status(403, X_Error_Code="GatedRepo"), DataError, "is gated: accept its terms"),
        (status(403), DataError, "HF_TOKEN lacks the permission"),
        (status(418), DataError, "answers 418"),
        (status(503), DataError, "answers 503, 4 times over; try again later"),
        (send(b"<html>Log in to this network"), DataError, "check the connection"),
        (send(b'{"id": "x/y"}'), DataError, "names no commit"),
    ],
)
def test_a_hub_that_refuses_is_one_clear_sentence(
    hub: Hub, data: Path, mood: Any, kind: type[BirdieError], said: str
) -> None:
    hub.moods["api"] = [mood] * 4
    with pytest.raises(kind, match=f"{REPO} at {hub.endpoint}.*{said}") as caught:
        get(hub, data)
    assert "\n" not in str(caught.value)
    assert not data.exists()


@pytest.mark.parametrize("mood", [status(403), status(500), cut(10), status(416)])
def test_a_file_that_does_not_come_is_one_clear_sentence(hub: Hub, data: Path, mood: Any) -> None:
    hub.moods[FOLDER + shard(1)] = [mood] * 100
    with pytest.raises(DataError, match=r"fineweb_train_000001\.bin of golf/shards") as caught:
        get(hub, data)
    assert "\n" not in str(caught.value)
    assert not list(data.rglob("*.part")), "nothing half-written"
    assert len(open_dataset(data / "datasets/fineweb10B_sp400").train) == 1


@pytest.mark.parametrize("path", ["api", MANIFEST, MODEL, FOLDER + shard(0)])
def test_a_server_in_passing_trouble_is_waited_for(hub: Hub, data: Path, path: str) -> None:
    hub.moods[path] = [status(500), status(503), status(429)]
    assert len(get(hub, data).fetched) == 4


def test_no_server_at_all(data: Path, hub: Hub) -> None:
    source = Source(REPO, endpoint="http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"cannot be had: ConnectError.*check the connection"):
        fetch("sp400", 1, data, source=source)
    assert not hub.seen


def test_names_of_nothing(hub: Hub, data: Path) -> None:
    with pytest.raises(ConfigError, match="owner/name; check --repo"):
        fetch("sp400", 1, data, source=Source("a/b/c", endpoint=hub.endpoint))
    with pytest.raises(DataError, match="no such revision"):
        fetch("sp400", 1, data, source=Source(REPO, "v9", endpoint=hub.endpoint))
    with pytest.raises(DataError, match=r"no variant sp512; it has byte260 \(in datasets/\), sp400 \(in datasets/\)"):
        get(hub, data, variant="sp512")
    with pytest.raises(ConfigError, match="must not be negative"):
        get(hub, data, -1)
    assert not data.exists()


def test_offline_is_said(hub: Hub, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    huggingface_hub.close_session()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="HF_HUB_OFFLINE is set"):
        get(hub, data)


def test_a_token_is_for_the_hub_alone(hub: Hub, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    get(hub, data)
    by_host: dict[str, set[str | None]] = {}
    for _, _, headers in hub.seen:
        sent = {name.lower(): value for name, value in headers.items()}
        by_host.setdefault(f"http://{sent['host']}", set()).add(sent.get("authorization"))
    assert by_host == {hub.endpoint: {"Bearer hf_secret"}, hub.storage: {None}}


def test_a_path_out_of_the_repository_is_refused(hub: Hub, data: Path) -> None:
    manifest = json.loads(hub.files[MANIFEST])
    manifest["tokenizers"][0]["model_path"] = "../../x"
    hub.files[MANIFEST] = json.dumps(manifest).encode()
    with pytest.raises(DataError, match=r"'\.\./\.\./x', which leads out of the repository"):
        get(hub, data)
    hub.listing = lambda answer: answer["siblings"][0].update(rfilename=f"../datasets/fineweb10B_sp400/{shard(0)}")
    with pytest.raises(DataError, match="leads out of it; nothing was fetched"):
        get(hub, data)
    assert not data.exists()


@pytest.mark.parametrize("size", [1 << 50, -1, "7", None, 10.0])
@pytest.mark.parametrize("path", [MANIFEST, MODEL, FOLDER + shard(0)])
def test_a_claimed_size_that_cannot_be_is_refused_before_anything_comes(
    hub: Hub, data: Path, size: object, path: str
) -> None:
    def claim(answer: dict[str, Any]) -> None:
        next(entry for entry in answer["siblings"] if entry["rfilename"] == path)["size"] = size

    hub.listing = claim
    with pytest.raises(DataError, match="nothing was fetched"):
        get(hub, data)
    assert set(hub.got()) <= {MANIFEST}
    assert not data.exists()


def test_a_server_that_sends_without_end_is_cut_off(hub: Hub, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    monkeypatch.setattr(transport, "_CHUNK", 1 << 16)
    hub.moods[FOLDER + shard(0)] = [send(hub.files[FOLDER + shard(0)] * 100)]
    with pytest.raises(DataError, match=r"sends more of .*fineweb_train_000000\.bin than the"):
        get(hub, data)
    assert not list(data.rglob("*_train_*"))


def test_too_little_space_is_found_out_first(hub: Hub, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10**6, 10**6))  # noqa: ARG005
    with pytest.raises(OutputError, match="where 1,000,000 are free; ask for fewer --train-shards"):
        get(hub, data)
    assert hub.got() == [MANIFEST]


def test_a_disk_that_fills_up_keeps_what_was_whole(hub: Hub, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    real = huggingface_hub.hf_hub_download

    def full(repo: str, name: str, **settings: Any) -> object:
        if name.endswith(shard(1)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(repo, name, **settings)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    with pytest.raises(OutputError, match=r"fineweb_train_000001\.bin of golf/shards: no space left on device"):
        get(hub, data)
    folder = data / "datasets/fineweb10B_sp400"
    assert {path.name for path in folder.iterdir()} == {"dataset.json", shard(0, "val"), shard(0)}


@pytest.mark.parametrize("name", [shard(0), shard(0, "val"), shard(77)])
def test_shards_of_other_data_are_never_replaced(hub: Hub, data: Path, name: str) -> None:
    path = data / "datasets/fineweb10B_sp400" / name
    path.parent.mkdir(parents=True)
    write_shard(path, np.arange(9))
    mine = files(data)
    with pytest.raises(OutputError, match="choose another root, or move it away"):
        get(hub, data)
    assert files(data) == mine
    path.write_bytes(path.read_bytes()[:-1])  # not a shard but a piece of one
    if name != shard(77):
        assert len(get(hub, data).fetched) == 4


def test_data_prepared_from_text_is_never_replaced(hub: Hub, data: Path, prepared: dict[str, Prepared]) -> None:
    shutil.copytree(prepared["sp400"].folder.parents[1], data)
    mine = files(data)
    with pytest.raises(OutputError, match="holds data of"):
        get(hub, data)
    assert files(data) == mine


def test_another_tokenizer_is_never_replaced(hub: Hub, data: Path) -> None:
    model = data / "tokenizers/fineweb_400_bpe.model"
    model.parent.mkdir(parents=True)
    model.write_bytes(b"another")
    with pytest.raises(OutputError, match="is another tokenizer than golf/shards has"):
        get(hub, data)
    assert model.read_bytes() == b"another"


def test_a_tokenizer_that_did_not_make_the_shards_is_refused(hub: Hub, data: Path, tmp_path: Path) -> None:
    draw = random.Random(1)
    text = tmp_path / "other.txt"
    lexicon = ["".join(draw.choices("abcdeéstnrl", k=draw.randint(1, 8))) for _ in range(300)]
    text.write_text("\n".join(" ".join(draw.choices(lexicon, k=30)) for _ in range(300)), encoding="utf-8")
    corpus = file_corpus([text], validation_fraction=0.1)
    right = hub.files[MODEL]
    for size, said in ((300, "has 300 pieces, so it is not of sp400"), (400, "come back when their text by sp400")):
        *_, made = prepare(corpus, size, tmp_path / "other")
        assert isinstance(made, Prepared)
        hub.files[MODEL] = Path(made.tokenizer).read_bytes()
        with pytest.raises(DataError, match=said):
            get(hub, data)
        shutil.rmtree(data)
    hub.files[MODEL] = right
    tokens = np.full(3_000, 400)
    write_shard(tmp_path / "large.bin", tokens)
    hub.files[FOLDER + shard(1)] = (tmp_path / "large.bin").read_bytes()
    with pytest.raises(DataError, match="holds token id 400, but sp400 has 400 ids"):
        get(hub, data)


def test_a_byte_table_that_is_wrong_for_the_text_is_refused(
    hub: Hub, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = fetching.check_bytes
    monkeypatch.setattr(fetching, "check_bytes", lambda *given: replace(check(*given), table_bytes=1))
    with pytest.raises(DataError, match="the byte table of sp400 counts 1 bytes"):
        get(hub, data)
    assert not list(data.rglob("*.bin"))


@pytest.mark.parametrize("chunk", [1, 7, 1_000, 1 << 20])
def test_a_stream_counts_alike_in_any_chunks(
    prepared: dict[str, Prepared], monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    made = prepared["sp400"]
    tokens = open_dataset(made.folder).validation_tokens()
    tokenizer = load_tokenizer(made.tokenizer)
    monkeypatch.setattr(fetching, "_CHUNK", chunk)
    count = fetching._Count(tokenizer)
    for part in np.array_split(tokens, 3):
        count.add(part, transport.RemoteFile("x", 1, ""))
    table = tokenizer.byte_table()
    assert count.totals.bytes == int(table.count(tokens[:-1], tokens[1:]).sum())
    assert (count.totals.tokens, count.totals.documents) == (len(tokens), int((tokens == tokenizer.bos_id).sum()))


def ask(capsys: pytest.CaptureFixture[str], *tokens: object) -> tuple[int, dict[str, Any], str]:
    code = run(build_app, ["prepare", *map(str, tokens), "--json"])
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    return code, json.loads(out), err


def test_the_command(hub: Hub, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--variant", "sp400", "--train-shards", 2, "--repo", REPO, "--endpoint", hub.endpoint, "-o", data]
    change_manifest(hub, files_train=3)
    code, answer, err = ask(capsys, "hub", *flags)
    assert code == 0
    assert answer["fetched"] == ["fineweb_400_bpe.model", shard(0, "val"), shard(0), shard(1)]
    assert (answer["commit"], answer["kept"]) == (COMMIT, [])
    assert answer["train"]["tokens"] == open_dataset(answer["folder"]).train_tokens
    assert "fetching: " in err
    assert "note: the manifest counts 3" in err
    assert run(build_app, ["prepare", "hub", *map(str, flags)]) == 0
    assert "fetched: 0 files, 0 bytes; 3 were there" in capsys.readouterr().out


def test_ctrl_c_says_what_stays(
    hub: Hub, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr("birdie.cli.hub.fetch", stopped)
    code, answer, err = ask(capsys, "hub", "--endpoint", hub.endpoint, "-o", data)
    assert (code, answer["error"]["type"]) == (130, "KeyboardInterrupt")
    assert "the same command goes on from there" in err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["stdlib", "--variant", "sp400"], "--variant is for birdie prepare hub"),
        (["hub", "more.txt", "--train-shards", "1"], "--train-shards is for birdie prepare hub"),
        (["hub", "--vocab-size", "400"], "choose with --variant"),
        (["hub", "--variant", "gpt2"], "variant 'gpt2' is unknown"),
    ],
)
def test_flags_that_do_not_go_together(capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    code, answer, _ = ask(capsys, *flags)
    assert (code, answer["error"]["type"]) == (1, "ConfigError")
    assert said in answer["error"]["message"]


def test_without_the_library_the_command_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, data: Path
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    code, answer, _ = ask(capsys, "hub", "-o", data)
    assert (code, answer["error"]["message"]) == (1, transport.MISSING)
    assert "pip install 'birdie[hub]'" in transport.MISSING
    assert not data.exists()
