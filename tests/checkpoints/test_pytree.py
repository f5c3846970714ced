"""A nested object and its flat form are the same thing; a hostile skeleton is refused in one sentence."""

import io
import json
import math
import struct
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
