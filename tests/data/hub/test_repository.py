"""The client of the hub: transfers resume and are retried, every failure is one sentence, the listing is checked."""

from pathlib import Path
from typing import Any

import pytest

from birdie.data.hub import repository
from birdie.data.hub.download import Source, download
from birdie.errors import BirdieError, DataError
from tests.data.hub.published import FOLDER, MANIFEST, MODEL, get, shard
from tests.data.hub.server import REPO, Fault, Hub, disconnect, send, status


def test_an_interrupted_transfer_resumes_where_it_broke(hub: Hub, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1_000
    )  # default 10 MB; an incomplete chunk is lost
    hub.faults[FOLDER + shard(0)] = [disconnect(5_000)]
    get(hub, data)
    headers_sent = [headers for method, path, headers in hub.requests if method == "GET" and path == FOLDER + shard(0)]
    assert [headers.get("Range") for headers in headers_sent] == [None, "bytes=5000-"]
    assert (data / "datasets/fineweb10B_sp400" / shard(0)).read_bytes() == hub.files[FOLDER + shard(0)]


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (status(404, X_Error_Code="RepoNotFound"), DataError, "check --repo"),
        (status(401), DataError, "HF_TOKEN"),
        (status(403, X_Error_Code="GatedRepo"), DataError, "is gated"),
        (status(403), DataError, "HF_TOKEN"),
        (status(418), DataError, "418"),
        (status(503), DataError, "503 in 4 attempts"),
        (send(b"<html>Log in to this network"), DataError, "check the connection"),
        (send(b'{"id": "x/y"}'), DataError, "names no commit"),
    ],
)
def test_a_refused_request_is_one_clear_sentence(
    hub: Hub, data: Path, fault: Fault, kind: type[BirdieError], message: str
) -> None:
    hub.faults["api"] = [fault] * 4
    with pytest.raises(kind, match=f"{REPO} at {hub.endpoint}.*{message}") as caught:
        get(hub, data)
    assert "\n" not in str(caught.value)
    assert not data.exists()


@pytest.mark.parametrize("path", ["api", MANIFEST, MODEL, FOLDER + shard(0)])
def test_transient_server_errors_are_retried(hub: Hub, data: Path, path: str) -> None:
    hub.faults[path] = [status(500), status(503), status(429)]
    assert len(get(hub, data).downloaded) == 4


def test_an_unreachable_server_is_one_clear_sentence(data: Path, hub: Hub) -> None:
    source = Source(REPO, endpoint="http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"ConnectError.*check the connection"):
        download("sp400", 1, data, source=source)
    assert not hub.requests


def test_offline_mode_is_named_in_the_error(hub: Hub, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    huggingface_hub.close_session()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="HF_HUB_OFFLINE"):
        get(hub, data)


def test_the_token_is_sent_to_the_hub_and_not_to_the_storage_host(
    hub: Hub, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    get(hub, data)
    by_host: dict[str, set[str]] = {}
    for _, _, headers in hub.requests:
        lower = {name.lower(): value for name, value in headers.items()}
        by_host.setdefault(f"http://{lower['host']}", set()).add(lower.get("authorization", "").rpartition(" ")[2])
    assert by_host == {hub.endpoint: {"hf_secret"}, hub.storage: {""}}


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


def test_a_server_that_sends_without_end_is_stopped(hub: Hub, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    monkeypatch.setattr(repository, "_BLOCK", 1 << 16)
    hub.faults[FOLDER + shard(0)] = [send(hub.files[FOLDER + shard(0)] * 100)]
    with pytest.raises(DataError, match=r"sends more of .*fineweb_train_000000\.bin than the"):
        get(hub, data)
    assert not list(data.rglob("*_train_*"))
