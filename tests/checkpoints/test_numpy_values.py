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
from birdie.checkpoints import numpy_values, pytree
from birdie.checkpoints.checkpoints import read_object, read_weights
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
    return type(one) is type(other) and one.dtype == other.dtype and repr(one) == repr(other)


@settings(max_examples=60)
@given(KINDS.flatmap(lambda kind: of_numpy.from_dtype(kind).map(kind.type)))
def test_every_number_and_text_comes_back(value: Any) -> None:
    tensors, tree = pytree.flatten({"value": value})
    assert same(pytree.rebuild(tree, tensors)["value"], value)


@settings(max_examples=60)
@given(
    st.one_of(
        of_numpy.boolean_dtypes(), of_numpy.integer_dtypes(endianness="="), of_numpy.floating_dtypes(endianness="=")
    )
    .filter(lambda kind: kind.itemsize <= 8)
    .flatmap(lambda kind: of_numpy.arrays(kind, of_numpy.array_shapes(min_dims=0, max_side=4))),
    st.booleans(),
)
def test_every_array_comes_back(tmp_path_factory: pytest.TempPathFactory, value: Any, is_fortran: bool) -> None:
    value = np.asfortranarray(value) if is_fortran and value.ndim else value
    path = tmp_path_factory.getbasetemp() / "array.pt"
    torch.save({"value": value, "pair": ("MT19937", value)}, path)
    content = read_object(path)
    for opened in (content, {"value": value, "pair": ("MT19937", value)}):
        tensors, tree = pytree.flatten(opened)
        back = pytree.rebuild(tree, tensors)
        for one in (back["value"], back["pair"][1]):
            assert type(one) is np.ndarray
            assert (one.shape, one.dtype) == (value.shape, value.dtype)
            assert one.tobytes() == value.tobytes()


VALUES = {
    "float": np.float64(0.25), "half": np.float16(0.5), "nan": np.float32("nan"), "integer": np.int64(-3),
    "bool": np.bool_(True), "complex": np.complex64(1 + 2j), "text": np.str_("é"), "bytes": np.bytes_(b"ab"),
}  # fmt: skip


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_with_numbers_of_numpy_is_opened_and_comes_back_whole(zipped: bool, tmp_path: Path) -> None:
    content: Any = {"network": {"w": torch.ones(3, 4)}, "best": VALUES, "log": [np.float64(0.5)]}
    torch.save(content, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    content = read_object(tmp_path / "x.pt")
    assert read_weights(tmp_path / "x.pt").dropped.keys() == {"best", "log"}
    birdie.save_object(content, tmp_path / "x.birdie")
    back = birdie.load_object(tmp_path / "x.birdie")
    assert all(same(back["best"][name], value) for name, value in VALUES.items())
    assert type(back["log"][0]) is np.float64


class Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("state", [
    None, (1, (3,), "u4", False, b"\0" * 12), (1, (1 << 40,), numpy_values.DType("u1"), False, b"a"),
    (1, (-1,), numpy_values.DType("f3"), False, b"abc"), (1, "ab", numpy_values.DType("u1"), False, b"ab"),
    (1, (2,), numpy_values.DType("O"), False, [1, 2]), (1, (2,), numpy_values.DType("U1"), False, b"\0" * 8),
])  # fmt: skip
def test_hostile_arrays_are_none(state: Any) -> None:
    array = numpy_values.Array()
    array.__setstate__(state)
    assert numpy_values.tensor_of(array) is None


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
