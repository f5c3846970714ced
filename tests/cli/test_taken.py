"""Compression, dry run, inspection and decompression agree on what a checkpoint holds, and nothing is lost unsaid."""

import argparse
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import birdie
from birdie.artifact import file_forecast as forecast
from birdie.cli import main

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
State = dict[str, Tensor]
Write = Callable[[Path], Path]


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 10))


def perceptron(seed: int = 0) -> State:
    return dict(network(seed).state_dict())


def adam(module: nn.Module) -> dict[str, Any]:
    """State of an optimizer after a step."""
    optimizer = torch.optim.Adam(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


def one_file(name: str, content: Callable[[], Any]) -> Write:
    def write(folder: Path) -> Path:
        torch.save(content(), folder / name)
        return folder / name

    return write


def texts(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"file": name}), encoding="utf-8")


def near(state: State) -> State:
    """An average of a network some steps apart."""
    generator = torch.Generator().manual_seed(1)
    return {name: tensor + 1e-3 * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}


def prefixed(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def without_dots(state: State) -> State:
    return {name.replace(".", ""): tensor for name, tensor in state.items()}


TWINS = prefixed("model.", perceptron()) | prefixed("ema_model.", near(perceptron()))
MATRIX = torch.linspace(-1, 1, 24 * 32).view(24, 32)

FILES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {  # content, and words that are printed
    "average in the state dict": (lambda: {"state_dict": TWINS, "epoch": 3}, (
        "two copies of one network: state_dict.model.", "state_dict.ema_model.", "--key state_dict.model.",
    )),
    "average whose names have no dots": (lambda: {"state_dict": prefixed("net.", perceptron()) | prefixed(
        "net_ema.", without_dots(near(perceptron())) | {"decay": torch.tensor(0.9)}
    )}, ("two copies of one network: state_dict.net.", "state_dict.net_ema.")),
    "student and teacher below a prefix": (lambda: prefixed("ssl.student.", perceptron()) | prefixed(
        "ssl.teacher.", near(perceptron())
    ) | {"ssl.center": torch.ones(3)}, ("two copies of one network: ssl.student.", "--key ssl.student.")),
    "twins": (lambda: prefixed("left.", perceptron()) | prefixed("right.", perceptron(1)), ()),
    "parts of equal shapes": (lambda: {"enc": perceptron(), "dec": perceptron(1), "n": 3}, ("taken: enc, dec",)),
    "scalars beside a network": (lambda: {"model": {"step": torch.tensor(3)}, "net": perceptron()}, ("taken: net",)),
    "buffers of an average": (lambda: {"net": perceptron(), "ema": {"mean": torch.ones(3)}}, ("dropped: ema 12 B",)),
    "a network of buffers": (lambda: {"model": {"mean": torch.ones(3)}, "ema": perceptron()}, ("taken: ema",)),
    "weights in a list": (lambda: {"weights": [MATRIX, MATRIX.T], "mean": torch.tensor(1.0)}, ("taken: weights",)),
    "weights in pairs": (lambda: {"fc1": (MATRIX, MATRIX[0]), "fc2": (-MATRIX, MATRIX[1])}, ()),
    "weights by number": (lambda: {number: MATRIX + number for number in range(12)}, ()),
    "layers of equal shapes": (lambda: {f"layer{n}": {"w": torch.randn(24, 32)} for n in range(3)}, ()),
    "experts by number": (lambda: {"router": {"w": MATRIX}, "experts": {n: perceptron(n) for n in range(3)}}, (
        "larger than what was taken: experts", "--key: experts",
    )),
    "optimizer larger than the model": (lambda: {"model": {"w": MATRIX}, "optimizer": adam(nn.Linear(90, 90))}, (
        "dropped: optimizer",
    )),
    "adapter alone": (lambda: {"lora": {"a.lora_A": MATRIX, "a.lora_B": MATRIX.T}, "r": 4}, ("taken: lora",)),
    "numbers of NumPy": (lambda: {
        "network_weights": perceptron(), "optimizer_state": adam(network()), "_best_ema": np.float64(0.9),
        "logging": {"dice": [0.1, np.float32(0.2)]}, "init_args": {"plans": (1, 2)}, "trainer_name": "x",
    }, ("taken: network_weights", "_best_ema")),
}  # fmt: skip


def training_state(folder: Path) -> Path:
    save_file(perceptron(), folder / "model.safetensors", {"format": "pt"})
    torch.save(adam(nn.Linear(90, 90)), folder / "optimizer.bin")
    torch.save({"last_epoch": 3}, folder / "scheduler.bin")
    torch.save({"numpy": np.random.RandomState(0).get_state(), "torch": torch.get_rng_state()}, folder / "rng_0.pkl")
    torch.save({"ema.0.weight": MATRIX, "decay": 0.9}, folder / "custom_checkpoint_0.pkl")
    torch.save({"mean": torch.tensor(0.5), "optimizer": adam(nn.Linear(9, 9))}, folder / "custom_checkpoint_1.pkl")
    return folder


def folds(folder: Path) -> Path:
    for fold in ("fold_0", "fold_1"):
        (folder / fold).mkdir(parents=True)
        torch.save(FILES["numbers of NumPy"][0](), folder / fold / "checkpoint_final.pth")
    texts(folder, "plans.json", "dataset.json", "fold_0/debug.json")
    return folder


def edited_shards(folder: Path) -> Path:
    state, names = perceptron(), sorted(perceptron())
    save_file({name: state[name] for name in names[:3]}, folder / "model-00001-of-00002.safetensors")
    save_file({name: state[name] for name in names[2:]}, folder / "model-00002-of-00002.safetensors")
    where = {name: f"model-0000{1 + (number > 2)}-of-00002.safetensors" for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where | {"gone": where[names[0]]}}))
    texts(folder, "config.json")
    return folder


def index_of_shards(folder: Path) -> Path:
    return edited_shards(folder) / "model.safetensors.index.json"


def pickled_shards(folder: Path) -> Path:
    for number, (name, tensor) in enumerate(perceptron().items()):
        torch.save({name: tensor}, folder / f"pytorch_model-0000{number + 1}-of-0000{len(perceptron())}.bin")
    return folder


FOLDERS: dict[str, tuple[Write, tuple[str, ...]]] = {
    "state of a trainer": (training_state, ()),
    "folds": (folds, ("fold_1/checkpoint_final.pth: optimizer_state: beside",)),
    "edited shards": (edited_shards, ("not taken, since", "names tensors that none of its shards holds: gone")),
    "index of edited shards": (index_of_shards, ("not taken, since",)),
    "shards of pickles": (pickled_shards, ("comes back as model.safetensors: pytorch_model-00001",)),
}
CASES: dict[str, tuple[Write, tuple[str, ...], tuple[str, ...]]] = {
    **{name: (one_file("x.pt", content), (), words) for name, (content, words) in FILES.items()},
    **{name: (write, (), words) for name, (write, words) in FOLDERS.items()},
    "part of a state dict": (
        one_file("x.ckpt", FILES["average in the state dict"][0]), ("--key", "state_dict.ema_model."),
        ("names are without the prefix ema_model.", "taken: state_dict.ema_model.", "--key: state_dict.model."),
    ),
    "both parts of a state dict": (
        one_file("x.ckpt", FILES["average in the state dict"][0]),
        ("--key", "state_dict.model.", "--key", "state_dict/ema_model."),
        ("taken: state_dict.model., state_dict.ema_model.",),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def without_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a dry run forecast what is meant alone: the rows beside it take most of its time."""
    monkeypatch.setattr(forecast, "forecast", partial(forecast.forecast, bits=()))


def ask(capsys: pytest.CaptureFixture[str], *tokens: object) -> Any:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, tokens), "--json"])
    assert not ended.value.code
    return json.loads(capsys.readouterr().out)


def printed(capsys: pytest.CaptureFixture[str], *tokens: object) -> str:
    with pytest.raises(SystemExit):
        main([*map(str, tokens)])
    return " ".join(capsys.readouterr().out.split())


def entries(content: Any, at: str = "") -> Iterator[str]:
    """Paths of all that an object holds."""
    items = content.items() if isinstance(content, Mapping) else enumerate(content)
    for key, item in items:
        path = f"{at}/{key}" if at else str(key)
        if isinstance(item, Mapping | list | tuple) and len(item):
            yield from entries(item, path)
        else:
            yield path


def require_nothing_lost(path: Path, answer: Mapping[str, Any]) -> None:
    """Every file is compressed, kept or named; every entry of a file of torch is taken or named."""
    if path.is_dir():
        files = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
        assert files == answer["compressed"].keys() | answer["files"].keys() | {
            name for name in answer["left_out"] if ": " not in name
        }
    elif not path.name.endswith(".json"):
        content = torch.load(path, weights_only=False)
        taken = [name.replace(".", "/").rstrip("/") if name not in content else name for name in answer["taken"]]
        for entry in entries(content) if taken else ():
            begins = [f"{entry}/".startswith(f"{name}/") for name in (*taken, *answer["dropped"])]
            starts = [entry.replace(".", "/").startswith(f"{name}/") for name in taken]
            starts += [entry.startswith(name) for name in answer["dropped"] if name.endswith(".")]
            assert any([*begins, *starts]), entry


@pytest.mark.parametrize("case", CASES)
def test_four_commands_agree(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write, flags, words = CASES[case]
    (tmp_path / "in").mkdir()
    path, file = write(tmp_path / "in"), tmp_path / "x.birdie"
    common = ("compress", path, "--effort", "fast", *flags)
    answer, planned = ask(capsys, *common, "-o", file), ask(capsys, *common, "--dry-run")
    for field in ("taken", "others", "dropped", "notes", "left_out", "input_bytes", "file_bytes", "weights"):
        assert planned.get(field) == answer.get(field)
    shown = ask(capsys, "inspect", file)
    names = [row["name"] for row in shown["tensors"]]
    assert (names, shown["files"]) == ([row["name"] for row in answer["tensors"]], answer["files"])
    state = birdie.load(file)
    assert sorted(names) == sorted(state)
    out = tmp_path / ("out" if path.is_dir() else "out.pt")
    ask(capsys, "decompress", file, "-o", out)
    if path.is_dir():
        suffixes = (".safetensors", *(Path(name).suffix for name in answer["compressed"]))
        assert sum(len(names_in(one)) for one in out.rglob("*") if one.suffix in suffixes) >= len(names)
    else:
        assert sorted(torch.load(out, weights_only=True)) == sorted(names)
    require_nothing_lost(path, answer)
    text = printed(capsys, *common, "--dry-run")
    for word in words:
        assert word in text
    for note in answer["notes"]:
        assert " ".join(note.split()) in text


def names_in(path: Path) -> list[str]:
    content: Any = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=False)
    return list(entries(content)) if isinstance(content, Mapping) else []


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("case", [name for name in CASES if not CASES[name][1]])
def test_a_lossless_copy_brings_back_every_file_or_says_what_it_lacks(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    path, file = CASES[case][0](tmp_path / "in"), tmp_path / "x.birdie"
    answer = ask(capsys, "compress", path, "--effort", "fast", "--lossless", "-o", file)
    if path.is_file() and not path.name.endswith(".json"):
        ask(capsys, "decompress", file, "-o", tmp_path / "out.pt")
        assert equal(torch.load(tmp_path / "out.pt", weights_only=False), torch.load(path, weights_only=False))
        return
    ask(capsys, "decompress", file, "-o", tmp_path / "out")
    root = path if path.is_dir() else path.parent
    for source in (one for one in root.rglob("*") if one.is_file()):
        name = source.relative_to(root).as_posix()
        back = tmp_path / "out" / name
        left = {key: why for key, why in answer["dropped"].items() if key == name or key.startswith(f"{name}: ")}
        if path.is_file() and source.suffix == ".json" and source != path:
            continue  # beside an index that was given by hand
        assert back.is_file() or name in left
        if back.is_file() and back.read_bytes() != source.read_bytes():
            load = load_file if source.suffix == ".safetensors" else lambda one: torch.load(one, weights_only=False)
            was, has = load(source), load(back)
            lost = [key for key in was if key not in has]
            assert all(any(f": {key}" in entry for entry in left) for key in lost)
            assert equal({key: was[key] for key in sorted(has)}, {key: has[key] for key in sorted(has)})


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "matrices in an optimizer alone": (
        lambda: {"model": {"step": torch.tensor(3)}, "optimizer": adam(nn.Linear(9, 9))}, r"matrices in optimizer.*none"
    ),
    "matrices in an object": (
        lambda: {"model": {"step": torch.tensor(3)}, "net": argparse.Namespace(w=MATRIX)}, r"matrices in net.*none"
    ),
    "vectors beside an object": (
        lambda: {"state_dict": {"bias": MATRIX[0]}, "nets": [argparse.Namespace(w=MATRIX)]}, r"matrices in nets.*none"
    ),
    "sparse weights": (lambda: {"state_dict": {"w": MATRIX.relu().to_sparse(), "b": MATRIX[0]}}, r"sparse.*to_dense"),
}  # fmt: skip


@pytest.mark.parametrize("flags", [(), ("--dry-run",)], ids=["compress", "dry run"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_dict_without_a_matrix_is_never_taken_for_the_model(
    case: str, flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, message = REFUSED[case]
    torch.save(content(), tmp_path / "x.pt")
    common = ("compress", tmp_path / "x.pt", "-o", tmp_path / "x.birdie", "--bits", "8", "--weights-only", *flags)
    with pytest.raises(SystemExit) as ended:
        main([*map(str, common)])
    error = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 1
    assert re.search(message, error), error
    assert error.count("error:") == 1
    assert not (tmp_path / "x.birdie").exists()


def quantized() -> Any:
    return torch.ao.quantization.quantize_dynamic(network(), {nn.Linear}, dtype=torch.qint8).state_dict()


@pytest.mark.parametrize("nested", [False, True])
def test_weights_that_torch_has_quantized_are_kept_whole_or_refused(
    nested: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default does as --lossless does: it never keeps the scales and leaves out what they scale."""
    torch.save({"state_dict": quantized(), "epoch": 3} if nested else quantized(), tmp_path / "x.pt")
    codes: list[int] = []
    for flags in ((), ("--lossless",)):
        file = tmp_path / f"{len(codes)}.birdie"
        with pytest.raises(SystemExit) as ended:
            main(["compress", str(tmp_path / "x.pt"), "-o", str(file), *flags])
        codes.append(int(ended.value.code or 0))
        if not codes[-1]:
            assert any(tensor.ndim > 1 for tensor in birdie.load(file).values())
    assert codes[0] == codes[1]
    text = capsys.readouterr()
    assert "qint8" in text.out + text.err


PACKED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "an archive": (lambda data: gzip.compress(bytes(257) + b"ustar" + data), "a tar archive; unpack it"),
    "an archive under zlib": (lambda data: zlib.compress(bytes(257) + b"ustar" + data), "a tar archive; unpack it"),
    "twice": (lambda data: gzip.compress(gzip.compress(data)), "packed as well; unpack it"),
    "another format": (lambda data: gzip.compress(b"GGUF" + data), "a GGUF file"),
}


@pytest.mark.parametrize("kind", PACKED)
def test_what_is_inside_of_a_packed_file_is_said(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack, words = PACKED[kind]
    torch.save(perceptron(), tmp_path / "x.pt")
    (tmp_path / "x.tar.gz").write_bytes(pack((tmp_path / "x.pt").read_bytes()))
    for flags in ((), ("--lossless",), ("--dry-run",)):
        with pytest.raises(SystemExit) as ended:
            main(["compress", str(tmp_path / "x.tar.gz"), "-o", str(tmp_path / "x.birdie"), *flags])
        assert ended.value.code == 1
        assert words in " ".join(capsys.readouterr().err.split())


def test_part_of_a_state_dict_loads_into_the_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": TWINS | {"weights": torch.ones(3)}}, tmp_path / "x.ckpt")
    flags = ("--lossless", "--key", "state_dict.ema_model.")
    ask(capsys, "compress", tmp_path / "x.ckpt", "-o", tmp_path / "x.birdie", *flags)
    module = network(5)
    birdie.load(tmp_path / "x.birdie", into=module)
    assert all(torch.equal(tensor, TWINS[f"ema_model.{name}"]) for name, tensor in module.state_dict().items())
    save_file(TWINS, tmp_path / "x.safetensors")
    again = (
        *("compress", tmp_path / "x.safetensors", "-o", tmp_path / "y.birdie"),
        "--lossless",
        "--key",
        "ema_model.",
    )
    ask(capsys, *again)
    assert birdie.load(tmp_path / "y.birdie").keys() == module.state_dict().keys()
    ask(capsys, "compress", tmp_path / "x.ckpt", "-o", tmp_path / "z.birdie", *flags, "--base", tmp_path / "y.birdie")
    assert all(tensor.scheme == "delta" for tensor in birdie.inspect(tmp_path / "z.birdie").tensors)
