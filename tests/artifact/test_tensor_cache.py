"""The cache keeps the first tensors that fit beside the latest; others are decoded again, unless they changed."""

import gc
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from birdie.artifact.tensor_cache import Slot, TensorCache

SIZE = 64
CPU = torch.device("cpu")


@dataclass
class Decoder:
    """Decodes names to tensors that hold their number, and notes the names."""

    log: list[str] = field(default_factory=list)

    def decode(self, name: str) -> Tensor:
        self.log.append(name)
        return torch.full((SIZE,), float(name))


def slot(name: str) -> Slot:
    return Slot(name, (SIZE,), (torch.float32,), CPU, parameter=True)


def cache_of(decoder: Decoder, layers: float = 1.0) -> TensorCache:
    return TensorCache(decoder.decode, lambda: decoder.log.append("close"), [slot("0")], int(layers * 4 * SIZE))


def read(cache: TensorCache, names: str) -> None:
    for name in names:
        assert cache.get(slot(name))[0].item() == float(name)


@pytest.mark.parametrize(("layers", "later"), [(1.0, "0123"), (1.5, "0123"), (2.5, "123"), (3.5, "23"), (5.5, "")])
def test_the_first_tensors_that_fit_are_kept(layers: float, later: str) -> None:
    decoder = Decoder()
    cache = cache_of(decoder, layers)
    for _ in range(3):
        read(cache, "0123")
    assert "".join(decoder.log) == "0123" + 2 * later


def test_the_tensor_that_was_read_last_is_not_decoded_again() -> None:
    decoder = Decoder()
    cache = cache_of(decoder)
    read(cache, "00111")
    assert "".join(decoder.log) == "01"


def test_a_tensor_that_is_held_is_the_same_object() -> None:
    decoder = Decoder()
    cache = cache_of(decoder)
    held, view = cache.get(slot("0")), cache.get(slot("1")).detach()
    read(cache, "234")
    assert cache.get(slot("0")) is held
    assert cache.get(slot("1")).data_ptr() == view.data_ptr()
    assert "".join(decoder.log) == "01234"


def test_a_changed_tensor_is_kept() -> None:
    decoder = Decoder()
    cache = cache_of(decoder)
    cache.get(slot("0")).fill_(7)
    read(cache, "1234")
    assert cache.get(slot("0"))[0].item() == 7
    assert "".join(decoder.log) == "01234"


def test_the_file_is_closed_with_the_cache() -> None:
    decoder = Decoder()
    cache = cache_of(decoder)
    del cache
    gc.collect()
    assert decoder.log == ["close"]
