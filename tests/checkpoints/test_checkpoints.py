"""Checkpoints of torch and safetensors are read whole, without running code; damage, bombs and links are refused."""

import argparse
import io
import json
import lzma
import os
import pickle
import subprocess
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.rivals import COMPRESSORS
from birdie.checkpoints.checkpoints import files_of, read_checkpoint, read_object, read_state_dict, read_weights
from birdie.errors import ArtifactError, WeightsError
from birdie.golf import int8_zlib as baseline
from tests.pipes import waiting_fails


def state() -> dict[str, torch.Tensor]:
    """Two tensors, one of them bfloat16."""
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(4, 5, generator=generator),
        "a.bias": torch.randn(4, generator=generator).bfloat16(),
    }


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Same names, same tensors."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def saved(content: Any, **options: Any) -> bytes:
    """Return the bytes that torch.save writes."""
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def safetensors_bytes() -> bytes:
    return safetensors.torch.save(state())


def compressed_by(package: str, compress: str, content: Callable[[], bytes]) -> Callable[[], bytes]:
    return lambda: getattr(pytest.importorskip(package), compress)(content())


def torch_bytes() -> bytes:
    return saved({"state_dict": state(), "epoch": 3})


FORMATS: dict[str, Callable[[], bytes]] = {
    "torch": torch_bytes,
    "torch, legacy": lambda: saved(state(), _use_new_zipfile_serialization=False),
    "safetensors": safetensors_bytes,
    "zlib": compressed_by("zlib", "compress", torch_bytes),
    "gzip": compressed_by("gzip", "compress", torch_bytes),
    "xz": compressed_by("lzma", "compress", torch_bytes),
    "lzma alone": lambda: lzma.compress(torch_bytes(), format=lzma.FORMAT_ALONE),
    "zstd": compressed_by("zstandard", "compress", torch_bytes),
    "brotli": compressed_by("brotli", "compress", torch_bytes),
    "gzip of safetensors": compressed_by("gzip", "compress", safetensors_bytes),
}
NAMES = [
    "x.pt",
    "x.pth",
    "x.th",
    "x.bin",
    "x.ptz",
    "epoch=3-step=10.ckpt",
    "model_best.pth.tar",
    "model.pkl",
    "weights",
]
NAMES += ["MODEL.PT", "x.safetensors", "x.json"]


@pytest.mark.parametrize("form", FORMATS)
def test_the_content_of_a_file_tells_its_format_whatever_its_name(form: str, tmp_path: Path) -> None:
    content = FORMATS[form]()
    for name in NAMES if form not in ("lzma alone", "zstd", "brotli", "zlib") else ["x.ptz"]:
        (tmp_path / name).write_bytes(content)
        assert equal(read_state_dict(tmp_path / name), state())
        assert equal(read_weights(tmp_path / name, skip_objects=True).state, state())
        read_checkpoint(tmp_path / name)


@pytest.mark.parametrize("form", FORMATS)
def test_a_truncated_file_is_refused(form: str, tmp_path: Path) -> None:
    content = FORMATS[form]()
    for keep in (0.05, 0.4, 0.7, 0.99):
        for name in ("x.pt", "x.ptz", "x.safetensors"):
            (tmp_path / name).write_bytes(content[: int(keep * len(content))])
            with pytest.raises(WeightsError):
                read_state_dict(tmp_path / name)


def test_a_lossless_copy_keeps_everything(tmp_path: Path) -> None:
    """The object of every file that torch.save wrote; of other files all tensors, under the names in the file."""
    prefixed = {f"module.{name}": tensor for name, tensor in state().items()}
    for nested in {"model": prefixed, "step": 3}, {"model": state(), "ema": prefixed}, prefixed:
        (tmp_path / "x.ptz").write_bytes(zlib.compress(saved(nested)))
        torch.save(nested, tmp_path / "x.pt")
        for name in "x.pt", "x.ptz":
            content = read_checkpoint(tmp_path / name).content
            assert saved(content) == saved(nested)
    save_file(prefixed, tmp_path / "x.safetensors")
    assert equal(read_checkpoint(tmp_path / "x.safetensors").content, prefixed)
    assert equal(read_state_dict(tmp_path / "x.safetensors"), state())
    with pytest.raises(WeightsError, match=r"not a file that torch\.save writes"):
        read_object(tmp_path / "x.safetensors")


def test_what_stands_beside_the_weights_is_listed_with_its_bytes(tmp_path: Path) -> None:
    tied = torch.zeros(5)
    extra = {"m": [torch.ones(7), (tied, tied[:])], "lr": 0.1}
    torch.save({"net": {"w": state(), "note": "x"}, "opt": extra, "again": tied, "step": 3}, tmp_path / "x.pt")
    choice = read_weights(tmp_path / "x.pt")
    weights, dropped = choice.state, choice.dropped
    assert equal(weights, state())
    assert dropped == {"opt": 4 * (7 + 5), "again": 0, "step": 0, "net/note": 0}
    torch.save({"model": {**state(), "tied": tied}, "shadow": {"t": tied, "x": 1}}, tmp_path / "x.pt")
    assert read_weights(tmp_path / "x.pt").dropped == {"shadow": 0}
    (tmp_path / "x.ptz").write_bytes(baseline.pack(state()).blob)
    for content in saved(state()), saved({"module.a": tied}), (tmp_path / "x.ptz").read_bytes():
        (tmp_path / "x.ptz").write_bytes(content)
        assert read_weights(tmp_path / "x.ptz").dropped == {}


class Loud:
    """Runs code in every way that unpickling an object of its class can."""

    calls: ClassVar[list[str]] = []

    def __new__(cls, *_: Any) -> "Loud":
        cls.calls.append("new")
        return super().__new__(cls)

    def __setstate__(self, _: Any) -> None:
        self.calls.append("setstate")

    def __hash__(self) -> int:
        self.calls.append("hash")
        return 1


@pytest.mark.parametrize("packed", [False, True])
def test_objects_of_other_classes_are_skipped_by_request_and_none_of_their_code_runs(
    tmp_path: Path, packed: bool
) -> None:
    loud = Loud()
    loud.__dict__.update(buffer=torch.zeros(6))
    best, values = np.float64(3.5), {"model": state(), "args": argparse.Namespace(lr=1), loud: 1, "loud": [loud]}
    path = tmp_path / ("x.ptz" if packed else "x.pt")
    path.write_bytes(zlib.compress(saved({**values, "best": best})) if packed else saved({**values, "best": best}))
    Loud.calls.clear()
    with pytest.raises(WeightsError, match=r"may run code .* --weights-only"):
        read_weights(path)
    choice = read_weights(path, skip_objects=True)
    weights, dropped = choice.state, choice.dropped
    assert equal(weights, state())
    assert dropped == {"args": 0, f"<{__name__}.Loud>": 0, "loud": 24, "best": 0}
    content = read_checkpoint(path).content
    assert type(content["args"]).__name__ == "argparse.Namespace"
    assert not Loud.calls
    with pytest.raises(WeightsError, match="may run code"):  # the stand-ins are gone
        read_weights(path)


def test_objects_that_pickle_calls_are_not_called(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for function, refused in (subprocess.getoutput, False), (os.system, True), (print, False):
        torch.save({"model": state(), "trap": Trap(marker, function)}, tmp_path / "x.pt")
        if refused:  # a module that torch blocks
            with pytest.raises(WeightsError, match="may run code"):
                read_weights(tmp_path / "x.pt", skip_objects=True)
        else:
            assert read_weights(tmp_path / "x.pt", skip_objects=True).dropped == {"trap": 0}
    assert not marker.exists()


def test_an_object_that_is_filled_after_it_is_built_is_refused(tmp_path: Path) -> None:
    torch.save({"model": state(), "log": defaultdict(list, a=[1])}, tmp_path / "x.pt")
    with pytest.raises(WeightsError, match="may run code"):
        read_weights(tmp_path / "x.pt", skip_objects=True)


def test_the_challenges_int8_export_is_dequantized(tmp_path: Path) -> None:
    packed = baseline.pack({"w": torch.randn(300, 256), "b": torch.randn(3)})
    (tmp_path / "x.int8.ptz").write_bytes(packed.blob)
    assert equal(read_state_dict(tmp_path / "x.int8.ptz"), baseline.unpack(packed.blob, 1 << 24))


def test_a_packed_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("birdie.checkpoints.checkpoints.MIN_UNPACKED_LIMIT", 1000)
    for blob in (zlib.compress(bytes(1 << 20), 9), lzma.compress(bytes(1 << 20))):
        (tmp_path / "x.ptz").write_bytes(blob)
        with pytest.raises(WeightsError, match="cannot be unpacked"):
            read_state_dict(tmp_path / "x.ptz")


@pytest.mark.parametrize("suffix", [".pt", ".ptz"])
def test_deflated_entries_are_inflated_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """A mapped deflated entry would be read as weights, wrong ones; an inflated one may be a bomb."""
    path = tmp_path / f"x{suffix}"
    zeros = {"w": torch.zeros(300, 300), **state()}
    with zipfile.ZipFile(io.BytesIO(saved(zeros))) as stored, zipfile.ZipFile(path, "w") as deflated:
        for entry in stored.infolist():
            deflated.writestr(entry.filename, stored.read(entry), zipfile.ZIP_DEFLATED)
    assert equal(read_state_dict(path), zeros)
    monkeypatch.setattr("birdie.checkpoints.checkpoints.MIN_UNPACKED_LIMIT", 1000)
    with pytest.raises(WeightsError, match=r"cannot be unpacked: .* more than the"):
        read_state_dict(path)


@pytest.mark.parametrize("group", ["quantized", "passthrough"])
def test_an_int8_export_with_a_key_that_is_no_name_is_refused(tmp_path: Path, group: str) -> None:
    content = torch.load(io.BytesIO(zlib.decompress(baseline.pack(state()).blob)), weights_only=True)
    content[group][3] = torch.ones(1)
    (tmp_path / "x.ptz").write_bytes(zlib.compress(saved(content)))
    with pytest.raises(WeightsError, match="item 3"):
        read_state_dict(tmp_path / "x.ptz")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tensors: {"state_dict": tensors, "epoch": 3},
        lambda tensors: {"best": torch.tensor(1.0), "model": tensors},
        lambda tensors: {"model": {"state_dict": tensors, "name": "x"}},
        lambda tensors: {f"module.{name}": tensor for name, tensor in tensors.items()},
        lambda tensors: {"model": {f"_orig_mod.module.{name}": tensor for name, tensor in tensors.items()}},
    ],
)
def test_wrappings_are_taken_off(tmp_path: Path, wrap: Any) -> None:
    torch.save(wrap(state()), tmp_path / "x.pt")
    assert equal(read_state_dict(tmp_path / "x.pt"), state())


class Trap:
    """A pickle of this runs a command when opened carelessly."""

    def __init__(self, marker: Path, function: Callable[[str], Any] = os.system) -> None:
        self.marker, self.function = marker, function

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return self.function, (f"touch {self.marker}",)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("packed", [False, True])
def test_code_is_never_run(tmp_path: Path, zipped: bool, packed: bool) -> None:
    marker = tmp_path / "ran"
    blob = saved({"a": torch.ones(1), "trap": Trap(marker)}, _use_new_zipfile_serialization=zipped)
    path = tmp_path / ("x.ptz" if packed else "x.pt")
    path.write_bytes(zlib.compress(blob) if packed else blob)
    with pytest.raises(WeightsError, match=r"may run code .* torch\.save\(model\.state_dict\(\)"):
        read_state_dict(path)
    assert not marker.exists()


def test_a_pickled_module_is_refused_with_the_way_out(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "x.pt")
    with pytest.raises(WeightsError, match=r"state_dict\(\)"):
        read_state_dict(tmp_path / "x.pt")


def programs(tmp_path: Path) -> None:
    """Files of programs and modules, in which all tensors belong to code."""
    module = nn.Sequential(nn.Linear(2, 2))
    torch.save(module, tmp_path / "module")
    torch.save({"model": module, "epoch": 3}, tmp_path / "module in a dict")
    torch.save(module, tmp_path / "legacy module", _use_new_zipfile_serialization=False)
    torch.save({"a": state(), "b": argparse.Namespace()}, tmp_path / "legacy", _use_new_zipfile_serialization=False)
    entries = {"TorchScript": "constants.pkl", "export": "models/model.json", "other": "a.txt"}
    for name, entry in (entries | {"npz": "a.npy", "agent": "policy.pth"}).items():
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(f"program/{entry}", b"x")
    for protocol in (3, 4, 5):
        (tmp_path / f"pickle {protocol}").write_bytes(pickle.dumps({"a": np.ones(3)}, protocol))
    (tmp_path / "__0_0.distcp").write_bytes(saved(state()))
    torch.save(
        {"table": nn.ParameterDict({"*": nn.Parameter(torch.ones(2, 2))}), "step": torch.tensor(3)},
        tmp_path / "parameters",
    )


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("module", r"weights_only=False"),
        ("module in a dict", r"weights_only=False"),
        ("legacy module", r"weights_only=False"),
        ("legacy", r"weights_only=False"),
        ("TorchScript", r"is a TorchScript program.*torch\.jit\.load"),
        ("export", r"is a program of torch\.export.*torch\.export\.load"),
        ("other", r"zip file that torch\.save did not write; birdie reads"),
        ("npz", r"zip file that torch\.save did not write, but NumPy; .*save_file\(dict\(numpy\.load"),
        ("agent", r"zip file that torch\.save did not write; .* unpack it"),
        *((f"pickle {protocol}", r"may run code when opened.*in the program that wrote it") for protocol in (3, 4, 5)),
        ("__0_0.distcp", r"a distributed checkpoint.*dcp_to_torch"),
        ("parameters", r"weights_only=False"),
    ],
)
def test_what_holds_code_is_refused_with_advice_that_works(tmp_path: Path, name: str, advice: str) -> None:
    """Leaving objects out is advised only where it opens the file."""
    programs(tmp_path)
    with pytest.raises(WeightsError, match=advice) as refused:
        read_weights(tmp_path / name)
    assert "--weights-only" not in str(refused.value)
    if name != "parameters":  # which has a number beside them
        with pytest.raises(WeightsError):
            read_weights(tmp_path / name, skip_objects=True)


def test_missing_and_unknown_files(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no such file"):
        read_state_dict(tmp_path / "x.pt")
    (tmp_path / "x.tflite").write_bytes(b"x")
    with pytest.raises(WeightsError, match=r"'\.tflite'"):
        read_state_dict(tmp_path / "x.tflite")
    with pytest.raises(WeightsError, match="holds none of"):
        read_state_dict(tmp_path)


def write_folder(folder: Path, weight_map: Any, *, safe: bool = True) -> None:
    """A Hugging Face folder of two shards, with `weight_map` in its index."""
    tensors = list(state().items())
    for number, (name, tensor) in enumerate(tensors, 1):
        if safe:
            save_file({name: tensor}, folder / f"model-{number}.safetensors")
        else:
            torch.save({name: tensor}, folder / f"model-{number}.bin")
    index = "model.safetensors.index.json" if safe else "pytorch_model.bin.index.json"
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("safe", [True, False])
def test_sharded_folders(tmp_path: Path, safe: bool) -> None:
    kind = "safetensors" if safe else "bin"
    write_folder(tmp_path, {"a.weight": f"model-1.{kind}", "a.bias": f"model-2.{kind}"}, safe=safe)
    assert equal(read_state_dict(tmp_path), state())
    assert equal(read_state_dict(next(tmp_path.glob("*.index.json"))), state())


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "", 3, "c:x"]
)
def test_shards_outside_their_folder_are_refused(tmp_path: Path, shard: Any) -> None:
    save_file(state(), tmp_path / "secret.safetensors")
    (tmp_path / "model").mkdir()
    write_folder(tmp_path / "model", {"a.weight": shard})
    with pytest.raises(WeightsError, match="outside its own folder"):
        read_state_dict(tmp_path / "model")


def write_cache(hub: Path, *, safe: bool = True) -> Path:
    """The cache of a model as the Hugging Face hub's client lays it out: names link to blobs; return the snapshot."""
    kind = "safetensors" if safe else "bin"
    model = hub / "models--someone--model"
    snapshot = model / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    write_folder(snapshot, {"a.weight": f"model-1.{kind}", "a.bias": f"model-2.{kind}"}, safe=safe)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        blob = model / "blobs" / f"{number:064x}"
        path.rename(blob)
        path.symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.mark.parametrize("safe", [True, False])
def test_links_into_the_blobs_of_the_same_cache_are_followed(tmp_path: Path, safe: bool) -> None:
    snapshot = write_cache(tmp_path / "hub", safe=safe)
    (tmp_path / "mine").symlink_to(snapshot)
    index = next(snapshot.glob("*.index.json"))
    for path in (snapshot, index, tmp_path / "mine", tmp_path / "mine" / index.name):
        assert equal(read_state_dict(path), state())
        assert [file.parent for file in files_of(path)] == [path if path.is_dir() else path.parent] * 3


@pytest.mark.parametrize("sharded", [True, False])
def test_links_that_stay_in_the_folder_are_followed(tmp_path: Path, sharded: bool) -> None:
    (tmp_path / "parts").mkdir()
    if not sharded:
        save_file(state(), tmp_path / "parts" / "one.safetensors")
        (tmp_path / "step").symlink_to("parts/one.safetensors")
        (tmp_path / "model.safetensors").symlink_to("step")
    else:
        write_folder(tmp_path, {"a.weight": "model-1.safetensors", "a.bias": "again/model-2.safetensors"})
        (tmp_path / "model-2.safetensors").rename(tmp_path / "parts" / "model-2.safetensors")
        (tmp_path / "again").symlink_to("parts")
    assert equal(read_state_dict(tmp_path), state())


@pytest.mark.parametrize("name", ["model-1.safetensors", "model.safetensors.index.json", "model.safetensors"])
@pytest.mark.parametrize("way", ["direct", "chain", "folder", "other cache", "circle", "nowhere"])
def test_links_out_of_the_folder_are_refused(tmp_path: Path, name: str, way: str) -> None:
    """Direct links, chains of links, and links into the blobs of another model."""
    snapshot = write_cache(tmp_path / "hub")
    if name == "model.safetensors":
        (snapshot / "model.safetensors.index.json").unlink()
        save_file(state(), snapshot / name)
    secret = tmp_path / "secret"
    secret.write_bytes((snapshot / name).read_bytes())
    (snapshot / name).unlink()
    other = tmp_path / "hub" / "models--other--model" / "blobs"
    other.mkdir(parents=True)
    (other / "0").write_bytes(secret.read_bytes())
    (snapshot / "step").symlink_to(name if way == "circle" else secret)
    (snapshot / "outside").symlink_to(tmp_path)
    targets: dict[str, str | Path] = {
        "direct": "../../../../secret",
        "chain": "step",
        "folder": "outside/secret",
        "circle": "step",
    }
    targets |= {"other cache": other / "0", "nowhere": "../../blobs/none"}
    (snapshot / name).symlink_to(targets[way])
    for read in (read_state_dict, read_checkpoint, files_of):
        with pytest.raises(WeightsError, match=r"outside its own folder|cannot open"):
            read(snapshot)


def test_blobs_that_are_a_link_out_of_the_cache_are_refused(tmp_path: Path) -> None:
    snapshot = write_cache(tmp_path / "hub")
    blobs = snapshot.parents[1] / "blobs"
    blobs.rename(tmp_path / "private")
    blobs.symlink_to(tmp_path / "private")
    with pytest.raises(WeightsError, match="outside its own folder"):
        read_state_dict(snapshot)


@pytest.mark.parametrize("name", ["model-1.safetensors", "model.safetensors.index.json", "model-1.bin"])
@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "folder", "device"])
def test_special_files_are_refused_without_waiting(tmp_path: Path, name: str, kind: str) -> None:
    """As a shard or index of a folder, and given directly: a pipe would be waited for."""
    safe = not name.endswith(".bin")
    suffix = "safetensors" if safe else "bin"
    write_folder(tmp_path, {"a.weight": f"model-1.{suffix}", "a.bias": f"model-2.{suffix}"}, safe=safe)
    (tmp_path / name).unlink()
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    elif kind == "link to a pipe":
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / name).symlink_to("pipe")
    elif kind == "device":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        (tmp_path / name).mkdir()
    for path in (tmp_path, tmp_path / name):
        if not path.is_dir() or path == tmp_path:
            with waiting_fails(), pytest.raises(WeightsError, match=r"regular file|is a folder|outside its own folder"):
                read_state_dict(path)


def test_real_checkpoints(shared_data: Path) -> None:
    """Nested and prefixed ResNets, a float GPT, int8 exports; a C program's weights are no checkpoint."""
    weights = shared_data / "weights"
    for path in sorted((weights / "resnet_cifar10").glob("*.th")):
        state = read_state_dict(path)
        assert "conv1.weight" in state
        assert all(isinstance(tensor, torch.Tensor) for tensor in state.values())
    for path in sorted((weights / "parameter_golf").iterdir()):
        assert "tok_emb.weight" in read_state_dict(path)
    with pytest.raises(WeightsError, match=r"stories260K\.bin"):
        read_state_dict(weights / "llama2c/stories260K.bin")


@pytest.mark.parametrize("suffix", [".pt", ".ptz"])
@pytest.mark.parametrize("entry", ["data.pkl", "data/0", "data/1", "version"])
def test_a_flipped_bit_in_any_entry_of_a_zip_file_is_noticed(tmp_path: Path, suffix: str, entry: str) -> None:
    """torch.load reads no checksum: a tensor with another bit would load."""
    data = bytearray(saved(state()))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        information = archive.getinfo(f"archive/{entry}")
        content = archive.read(information)
    data[data.index(content, information.header_offset)] ^= 1
    path = tmp_path / f"x{suffix}"
    path.write_bytes(data if suffix == ".pt" else zlib.compress(data))
    with pytest.raises(WeightsError, match=f"archive/{entry} "):
        read_object(path)


def test_entries_that_overlap_are_refused(tmp_path: Path) -> None:
    """A small file could otherwise have a terabyte to be checked."""
    data = saved(state())
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
    one, other = (entry.header_offset.to_bytes(4, "little") for entry in entries[-2:])
    directory = data.index(b"PK\x01\x02")
    (tmp_path / "x.pt").write_bytes(data[:directory] + data[directory:].replace(other, one))
    with pytest.raises(WeightsError, match="overlap"):
        read_state_dict(tmp_path / "x.pt")


class Subclass(torch.Tensor):
    """A tensor of a class of its own."""


def test_tensors_of_other_classes_are_refused_with_the_way_out(tmp_path: Path) -> None:
    """They are neither damaged nor replaced by stand-ins."""
    path = tmp_path / "x.pt"
    torch.save({"w": torch.zeros(4, 4).as_subclass(Subclass), "step": 1}, path)
    with pytest.raises(WeightsError, match=r"\(tests\.checkpoints\.test_checkpoints\.Subclass\)"):
        read_state_dict(path)
    for read in (read_checkpoint, lambda path: read_weights(path, skip_objects=True)):
        with pytest.raises(WeightsError, match="save plain tensors"):
            read(path)


DATA = bytes(range(256)) * 300


@pytest.mark.parametrize("name", COMPRESSORS)
def test_round_trip_bound_and_damage(name: str) -> None:
    compressor = COMPRESSORS[name]
    if not compressor.installed:
        pytest.skip(f"{compressor.package} is not installed")
    packed = compressor.compress(DATA)
    assert compressor.version
    assert compressor.decompress(packed, len(DATA)) == DATA
    for damaged, limit in ((packed, len(DATA) - 1), (packed[:-4], len(DATA)), (b"no", 10), (b"", 10)):
        with pytest.raises(ArtifactError):
            compressor.decompress(damaged, limit)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}'])
def test_a_broken_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match="weight_map"):
        read_state_dict(tmp_path)
