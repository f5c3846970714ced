"""Laws of loading into modules: as load_state_dict of torch with old versions, hooks, extra state; all or nothing."""

import io
import itertools
import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import birdie
from birdie.artifact.container import Reader
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.errors import ArtifactError, ConfigError, WeightsError
from tests.nightly import mostly_nightly

HOW = ["into", "lazy"]


def saved(model: Any, folder: Path, **settings: Any) -> Path:
    birdie.save(model, folder / "m.birdie", lossless=True, **settings)
    return folder / "m.birdie"


def loaded(path: Path, module: nn.Module, how: str, **settings: Any) -> dict[str, Any]:
    """State dict of `module` once it is loaded."""
    birdie.load(path, into=module, lazy=how == "lazy", **settings)
    return dict(module.state_dict())


def require_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, item in one.items():
        assert torch.equal(item, other[name]) if isinstance(item, Tensor) else item == other[name], name


class Versioned(nn.Linear):
    """Version 2 keeps logarithms of its gains; version 1, and files without a version, keep the gains."""

    _version = 2

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.gains = nn.Parameter(torch.linspace(-1, 1, 8))

    def _load_from_state_dict(self, state: Any, prefix: str, about: Any, *rest: Any) -> None:
        if about.get("version") is None or about["version"] < 2:
            state[prefix + "gains"] = state[prefix + "gains"].log()
        super()._load_from_state_dict(state, prefix, about, *rest)


class Demanding(nn.Linear):
    """A file without a version is an error, as in torchvision's MNASNet."""

    _version = 2

    def __init__(self) -> None:
        super().__init__(8, 8)

    def _load_from_state_dict(self, state: Any, prefix: str, about: Any, *rest: Any) -> None:
        if about.get("version") not in (1, 2):
            raise ValueError(f"version {about.get('version')} is not one of 1 and 2")
        super()._load_from_state_dict(state, prefix, about, *rest)


class Unversioned(nn.Linear):
    """Has torch's default version, 1, and converts what has none, by a hook and in place."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self._register_load_state_dict_pre_hook(self.convert)

    @staticmethod
    def convert(state: Any, prefix: str, about: Any, *_: Any) -> None:
        if about.get("version") is None:
            state[prefix + "weight"].mul_(2)


KINDS = [Versioned, Demanding, Unversioned]


@pytest.mark.parametrize(
    ("kind", "nest", "how"),
    mostly_nightly(
        itertools.product(KINDS, (False, True), HOW),
        [(Versioned, True, "into"), (Demanding, False, "into"), (Unversioned, True, "lazy")],
    ),
)
def test_what_a_module_wrote_is_not_converted_again(
    kind: Callable[[], nn.Module], nest: bool, how: str, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.ReLU(), kind(), nn.BatchNorm1d(8)) if nest else kind()

    model = build()
    require_same(loaded(saved(model, tmp_path), build(), how), dict(model.state_dict()))
    other = build()
    other.load_state_dict(birdie.load(tmp_path / "m.birdie"))
    require_same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("version", [None, 1])
def test_old_files_are_converted_once(version: int | None, how: str, tmp_path: Path) -> None:
    old: Any = OrderedDict(weight=torch.randn(8, 8), bias=torch.randn(8), gains=torch.rand(8) + 0.5)
    if version is not None:
        old._metadata = OrderedDict({"": {"version": version, "by": "hand"}})
    expected, path = old["gains"].log(), saved(old, tmp_path)
    assert torch.equal(loaded(path, Versioned(), how)["gains"], expected)
    plain = Unversioned()
    birdie.load(saved(dict(plain.state_dict()), tmp_path), into=(other := Unversioned()), lazy=how == "lazy")
    assert torch.equal(other.weight, plain.weight * 2)


@pytest.mark.parametrize("kind", KINDS)
def test_quantize_leaves_versions_alone(kind: Callable[[], nn.Module]) -> None:
    model = kind()
    original = {name: weight.clone() for name, weight in model.state_dict().items()}
    birdie.quantize_(model)
    assert all(torch.allclose(weight, original[name], atol=0.01) for name, weight in model.state_dict().items())


def test_a_file_grows_only_by_versions_that_matter(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.InstanceNorm1d(4), nn.LSTM(4, 4))
    path = saved(plain, tmp_path)
    with Reader(path) as reader:
        assert reader.fields.keys() == {"order"}
    content = path.read_bytes()
    assert saved(dict(plain.state_dict()), tmp_path).read_bytes() == content
    with Reader(saved(nn.Sequential(plain, Versioned()), tmp_path)) as reader:
        assert reader.fields["state"] == {"versions": {"1": 2}}


def old_norm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight for name, weight in state.items() if "num_batches" not in name}


def old_weight_norm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
    return {
        next((name.replace(new, old) for new, old in names.items() if new in name), name): weight
        for name, weight in state.items()
    }


class Renamed(nn.Module):
    """Takes the names of an earlier program by a hook, and adds what that did not have."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.register_buffer("steps", torch.tensor(3))
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}fc.")]:
            state[name.replace("fc.", "proj.")] = state.pop(name)
        state.setdefault(f"{prefix}steps", module.get_buffer("steps"))


OLD: dict[str, tuple[Callable[[], nn.Module], Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = {
    "norms without a counter": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), old_norm),
    "weight norm of before parametrizations": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.ReLU()), old_weight_norm),
    "names of before": (
        lambda: nn.Sequential(Renamed()),
        lambda state: {name.replace("proj", "fc"): item for name, item in state.items() if "steps" not in name}),
    "numbers of torch 0.3, which had one element": (
        lambda: nn.Sequential(nn.BatchNorm1d(4)),
        lambda state: state | {"0.num_batches_tracked": state["0.num_batches_tracked"].reshape(1)}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "wrap", "how"),
    mostly_nightly(
        itertools.product(OLD, (False, True), HOW),
        [*((case, False, "into") for case in OLD), ("names of before", True, "lazy")],
    ),
)
def test_what_the_module_converts_loads(case: str, wrap: bool, how: str, tmp_path: Path) -> None:
    build, old = OLD[case]
    state = old(dict(build().state_dict()))
    expected, module = build(), build()
    expected.load_state_dict(state)
    if wrap:  # the file is that of a wrapped module
        state = {f"module.{name}": item for name, item in state.items()}
    require_same(loaded(saved(state, tmp_path), module, how), dict(expected.state_dict()))


class Extra(nn.Linear):
    """Keeps something that is no weight."""

    def __init__(self, extra: Any) -> None:
        super().__init__(4, 4)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


EXTRAS: list[Any] = [
    3,
    None,
    "text",
    {"step": 7, "names": ["a", "b"], 2: (1.5, None)},
    torch.randn(40, 40),
    {"amax": torch.randn(5), "history": [torch.tensor(3), torch.ones(2, 2)], "dtype": torch.float8_e4m3fn},
    b"\0bytes",
]


def text_of(extra: Any) -> str:
    return repr(extra)


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: type(extra).__name__)
def test_extra_state_is_kept_exactly(extra: Any, tmp_path: Path) -> None:
    eager, lazy = (nn.Sequential(nn.Linear(64, 64), Extra("other")) for _ in range(2))
    quantized = nn.Sequential(nn.Linear(64, 64), Extra(extra))
    birdie.save(quantized, tmp_path / "m.birdie", scheme="int4")
    birdie.load(tmp_path / "m.birdie", into=eager)
    birdie.load(tmp_path / "m.birdie", into=lazy, lazy=True)
    birdie.quantize_(quantized)
    for module in (eager, lazy, quantized):
        assert isinstance(module[1], Extra)
        assert text_of(module[1].extra) == text_of(extra)
        assert not isinstance(extra, Tensor) or torch.equal(module[1].extra, extra)


def test_extra_state_survives_as_a_state_dict_and_what_cannot_be_kept_is_named(tmp_path: Path) -> None:
    state = birdie.load(saved(Extra({"a": torch.ones(2), "b": 1}), tmp_path))
    assert text_of(state["_extra_state"]) == text_of({"a": torch.ones(2), "b": 1})
    again = birdie.load(saved(state, tmp_path))
    assert text_of(again["_extra_state"]) == text_of(state["_extra_state"])
    with pytest.raises(WeightsError, match=r"extra state '0._extra_state' .* object"):
        saved(nn.Sequential(Extra(object())), tmp_path)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


@pytest.mark.parametrize("how", HOW)
def test_not_strict_returns_what_torch_returns(how: str, tmp_path: Path) -> None:
    source, module = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 2)), net()
    expected = net().load_state_dict(source.state_dict(), strict=False)
    keys = birdie.load(saved(source, tmp_path), into=module, lazy=how == "lazy", strict=False)
    assert keys.missing_keys == expected.missing_keys
    assert sorted(keys.unexpected_keys) == sorted(expected.unexpected_keys)
    assert torch.equal(module.get_parameter("0.weight"), source.get_parameter("0.weight"))
    with pytest.raises(WeightsError, match=r"different shape: 0\.weight"):
        birdie.load(tmp_path / "m.birdie", into=nn.Sequential(nn.Linear(5, 4)), strict=False)


@pytest.mark.parametrize("how", HOW)
def test_a_part_of_a_file(how: str, tmp_path: Path) -> None:
    source = nn.ModuleDict({"encoder": net(), "decoder": nn.Linear(4, 4)})
    path = saved(source, tmp_path)
    encoder = dict(source["encoder"].state_dict())
    require_same(loaded(path, net(), how, prefix="encoder."), encoder)
    require_same(dict(birdie.load(path, prefix="encoder.")), encoder)
    module = nn.ModuleDict({"encoder": net(), "decoder": nn.Linear(4, 4)})
    original = module["encoder"].get_parameter("0.weight").clone()
    state = loaded(path, module, how, names=["decoder.*", "encoder.0.bias"])
    assert torch.equal(state["decoder.weight"], source.get_parameter("decoder.weight"))
    assert torch.equal(state["encoder.0.bias"], source["encoder"].get_parameter("0.bias"))
    assert torch.equal(state["encoder.0.weight"], original)
    assert birdie.load(path, names=["encoder.0.bias"]).keys() == {"encoder.0.bias"}
    with pytest.raises(ArtifactError, match=r"no tensor 'encoder\.nothing'"):
        birdie.load(path, prefix="encoder.", names=["nothing"])
    with pytest.raises(ArtifactError, match="no tensor named"):
        birdie.load(path, prefix="nothing.")
    with pytest.raises(WeightsError, match=r"unexpected: decoder\.bias"):
        birdie.load(path, into=nn.ModuleDict({"encoder": net()}), lazy=how == "lazy", names=["decoder.bias"])
    with pytest.raises(ConfigError, match="give into="):
        birdie.load(path, strict=False)


def test_only_what_is_loaded_is_decoded(tmp_path: Path) -> None:
    path = saved({"a": torch.randn(8, 8), "b": torch.randn(8, 8)}, tmp_path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of b, the last
    path.write_bytes(data)
    assert birdie.load(path, names=["a"])["a"].shape == (8, 8)
    with pytest.raises(ArtifactError, match="'b'"):
        birdie.load(path, names=["b"])


class Failing(nn.Linear):
    """Fails after everything before it has been loaded."""

    def _load_from_state_dict(self, *_: Any) -> None:
        raise KeyError("no luck")


class Growing(nn.Module):
    """Takes a queue of any length, by a buffer of its own."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(2))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.queue = torch.empty_like(state[prefix + "queue"])
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("last", [lambda: Failing(4, 4), lambda: nn.Linear(4, 5), lambda: nn.Linear(4, 4, bias=False)])
def test_a_failed_load_leaves_the_module_as_it_was(last: Callable[[], nn.Module], how: str, tmp_path: Path) -> None:
    source = nn.Sequential(net(), Extra({"n": 1}), Growing(), nn.DataParallel(nn.Linear(4, 4)), nn.Linear(4, 4))
    source[2].register_buffer("queue", torch.ones(5))
    path = saved(source, tmp_path)
    module = nn.Sequential(net(), Extra({"n": 2}), Growing(), nn.DataParallel(nn.Linear(4, 4)), last())
    tensors = {id(item): item.clone() for item in [*module.parameters(), *module.buffers()]}
    parts, extra = [type(part) for part in module.modules()], module[1].extra
    with pytest.raises(WeightsError, match=r"no luck|different|unexpected"):
        birdie.load(path, into=module, lazy=how == "lazy")
    assert {id(item) for item in [*module.parameters(), *module.buffers()]} == tensors.keys()
    for item in [*module.parameters(), *module.buffers()]:
        assert torch.equal(item, tensors[id(item)])
    assert [type(part) for part in module.modules()] == parts
    assert module[1].extra == extra
    assert module.training


@pytest.mark.parametrize("how", HOW)
def test_a_buffer_takes_the_length_in_the_file(how: str, tmp_path: Path) -> None:
    source = Growing()
    source.queue = torch.ones(5)
    assert torch.equal(loaded(saved(source, tmp_path), Growing(), how)["queue"], torch.ones(5))


def test_hooks_after_loading_see_the_new_values(tmp_path: Path) -> None:
    module, source, seen = nn.Linear(4, 4), nn.Linear(4, 4), []
    module.register_load_state_dict_post_hook(lambda module, _: seen.append(module.weight.clone()))
    memory = module.weight.data_ptr()
    birdie.load(saved(source, tmp_path), into=module)
    assert torch.equal(seen[0], source.weight)
    assert module.weight.data_ptr() == memory


def test_the_checkpoint_of_an_optimizer_has_its_module_s_versions(tmp_path: Path) -> None:
    model = Versioned()
    birdie.save_object(model.state_dict(), tmp_path / "m.birdie")
    require_same(loaded(tmp_path / "m.birdie", Versioned(), "into"), dict(model.state_dict()))


class Recipe(nn.Linear):
    """Keeps its state as bytes in memory, as Transformer Engine does."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(4, 4)
        self.scale = scale

    def get_extra_state(self) -> io.BytesIO:
        buffer = io.BytesIO()
        torch.save({"scale": torch.tensor(self.scale)}, buffer)
        buffer.seek(3)
        return buffer

    def set_extra_state(self, state: io.BytesIO) -> None:
        assert state.tell() == 3
        state.seek(0)
        self.scale = float(torch.load(state, weights_only=True)["scale"])


@pytest.mark.parametrize("lazy", [False, True])
def test_extra_state_may_be_a_buffer(lazy: bool, tmp_path: Path) -> None:
    birdie.save(nn.Sequential(Recipe(0.5), Recipe(2.0)), tmp_path / "m.birdie")
    loaded = birdie.load(tmp_path / "m.birdie", into=nn.Sequential(Recipe(), Recipe()), lazy=lazy)
    assert [part.scale for part in loaded] == [0.5, 2.0]


def test_a_file_of_torch_may_have_such_extra_state(tmp_path: Path) -> None:
    state = nn.Sequential(Recipe(0.5)).state_dict()
    torch.save(state, tmp_path / "x.pt")
    for name, options in {"lossy": [], "lossless": ["--lossless"]}.items():
        file = tmp_path / f"{name}.birdie"
        assert run(build_app, ["compress", str(tmp_path / "x.pt"), "-o", str(file), *options]) == 0
        assert run(build_app, ["decompress", str(file), "-o", str(tmp_path / f"{name}.pt")]) == 0
        with torch.serialization.safe_globals([io.BytesIO]):
            back = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        buffer, original = back["0._extra_state"], state["0._extra_state"]
        assert (buffer.getvalue(), buffer.tell()) == (original.getvalue(), original.tell())


def test_a_file_without_extra_state_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    birdie.save(nn.Sequential(Recipe(0.5)), tmp_path / "m.birdie")
    for name, lost in {"x.safetensors": ["0._extra_state"], "folder": ["0._extra_state"], "x.pt": []}.items():
        assert run(build_app, ["decompress", str(tmp_path / "m.birdie"), "-o", str(tmp_path / name), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["left_out"] == lost


@pytest.mark.parametrize("kind", [Versioned, Demanding])
def test_versions_of_a_state_dict_are_kept(kind: Callable[[], nn.Module], tmp_path: Path) -> None:
    model = kind()
    state = OrderedDict((f"net.{name}", weight) for name, weight in model.state_dict().items())
    vars(state)["_metadata"] = {"net": {"version": 2}}
    path = saved(state, tmp_path)
    require_same(loaded(path, nn.ModuleDict({"net": kind()}), "into"), dict(state))
    require_same(loaded(path, kind(), "into", prefix="net."), dict(model.state_dict()))
