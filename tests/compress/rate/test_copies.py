"""Equal tensors are stored once, and are independent tensors again when they are loaded."""

import io
import json
from typing import Any

import pytest
import torch
from torch import Tensor

import birdie
from birdie.artifact import metadata
from birdie.compress.rate.assignment import assign
from birdie.compress.rate.groups import merge_copies
from birdie.compress.rate.target import Target
from birdie.compress.state import ModelState
from birdie.errors import ArtifactError
from tests.artifact.states import same_bits

TABLE = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))


def copies(state: dict[str, Tensor], schemes: Any = None) -> dict[str, str]:
    assignment = merge_copies(assign(ModelState.of(state), schemes, Target()))
    assert assignment.tensors.keys() == state.keys() - assignment.ties.keys()
    return {name: assignment.ties[name] for name in assignment.copies}


def saved(state: Any, **settings: Any) -> bytes:
    file = io.BytesIO()
    birdie.save(state, file, **settings)
    return file.getvalue()


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        *(({}, dtype) for dtype in (torch.float32, torch.bfloat16, torch.int32)),
        *((settings, torch.float32) for settings in ({"bits": 16}, {"lossless": True}, {"scheme": "int4"})),
    ],
    ids=str,
)
def test_a_copy_costs_a_few_bytes_and_is_a_tensor_of_its_own(settings: dict[str, Any], dtype: torch.dtype) -> None:
    table = (100 * TABLE).to(dtype)
    once, twice = {"embed": table}, {"embed": table, "head": table.clone()}
    file = saved(twice, **settings)
    assert len(file) <= len(saved(once, **settings)) + 64
    loaded = birdie.load(file)
    assert same_bits(loaded["head"], loaded["embed"])
    loaded["head"].zero_()
    assert loaded["embed"].any()


def test_ties_stay_ties_beside_copies() -> None:
    one, other = TABLE.clone(), TABLE.clone()
    state = {"a": TABLE, "b": one, "c": one, "d": other, "e": other}
    assert copies(state) == {"a": "b"}
    loaded = birdie.load(saved(state))
    memory = {name: tensor.data_ptr() for name, tensor in loaded.items()}
    assert memory["b"] == memory["c"]
    assert memory["d"] == memory["e"]
    assert len(set(memory.values())) == 3


def test_equal_bits_of_one_kind_are_equal() -> None:
    changed, zeros = TABLE.clone(), TABLE.masked_fill(TABLE < 0, 0)
    changed[40, 7] += 1e-3
    assert copies({"a": TABLE, "b": changed}) == {}
    assert copies({"a": TABLE, "b": TABLE.reshape(48, 64)}) == {}
    assert copies({"a": TABLE, "b": TABLE.double()}) == {}
    assert copies({"a": zeros, "b": torch.where(TABLE < 0, -0.0, TABLE)}) == {}
    assert copies({"a": TABLE.T, "b": TABLE.T.contiguous()}) == {"b": "a"}
    assert copies({name: TABLE.clone() for name in "abc"}) == {"b": "a", "c": "a"}


def test_averages_of_an_optimizer_are_independent_again() -> None:
    checkpoint = {"exp_avg": TABLE, "exp_avg_sq": TABLE.clone(), "step": 1}
    file = io.BytesIO()
    birdie.save_object(checkpoint, file)
    back = birdie.load_object(file.getvalue())
    assert torch.equal(back["exp_avg"], back["exp_avg_sq"])
    assert back["exp_avg"].data_ptr() != back["exp_avg_sq"].data_ptr()


def test_modules_get_their_own_tensors() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    model[1].load_state_dict(model[0].state_dict())
    other = birdie.load(saved(model), into=torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)))
    first, _, second, _ = other.parameters()
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


def test_copies_count_for_the_limit_of_decoded_bytes() -> None:
    file = saved({name: TABLE.clone() for name in "abcd"})
    with pytest.raises(ArtifactError, match=f"{4 * TABLE.nbytes:,} bytes"):
        birdie.load(file, max_bytes=4 * TABLE.nbytes - 1)
    assert len(birdie.load(file, max_bytes=4 * TABLE.nbytes)) == 4


@pytest.mark.parametrize("wrong", [[1], [-1], [0, 0], "0", [True], [0.0], {}, 5])
def test_a_list_of_copies_that_no_file_has_is_refused(wrong: Any) -> None:
    with pytest.raises(ArtifactError, match="copies"):
        metadata.parse(json.dumps({"copies": wrong}).encode(), "x.birdie", aliases=1)
    assert metadata.copies_in(metadata.parse(b'{"copies":[0]}', "x.birdie", aliases=1), ["head"]) == ["head"]
