"""An index says from which shard each tensor is read, through every door, and shards come back as shards."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import birdie
from birdie.artifact.base import Base
from birdie.artifact.folders import write_folder
from birdie.artifact.options import SaveOptions
from birdie.artifact.repack import write_checkpoint
from birdie.checkpoints.checkpoint import open_checkpoint
from birdie.cli import main
from birdie.errors import ArtifactError, WeightsError

State = dict[str, Tensor]
NAMES = {"safetensors": "model.safetensors.index.json", "bin": "pytorch_model.bin.index.json"}


def state(seed: int, *names: str) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(16, 24, generator=generator) for name in names}


def content(path: Path) -> State:
    if path.suffix == ".safetensors":
        return load_file(path)
    loaded: State = torch.load(path, weights_only=True)
    return loaded


def write(folder: Path, shards: Mapping[str, State], where: Mapping[str, str], kind: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in shards.items():
        if kind == "safetensors":
            save_file(tensors, folder / name, {"format": "pt"})
        else:
            torch.save(tensors, folder / name)
    index = folder / NAMES[kind]
    index.write_text(json.dumps({"metadata": {"total_size": 9}, "weight_map": where}, indent=1))
    return index


def edited(folder: Path, overlay: str, kind: str = "safetensors") -> tuple[Path, State, State]:
    """A model of two shards and an edit of one tensor in a third; return the index, the model and the stale copy."""
    old, new = state(0, "a.w", "b.w", "c.w", "d.w"), state(1, "b.w")
    one, two, overlay = f"m-00001-of-00002.{kind}", f"m-00002-of-00002.{kind}", f"{overlay}.{kind}"
    shards = {one: {"a.w": old["a.w"], "b.w": old["b.w"]}, two: {"c.w": old["c.w"], "d.w": old["d.w"]}, overlay: new}
    index = write(folder, shards, {"a.w": one, "b.w": overlay, "c.w": two, "d.w": two}, kind)
    return index, old | new, {"b.w": old["b.w"]}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def run(*tokens: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(token) for token in tokens])
    return int(ended.value.code or 0)


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("overlay", ["00-first", "m-00001", "zz-last", "m-00003-of-00003"])
def test_a_tensor_is_read_from_the_shard_that_the_index_gives_it_to(overlay: str, kind: str, tmp_path: Path) -> None:
    index, model, _ = edited(tmp_path, overlay, kind)
    stale = f"m-00001-of-00002.{kind}"
    for door in (tmp_path, index):
        for complete in (False, True):
            checkpoint = open_checkpoint(door, complete=complete)
            assert same(checkpoint.content, model)
            assert checkpoint.dropped[f"{stale}: b.w"] == model["b.w"].nbytes
            assert any("b.w" in note and index.name in note for note in checkpoint.notes)
        base = Base.open(door)
        other = base("b.w")
        assert other is not None
        assert torch.equal(other, model["b.w"])
    one = open_checkpoint(tmp_path / stale)
    assert same(one.content, {"a.w": model["a.w"]})
    assert one.dropped == {f"{stale}: b.w": model["b.w"].nbytes}
    assert "b.w" in one.notes[0]
    assert open_checkpoint(tmp_path / stale, complete=True).content.keys() == {"a.w"}
    assert same(open_checkpoint(tmp_path / f"{overlay}.{kind}").content, {"b.w": model["b.w"]})


def test_what_an_index_does_not_name_and_names_in_vain_is_said(tmp_path: Path) -> None:
    index, model, _ = edited(tmp_path, "z")
    where = json.loads(index.read_text())["weight_map"]
    del where["d.w"]
    index.write_text(json.dumps({"weight_map": where | {"gone.w": where["a.w"]}}))
    save_file(state(5, "extra.w"), tmp_path / "m-00003-of-00002.safetensors")
    for door in (tmp_path, index):
        checkpoint = open_checkpoint(door)
        assert checkpoint.content.keys() == model.keys() - {"d.w"}
        assert {"m-00001-of-00002.safetensors: b.w", "m-00002-of-00002.safetensors: d.w"} <= checkpoint.dropped.keys()
        assert any("gone.w" in note for note in checkpoint.notes)
        assert any("d.w" in note for note in checkpoint.notes)


def test_a_shard_that_is_missing_is_an_error_by_every_door(tmp_path: Path) -> None:
    index, *_ = edited(tmp_path, "z")
    (tmp_path / "m-00002-of-00002.safetensors").unlink()
    for door in (tmp_path, index):
        with pytest.raises(WeightsError, match=r"m-00002-of-00002\.safetensors is missing, a shard that"):
            open_checkpoint(door)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("by", ["folder", "index"])
@pytest.mark.parametrize("flag", ["--lossless", "--scheme=int8"])
def test_shards_come_back_under_their_names_with_their_index(
    flag: str, by: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index, model, _ = edited(tmp_path / "in", "z", kind)
    file, out = tmp_path / "x.birdie", tmp_path / "out"
    assert run("compress", tmp_path / "in" if by == "folder" else index, "-o", file, "--effort", "fast", flag) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert run("decompress", file, "-o", out) == 0
    names = {path.name for path in out.iterdir()}
    if kind == "bin" and flag != "--lossless":
        assert names == {"model.safetensors"}
        assert "comes back as model.safetensors: m-00001-of-00002.bin, m-00002-of-00002.bin, z.bin" in printed
        return
    assert names == files_of(tmp_path / "in").keys()
    assert (out / index.name).read_bytes() == index.read_bytes()
    where = json.loads(index.read_text())["weight_map"]
    for name in {*where.values()}:
        tensors = content(out / name)
        assert tensors.keys() == {tensor for tensor, shard in where.items() if shard == name}
        assert all(torch.equal(tensor, birdie.load(file)[key]) for key, tensor in tensors.items())
        assert flag != "--lossless" or all(torch.equal(tensor, model[key]) for key, tensor in tensors.items())
    other = tmp_path / "other"
    assert run("decompress", file, "-o", other, "--max-shard-size", "2kB") == 0
    assert same(open_checkpoint(other).content, birdie.load(file))
    assert not open_checkpoint(other).notes


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_distribution_of_tensors_over_shards_comes_back(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Shards in any order of their names, in folders of their own, with copies of tensors that others have."""
    folder = tmp_path_factory.mktemp("shards")
    files = data.draw(st.lists(st.sampled_from(["b", "a", "sub/c", "x-00002-of-00002"]), min_size=1, unique=True))
    names = data.draw(st.lists(st.sampled_from(["w", "a.b", "z.0", "m_x", "sub"]), min_size=len(files), unique=True))
    where = {name: f"{files[number % len(files)]}.safetensors" for number, name in enumerate(names)}
    (folder / "in" / "sub").mkdir(parents=True)
    (folder / "out").mkdir()
    model = state(0, *names)
    copies = data.draw(st.sets(st.sampled_from(names)))
    shards: dict[str, State] = {file: {} for file in where.values()}
    for name in names:
        for file, tensors in shards.items():
            if where[name] == file:
                tensors[name] = model[name]
            elif name in copies:
                tensors[name] = -model[name]
    index = write(folder / "in", shards, where, "safetensors")
    write_checkpoint(
        open_checkpoint(folder / "in", complete=True), folder / "x.birdie", SaveOptions(lossless=True, effort="fast")
    )
    write_folder(folder / "x.birdie", folder / "out")
    assert files_of(folder / "out").keys() == files_of(folder / "in").keys()
    assert (folder / "out" / index.name).read_bytes() == index.read_bytes()
    for file in shards:
        assert same(load_file(folder / "out" / file), {name: model[name] for name in names if where[name] == file})


def training_files(folder: Path) -> None:
    """Weights, a large optimizer with tied tensors, and a checkpoint with all around the weights."""
    folder.mkdir()
    save_file(state(0, "w"), folder / "model.safetensors", {"format": "pt"})
    shared = torch.randn(300, 900)
    optimizer = {"state": {0: {"exp_avg": shared, "again": shared}}, "param_groups": [{"params": [0], "lr": 1e-3}]}
    torch.save(optimizer, folder / "optimizer.bin")
    torch.save({"net": state(1, "a.w"), "epoch": 3, "name": "x"}, folder / "last.ckpt")


def test_a_lossless_copy_of_a_folder_has_all_that_its_files_hold(tmp_path: Path) -> None:
    training_files(tmp_path / "in")
    assert run("compress", tmp_path / "in", "-o", tmp_path / "x.birdie", "--lossless", "--effort", "fast") == 0
    assert not open_checkpoint(tmp_path / "in", complete=True).left_out
    assert run("decompress", tmp_path / "x.birdie", "-o", tmp_path / "out") == 0
    assert files_of(tmp_path / "out").keys() == files_of(tmp_path / "in").keys()
    optimizer = torch.load(tmp_path / "out" / "optimizer.bin", weights_only=True)
    moments = optimizer["state"][0]
    assert torch.equal(moments["exp_avg"], torch.load(tmp_path / "in" / "optimizer.bin")["state"][0]["exp_avg"])
    assert moments["exp_avg"].data_ptr() == moments["again"].data_ptr()
    assert optimizer["param_groups"] == [{"params": [0], "lr": 1e-3}]
    last: Any = content(tmp_path / "out" / "last.ckpt")
    assert (last["epoch"], last["name"]) == (3, "x")
    assert same(last["net"], state(1, "a.w"))
    assert open_checkpoint(tmp_path / "in").left_out.keys() == {"optimizer.bin"}
    assert open_checkpoint(tmp_path / "in", weights_only=True).left_out.keys() == {
        "optimizer.bin", "last.ckpt: epoch", "last.ckpt: name"
    }  # fmt: skip


def damaged(about: Mapping[str, Any], folder: Path) -> None:
    birdie.save(state(0, "a", "b"), folder / "x.birdie", metadata={"weights": {"": "model"}, **about})
    with pytest.raises(ArtifactError, match="damaged"):
        write_folder(folder / "x.birdie", folder / "out")


TWO = ["m-1.safetensors", "m-2.safetensors"]


@pytest.mark.parametrize(
    "shards",
    [
        3, {"": 3}, {"": {"files": "ab"}}, {"": {"files": ["../x"]}}, {"": {"files": ["/x"]}}, {"": {"files": [3]}},
        {"": {"files": TWO}}, {"": {"files": TWO, "of": [0]}}, {"": {"files": TWO, "of": [0, 2]}},
        {"": {"files": TWO, "of": [0, -1]}}, {"": {"files": TWO, "of": [0, True]}},
        {"": {"files": TWO * 2, "of": [0, 1]}},
        {"": {"files": ["a", "a/b"], "of": [0, 1]}}, {"": {"files": TWO, "of": [0, 1], "index": "../x"}},
        {"": {"files": TWO, "of": [0, 1], "index": 3}},
    ],
    ids=str,
)  # fmt: skip
def test_shards_that_are_no_files_of_a_folder_are_refused(shards: object, tmp_path: Path) -> None:
    damaged({"shards": shards}, tmp_path)


def test_the_only_copy_of_a_tensor_is_read_wherever_it_lies(tmp_path: Path) -> None:
    index, model, _ = edited(tmp_path, "z")
    where = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": where | {"c.w": where["a.w"]}}))
    checkpoint = open_checkpoint(tmp_path)
    assert same(checkpoint.content, model)
    assert any(note.startswith("c.w was read from m-00002") for note in checkpoint.notes)
