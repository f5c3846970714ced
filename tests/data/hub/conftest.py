"""Fixtures of the download tests: published data sets, and a stand-in of the hub that has them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from birdie.data.corpus import file_corpus
from birdie.data.prepare import PreparedDataset, prepare
from tests.data.hub.published import MANIFEST, MODEL, ROOT
from tests.data.hub.server import Hub
from tests.data.random_text import random_lines


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
    """A hub with these data sets in the challenge's layout; without the user's token and cache."""
    pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed")
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
