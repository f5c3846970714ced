"""Cache of decoded tensors: the first that are read stay, up to a limit in bytes, and others are decoded at each read.

    Slot ─► TensorCache.get ─► kept, read last, or still referenced? ─► tensor
                               └─ no: decode and cast

A forward reads its weights in a cycle, and a cycle that is longer than a cache of the latest tensors never hits it. So
tensors are kept in the order in which they come; beyond the limit the one that was read last stays until the next read,
and a tensor lives as long as anything refers to it.
"""

import math
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from birdie.errors import ConfigError
from birdie.system.device import dtype_name
from birdie.system.platform import at_fork

_lock = threading.RLock()  # of all caches
at_fork(_lock.acquire, _lock.release)  # a child has only the thread that forks


@dataclass(frozen=True, slots=True)
class Slot:
    """Stand-in, in a module, for a tensor that is not decoded."""

    stored: str  # name of the entry that holds its bytes: tied tensors share one
    shape: tuple[int, ...]  # of the tensor
    # to which the decoded tensor is cast, one after the other: that of the built module, and that to load
    dtypes: tuple[torch.dtype, ...]
    device: torch.device  # of the tensor
    parameter: bool  # True for a (frozen) parameter, False for a buffer

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
        slots: all that may be read.
        cache_bytes: None: the largest of them.
    """

    def __init__(
        self,
        decode: Callable[[str], Tensor],
        close: Callable[[], None],
        slots: Collection[Slot],
        cache_bytes: int | None,
    ) -> None:
        largest = max(slots, key=lambda slot: slot.nbytes, default=None)
        room = 0 if largest is None else largest.nbytes  # for the tensor that was read last
        if largest is not None and cache_bytes is not None and cache_bytes < room:
            raise ConfigError(
                f"cache_bytes {cache_bytes:,} is less than the {room:,} of tensor {largest.stored!r} in "
                f"{dtype_name(largest.dtypes[-1])}; give that much or more"
            )
        self._limit = 0 if cache_bytes is None else cache_bytes - room
        self._decode = decode
        self._kept: dict[Slot, Tensor] = {}
        self._last: tuple[Slot, Tensor] | None = None
        self._versions: dict[Slot, int] = {}
        self._alive: weakref.WeakValueDictionary[Slot, Tensor] = weakref.WeakValueDictionary()
        self._memory: dict[Slot, weakref.ref[torch.UntypedStorage]] = {}
        weakref.finalize(self, close)

    def get(self, slot: Slot) -> Tensor:
        """Return the tensor of `slot`: the same object as long as anything refers to it."""
        return (self._get if "torch._dynamo" not in sys.modules else self._get_untraced)(slot)

    @_disable_dynamo  # torch.compile would trace the decoder; torch.compiler.disable takes a second to import
    def _get_untraced(self, slot: Slot) -> Tensor:
        return self._get(slot)

    def _get(self, slot: Slot) -> Tensor:
        with _lock:
            tensor = self._kept.get(slot)
            if tensor is None:
                tensor = self._alive.get(slot)
                self._forget_last()  # before decoding, so that the two never stand side by side
                if tensor is None:
                    tensor = self._decoded(slot)
                if slot.nbytes + sum(kept.nbytes for kept in self._kept) <= self._limit:
                    self._kept[slot] = tensor
                else:
                    self._last = slot, tensor
        _require_frozen(slot, tensor)
        return tensor

    def _forget_last(self) -> None:
        if self._last is not None:
            (slot, tensor), self._last = self._last, None
            if tensor._version != self._versions[slot]:
                self._kept[slot] = tensor
            _require_frozen(slot, tensor)

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


def _require_frozen(slot: Slot, tensor: Tensor) -> None:
    if tensor.requires_grad and tensor.is_leaf:
        raise ConfigError(
            f"tensor {slot.stored!r} is lazily loaded and cannot be trained; load it without lazy to train"
        )
