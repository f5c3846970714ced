"""A module whose loading fails is as it was, whatever its own code had done until then."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import birdie
from birdie.compress.filling import fill
from birdie.errors import WeightsError

Act = Callable[["Part"], object]


class Part(nn.Module):
    """Changes itself before or after torch copies values into it."""

    count: Tensor
    weight: nn.Parameter

    def __init__(self, act: Act | None = None, *, first: bool = False, persistent: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.register_buffer("count", torch.zeros(3), persistent=persistent)
        self.calls: list[int] = [1]
        self.names = {"a"}
        self.act, self.first = act, first

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if self.act is not None and self.first:
            self.act(self)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if self.act is not None and not self.first:
            self.act(self)


class Model(nn.Module):
    """Two parts, the first of which shares a weight with the head."""

    first: Part
    last: Part

    def __init__(self, act: Act | None = None, last: Act | None = None, **options: Any) -> None:
        super().__init__()
        self.first, self.last = Part(act, **options), Part(last, **options)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.first.weight


def add_to_weight(part: Part) -> None:
    with torch.no_grad():
        part.weight.add_(1)


def delete(part: Part) -> None:
    del part.count


ACTS: dict[str, Act] = {
    "fill": lambda part: part.count.fill_(9),
    "item": lambda part: part.count.__setitem__(0, 5),
    "add": add_to_weight,
    "a view": lambda part: part.weight.data.view(-1)[2:].mul_(3).add_(1),
    "data": lambda part: setattr(part.weight, "data", torch.ones(4, 4)),
    "a parameter": lambda part: setattr(part, "weight", nn.Parameter(torch.ones(4, 4))),
    "a buffer more": lambda part: part.register_buffer("more", torch.ones(2)),
    "a buffer less": delete,
    "size": lambda part: part.count.resize_(70),
    "out": lambda part: torch.add(part.count, 1, out=part.count),
    "memory": lambda part: part.count.set_(torch.ones(3).untyped_storage()),
    "flag": lambda part: part.weight.requires_grad_(False),
    "several": lambda part: torch._foreach_add_([part.count, part.weight.data], 1),
    "normal": lambda part: nn.init.normal_(part.weight),
    "a list": lambda part: part.calls.append(2),
    "a set": lambda part: part.names.clear(),
    "a module": lambda part: setattr(part, "inner", nn.Linear(1, 1)),
    "a hook": lambda part: part.register_forward_hook(lambda *_: None),
    "mode": lambda part: part.eval(),
}


def crash(_: Part) -> None:
    raise ZeroDivisionError("at the end")


def crash_later(model: nn.Module, _: Any) -> None:
    raise ZeroDivisionError(type(model).__name__)


def state_of(model: nn.Module, *, addresses: bool = True) -> dict[str, Any]:
    """Everything about a module that a loading could change."""
    parts = {
        name: {key: list(value) if isinstance(value, dict | list | set) else value for key, value in vars(part).items()}
        for name, part in model.named_modules()
    }
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    content = {
        name: (id(tensor), addresses and tensor.data_ptr(), tensor.requires_grad, tensor.tolist())
        for name, tensor in tensors
        if isinstance(tensor, Tensor)
    }
    return {"parts": parts, "tensors": content, "saved": list(model.state_dict())}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("first", [True, False], ids=["before the copy", "after it"])
@pytest.mark.parametrize("persistent", [True, False], ids=["saved", "not saved"])
@pytest.mark.parametrize("failure", ["code of the last part", "a hook afterwards", "shape", "missing"])
def test_a_module_is_as_it_was_after_an_error(act: str, first: bool, persistent: bool, failure: str) -> None:
    options = {"first": first, "persistent": persistent}
    state = Model(persistent=persistent).state_dict()
    model = Model(ACTS[act], crash if failure.startswith("code") else None, **options)
    if failure == "shape":
        model.norm = nn.BatchNorm1d(5)
    if failure == "missing":
        model.more = nn.Linear(2, 2)
    if "hook" in failure:
        model.register_load_state_dict_post_hook(crash_later)
    addresses = act != "size"  # which the allocator may change
    original = state_of(model, addresses=addresses)
    with pytest.raises(WeightsError):
        fill(model, {name: torch.full_like(tensor, 7) for name, tensor in state.items()}, "the file")
    assert state_of(model, addresses=addresses) == original
    assert model.head.weight is model.first.weight


def test_without_an_error_what_the_code_of_the_module_did_stays() -> None:
    state = {name: torch.full_like(tensor, 7) for name, tensor in Model().state_dict().items()}
    for name, act in ACTS.items():
        model = Model(act)
        if name not in ("a buffer less", "a parameter", "size", "memory", "a module"):  # which break the module
            fill(model, state, "the file")
            assert torch.equal(model.last.weight, torch.full((4, 4), 7.0))
    model = Model(ACTS["fill"])
    fill(model, state, "the file")
    assert model.first.count.tolist() == [9, 9, 9]
    assert model.first.weight.data_ptr() == model.head.weight.data_ptr()


def test_a_damaged_tensor_at_the_end_leaves_the_module_as_it_was(tmp_path: Any) -> None:
    model, path = Model(), tmp_path / "model.birdie"
    birdie.save({name: torch.randn(tensor.shape) for name, tensor in model.state_dict().items()}, path, lossless=True)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    original = state_of(model)
    for attempt in (partial(birdie.load, path, into=model), partial(birdie.load, path, into=model, strict=False)):
        with pytest.raises(birdie.ArtifactError):
            attempt()
        assert state_of(model) == original


def test_memory_is_copied_only_where_something_is_written() -> None:
    """Values that torch copies go to new memory, so a loading takes no second copy of the module."""
    state, cloned = Model().state_dict(), []
    with pytest.MonkeyPatch.context() as patch:
        clone = Tensor.clone
        patch.setattr(Tensor, "clone", lambda tensor, **options: cloned.append(tensor) or clone(tensor, **options))
        fill(Model(ACTS["fill"], first=True), dict(state), "the file")
    assert sum(tensor.numel() == 3 for tensor in cloned) <= 2
