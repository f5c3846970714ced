"""The cache starts the tensor that is read next: each once, at most one at a time, and none whose memory is lost."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from birdie.artifact.tensor_cache import Slot, Store, Stored

SIZE = 64
CPU = torch.device("cpu")


@dataclass
class Decoder:
    """Decodes names to tensors that hold their number, and starts those that begin with a w; notes both."""

    log: list[str] = field(default_factory=list)
    waiting: set[str] = field(default_factory=set)

    def decode(self, name: str) -> Tensor:
        self.log.append(f"decode {name}")
        return torch.full((SIZE,), float(name[1:]))

    def start(self, name: str) -> "Started | None":
        if name[0] != "w":
            return None
        assert not self.waiting, "two tensors are started at the same time"
        self.log.append(f"start {name}")
        self.waiting.add(name)
        return Started(self, name)


@dataclass
class Started:
    """A tensor that was started."""

    decoder: Decoder
    name: str

    def wait(self) -> Tensor:
        self.decoder.waiting.remove(self.name)
        self.decoder.log.append(f"wait {self.name}")
        return torch.full((SIZE,), float(self.name[1:]))


def slot(name: str) -> Slot:
    return Slot(Stored(name, (SIZE,), torch.float32), ((CPU, torch.float32),), parameter=True)


def store_of(decoder: Decoder, layers: float = 1.0) -> Store:
    store = Store(decoder.decode, lambda: decoder.log.append("close"), int(layers * 4 * SIZE), decoder.start)
    store.fit({"": slot("w0")})
    return store


def read(store: Store, names: str) -> Iterator[str]:
    """Read tensors one after the other, and yield the wrong ones."""
    for name in names.split():
        if store.get(slot(name))[0].item() != float(name[1:]):
            yield name


def test_each_tensor_is_started_while_the_one_before_it_is_used() -> None:
    decoder = Decoder()
    store = store_of(decoder)
    assert list(read(store, "w0 w1 w2")) == []
    assert decoder.log == ["decode w0", "decode w1", "decode w2"]
    decoder.log.clear()
    for _ in range(2):
        assert list(read(store, "w0 w1 w2")) == []
    first = ["decode w0", "start w1", "wait w1", "start w2", "wait w2", "start w0"]
    assert decoder.log == [*first, "wait w0", *first[1:]]


def test_tensors_that_cannot_be_started_are_passed_over() -> None:
    decoder = Decoder()
    store = store_of(decoder)
    for _ in range(3):
        assert list(read(store, "w0 b7 b8 w1 b9")) == []
    weights = [entry for entry in decoder.log if entry[-2] == "w"]
    assert weights == ["decode w0", "decode w1", "decode w0", *["start w1", "wait w1", "start w0", "wait w0"] * 2][:-1]


def test_a_tensor_that_is_not_read_after_all_is_waited_for_before_its_memory_is_given_away() -> None:
    decoder = Decoder()
    store = store_of(decoder)
    assert list(read(store, "w0 w1 w2 w0")) == []
    assert decoder.log[-1] == "start w1"
    assert list(read(store, "w2")) == []
    assert decoder.log[-3:] == ["decode w2", "wait w1", "start w0"]


@pytest.mark.parametrize("layers", [1.0, 2.5, 9.0])
def test_tensors_in_memory_are_not_started(layers: float) -> None:
    decoder = Decoder()
    store = store_of(decoder, layers)
    held = store.get(slot("w1"))
    for _ in range(3):
        assert list(read(store, "w0 w1 w2 w3")) == []
    assert held is store.get(slot("w1"))
    assert "start w1" not in decoder.log
    decodings = sum(not entry.startswith("start") for entry in decoder.log)
    assert decodings == (4 if layers == 9 else 10)  # room for one more is taken by the one that is held


def test_what_was_started_is_waited_for_when_the_cache_goes() -> None:
    decoder = Decoder()
    store = store_of(decoder)
    assert list(read(store, "w0 w1 w0")) == []
    assert decoder.waiting == {"w1"}
    del store
    gc.collect()
    assert decoder.log[-2:] == ["wait w1", "close"]
