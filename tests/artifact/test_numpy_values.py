"""Numbers and texts of NumPy in checkpoints are opened from their bytes, and a lossless copy keeps them."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

import birdie
from birdie.artifact import numpy_values, pytree
from birdie.artifact.checkpoints import read_object, read_weights
from birdie.errors import ArtifactError

KINDS = st.one_of(
    of_numpy.boolean_dtypes(),
    of_numpy.integer_dtypes(),
    of_numpy.floating_dtypes(sizes=(16, 32, 64)),
    of_numpy.complex_number_dtypes(sizes=(64, 128)),
    of_numpy.unicode_string_dtypes(min_len=1, max_len=4),
    of_numpy.byte_string_dtypes(min_len=1, max_len=4),
)


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one.dtype == other.dtype and one.tobytes() == other.tobytes()


@settings(max_examples=60)
@given(KINDS.flatmap(lambda kind: of_numpy.from_dtype(kind).map(kind.type)))
def test_every_number_and_text_comes_back(value: Any) -> None:
    tensors, tree = pytree.flatten({"value": value})
    assert same(pytree.rebuild(tree, tensors)["value"], value)


VALUES = {
    "float": np.float64(0.25), "half": np.float16(0.5), "nan": np.float32("nan"), "integer": np.int64(-3),
    "bool": np.bool_(True), "complex": np.complex64(1 + 2j), "text": np.str_("é"), "bytes": np.bytes_(b"ab"),
}  # fmt: skip


def test_a_file_with_numbers_of_numpy_is_opened_and_comes_back_whole(tmp_path: Path) -> None:
    torch.save({"network": {"w": torch.ones(3, 4)}, "best": VALUES, "log": [np.float64(0.5)]}, tmp_path / "x.pt")
    content = read_object(tmp_path / "x.pt")
    assert read_weights(tmp_path / "x.pt").dropped.keys() == {"best", "log"}
    birdie.save_object(content, tmp_path / "x.birdie")
    back = birdie.load_object(tmp_path / "x.birdie")
    assert all(same(back["best"][name], value) for name, value in VALUES.items())
    assert type(back["log"][0]) is np.float64


def test_other_values_of_numpy_keep_no_file_from_being_opened(tmp_path: Path) -> None:
    others = {
        "array": np.arange(3), "state": np.random.RandomState(0).get_state(), "generator": np.random.default_rng(0),
        "date": np.datetime64("2020-01-01"), "kind": np.dtype("f4"), "pair": np.zeros(1, "i4,f8")[0],
    }  # fmt: skip
    torch.save({"model": {"w": torch.ones(3, 4)}, **others}, tmp_path / "x.pt")
    assert read_weights(tmp_path / "x.pt").dropped.keys() == others.keys()
    assert read_weights(tmp_path / "x.pt").state.keys() == {"w"}


class Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("code", "data"),
    [
        ("O", b"\0" * 8), ("f8", b"\0"), ("U99999999", b"a"), ("f8,f8", b"\0" * 16), (3, b"a"), ("f3", b"abc"),
        ("<f8", "text"), ("V8", b"\0" * 8), ("", b""), ("i8" * 99, b""), ("c1", b"a"),
    ],
    ids=str,
)  # fmt: skip
def test_hostile_values_are_no_numbers(code: Any, data: Any) -> None:
    assert isinstance(numpy_values.scalar(code, data), numpy_values.NumPyValue)
    with pytest.raises(ArtifactError, match="damaged"):
        pytree.rebuild(["numpy", code, data.hex() if isinstance(data, bytes) else data], {})


def test_functions_of_numpy_are_never_called(tmp_path: Path) -> None:
    """A pickle may name any function below numpy, and give it arguments; one of them writes a file."""
    target = tmp_path / "written.npy"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"model": {"w": torch.ones(3, 4)}, "x": Call(np.save, str(target), [1])}, tmp_path / "x.pt")
    assert b"numpy" in pickle.dumps(Call(np.save, "x", [1]))
    assert read_weights(tmp_path / "x.pt").dropped.keys() == {"x"}
    assert not target.exists()
