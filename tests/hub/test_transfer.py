"""Folders go to the Hub and come back: through huggingface_hub itself, against a stand-in of its HTTP API."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import birdie
from birdie.artifact.options import SaveOptions
from birdie.artifact.saving import write_model
from birdie.cli import main
from birdie.errors import ArtifactError, ConfigError, DataError
from birdie.hub.folder import write_birdie_folder
from birdie.hub.transfer import download, push
from tests.hub.server import Hub, running


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running(monkeypatch, tmp_path) as server:
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.endpoint)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", server.endpoint)
        yield server


def model(path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    state = {"w": torch.randn(32, 32, generator=generator)}
    write_model(state, path, files={"config.json": b'{"model_type": "x"}', "LICENSE": b"free"})
    return path


def run(*tokens: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(token) for token in tokens])
    return int(ended.value.code or 0)


@pytest.mark.filterwarnings("ignore:Use .content:DeprecationWarning")  # of huggingface_hub, for large files
def test_a_model_goes_to_the_hub_and_comes_back(hub: Hub, tmp_path: Path) -> None:
    file = model(tmp_path / "small.birdie")
    assert run("hub", "push", file, "user/small") == 0
    files = hub.repositories["user/small"]
    assert set(files) == {"model.birdie", "model.safetensors", "config.json", "LICENSE", "README.md"}
    assert files["model.birdie"] == file.read_bytes()
    assert hub.private["user/small"]
    assert sorted(hub.large.values()) == sorted(files[name] for name in ("model.birdie", "model.safetensors"))
    assert run("hub", "pull", "user/small", "-o", tmp_path / "back") == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == files
    assert torch.equal(birdie.load(tmp_path / "back" / "model.birdie")["w"], birdie.load(file)["w"])
    hub.repositories["user/small"] = {**files, ".gitattributes": b"theirs", ".ssh/config": b"theirs"}
    for target in ("back", "new"):
        assert run("hub", "pull", "user/small", "-o", tmp_path / target, "--overwrite") == 0
        hidden = {path.name for path in (tmp_path / target).rglob("*") if path.is_file()} - files.keys()
        assert hidden == ({".gitattributes", "config"} if target == "new" else set())


@pytest.mark.filterwarnings("ignore:Use .content:DeprecationWarning")
def test_the_card_of_a_fine_tune_names_its_base(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = {"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(0))}
    file = tmp_path / "tuned.birdie"
    write_model({"w": base["w"] + 1e-4}, file, SaveOptions(lossless=True, base=base), files={"config.json": b"{}"})
    assert run("hub", "push", file, "user/tuned", "--base-model", "user/base") == 0
    card = hub.repositories["user/tuned"]["README.md"].decode()
    assert card.startswith("---\nlibrary_name: birdie\ntags: [birdie, compressed]\nbase_model: user/base\n---\n")
    assert "[user/base](https://huggingface.co/user/base)" in card
    folder = tmp_path / "folder"
    write_birdie_folder(model(tmp_path / "small.birdie"), folder)
    for source, name, message in (
        (file, "base\nx: y", "write USER/NAME"),
        (folder, "user/base", "becomes a folder; drop it"),
    ):
        assert run("hub", "push", source, "user/other", "--base-model", name) == 1
        assert message in " ".join(capsys.readouterr().err.split())
    assert "user/other" not in hub.repositories


def test_what_goes_wrong_is_one_sentence(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="user/none"):
        download("user/none")
    with pytest.raises(ConfigError, match="not a folder with files"):
        push(tmp_path / "missing", "user/x")
    hub.refused = True
    with pytest.raises(DataError, match="user/x"):
        push(model(tmp_path / "x.birdie").parent, "user/x")
    plain = tmp_path / "plain.birdie"
    birdie.save({"w": torch.ones(4)}, plain)
    assert run("hub", "folder", plain, "-o", tmp_path / "folder") == 1
    assert not (tmp_path / "folder").exists()
    assert run("hub", "push", plain) == 1


@pytest.mark.parametrize(("config", "reason"), [(b"[" * 200_000, "nested too deeply"), (b"[1]", "not an object")])
def test_a_configuration_that_is_no_object_is_one_sentence(tmp_path: Path, config: bytes, reason: str) -> None:
    write_model({"w": torch.randn(32, 32)}, tmp_path / "model.birdie", files={"config.json": config})
    with pytest.raises(ArtifactError, match=reason):
        write_birdie_folder(tmp_path / "model.birdie", tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_any_folder_of_files_can_be_pushed(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "submission"
    (folder / "logs").mkdir(parents=True)
    (folder / "README.md").write_text("a record")
    (folder / "logs" / "seed42.txt").write_text("val_bpb")
    assert run("hub", "push", folder, "user/record", "--public") == 0
    assert hub.repositories["user/record"] == {"README.md": b"a record", "logs/seed42.txt": b"val_bpb"}
    assert not hub.private["user/record"]
