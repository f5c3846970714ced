"""Files that a released version of the format wrote are read, and give the same, for ever (make.py lists them)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import birdie
from birdie.artifact import container
from birdie.artifact.codes import SCHEMES
from birdie.entropy import coder
from birdie.gpt.run.recipe_loading import load_run_recipe
from birdie.gpt.train.training_checkpoint import load_checkpoint
from tests.reference import container as reference
from tests.released.make import (
    CHAIN,
    CURRENT,
    DELTAS,
    FOLDER,
    RECIPE,
    RUN,
    digests,
    digests_of_chain,
    settings,
    tensor_files,
)

VERSIONS = sorted(path for path in FOLDER.iterdir() if (path / "digests.json").is_file())
CASES = [(version, path) for version in VERSIONS for path in tensor_files(version)]


def pinned(version: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((version / "digests.json").read_text())
    return content


@pytest.mark.parametrize(("version", "path"), CASES, ids=[str(path.relative_to(FOLDER)) for _, path in CASES])
def test_a_file_decodes_to_the_tensors_that_it_had(version: Path, path: Path) -> None:
    assert digests(path) == pinned(version)[path.relative_to(version).as_posix()]
    if path.stem not in DELTAS:
        assert [tensor.name for tensor in birdie.inspect(path).tensors] == [*birdie.load(path)]


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_a_chain_gives_back_the_files_of_its_checkpoints(version: Path) -> None:
    assert digests_of_chain(version / CHAIN) == pinned(version)[CHAIN]


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_a_recipe_has_the_settings_that_it_states(version: Path) -> None:
    assert _difference(pinned(version)[RECIPE], settings(version / RECIPE)) == {}
    assert load_run_recipe(version / RUN).to_dict() == load_run_recipe(version / RECIPE).to_dict()


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_a_run_folder_has_its_checkpoint_and_its_model(version: Path) -> None:
    assert load_checkpoint(version / RUN / "checkpoints").step == load_run_recipe(version / RUN).train.iterations
    assert birdie.load(version / RUN / "model.birdie")


def test_an_object_comes_back() -> None:
    content = birdie.load_object(CURRENT / "object.birdie")
    assert (content["step"], content["order"]) == (7, ["a", (0.5, None)])
    assert {name: weight.dtype for name, weight in content["model"].items()} == {"w": torch.float16, "b": torch.float32}


@pytest.mark.parametrize("path", sorted(CURRENT.rglob("*.birdie")), ids=lambda path: path.name)
def test_the_reference_reader_reads_the_same_entries(path: Path) -> None:
    if path.is_dir():
        return
    expected = reference.read(path.read_bytes())
    with container.Reader(path) as reader:
        assert expected.metadata == reader.metadata
        for entry, name in zip(expected.entries, reader.entries, strict=True):
            ours = reader.read(name)
            assert (entry.name, container.KINDS[ours.kind]) == (name, entry.kind)
            assert (entry.scheme, entry.dtype, entry.shape) == (ours.scheme, ours.dtype, ours.shape)
            assert (entry.params, entry.target) == (ours.params, ours.target)
            assert entry.streams == [(stream.coder, stream.payload) for stream in ours.streams]


def test_this_version_has_every_kind_scheme_and_coder_in_few_bytes() -> None:
    kinds, schemes, coders = set(), set(), set()
    for path in CURRENT.rglob("*.birdie"):
        if path.is_file():
            with container.Reader(path) as reader:
                entries = [reader.entry(name) for name in reader.entries]
            kinds |= {entry.kind for entry in entries}
            schemes |= {entry.scheme for entry in entries if entry.kind == container.TENSOR}
            coders |= {stream.coder for entry in entries for stream in entry.streams}
    assert kinds == {*range(len(container.KINDS))}
    assert schemes == {*SCHEMES}
    assert coders == {*coder.NAMES}
    assert sum(path.stat().st_size for path in CURRENT.rglob("*") if path.is_file()) < 150_000


def _difference(stated: dict[str, Any], loaded: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are not what is stated; later versions may have more."""
    wrong: dict[str, Any] = {}
    for key, value in stated.items():
        if isinstance(value, dict):
            wrong |= {f"{key}.{inner}": other for inner, other in _difference(value, loaded[key]).items()}
        elif loaded[key] != value:
            wrong[key] = loaded[key]
    return wrong
