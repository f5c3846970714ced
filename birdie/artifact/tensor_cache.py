"""Cache of decoded tensors, bounded in bytes; a tensor is decoded when it is first read.

    Slot ─► Store.get ─► changed, cached, or still referenced? ─► tensor
                         └─ no: make room, then decode and cast

The cache has two parts. Every tensor enters the window, which evicts the oldest first. An evicted tensor moves to the
rest of the cache while there is room, and stays there. Plain least-recently-used eviction would be useless: a forward
reads its weights in a cycle, and a cycle longer than such a cache never hits it. A tensor lives as long as anything
refers to it; the cache decides only which tensors live longer.
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

ROOM = 1.5  # size of the window over the largest layer: a layer's forward may read weights of its children as well


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file, not decoded. `name` is the entry that holds its bytes: tied tensors share one."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Slot:
    """Stand-in, in a module, for a tensor that is not decoded.

    Attributes:
        stored: the tensor in the file.
        casts: (device, dtype) pairs to convert the decoded tensor to, in order: that of the built module, then moves.
        parameter: True for a (frozen) parameter, False for a buffer.
    """

    stored: Stored
    casts: tuple[tuple[torch.device, torch.dtype], ...]
    parameter: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor once decoded and cast."""
        return math.prod(self.stored.shape) * self.casts[-1][1].itemsize

    def cast(self, device: torch.device, dtype: torch.dtype) -> "Slot":
        """Return the slot of the same tensor, moved once more; moves that keep the dtype replace the last one."""
        kept = self.casts[:-1] if self.casts[-1][1] == dtype else self.casts
        return replace(self, casts=(*kept, (device, dtype)))


class Store:
    """Cache that decodes tensors and keeps at most `cache_bytes` of them; None: 1.5 times the largest layer (`fit`).

    A lock serializes threads. A tensor that was changed in place (a step counter, for example; torch's version counter
    shows it) is never decoded again: it is kept in addition to the cache from then on.
    """

    def __init__(self, decode: Callable[[str], Tensor], close: Callable[[], None], cache_bytes: int | None) -> None:
        self._decode = decode
        self._lock = threading.RLock()
        self._recent: dict[Slot, Tensor] = {}  # the oldest first
        self._settled: dict[Slot, Tensor] = {}  # evicted from the window, kept for good
        self._changed: dict[Slot, Tensor] = {}
        self._versions: dict[Slot, int] = {}
        self._alive: weakref.WeakValueDictionary[Slot, Tensor] = weakref.WeakValueDictionary()
        self._memory: dict[Slot, weakref.ref[torch.UntypedStorage]] = {}
        self._allowed = cache_bytes
        self.cache_bytes, self.window = cache_bytes or 0, 0
        weakref.finalize(self, close)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the tensors in the cache now, without changed ones."""
        return _bytes(self._recent) + _bytes(self._settled)

    def get(self, slot: Slot) -> Tensor:
        """Return the tensor of `slot`: the same object as long as anything refers to it.

        Raises:
            ArtifactError: its bytes are corrupt.
            ConfigError: the caller set `requires_grad` on it.
        """
        with self._lock:
            tensor = self._changed.get(slot)
            if tensor is None:
                tensor = self._settled.get(slot)
            if tensor is None:
                tensor = self._through_window(slot)
        _require_frozen(slot, tensor)
        return tensor

    def _through_window(self, slot: Slot) -> Tensor:
        """Return the tensor of `slot`, decoded if necessary, and make it the newest of the window."""
        tensor = self._recent.pop(slot, None)
        if tensor is None:
            tensor = self._alive.get(slot)
            self._make_room(slot.nbytes)  # before decoding, so that the two never stand side by side
        if tensor is None:
            tensor = self._revived(slot)
            self._versions[slot] = tensor._version
            self._alive[slot] = tensor
            if tensor.is_contiguous() and tensor.storage_offset() == 0:
                self._memory[slot] = weakref.ref(tensor.untyped_storage())
        self._recent[slot] = tensor
        return tensor

    def _make_room(self, size: int) -> None:
        while self._recent and _bytes(self._recent) + size > self.window:
            oldest = next(iter(self._recent))
            tensor = self._recent.pop(oldest)
            _require_frozen(oldest, tensor)
            if self._is_changed(oldest, tensor):
                self._changed[oldest] = tensor
            elif _bytes(self._settled) + oldest.nbytes <= self.cache_bytes - self.window:
                self._settled[oldest] = tensor

    def _is_changed(self, slot: Slot, tensor: Tensor) -> bool:
        return tensor._version != self._versions[slot]

    def _revived(self, slot: Slot) -> Tensor:
        """Return the tensor over memory that a view of it (as `state_dict` creates) has kept alive, or decode it."""
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
        """Drop `slot` from the cache; return its tensor if that was changed, for it cannot be decoded again."""
        with self._lock:
            for part in (self._recent, self._settled):
                tensor = part.pop(slot, None)
                if tensor is not None and self._is_changed(slot, tensor):
                    self._changed[slot] = tensor
            return self._changed.get(slot)

    def fit(self, layer: Mapping[str, Slot]) -> None:
        """Widen the window to 1.5 times the tensors of a layer, within the limit on the cache.

        Raises:
            ConfigError: a tensor of the layer is larger than the cache may be.
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
                    f"{dtype_name(slot.casts[-1][1])}; give that much or more"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return this very cache: copies of a module share it."""
        return self


def _bytes(part: Mapping[Slot, Tensor]) -> int:
    return sum(slot.nbytes for slot in part)


def _require_frozen(slot: Slot, tensor: Tensor) -> None:
    if tensor.requires_grad and tensor.is_leaf:
        raise ConfigError(
            f"tensor {slot.stored.name!r} is lazily loaded and cannot be trained; load it without lazy to train"
        )
