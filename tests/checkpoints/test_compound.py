"""Complete objects keep all that torch.load opens with weights_only=True: attributes, layout in memory, views of one
memory, and values that consist of tensors. Structures that would be read outside of memory are refused."""

import io
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import Parameter

import birdie
from birdie.artifact.safetensors_export import to_safetensors
from birdie.checkpoints import pytree
from birdie.errors import ArtifactError, WeightsError

pytestmark = pytest.mark.filterwarnings("ignore:.*(deprecated|beta|prototype|invariant)")


def kept(content: Any, folder: Path) -> Any:
    birdie.save_object({"content": content, "w": torch.ones(2)}, folder / "x.birdie")
    return birdie.load_object(folder / "x.birdie")["content"]


def reloaded(content: Any) -> Any:
    """Return what torch.save and torch.load make of it."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


def facts(value: Any) -> Any:
    """Return all that tells two values apart."""
    if isinstance(value, torch.UntypedStorage | torch.storage.TypedStorage):
        return bytes(value.untyped() if isinstance(value, torch.storage.TypedStorage) else value)
    if not isinstance(value, Tensor):
        return repr(value)
    about: tuple[Any, ...] = type(value), value.dtype, tuple(value.shape) if not value.is_nested else (), value.layout
    about = *about, value.requires_grad, value.is_quantized, value.is_meta, value.is_conj(), value.is_neg()
    if value.is_nested:
        return *about, [facts(part.detach()) for part in value.unbind()]
    if value.is_meta:
        return *about, value.stride()
    if value.is_quantized:
        by_channel = value.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
        numbers = (
            (
                value.q_per_channel_scales().tolist(),
                value.q_per_channel_zero_points().tolist(),
                value.q_per_channel_axis(),
            )
            if by_channel
            else (value.q_scale(), value.q_zero_point())
        )
        return *about, value.qscheme(), numbers, value.stride(), value.int_repr().tolist()
    if value.layout is torch.sparse_coo:
        return *about, value.is_coalesced(), value._indices().tolist(), value._values().tolist()
    if value.layout is not torch.strided:
        by_row = value.layout in (torch.sparse_csr, torch.sparse_bsr)
        inner = (value.crow_indices(), value.col_indices()) if by_row else (value.ccol_indices(), value.row_indices())
        return *about, [(index.dtype, index.tolist()) for index in inner], value.values().tolist()
    return *about, value.stride(), value.tolist()


DENSE = torch.arange(48.0).reshape(6, 8) * (torch.arange(48) % 3 == 0).reshape(6, 8)
ROWS, COLUMNS = torch.rand(6).double() + 0.1, torch.rand(8).double() + 0.1
VALUES: dict[str, Callable[[], Any]] = {
    "sparse": lambda: DENSE.to_sparse(),
    "sparse, not coalesced": lambda: torch.sparse_coo_tensor(torch.tensor([[1, 0, 1]]), torch.ones(3, 2), (3, 2)),
    "sparse with gradients": lambda: Parameter(DENSE.to_sparse()),
    "sparse integers": lambda: DENSE.int().to_sparse(),
    "sparse, empty": lambda: torch.zeros(3, 4).to_sparse(),
    "csr": lambda: DENSE.to_sparse_csr(),
    "csc": lambda: DENSE.to_sparse_csc(),
    "bsr": lambda: DENSE.to_sparse_bsr((2, 4)),
    "bsc": lambda: DENSE.to_sparse_bsc((3, 2)),
    "csr of int32": lambda: torch.sparse_compressed_tensor(
        torch.tensor([0, 1, 2]).int(), torch.tensor([0, 1]).int(), torch.ones(2), (2, 2), layout=torch.sparse_csr
    ),
    "qint8": lambda: torch.quantize_per_tensor(DENSE, 0.5, 3, torch.qint8),
    "quint8": lambda: torch.quantize_per_tensor(DENSE, 0.5, 3, torch.quint8),
    "qint32": lambda: torch.quantize_per_tensor(DENSE, 0.5, 0, torch.qint32),
    "qint8 rows": lambda: torch.quantize_per_channel(DENSE, ROWS, torch.arange(6), 0, torch.qint8),
    "qint8 columns": lambda: torch.quantize_per_channel(DENSE, COLUMNS, torch.arange(8), 1, torch.qint8),
    "quint8 floats": lambda: torch.quantize_per_channel(DENSE, ROWS.float(), ROWS.float(), 0, torch.quint8),
    "quint4x2": lambda: torch.quantize_per_channel(DENSE, ROWS.float(), ROWS.float(), 0, torch.quint4x2),
    "qint8 channels last": lambda: torch.quantize_per_channel(
        torch.randn(2, 8, 3, 3).to(memory_format=torch.channels_last), COLUMNS, torch.arange(8), 1, torch.qint8
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged),
    "meta": lambda: torch.empty(3, 4, device="meta").t(),
    "meta parameter": lambda: Parameter(torch.empty(3, 4, device="meta", dtype=torch.bfloat16)),
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch._neg_view(torch.randn(3)),
    "untyped storage": lambda: torch.randn(4).untyped_storage(),
    "empty storage": lambda: torch.UntypedStorage(0),
    "typed storage": lambda: torch.storage.TypedStorage(
        wrap_storage=torch.randn(4).untyped_storage(), dtype=torch.float32, _internal=True
    ),
    "quantization scheme": lambda: torch.per_channel_symmetric,
    "layout": lambda: torch.sparse_coo,
    "memory format": lambda: torch.channels_last,
    "dtype": lambda: torch.quint4x2,
    "counter": lambda: Counter(a=3),
    "numbers": lambda: [1 + 2j, float("nan"), -0.0, float("-inf"), 2**70, b"\0", bytearray(b"a"), torch.Size([1, 2])],
    "keys": lambda: {0: 1, -1: 2, True: 3, None: 4, 0.5: 5, (0, "a"): 6, b"x": 7, "0": 8},
    "generator": lambda: torch.get_rng_state(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels last, ambiguous": lambda: torch.randn(8, 3, 1, 1).to(memory_format=torch.channels_last),
    "channels last 3d": lambda: torch.randn(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d),
    "transposed": lambda: torch.randn(3, 4, 5).permute(1, 2, 0),
    "expanded": lambda: torch.randn(1, 5).expand(9, 5),
    "expanded scalar": lambda: torch.tensor(2.5).expand(3, 4),
    "windows": lambda: torch.arange(10.0).unfold(0, 4, 2),
    "parameter that is expanded": lambda: Parameter(torch.randn(5).expand(2, 5)),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back(name: str, tmp_path: Path) -> None:
    content = VALUES[name]()
    with suppress(Exception):  # what torch.load refuses can still be an object in memory
        content = reloaded(content)
    back = kept(OrderedDict(b=[content, 1], a=(content,), c=content), tmp_path)
    assert [facts(one) for one in (back["b"][0], back["a"][0], back["c"])] == [facts(content)] * 3


def views() -> dict[str, Any]:
    w, memory = torch.randn(6, 8), torch.randn(20)
    return {
        "row": w[2],
        "w": w,
        "columns": w[:, :3],
        "turned": w.t(),
        "deep": {"10": [w[0, 2:4]], "9": w},
        "one": memory[:12].view(3, 4),
        "two": memory[8:16],
        "own": w[:2].clone(),
    }


def test_views_share_their_memory_again(tmp_path: Path) -> None:
    content = views()
    birdie.save_object(content, tmp_path / "x.birdie")
    back = birdie.load_object(tmp_path / "x.birdie")
    flat = birdie.load(tmp_path / "x.birdie")
    expected = {name: value for name, value in content.items() if name != "deep"}
    expected |= {"deep/~:10/0": content["deep"]["10"][0], "deep/~:9": content["deep"]["9"]}
    assert [*flat] == ["row", "w", "columns", "turned", "deep/~:10/0", "deep/~:9", "one", "two", "own"]
    to_safetensors(tmp_path / "x.birdie", tmp_path / "x.safetensors")
    written = load_file(tmp_path / "x.safetensors")
    assert all(
        torch.equal(flat[name], tensor) and torch.equal(written[name], tensor) for name, tensor in expected.items()
    )
    assert all(back[name].stride() == content[name].stride() for name in content if name != "deep")
    back["w"].zero_()
    assert all(not tensor.any() for tensor in (back["row"], back["columns"], back["turned"], back["deep"]["10"][0]))
    assert back["deep"]["9"] is back["w"]
    assert torch.equal(back["own"], content["own"])
    back["one"].zero_()
    assert torch.equal(back["two"], torch.cat([torch.zeros(4), content["two"][4:]]))
    buffer, again = io.BytesIO(), io.BytesIO()
    torch.save(content, buffer)
    torch.save(birdie.load_object(tmp_path / "x.birdie"), again)
    assert len(again.getvalue()) <= len(buffer.getvalue())


def test_attributes_are_kept(tmp_path: Path) -> None:
    first, plain = Parameter(torch.randn(3, 2)), torch.randn(3)
    first.no_decay, first.axes = True, ("rows", 2)  # type: ignore[attr-defined]
    plain.optim = {"lr": 1e-3, "dtype": torch.bfloat16}  # type: ignore[attr-defined]
    last = torch.randn(2, 3, 1, 4).to(memory_format=torch.channels_last)
    last.tag = None  # type: ignore[attr-defined]
    content = {"list": [first, plain], "tied": first, "data": first.data, "last": last}
    back = kept(content, tmp_path)
    assert back["tied"] is back["list"][0]
    assert vars(back["tied"]) == vars(first)
    assert vars(back["list"][1]) == vars(plain)
    assert vars(back["data"]) == {}
    assert type(back["tied"]) is Parameter
    assert back["data"].data_ptr() == back["tied"].data_ptr()
    assert back["last"].stride() == last.stride()
    assert vars(back["last"]) == {"tag": None}


class Subclass(Tensor):
    pass


@pytest.mark.parametrize("build", [lambda: torch.ones(2).as_subclass(Subclass), lambda: torch.ones(2, 2).to_mkldnn()])
def test_tensors_of_other_classes_and_layouts_are_named_with_a_way_out(build: Any, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"tensor 'content/w' .*full_tensor"):
        kept({"w": build()}, tmp_path)


FLOATS, INDICES = torch.ones(4), torch.arange(4)
HOSTILE = [
    ["made", "sparse", ["list", ["tensor"], ["tensor"], ["size", 3], False]],  # index 3
    ["made", "sparse", ["list", ["tensor"], ["tensor"], ["size", 1 << 60], False]],
    ["made", "sparse", ["list", ["tensor"]]],
    ["made", "compressed", ["list", ["layout", "sparse_csr"], ["tensor"], ["tensor"], 1, ["size", 2, 2]]],
    ["made", "compressed", ["list", ["layout", "strided"], ["tensor"], ["tensor"], 1, ["size", 2, 2]]],
    ["made", "quantized", ["list", ["tensor"], ["dtype", "qint8"], ["size", 4], 0.5, 0]],  # of int64
    ["made", "quantized", ["list", ["tensor"], ["dtype", "quint4x2"], ["size", 1 << 40], 0.5, 0]],
    ["made", "quantized", ["list", ["tensor"], ["dtype", "float32"], ["size", 4], 0.5, 0]],
    ["made", "nested", ["list", ["tensor"], ["tensor"], 3]],
    ["made", "jagged", ["list", ["tensor"], ["tensor"], None, 2]],
    ["made", "storage", ["list", ["dtype", "float32"], ["tensor"]]],
    ["made", "meta", ["list", ["dtype", "float32"], ["size", 1 << 60], ["tuple", 1]]],
    ["made", "meta", ["list", ["dtype", "float32"], ["size", 2], ["tuple", 1, 1]]],
    ["made", "sparse", 3],
    ["made", ["sparse"], ["list"]],
    ["made", "what", ["list"]],
    ["made", "meta", ["list", ["dtype", "int8"], ["size", 2], ["tuple", 1]], 1],
    ["view", "1", 0, [5], [1]],
    ["view", "1", 1, [4], [1]],
    ["view", "1", -1, [2], [1]],
    ["view", "1", 0, [2], [-1]],
    ["view", "1", 0, [2, 2], [1]],
    ["view", "1", 0, [1 << 62, 4], [0, 1]],
    ["view", "1", 0, [True], [1]],
    ["view", "1", 0, [4], [1], 8],
    ["view", "x", 0, [4], [1]],
    ["view", ["1"], 0, [4], [1]],
    ["with", ["tensor"], 3],
    ["with", ["tensor"], ["dict", ["shape"], [3]]],
    ["with", ["tensor"], ["dict", ["to"], [3]]],
    ["with", ["tensor"], ["dict", [1], [3]]],
    ["with", ["list"], ["dict", ["a"], [3]]],
    ["tensor", [0, 1]],
    ["tensor", [0, 0, 0]],
    ["tensor", []],
    ["tensor", [4, 0]],
]


@pytest.mark.parametrize("node", HOSTILE, ids=str)
def test_hostile_structures_are_refused(node: Any) -> None:
    for inner in (
        {"0": INDICES},
        {"0/0": INDICES, "0/1": FLOATS},
        {"0/1": INDICES, "0/2": INDICES, "0/0": INDICES.int()},
    ):
        tensors = {**inner, "1": FLOATS}
        with pytest.raises(ArtifactError, match="tree of the file") as caught:
            pytree.rebuild(["list", node, ["tensor"]], tensors)
        assert "\n" not in str(caught.value)


@settings(max_examples=60)
@given(st.sampled_from([*VALUES]), st.data())
def test_a_changed_structure_is_refused_or_harmless(name: str, data: st.DataObject) -> None:
    tensors, skeleton = pytree.flatten([VALUES[name](), views()])
    parts = [(skeleton, i) for i in range(len(skeleton))]
    for holder, i in parts:
        if isinstance(holder[i], list):
            parts += [(holder[i], j) for j in range(len(holder[i]))]
    holder, i = data.draw(st.sampled_from(parts))
    holder[i] = data.draw(
        st.sampled_from([None, -1, 0, 1, 9, 1 << 40, 0.5, "dict", "made", [], ["tensor"], ["size", 7]])
    )
    with suppress(ArtifactError):
        pytree.rebuild(skeleton, tensors)


def test_a_flat_state_dict_of_views_fills_a_module(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    state = OrderedDict(weight=model.weight.detach(), bias=model.weight.detach()[3])
    birdie.save_object(state, tmp_path / "x.birdie")
    fresh = birdie.load(tmp_path / "x.birdie", into=nn.Linear(8, 8))
    assert torch.equal(fresh.weight, state["weight"])
    assert torch.equal(fresh.bias, state["bias"])
