"""A nested object and its flat form are the same thing; a hostile skeleton is refused in one sentence."""

import io
import json
import math
import struct
import sys
import zlib
from collections import Counter, OrderedDict
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from birdie.checkpoints import pytree as tree
from birdie.errors import ArtifactError, WeightsError


def same(one: Any, other: Any) -> bool:
    """Return whether two objects are equal in types, dtypes, order of keys, NaN payloads and what takes gradients."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return (
            (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)
            and one.shape == other.shape
            and torch.equal(one, other)
        )
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return same([one.real, one.imag], [other.real, other.imag])
    if isinstance(one, dict):
        about = same(getattr(one, "_metadata", None), getattr(other, "_metadata", None))
        return about and same([*one.items()], [*other.items()])
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def through(content: Any) -> Any:
    """There and back, as text in between, the tensors in whatever order."""
    tensors, skeleton = tree.flatten(content)
    return tree.rebuild(json.loads(json.dumps(skeleton)), dict(reversed(tensors.items())))


T = torch.arange(3.0)
KEYS = st.one_of(
    st.text(st.sampled_from("ab/~:=.01-é\n"), max_size=4), st.integers(-3, 12), st.none(), st.booleans(), st.floats()
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    st.binary(max_size=5),
    st.binary(max_size=5).map(bytearray),
    st.sampled_from([torch.float32, torch.int8, torch.device("cuda:1"), torch.Size([2, 0])]),
    st.sets(st.one_of(st.integers(), st.text("ab")), max_size=3),
    st.sampled_from([T, T.int(), T[:0], Parameter(T.clone()), Parameter(T.int(), requires_grad=False)]),
)
CONTENTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.text("ab/~1", max_size=3), st.just(T), min_size=1, max_size=5),
        st.dictionaries(st.text("ab"), st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=12,
)


@settings(max_examples=25)
@given(CONTENTS)
def test_any_nesting_comes_back(content: Any) -> None:
    assert same(through(content), content)


def test_the_same_content_has_the_same_skeleton_and_is_not_changed() -> None:
    content = {"b": {"x": T, "a": T}, "a": [T, {"x": 1, "a": 2}], "n": {"x": None, "a": math.inf}}
    one, two = tree.flatten(content), tree.flatten(content)
    assert one[1] == two[1]
    assert list(one[0]) == list(two[0]) == ["b/x", "b/a", "a/0"]
    assert list(content) == ["b", "a", "n"]


def test_names_and_keys_are_written_once() -> None:
    """A thousand tensors with a scale and a dtype each: what stands around them takes a few bytes each, unpacked."""
    names = [f"blocks.{layer}.mlp.{kind}.weight" for layer in range(250) for kind in ("up", "down", "gate", "norm")]
    content = {
        "quantized": dict.fromkeys(names, T),
        "scales": dict.fromkeys(names, T),
        "dtypes": dict.fromkeys(names, "bfloat16"),
    }
    tensors, skeleton = tree.flatten(content)
    text = json.dumps(skeleton, separators=(",", ":"))
    assert len(tensors) == 2000
    assert "blocks" not in text
    assert len(text) < 20_000
    assert len(zlib.compress(text.encode(), 9)) < 250


def test_metadata_of_a_state_dict_is_kept() -> None:
    state = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()
    back = through(state)
    assert vars(back)["_metadata"] == vars(state)["_metadata"]
    assert vars(back)["_metadata"]
    assert same(back, state)


def with_metadata(state: dict[str, Tensor], metadata: Any) -> OrderedDict[str, Tensor]:
    ordered = OrderedDict(state)
    vars(ordered)["_metadata"] = metadata
    return ordered


@pytest.mark.parametrize("where", ["top", "m"])
@pytest.mark.parametrize("names", [("a", "b"), ("b", "a"), ("~m/x", "x"), ("",)], ids=str)
def test_tensors_in_metadata_are_not_taken_for_those_of_the_dict(names: tuple[str, ...], where: str) -> None:
    inner = with_metadata({"x": T + 1, "b": T + 2}, {"version": T + 3})
    for metadata in {"x": T + 1}, [T + 4], inner, {"version": 1}, inner | {"a": None}:
        state = with_metadata(dict.fromkeys(names, T), metadata)
        for content in {"m": state, "k": {"x": None}, "n": dict.fromkeys(names, 0)}, {"m": state, "k": 1}:
            assert same(through(state if where == "top" else content), state if where == "top" else content)


def test_tensors_that_are_one_stay_one() -> None:
    plain, tied = torch.ones(2), Parameter(torch.ones(2))
    back = through({"a": plain, "b": [plain], "c": tied, "d": {"x": tied, "y": tied}})
    assert back["a"] is back["b"][0]
    assert back["c"] is back["d"]["x"] is back["d"]["y"]


def test_a_state_dict_keeps_its_names() -> None:
    assert tree.flatten({"a/b": T, "~": T, "1": T})[0].keys() == {"a/b", "~", "1"}
    assert tree.flatten({"s": {"a/b": T, "1": T}, "n": {1: T}})[0].keys() == {"s/a~sb", "s/~:1", "n/1"}
    assert tree.flatten(T)[0].keys() == {"~"}


class Odd:
    """Not a thing torch.load yields."""


def too_deep() -> list[Any]:
    content: list[Any] = []
    for _ in range(200):
        content = [content]
    return content


def too_large() -> list[Any]:
    """Billions of values in a few lists that hold one another twice."""
    content: list[Any] = [1]
    for _ in range(40):
        content = [content, content]
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": [Odd()]}, r"'a/0' of the checkpoint is or holds an Odd"),
        ({"a": "\ud800"}, "no text"),
        ({"\udfff": 1}, "no text"),
        ([1 << 5000], "too long"),
        ({(1, Odd()): 1}, "Odd"),
        (too_deep(), "too deep"),
        (too_large(), "too large"),
        (["x" * 1_000_000] * 100, "too large"),
        (torch.layout, "type"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else "",
)
def test_what_no_skeleton_holds_is_refused(content: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "MAX_VALUES", 10_000)
    with pytest.raises(WeightsError, match=message) as caught:
        tree.flatten(content)
    assert len(str(caught.value)) < 300


def test_a_tuple_key_without_end_is_refused() -> None:
    key: Any = ()
    for _ in range(sys.getrecursionlimit()):
        key = (key,)
    with pytest.raises((WeightsError, RecursionError)):  # building the dict itself may fail first
        tree.flatten({key: 1})


@pytest.mark.parametrize(
    "skeleton",
    [
        None,
        3,
        [],
        {},
        ["what"],
        [["dict"]],
        ["tensor"],
        ["tensor", 4],
        ["dict"],
        ["dict", ["a"], []],
        ["dict", 0, []],
        ["dict", -1, []],
        ["dict", ["a", "a"], [["tensor"], ["tensor"]]],
        ["dict", [["list"]], [1]],
        ["dict", [["bytearray", ""]], [1]],
        ["dict", ["a", "b"], [["tensor"], ["tensor"]], 1],
        ["dict", ["a", "c"], [["tensor"], ["tensor"]]],
        ["tensors"],
        ["tensors", 0],
        ["tensors", [0]],
        ["tensors", [0, -1]],
        ["tensors", [0, 1]],
        ["tensors", [0.5, 0]],
        ["tensors", ["x", 0]],
        ["tensors", [], 1],
        ["tensors", [], True],
        ["tensors", [], "1"],
        ["list", ["tensors", []], ["tensors", []]],
        ["ordered", ["list"]],
        ["counter", 3],
        ["list", ["dtype", "nn"], ["tensors", []]],
        ["list", ["dtype", ["x"]], ["tensors", []]],
        ["list", ["device", "nowhere"], ["tensors", []]],
        ["list", ["float", "00"], ["tensors", []]],
        ["list", ["bytes", "!"], ["tensors", []]],
        ["list", ["size", 1 << 70], ["tensors", []]],
        ["set", ["list"]],
    ],
    ids=str,
)
def test_hostile_skeletons_are_refused(skeleton: Any) -> None:
    """None of them takes the integer tensors a and b."""
    with pytest.raises(ArtifactError, match="tree of the file") as caught:
        tree.rebuild(skeleton, {"a": T.int(), "b": T.int()})
    assert "\n" not in str(caught.value)


def deep() -> Any:
    """Far deeper than any limit."""
    skeleton: Any = 1
    for _ in range(5000):
        skeleton = ["list", skeleton]
    return skeleton


@pytest.mark.parametrize(
    "skeleton",
    [
        deep(),
        ["list", *[0] * 10_001],
        ["list", ["dict", ["x" * 1_000_000], [1]], *[["dict", 0, [1]]] * 100_000],
        ["list", ["dict", [str(i) for i in range(1000)], [0] * 1000], *[["tensors", 0]] * 100_000],
    ],
    ids=["deep", "wide", "long keys again and again", "absent tensors again and again"],
)
def test_skeletons_without_end_are_refused(skeleton: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "MAX_VALUES", 10_000)
    with pytest.raises(ArtifactError, match="tree of the file"):
        tree.rebuild(skeleton, {"a": T})


@settings(max_examples=25)
@given(CONTENTS, st.data())
def test_a_changed_skeleton_is_refused_or_harmless(content: Any, data: st.DataObject) -> None:
    """Whatever part is replaced: an object or ArtifactError, nothing else."""
    tensors, skeleton = tree.flatten(content)
    parts = [(skeleton, i) for i in range(len(skeleton))] if isinstance(skeleton, list) else []
    for holder, i in parts:
        if isinstance(holder[i], list):
            parts += [(holder[i], j) for j in range(len(holder[i]))]
    if parts:
        holder, i = data.draw(st.sampled_from(parts))
        holder[i] = data.draw(st.sampled_from([None, -1, 0, 1, 9, 0.5, "dict", "tensor", [], ["tensor"], ["set", 1]]))
    with suppress(ArtifactError):
        tree.rebuild(skeleton, tensors)


@given(data=st.binary(max_size=300), position=st.integers(0, 400))
def test_a_buffer_comes_back_with_its_position(data: bytes, position: int) -> None:
    buffer = io.BytesIO(data)
    buffer.seek(position)
    tensors, skeleton = tree.flatten({"state": [buffer, io.BytesIO()], "w": torch.ones(2)})
    back, empty = tree.rebuild(json.loads(json.dumps(skeleton)), tensors)["state"]
    assert (type(back), back.getvalue(), back.tell()) == (io.BytesIO, data, position)
    assert (empty.getvalue(), empty.tell()) == (b"", 0)
    assert buffer.tell() == position


@pytest.mark.parametrize("parts", [["AA==", -1], ["AA==", "x"], ["A", 0], ["AA=="]])
def test_a_damaged_buffer_is_refused(parts: list[Any]) -> None:
    with pytest.raises(ArtifactError):
        tree.rebuild(["list", ["buffer", *parts]], {})


def test_a_closed_buffer_is_refused() -> None:
    buffer = io.BytesIO()
    buffer.close()
    with pytest.raises(WeightsError, match="BytesIO"):
        tree.flatten({"state": buffer})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"b": torch.ones(1), "a": torch.ones(2)}, False),
        (OrderedDict(a=torch.ones(1)), False),
        ({"m": {"a": torch.ones(1)}, "list": [torch.ones(2), (torch.ones(1),)]}, False),
        (torch.ones(1), False),
        ({"a": torch.ones(1), "step": 3}, True),
        ([{"a": torch.ones(1), "none": None}], True),
        (OrderedDict(a=torch.ones(1), b="text"), True),
        (Counter(a=3), True),
    ],
)
def test_values_are_told_from_tensors(content: Any, expected: bool) -> None:
    assert tree.holds_values(tree.flatten(content)[1]) == expected
