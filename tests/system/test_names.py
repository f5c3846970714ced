"""Names that come from a file: sixty hostile ones, through every door at which a name becomes a path."""

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import birdie
from birdie.artifact import container, kept_files
from birdie.artifact.container import Reader
from birdie.artifact.folders import write_folder
from birdie.artifact.saving import write_model
from birdie.checkpoints.checkpoints import read_state_dict
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.errors import ArtifactError, ConfigError, DataError, WeightsError
from birdie.gpt.data.published import _checked, read_manifest
from birdie.system.names import in_markdown, is_name, is_part, shown

GOOD = (
    *("a", "a/b.bin", ".gitattributes", "a/..b", "a/b c.bin", "...x", "config.json", "tokenizer/vocab.json", "git"),
    *("unet", "model-00001-of-00002.safetensors", "é/漢.json", "x" * 255, ".gitignore", "console.log", "com10", "~x"),
)
HOSTILE = (
    # out of the folder, or none of its files
    *("", ".", "..", "/", "//", "../x", "a/..", "a/../b", "a/../../x", "../../../../etc/passwd", "./a", "a/.", "a/./b"),
    *("/etc/passwd", "//host/share/x", "/tmp/x", "a//b", "a/", "/a", "\\x", "..\\x", "a\\..\\..\\x", "\\\\host\\x"),
    # drives, streams and devices
    *(
        "c:",
        "c:x",
        "C:\\x",
        "c:/x",
        "a:b",
        "a/c:x",
        "nul",
        "NUL",
        "con",
        "a/CON",
        "aux.txt",
        "com1",
        "LPT9.json",
        "prn.a.b",
    ),
    # what git runs or reads
    *(".git", ".git/config", "a/.git/hooks/pre-commit", ".GIT/x", ".Git", "git~1/config", ".git ", ".git./x"),
    # characters that no name has, or that hide what it is
    *("a\0b", "\0", "a\nb", "a\rb", "a\tb", "a\x1b[2Jb", "a\x7fb", "a\u202egnp.exe", "a\u200db", "a\ufeff", "a\ud800b"),
    *("a*", "a?", "a|b", 'a"b', "a<b", "a>b", "a.", "a ", "a/b. ", "x" * 256, "a/" * 600 + "a"),
)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A model that lies elsewhere, as the names of the attack would say."""
    path = tmp_path / "victim" / "model.safetensors"
    path.parent.mkdir()
    path.write_bytes(b"mine")
    return path


def test_there_are_sixty_names_and_each_is_refused() -> None:
    assert len(set(HOSTILE)) >= 60
    assert [name for name in HOSTILE if is_name(name)] == []
    assert [name for name in GOOD if not is_name(name)] == []
    assert [value for value in (None, 7, b"a", ["a"], {"a": 1}, True) if is_name(value)] == []
    assert not is_part("a/b")
    assert is_part("a")


def file_of(fields: dict[str, Any]) -> bytes:
    """A .birdie file with these metadata: of a folder, as `birdie compress FOLDER` writes them."""
    with Reader(plain()) as reader:
        entries = [reader.read("w")]
    return container.to_bytes(entries, json.dumps(fields).encode())


def plain() -> bytes:
    file = BytesIO()
    birdie.save({"w": torch.ones(2, 2)}, file, lossless=True)
    return file.getvalue()


def weights_named(name: str, folder: Path) -> None:
    (folder / "x.birdie").write_bytes(file_of({"metadata": {"weights": {"": name}}}))
    write_folder(folder / "x.birdie", folder / "out")


def component_named(name: str, folder: Path) -> None:
    if name == "":
        raise ArtifactError('the component "" is the folder itself')
    (folder / "x.birdie").write_bytes(file_of({"metadata": {"weights": {name: "model"}}}))
    write_folder(folder / "x.birdie", folder / "out")


def kept_in_a_file(name: str, _: Path) -> None:
    content = kept_files.entry_of({"a": b"x"})
    metadata = json.dumps({"files": {name: 1}}).encode()
    with Reader(container.to_bytes([content], metadata)) as reader:
        kept_files.read(reader)


def kept_beside_tensors(name: str, folder: Path) -> None:
    write_model({"w": torch.ones(2)}, folder / "y.birdie", files={name: b""})


def shard_of_an_index(name: str, folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    read_state_dict(index)


def file_of_a_repository(name: str, _: Path) -> None:
    class Sibling:
        rfilename, size, lfs, blob_id = name, 1, None, "0" * 40

    _checked(Sibling())


def tokenizer_of_a_manifest(name: str, _: Path) -> None:
    manifest = {"datasets": [{"name": "d", "tokenizer_name": "t"}], "tokenizers": [{"name": "t", "model_path": name}]}
    read_manifest(json.dumps(manifest).encode(), "d")


DOORS = (
    weights_named,
    component_named,
    kept_in_a_file,
    kept_beside_tensors,
    shard_of_an_index,
    file_of_a_repository,
    tokenizer_of_a_manifest,
)


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_no_hostile_name_passes_a_door(door: Callable[[str, Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "a" / "folder"
    folder.mkdir(parents=True)
    for name in HOSTILE:
        with pytest.raises((ArtifactError, ConfigError, WeightsError, DataError)):
            door(name, folder)
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert names <= {"a", "a/folder", "a/folder/x.birdie", "a/folder/model.safetensors.index.json"}


@pytest.mark.parametrize("where", ["absolute", "slashes", "relative"])
def test_weights_that_name_another_place_replace_nothing(where: str, victim: Path, tmp_path: Path) -> None:
    """The metadata of a hostile file say what the weights are called; a leading slash was stripped before the check."""
    stem = victim.with_suffix("")
    name = {"absolute": str(stem), "slashes": f"//{stem}", "relative": f"../{stem.relative_to(tmp_path)}"}[where]
    (tmp_path / "evil.birdie").write_bytes(file_of({"metadata": {"weights": {"": name}}}))
    assert run(build_app, ["decompress", str(tmp_path / "evil.birdie"), "-o", str(tmp_path / "out")]) == 1
    assert victim.read_bytes() == b"mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evil.birdie", "victim"]


def test_from_pretrained_believes_no_name(victim: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    fields = {"metadata": {"weights": {"": str(victim.with_suffix(""))}}, "files": {"config.json": 2}}
    config = {"model_type": "bert", "architectures": ["BertModel"]}
    data = json.dumps(config).encode()
    with Reader(plain()) as reader:
        entries = [reader.read("w"), kept_files.entry_of({"config.json": data})]
    fields["files"] = {"config.json": len(data)}
    (tmp_path / "evil.birdie").write_bytes(container.to_bytes(entries, json.dumps(fields).encode()))
    with pytest.raises(ArtifactError, match="weights of its folder"):
        birdie.from_pretrained(tmp_path / "evil.birdie")
    assert victim.read_bytes() == b"mine"


STEERING = "\x1b]0;title\x07", "\x1b[2J", "a\nb", "a\rb", "\u202egnp.exe", "\u2028", "\x9b31m", "\ud800", "a\tb"


@given(st.text() | st.sampled_from(STEERING))
def test_what_is_shown_steers_no_terminal(text: str) -> None:
    assert shown(text).isprintable()
    assert "\n" not in in_markdown(text)


@pytest.mark.parametrize("name", [name for name in STEERING if name.isascii() or name == "\u202egnp.exe"])
def test_an_error_about_a_file_steers_no_terminal(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of tensors and of the base are the file's; the terminal sees what can be printed."""
    entry = container.Entry(name, 3, 11, (2,))
    for fields in ({"base": {"of": name, "names": {name: name}}}, {"of": name}):
        file = tmp_path / "x.birdie"
        file.write_bytes(container.to_bytes([entry], json.dumps(fields).encode()))
        for command in (["inspect"], ["decompress", "-o", str(tmp_path / "y.pt")]):
            run(build_app, [command[0], str(file), *command[1:]])
    output = "".join(capsys.readouterr())
    assert output.replace("\n", "").isprintable()
