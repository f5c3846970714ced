"""Model folders: one file and back, with the names, the files and the shards that the library expects."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import birdie
from birdie.artifact.checkpoints import read_files
from birdie.artifact.folders import read_folder, write_folder
from birdie.cli import main
from birdie.errors import OutputError, WeightsError

Write = Callable[[Path], None]


def run(*tokens: object) -> int:
    """Run the command line and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(token) for token in tokens])
    return int(ended.value.code or 0)


def tensors(seed: int = 0, names: tuple[str, ...] = ("a.weight", "b.weight", "c.bias")) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(16, 24, generator=generator).bfloat16() for name in names}


def write_files(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")


def sharded(folder: Path) -> None:
    write_files(folder, config__json='{"model_type": "llama"}', tokenizer__json="{}", LICENSE="free")
    state = tensors()
    where = {}
    for number, name in enumerate(state, start=1):
        file = f"model-{number:05}-of-00003.safetensors"
        save_file({name: state[name]}, folder / file)
        where[name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def pickled(folder: Path) -> None:
    write_files(folder, config__json="{}")
    torch.save(tensors(), folder / "pytorch_model.bin")


def compiled(folder: Path) -> None:
    write_files(folder, config__json="{}")
    save_file({f"_orig_mod.{name}": tensor for name, tensor in tensors().items()}, folder / "model.safetensors")


def adapter(folder: Path) -> None:
    write_files(folder, adapter_config__json="{}")
    save_file(tensors(), folder / "adapter_model.safetensors")


def pipeline(folder: Path) -> None:
    write_files(folder, model_index__json="{}")
    for part, stem in (("unet", "diffusion_pytorch_model"), ("text_encoder", "model")):
        write_files(folder / part, config__json=f'{{"part": "{part}"}}')
        save_file(tensors(len(part)), folder / part / f"{stem}.safetensors")
    write_files(folder / "scheduler", scheduler_config__json="{}")


@pytest.mark.parametrize("write", [sharded, pickled, compiled, adapter, pipeline])
@pytest.mark.parametrize("flags", [["--lossless"], ["--bits", "9"]], ids=" ".join)
def test_a_folder_comes_back_with_its_names_and_files(write: Write, flags: list[str], tmp_path: Path) -> None:
    source, file, target = tmp_path / "source", tmp_path / "x.birdie", tmp_path / "target"
    write(source)
    assert run("compress", source, "-o", file, *flags) == 0
    assert run("decompress", file, "-o", target) == 0
    original, decoded = read_folder(source), read_folder(target)
    assert decoded.files == original.files
    assert decoded.weights == original.weights
    assert decoded.left_out == ()
    assert decoded.tensors.keys() == original.tensors.keys() == birdie.load(file).keys()
    for name, tensor in original.tensors.items():
        assert decoded.tensors[name].dtype is tensor.dtype
        assert torch.equal(decoded.tensors[name], birdie.load(file)[name])
        assert torch.equal(decoded.tensors[name], tensor) == (flags == ["--lossless"])
    assert set(birdie.inspect(file).files) == set(original.files)


def test_weights_are_cut_into_shards_of_at_most_so_many_bytes(tmp_path: Path) -> None:
    sharded(tmp_path / "source")
    assert run("compress", tmp_path / "source", "-o", tmp_path / "x.birdie", "--lossless") == 0
    size = 16 * 24 * 2
    for most, shards in ((2 * size, 2), (size, 3), (1, 3), (3 * size, 1)):
        target = tmp_path / str(most)
        write_folder(tmp_path / "x.birdie", target, max_shard_bytes=most)
        files = sorted(path.name for path in target.glob("*.safetensors"))
        assert len(files) == shards
        assert len({tensor.name for tensor in target.iterdir()}) == len(files) + 3 + (shards > 1)
        if shards > 1:
            index = json.loads((target / "model.safetensors.index.json").read_text())
            assert index["metadata"]["total_size"] == 3 * size
            assert set(index["weight_map"].values()) == set(files)
        state = read_files(target)
        assert all(torch.equal(state[name], tensor) for name, tensor in tensors().items())


def test_the_library_finds_what_kind_of_file_it_is(tmp_path: Path) -> None:
    birdie.save(tensors(), tmp_path / "x.birdie", lossless=True)
    write_folder(tmp_path / "x.birdie", tmp_path / "target")
    data = (tmp_path / "target" / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"] == {"format": "pt"}
    assert load_file(tmp_path / "target" / "model.safetensors").keys() == tensors().keys()


def test_only_what_belongs_to_the_model_is_kept(tmp_path: Path) -> None:
    sharded(tmp_path)
    write_files(
        tmp_path, trainer_state__json="{}", README__md="card", run__log="", spiece__model="x", modeling_x__py=""
    )
    write_files(tmp_path / "onnx", config__json="{}")
    write_files(tmp_path / "checkpoint-100", config__json="{}")
    write_files(tmp_path / "1_Pooling", config__json="{}")
    (tmp_path / "training_args.bin").write_bytes(b"")
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate((1 << 26) + 1)
    folder = read_folder(tmp_path)
    assert set(folder.files) == {
        "1_Pooling/config.json", "LICENSE", "config.json", "modeling_x.py", "spiece.model", "tokenizer.json",
    }  # fmt: skip
    assert folder.left_out == ("large.json",)


def no_weights(folder: Path) -> None:
    write_files(folder, config__json="{}")


def missing_shard(folder: Path) -> None:
    sharded(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()


def cut_shard(folder: Path) -> None:
    sharded(folder)
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def empty_pipeline(folder: Path) -> None:
    write_files(folder, model_index__json="{}")


def link_outside(folder: Path) -> None:
    sharded(folder)
    (folder / "vocab.json").symlink_to("/etc/hostname")


MISTAKES: list[tuple[Write, str]] = [
    (no_weights, "holds none of"),
    (missing_shard, "model-00002-of-00003.safetensors"),
    (cut_shard, "model-00002-of-00003.safetensors"),
    (empty_pipeline, "none of whose folders has weights"),
    (link_outside, "outside its own folder"),
]


@pytest.mark.parametrize(("write", "words"), MISTAKES, ids=[write.__name__ for write, _ in MISTAKES])
def test_a_folder_that_is_not_complete_is_one_sentence(write: Write, words: str, tmp_path: Path) -> None:
    write(tmp_path / "source")
    with pytest.raises(WeightsError, match=words):
        read_folder(tmp_path / "source")


@pytest.mark.parametrize("taken", ["a file", "other files", "a shard of nothing"])
def test_targets_that_cannot_be_written_are_refused_before_anything_is_lost(taken: str, tmp_path: Path) -> None:
    birdie.save(tensors(), tmp_path / "x.birdie")
    target = tmp_path / "target"
    flags: list[str] = []
    if taken == "a file":
        target.write_text("mine")
    elif taken == "other files":
        write_files(target, thesis__txt="mine")
    else:
        flags = ["--max-shard-size", "0"]
    paths = sorted(tmp_path.rglob("*"))
    assert run("decompress", tmp_path / "x.birdie", "-o", target, *flags) == 1
    assert sorted(tmp_path.rglob("*")) == paths


def test_a_model_folder_keeps_what_birdie_did_not_write(tmp_path: Path) -> None:
    sharded(tmp_path / "target")
    names = sorted(path.name for path in (tmp_path / "target").iterdir())
    birdie.save(tensors(5), tmp_path / "x.birdie", lossless=True, files={"config.json": b"{}"})
    with pytest.raises(OutputError, match="has content"):
        write_folder(tmp_path / "x.birdie", tmp_path / "target")
    write_folder(tmp_path / "x.birdie", tmp_path / "target", overwrite=True)
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == sorted({*names, "model.safetensors"})
    (tmp_path / "target" / "model.safetensors.index.json").unlink()
    assert all(torch.equal(read_files(tmp_path / "target")[name], tensor) for name, tensor in tensors(5).items())
