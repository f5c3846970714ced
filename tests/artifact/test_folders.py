"""Model folders: one file and back, with the names, the files and the shards that the library expects."""

import functools
import json
import operator
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import birdie
from birdie.artifact.folders import write_folder
from birdie.artifact.options import SaveOptions
from birdie.artifact.repack import write_checkpoint
from birdie.artifact.saving import write_model
from birdie.checkpoints.checkpoint import open_checkpoint
from birdie.checkpoints.checkpoints import is_foreign_pickle, read_state_dict
from birdie.cli import main
from birdie.errors import ArtifactError, ConfigError, OutputError, WeightsError

Write = Callable[[Path], None]


def run(*tokens: object) -> int:
    """Run the command line, with the fast coder, and return its exit code."""
    coder = ["--effort", "fast"] if tokens[0] == "compress" else []
    with pytest.raises(SystemExit) as ended:
        main([*map(str, tokens), *coder])
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


@pytest.mark.parametrize(
    ("write", "flags"),
    [*((write, ["--lossless"]) for write in (sharded, pickled, compiled, adapter)), (pipeline, ["--scheme", "*=int8"])],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value.__name__,
)
def test_a_folder_comes_back_with_its_names_and_files(write: Write, flags: list[str], tmp_path: Path) -> None:
    source, file, target = tmp_path / "source", tmp_path / "x.birdie", tmp_path / "target"
    write(source)
    assert run("compress", source, "-o", file, *flags) == 0
    assert run("decompress", file, "-o", target) == 0
    original, decoded = open_checkpoint(source), open_checkpoint(target)
    assert decoded.files == original.files
    assert decoded.metadata == original.metadata
    assert not decoded.left_out
    assert decoded.content.keys() == original.content.keys() == birdie.load(file).keys()
    for name, tensor in original.content.items():
        assert decoded.content[name].dtype is tensor.dtype
        assert torch.equal(decoded.content[name], birdie.load(file)[name])
        assert torch.equal(decoded.content[name], tensor) == (flags == ["--lossless"])
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
        state = read_state_dict(target)
        assert all(torch.equal(state[name], tensor) for name, tensor in tensors().items())


def test_the_library_finds_what_kind_of_file_it_is(tmp_path: Path) -> None:
    birdie.save(tensors(), tmp_path / "x.birdie", lossless=True)
    write_folder(tmp_path / "x.birdie", tmp_path / "target")
    data = (tmp_path / "target" / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"] == {"format": "pt", "writer": "birdie"}
    assert load_file(tmp_path / "target" / "model.safetensors").keys() == tensors().keys()


def test_every_file_is_compressed_or_kept_or_left_out_for_a_reason(tmp_path: Path) -> None:
    sharded(tmp_path)
    write_files(tmp_path, README__md="card", run__log="", spiece__model="x", modeling_x__py="", __env="secret")
    write_files(tmp_path / "onnx", model__onnx="weights")
    write_files(tmp_path / "checkpoint-100", config__json="{}")
    write_files(tmp_path / "1_Pooling", config__json="{}")
    torch.save({"lr": 1e-3}, tmp_path / "training_args.bin")
    torch.save(torch.optim.Adam([torch.ones(4, 4, requires_grad=True)]).state_dict(), tmp_path / "optimizer.pt")
    for name, size in (("large.json", (1 << 26) + 1), ("notes", 1_000_001), ("small", 1_000_000)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    folder = open_checkpoint(tmp_path)
    assert set(folder.files) == {
        "1_Pooling/config.json", "LICENSE", "README.md", "config.json", "model.safetensors.index.json",
        "modeling_x.py", "optimizer.pt", "run.log", "small", "spiece.model", "tokenizer.json", "training_args.bin",
    }  # fmt: skip
    assert {name: count for name, (count, _) in folder.left_out.items()} == {
        ".env": 6, "checkpoint-100/config.json": 2, "large.json": (1 << 26) + 1, "notes": 1_000_001,
        "onnx/model.onnx": 7,
    }  # fmt: skip
    accounted = {path.relative_to(tmp_path).as_posix() for path in folder.sources} | folder.files.keys()
    paths = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert accounted | folder.left_out.keys() == paths
    other = open_checkpoint(tmp_path, keep=["note*", "onnx/*"], skip=["small", "*.log"])
    assert {"notes", "onnx/model.onnx"} <= other.files.keys()
    assert other.left_out["small"] == (1_000_000, "--skip")
    with pytest.raises(ConfigError, match=r"no file of .* matches '\*\.h5'"):
        open_checkpoint(tmp_path, skip=["*.h5"])


def save(state: dict[str, Tensor], path: Path, **header: str) -> None:
    """Write a file of weights, of the format that its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file(state, path, {"format": "pt", **header})
    else:
        torch.save(state, path)


A, B, C = ({name: tensor} for name, tensor in tensors().items())
LAYOUTS: dict[str, tuple[dict[str, dict[str, Tensor]], set[str], set[str]]] = {
    # files; components; left out
    "embedder": ({"model.safetensors": A, "2_Dense/model.safetensors": B}, {"", "2_Dense"}, set()),
    "embedder of two heads": (
        {"0_T/model.safetensors": A, "2_Dense/pytorch_model.bin": B, "a/b/model.safetensors": C},
        {"0_T", "2_Dense", "a/b"},
        set(),
    ),
    "model with an adapter": (
        {"model.safetensors": A, "lora/adapter_model.safetensors": B, "adapter_model.bin": C},
        {"", "adapter_model", "lora"},
        set(),
    ),
    "speech pipeline": (
        {"embedding_model.ckpt": A, "classifier.ckpt": B, "decoder.PT": C},
        {"", "decoder.PT", "embedding_model.ckpt"},
        set(),
    ),
    "two formats": ({"model.safetensors": A, "pytorch_model.bin": A | B}, {""}, {"pytorch_model.bin"}),
    "three formats": (
        {"model.safetensors": A, "tf_model.h5": A, "sub/flax_model.msgpack": A, "sub/pytorch_model.bin": B},
        {"", "sub"},
        {"tf_model.h5", "sub/flax_model.msgpack"},
    ),
    "variants": (
        {"model.safetensors": A, "model.fp16.safetensors": A, "model.bf16-00001-of-00002.safetensors": A},
        {""},
        {"model.fp16.safetensors", "model.bf16-00001-of-00002.safetensors"},
    ),
    "a variant alone": ({"unet/diffusion_pytorch_model.fp16.safetensors": A}, {"unet"}, set()),
    "shards without an index": (
        {"model-00001-of-00002.safetensors": A, "model-00002-of-00002.safetensors": B}, {""}, set()
    ),
    "shards of pickles": (
        {"pytorch_model-00001-of-00002.bin": A, "pytorch_model-00002-of-00002.bin": B}, {""}, set()
    ),
    "open_clip": ({"open_clip_model.safetensors": A, "open_clip_pytorch_model.bin": A}, {""}, {
        "open_clip_pytorch_model.bin"
    }),
    "open_clip beside transformers": (
        {"open_clip_pytorch_model.bin": A, "model.safetensors": B}, {""}, {"open_clip_pytorch_model.bin"}
    ),
    "parts for each GPU": (
        {"consolidated.00.pth": A, "consolidated.01.pth": A, "consolidated.02.pth": B},
        {"", "consolidated.01.pth", "consolidated.02.pth"},
        set(),
    ),
    "a part for one GPU": ({"consolidated.00.pth": A}, {""}, set()),
    "parts beside the library's file": (
        {"consolidated.00.pth": A, "consolidated.01.pth": B, "model.safetensors": A | B},
        {""},
        {"consolidated.00.pth", "consolidated.01.pth"},
    ),
    "the authors' names beside the library's": (
        {"consolidated.safetensors": A | B, "model-00001-of-00001.safetensors": A},
        {""},
        {"consolidated.safetensors"},
    ),
    "no suffix": ({"model.safetensors": A, "head": B}, {"", "head"}, set()),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_in_every_place_come_back_or_are_named(layout: str, tmp_path: Path) -> None:
    source, file, target = tmp_path / "source", tmp_path / "x.birdie", tmp_path / "target"
    files, components, left_out = LAYOUTS[layout]
    for name, state in files.items():
        save(state, source / name)
    folder = open_checkpoint(source)
    assert folder.metadata["weights"].keys() == components
    assert folder.left_out.keys() == left_out
    write_checkpoint(folder, file, SaveOptions(lossless=True))
    write_folder(file, target)
    again = open_checkpoint(target)
    assert again.content.keys() == folder.content.keys()
    assert all(torch.equal(again.content[name], tensor) for name, tensor in folder.content.items())
    taken = [name for name in files if name not in left_out]
    for name in taken:
        if (
            Path(name).name not in ("pytorch_model.bin", "adapter_model.bin")
            and "-of-" not in name
            and Path(name).suffix
        ):
            assert (target / name).is_file()


def test_a_variant_alone_keeps_its_name_in_shards_too(tmp_path: Path) -> None:
    save(tensors(), tmp_path / "source" / "model.fp16.safetensors")
    assert run("compress", tmp_path / "source", "-o", tmp_path / "x.birdie") == 0
    write_folder(tmp_path / "x.birdie", tmp_path / "target", max_shard_bytes=1000)
    assert {path.name for path in (tmp_path / "target").iterdir()} == {
        "model.safetensors.index.fp16.json", *(f"model.fp16-{number:05}-of-00003.safetensors" for number in (1, 2, 3))
    }  # fmt: skip
    assert open_checkpoint(tmp_path / "target").metadata["weights"] == {"": "model.fp16"}


def test_an_index_without_its_shards_is_left_out_beside_other_weights(tmp_path: Path) -> None:
    sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for path in tmp_path.glob("model-*"):
        path.unlink()
    save(A, tmp_path / "model.safetensors")
    folder = open_checkpoint(tmp_path)
    assert folder.content.keys() == A.keys()
    assert "stale" in folder.left_out[index.name][1]


def test_headers_of_all_files_survive(tmp_path: Path) -> None:
    save(A, tmp_path / "source" / "model-00001-of-00002.safetensors", owner="one", quant="4 bits")
    save(B, tmp_path / "source" / "model-00002-of-00002.safetensors", owner="two")
    save(C, tmp_path / "source" / "head" / "model.safetensors", labels="3")
    assert run("compress", tmp_path / "source", "-o", tmp_path / "x.birdie") == 0
    write_folder(tmp_path / "x.birdie", tmp_path / "target")
    headers = open_checkpoint(tmp_path / "target").metadata["headers"]
    second = "owner (model-00002-of-00002.safetensors)"
    assert headers == {"": {"owner": "one", second: "two", "quant": "4 bits"}, "head": {"labels": "3"}}


@pytest.mark.parametrize("name", ["head.h5", "head.pt", "program.pt", "weights.npz", "head.onnx"])
def test_weights_that_are_not_understood_are_an_error_unless_they_are_named(name: str, tmp_path: Path) -> None:
    sharded(tmp_path)
    path = tmp_path / name
    if name == "head.pt":
        torch.save(torch.nn.Linear(3, 3), path)
    elif name == "program.pt":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("program/constants.pkl", b"")
            archive.writestr("program/data/0", b"")
    else:
        path.write_bytes(b"\x89HDF\r\n\x1a\n" if name == "head.h5" else b"PK\x05\x06" + bytes(18))
    with pytest.raises(WeightsError, match=rf"{name} holds weights .* --skip {name}"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path, skip=[name]).left_out[name] == (path.stat().st_size, "--skip")
    assert open_checkpoint(tmp_path, keep=[name]).files[name] == path.read_bytes()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ["scaler.pkl", "vocab.pickle", "sub/encoder.joblib"])
def test_small_pickles_of_other_programs_are_kept_and_never_opened(name: str, protocol: int, tmp_path: Path) -> None:
    save(A, tmp_path / "model.safetensors")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(pickle.dumps({"mean": Path(), "scale": [1.0]}, protocol))
    assert open_checkpoint(tmp_path).files.keys() == {name}
    (tmp_path / name).write_bytes(pickle.dumps(bytes(1_000_001), protocol))
    with pytest.raises(WeightsError, match=r"pickle|pickled"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("length", [0x0280, 0x0380, 0x0480, 0x0580, 0x8B18])
def test_weights_are_found_whatever_the_length_and_names_of_their_header(length: int, tmp_path: Path) -> None:
    """Lengths of headers, little-endian, are the first bytes of pickles and others; a name may be the mark of a tar."""
    path, state = tmp_path / "adapter_model.safetensors", {"ustar." * 40: torch.randn(8, 8), "w": torch.randn(8, 8)}
    save_file(state, path, {"text": ""})
    save_file(state, path, {"text": " " * (length - int.from_bytes(path.read_bytes()[:8], "little"))})
    assert path.read_bytes()[:8] == length.to_bytes(8, "little")
    assert open_checkpoint(tmp_path).content.keys() == state.keys()


def test_the_older_format_of_torch_is_no_pickle_of_others(tmp_path: Path) -> None:
    for protocol in (2, 3, 4):
        torch.save(A, tmp_path / "old.pkl", _use_new_zipfile_serialization=False, pickle_protocol=protocol)
        assert not is_foreign_pickle(tmp_path / "old.pkl")
    torch.save(A, tmp_path / "old.pkl", _use_new_zipfile_serialization=False)
    assert open_checkpoint(tmp_path).content.keys() == A.keys()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize("name", ["head.pt", "tokenizer.model", "sub/model.safetensors", "vocab.json"])
def test_a_pointer_of_git_lfs_is_never_taken_for_the_file(name: str, tmp_path: Path) -> None:
    save(A, tmp_path / "model.safetensors")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(WeightsError, match=rf"{name} is a pointer of Git LFS.*git lfs pull"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path, skip=[name]).left_out[name] == (len(POINTER), "--skip")


def test_a_pointer_beside_the_same_weights_is_left_out(tmp_path: Path) -> None:
    save(A, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(POINTER)
    assert open_checkpoint(tmp_path).left_out.keys() == {"pytorch_model.bin"}


PARTS: dict[str, tuple[list[str], str]] = {
    "DeepSpeed": (["global_step10/zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_to_fp32.py"], r"zero_to_fp32\.py"),
    "distributed": (["pytorch_model_fsdp_0/__0_0.distcp", "config.json"], "dcp_to_torch"),
    "TensorFlow": (["model.ckpt.data-00000-of-00001", "checkpoint"], r"model\.ckpt\.data-00000-of-00001 \(\d+ bytes"),
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_folder_whose_weights_are_in_parts_says_what_to_do(kind: str, tmp_path: Path) -> None:
    names, advice = PARTS[kind]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        torch.save({"module": {"w": torch.empty(0)}}, tmp_path / name) if name.endswith(".pt") else (
            tmp_path / name
        ).write_text("import torch\n" * 9)
    with pytest.raises(WeightsError, match=advice):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("keys", [(), ("model",), ("state", "a.b")], ids=str)
def test_weights_in_a_dict_of_a_file_come_back_in_it_and_are_named(keys: tuple[str, ...], tmp_path: Path) -> None:
    content: Any = A
    for key in reversed(keys):
        content = {"step": torch.tensor(5), key: content, "epoch": 3}
    torch.save(content, tmp_path / "head.ckpt")
    save(B, tmp_path / "model.safetensors")
    folder = open_checkpoint(tmp_path)
    assert folder.taken == ((f"head.ckpt: {'.'.join(keys)}",) if keys else ())
    assert folder.left_out.keys() == {f"head.ckpt: {'/'.join((*keys[:depth], 'step'))}" for depth in range(len(keys))}
    write_checkpoint(folder, tmp_path / "x.birdie", SaveOptions(lossless=True))
    write_folder(tmp_path / "x.birdie", tmp_path / "target")
    back = torch.load(tmp_path / "target" / "head.ckpt")
    for depth in range(len(keys)):
        around: Any = functools.reduce(operator.getitem, keys[:depth], back)
        assert list(around) == [keys[depth], "epoch"]
    state = functools.reduce(operator.getitem, keys, back)
    assert state.keys() == A.keys()
    birdie.save(A, tmp_path / "y.birdie", metadata={"weights": {"": "x.pt"}, "keys": {"": [3]}})
    with pytest.raises(ArtifactError, match="keys in the metadata"):
        write_folder(tmp_path / "y.birdie", tmp_path / "other")
    for beside in (3, {"": 3}, {"": ["dict", ["a"], [1]]}, {"": ["dict", ["b"], [None]]}, {"": ["tensors", []]}):
        birdie.save(A, tmp_path / "z.birdie", metadata={"weights": {"": "x.pt"}, "keys": {"": ["a"]}, "beside": beside})
        with pytest.raises(ArtifactError, match="damaged"):
            write_folder(tmp_path / "z.birdie", tmp_path / "other")


def test_the_command_names_what_becomes_of_each_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(A, tmp_path / "in" / "model.safetensors")
    save(A, tmp_path / "in" / "pytorch_model.bin")
    save(B, tmp_path / "in" / "2_Dense" / "model.safetensors")
    write_files(tmp_path / "in", notes__md="x" * 7)
    command = ("compress", tmp_path / "in", "-o", tmp_path / "x.birdie")
    assert run(*command) == 0
    out = capsys.readouterr().out
    for words in ("2_Dense/model.safetensors", "pytorch_model.bin: ", "model.safetensors is taken", "1 in all: any of"):
        assert words in " ".join(out.split())
    assert run(*command, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["compressed"].keys() == {"model.safetensors", "2_Dense/model.safetensors"}
    assert answer["files"] == {"notes.md": 7}
    size = (tmp_path / "in" / "pytorch_model.bin").stat().st_size
    assert answer["left_out"]["pytorch_model.bin"]["bytes"] == answer["dropped"]["pytorch_model.bin"] == size


@pytest.mark.parametrize(
    "weights", [{"../x": "model"}, {"a": ["..", "m"]}, {"a": ["x", "m/n"]}, {"a": ["x"]}, {"a": 3}]
)
def test_weights_outside_of_the_folder_are_refused(weights: dict[str, object], tmp_path: Path) -> None:
    birdie.save({"a/w": torch.ones(3)}, tmp_path / "x.birdie", metadata={"weights": weights})
    with pytest.raises(ArtifactError, match="do not name the weights"):
        write_folder(tmp_path / "x.birdie", tmp_path / "target")


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
        open_checkpoint(tmp_path / "source")


def edited(folder: Path) -> None:
    (folder / "config.json").write_text('{"mine": 1}')


def noted(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "notes.txt").write_text("mine")


def trained(folder: Path) -> None:
    save(tensors(7), next(folder.glob("*.safetensors")))


def linked(folder: Path) -> None:
    (folder / "more.safetensors").symlink_to(next(folder.glob("*.safetensors")))


def other_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "thesis.safetensors"}}')


@pytest.mark.parametrize("shards", [(10_000, 10_000), (10_000, 1), (1, 10_000), (1, 800)], ids=str)
def test_a_folder_that_birdie_wrote_is_replaced_as_a_file_of_its_kind_is(
    shards: tuple[int, int], tmp_path: Path
) -> None:
    for number, most in enumerate(shards):
        file = tmp_path / f"{number}.birdie"
        write_model(tensors(number), file, SaveOptions(lossless=True), files={"config.json": b"{}", "a/b.txt": b"c"})
        write_folder(file, tmp_path / "target", max_shard_bytes=most)
        assert all(
            torch.equal(read_state_dict(tmp_path / "target")[name], one) for name, one in tensors(number).items()
        )
        assert open_checkpoint(tmp_path / "target").metadata.keys() - {"shards"} == {"weights"}
    for change in (edited, noted, trained, linked, other_index):
        shutil.copytree(tmp_path / "target", tmp_path / "copy")
        change(tmp_path / "copy")
        contents = {path: path.read_bytes() for path in (tmp_path / "copy").rglob("*") if path.is_file()}
        with pytest.raises(OutputError, match="has content"):
            write_folder(tmp_path / "0.birdie", tmp_path / "copy")
        assert {path: path.read_bytes() for path in (tmp_path / "copy").rglob("*") if path.is_file()} == contents
        shutil.rmtree(tmp_path / "copy")


def test_a_model_folder_keeps_what_birdie_did_not_write(tmp_path: Path) -> None:
    sharded(tmp_path / "target")
    names = sorted(path.name for path in (tmp_path / "target").iterdir())
    write_model(tensors(5), tmp_path / "x.birdie", SaveOptions(lossless=True), files={"config.json": b"{}"})
    with pytest.raises(OutputError, match="has content"):
        write_folder(tmp_path / "x.birdie", tmp_path / "target")
    write_folder(tmp_path / "x.birdie", tmp_path / "target", overwrite=True)
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == sorted({*names, "model.safetensors"})
    (tmp_path / "target" / "model.safetensors.index.json").unlink()
    assert all(torch.equal(read_state_dict(tmp_path / "target")[name], tensor) for name, tensor in tensors(5).items())


def test_names_that_two_folders_share_are_refused(tmp_path: Path) -> None:
    save({"a/w": A["a.weight"]}, tmp_path / "model.safetensors")
    save(B, tmp_path / "a" / "model.safetensors")
    with pytest.raises(WeightsError, match="rename one of them"):
        open_checkpoint(tmp_path)


def test_a_lossless_folder_comes_back_to_the_byte(tmp_path: Path) -> None:
    folder, back = tmp_path / "model", tmp_path / "back"
    sharded(folder)
    wide = {"y": torch.ones(4), "x.10": torch.ones(2).half(), "x.9": torch.ones(3, dtype=torch.int64)}
    (folder / "vae").mkdir()
    save_file(wide, folder / "vae" / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    data = b'{ "z": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'  # a space that birdie does not write
    (folder / "vae" / "other.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + bytes(4))
    write_checkpoint(open_checkpoint(folder, complete=True), tmp_path / "x.birdie", SaveOptions(lossless=True))
    for _ in range(2):  # the second time the files are those that are written there
        write_folder(tmp_path / "x.birdie", back)
        names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        assert names == sorted(path.relative_to(back) for path in back.rglob("*") if path.is_file())
        others = [str(name) for name in names if (folder / name).read_bytes() != (back / name).read_bytes()]
        assert others == ["vae/other.safetensors"]
    assert any("other.safetensors" in note for note in open_checkpoint(folder, complete=True).notes)
    save_file({"a.weight": tensors(1)["a.weight"]}, back / "model-00001-of-00003.safetensors")
    with pytest.raises(OutputError, match="has content"):
        write_folder(tmp_path / "x.birdie", back)


def test_kept_files_are_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sharded(tmp_path / "model")
    (tmp_path / "model" / "vocab.txt").write_text("word " * 5000)
    source = open_checkpoint(tmp_path / "model")
    weights = sum(tensor.nbytes for tensor in tensors().values())
    assert source.input_bytes - source.kept_bytes == weights
    assert f"{weights:,} B of weights and {source.kept_bytes:,} B of 5 kept files, in a folder" in source.size_text
    assert run("compress", tmp_path / "model", "-o", tmp_path / "x.birdie", "--scheme", "int4") == 0
    summary = birdie.inspect(tmp_path / "x.birdie")
    after = summary.bytes - summary.file_bytes
    assert f"weights: {weights:,} B → {after:,} B ({weights / after:.2f}× smaller)" in capsys.readouterr().out
