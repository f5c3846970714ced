"""Cache of decoded tensors: the first that are read stay, up to a limit in bytes, and others are decoded again.

    Slot ─► TensorCache.get ─► kept, of the layer in use, or still referenced? ─► tensor
                               └─ no: decode and cast

A forward reads its weights in a cycle, and a cycle that is longer than a cache of the latest tensors never hits it. So
tensors are kept in the order in which they come, except that the layer in use may read its own several times: the
latest tensors stay as long as there is room in `window`. Beyond that, a tensor lives as long as anything refers to it.
"""

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from birdie.errors import ConfigError
from birdie.system.device import dtype_name
from birdie.system.platform import at_fork

ROOM = 1.5  # size of the window over the largest layer: a layer's forward may read weights of its children as well


@dataclass(frozen=True, slots=True)
class Slot:
    """Stand-in, in a module, for a tensor that is not decoded.

    Attributes:
        stored: name of the entry that holds its bytes: tied tensors share one.
        shape: of the tensor.
        dtypes: to which the decoded tensor is cast, one after the other: that of the built module, and that to load.
        device: of the tensor.
        parameter: True for a (frozen) parameter, False for a buffer.
    """

    stored: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    parameter: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor once decoded and cast."""
        return math.prod(self.shape) * self.dtypes[-1].itemsize


class TensorCache:
    """Decodes tensors, and keeps at most `cache_bytes` of them; a lock serializes threads.

    A tensor that was changed in place (a step counter, for example; torch's version counter shows it) cannot be decoded
    again: it is kept from then on, whatever its size.

    Args:
        decode: name of a stored tensor → tensor.
        close: called when nothing refers to the cache.
        layers: name → slot, of the tensors of each module.
        cache_bytes: None: 1.5 times the largest layer.
    """

    def __init__(
        self,
        decode: Callable[[str], Tensor],
        close: Callable[[], None],
        layers: Iterable[Mapping[str, Slot]],
        cache_bytes: int | None,
    ) -> None:
        layers = list(layers)
        self.window = int(ROOM * max((_bytes(layer.values()) for layer in layers), default=0))
        self.cache_bytes = self.window if cache_bytes is None else cache_bytes
        self.window = min(self.window, self.cache_bytes)
        for name, slot in (item for layer in layers for item in layer.items()):
            if slot.nbytes > self.cache_bytes:
                raise ConfigError(
                    f"cache_bytes {self.cache_bytes:,} is less than the {slot.nbytes:,} of tensor {name!r} in "
                    f"{dtype_name(slot.dtypes[-1])}; give that much or more"
                )
        self._decode, self._lock = decode, threading.RLock()
        self._kept: dict[Slot, Tensor] = {}
        self._latest: dict[Slot, Tensor] = {}  # the oldest first
        self._versions: dict[Slot, int] = {}
        self._alive: weakref.WeakValueDictionary[Slot, Tensor] = weakref.WeakValueDictionary()
        self._memory: dict[Slot, weakref.ref[torch.UntypedStorage]] = {}
        _caches.add(self)
        weakref.finalize(self, close)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the tensors in the cache now."""
        return _bytes(self._kept) + _bytes(self._latest)

    def get(self, slot: Slot) -> Tensor:
        """Return the tensor of `slot`: the same object as long as anything refers to it."""
        with self._lock:
            tensor = self._kept.get(slot)
            if tensor is None:
                tensor = self._latest.pop(slot, None)
                if tensor is None:
                    tensor = self._alive.get(slot)
                    self._make_room(slot.nbytes)  # before decoding, so that the two never stand side by side
                if tensor is None:
                    tensor = self._decoded(slot)
                    if _bytes(self._kept) + slot.nbytes <= self.cache_bytes - self.window:
                        self._kept[slot] = tensor
                if slot not in self._kept:
                    self._latest[slot] = tensor
        _require_frozen(slot, tensor)
        return tensor

    def _make_room(self, size: int) -> None:
        while self._latest and _bytes(self._latest) + size > self.window:
            oldest = next(iter(self._latest))
            tensor = self._latest.pop(oldest)
            _require_frozen(oldest, tensor)
            if tensor._version != self._versions[oldest]:
                self._kept[oldest] = tensor

    def _decoded(self, slot: Slot) -> Tensor:
        """Return the tensor over memory that a view of it (as `state_dict` creates) has kept alive, or decode it."""
        memory = self._memory[slot]() if slot in self._memory else None
        with torch.inference_mode(False), torch.no_grad():
            if memory is not None and memory.nbytes() == slot.nbytes:
                tensor = torch.empty(0, dtype=slot.dtypes[-1], device=slot.device).set_(memory).view(slot.shape)
            else:
                tensor = self._decode(slot.stored)
                for dtype in slot.dtypes:  # where they are computed changes no bit
                    tensor = tensor.to(dtype)
                tensor = tensor.to(slot.device)
            tensor = nn.Parameter(tensor, requires_grad=False) if slot.parameter else tensor
        self._versions[slot], self._alive[slot] = tensor._version, tensor
        if tensor.is_contiguous() and tensor.storage_offset() == 0:
            self._memory[slot] = weakref.ref(tensor.untyped_storage())
        return tensor


_caches: weakref.WeakSet[TensorCache] = weakref.WeakSet()
_held: list[TensorCache] = []
_forking = threading.Lock()  # two threads may fork


def _before_fork() -> None:
    """Wait until no other thread is inside of a cache: the child has only the thread that forks."""
    _forking.acquire()
    _held[:] = list(_caches)
    for cache in _held:
        cache._lock.acquire()


def _after_fork() -> None:
    while _held:
        _held.pop()._lock.release()
    _forking.release()


at_fork(_before_fork, _after_fork)


def _bytes(slots: Iterable[Slot]) -> int:
    return sum(slot.nbytes for slot in slots)


def _require_frozen(slot: Slot, tensor: Tensor) -> None:
    if tensor.requires_grad and tensor.is_leaf:
        raise ConfigError(
            f"tensor {slot.stored!r} is lazily loaded and cannot be trained; load it without lazy to train"
        )
