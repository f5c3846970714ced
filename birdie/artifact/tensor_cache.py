"""Tensors of a file, decoded when asked for; a bounded number of them is held.

    Slot ─► Store.get ─► changed, cached, or still in use somewhere? ─► tensor
                         └─ no: make room, then decode and cast

The cache has two parts. Through the window everything passes, the oldest leaving first. What leaves settles in the rest
of the cache while there is room, and stays: a forward reads its weights in a circle, and of a circle longer than itself
a least-recently-used cache never hits one. A tensor lives as long as somebody holds it; the cache decides only what
lives longer.
"""

import math
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from birdie.errors import ConfigError
from birdie.runtime.device import dtype_name

ROOM = 1.5  # of the window over the largest layer: what a layer's forward reads of its children


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file, undecoded. `name` is that of its bytes: tied tensors have one."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Slot:
    """What stands in a module for a tensor that is not decoded.

    Attributes:
        stored: what the file holds.
        casts: devices and dtypes it goes through once decoded, as the module was built, then moved.
        parameter: whether it is read as a parameter (frozen), not as a buffer.
    """

    stored: Stored
    casts: tuple[tuple[torch.device, torch.dtype], ...]
    parameter: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor once decoded and cast."""
        return math.prod(self.stored.shape) * self.casts[-1][1].itemsize

    def cast(self, device: torch.device, dtype: torch.dtype) -> "Slot":
        """The same tensor, moved once more."""
        return self if self.casts[-1] == (device, dtype) else replace(self, casts=(*self.casts, (device, dtype)))


class Store:
    """Decodes tensors and holds at most `cache_bytes` of them; None stands for what `fit` finds. Threads take turns.

    A tensor that was changed in place (a counter, say; torch's version counter tells) is never decoded again: it is
    held beside the cache from then on.
    """

    def __init__(self, decode: Callable[[str], Tensor], close: Callable[[], None], cache_bytes: int | None) -> None:
        self._decode = decode
        self._lock = threading.RLock()
        self._passing: dict[Slot, Tensor] = {}  # the oldest first
        self._settled: dict[Slot, Tensor] = {}
        self._changed: dict[Slot, Tensor] = {}
        self._versions: dict[Slot, int] = {}
        self._alive: weakref.WeakValueDictionary[Slot, Tensor] = weakref.WeakValueDictionary()
        self._memory: dict[Slot, weakref.ref[torch.UntypedStorage]] = {}
        self._allowed = cache_bytes
        self.cache_bytes, self.window = cache_bytes or 0, 0
        weakref.finalize(self, close)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the tensors held now, changed ones aside."""
        return _bytes(self._passing) + _bytes(self._settled)

    def get(self, slot: Slot) -> Tensor:
        """The tensor of `slot`; the same one as long as anybody holds it.

        Raises:
            ArtifactError: its bytes are corrupt.
            ConfigError: somebody asked for its gradient.
        """
        with self._lock:
            tensor = self._changed.get(slot)
            if tensor is None:
                tensor = self._settled.get(slot)
            if tensor is None:
                tensor = self._pass(slot)
        _require_frozen(slot, tensor)
        return tensor

    def _pass(self, slot: Slot) -> Tensor:
        tensor = self._passing.pop(slot, None)
        if tensor is None:
            tensor = self._alive.get(slot)
            self._make_room(slot.nbytes)  # before decoding, so that the two never stand side by side
        if tensor is None:
            tensor = self._revived(slot)
            self._versions[slot] = tensor._version
            self._alive[slot] = tensor
            if tensor.is_contiguous() and tensor.storage_offset() == 0:
                self._memory[slot] = weakref.ref(tensor.untyped_storage())
        self._passing[slot] = tensor
        return tensor

    def _make_room(self, size: int) -> None:
        while self._passing and _bytes(self._passing) + size > self.window:
            oldest = next(iter(self._passing))
            tensor = self._passing.pop(oldest)
            _require_frozen(oldest, tensor)
            if self._is_changed(oldest, tensor):
                self._changed[oldest] = tensor
            elif _bytes(self._settled) + oldest.nbytes <= self.cache_bytes - self.window:
                self._settled[oldest] = tensor

    def _is_changed(self, slot: Slot, tensor: Tensor) -> bool:
        return tensor._version != self._versions[slot]

    def _revived(self, slot: Slot) -> Tensor:
        """The tensor in memory that a view of it (as `state_dict` makes) has kept, or decoded."""
        memory = self._memory[slot]() if slot in self._memory else None
        with torch.inference_mode(False), torch.no_grad():
            if memory is not None and memory.nbytes() == slot.nbytes:
                device, dtype = slot.casts[-1]
                tensor = torch.empty(0, dtype=dtype, device=device).set_(memory).view(slot.stored.shape)
            else:
                tensor = self._decode(slot.stored.name)
                for device, dtype in slot.casts:
                    tensor = tensor.to(device, dtype)
            return nn.Parameter(tensor, requires_grad=False) if slot.parameter else tensor

    def release(self, slot: Slot) -> Tensor | None:
        """Hold `slot` no longer; its tensor, if that was changed and cannot be decoded again."""
        with self._lock:
            for part in (self._passing, self._settled):
                tensor = part.pop(slot, None)
                if tensor is not None and self._is_changed(slot, tensor):
                    self._changed[slot] = tensor
            return self._changed.get(slot)

    def fit(self, layer: Mapping[str, Slot]) -> None:
        """Make the window large enough for a layer of these tensors and half as much again, as far as that is allowed.

        Raises:
            ConfigError: not even one of them fits.
        """
        self.window = max(self.window, int(ROOM * sum(slot.nbytes for slot in layer.values())))
        if self._allowed is None:
            self.cache_bytes = max(self.cache_bytes, self.window)
            return
        self.window = min(self.window, self._allowed)
        for name, slot in layer.items():
            if slot.nbytes > self._allowed:
                raise ConfigError(
                    f"cache_bytes {self._allowed:,} is less than the {slot.nbytes:,} of tensor {name!r} in "
                    f"{dtype_name(slot.casts[-1][1])}; load with that much or more"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copies of a module share its store: nothing in it belongs to one of them."""
        return self


def _bytes(part: Mapping[Slot, Tensor]) -> int:
    return sum(slot.nbytes for slot in part)


def _require_frozen(slot: Slot, tensor: Tensor) -> None:
    if tensor.requires_grad and tensor.is_leaf:
        raise ConfigError(
            f"tensor {slot.stored.name!r} is lazily loaded and cannot be trained; load it without lazy to train"
        )
