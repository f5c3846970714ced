"""Cache of decoded tensors, bounded in bytes; a tensor is decoded when it is first read.

    Slot ─► Store.get ─► changed, cached, or still referenced? ─► tensor
                         └─ no: make room, then decode and cast; start what followed it the last time

The cache has two parts. Every tensor enters the window, which evicts the oldest first. An evicted tensor moves to the
rest of the cache while there is room, and stays there. Plain least-recently-used eviction would be useless: a forward
reads its weights in a cycle, and a cycle longer than such a cache never hits it. A tensor lives as long as anything
refers to it; the cache decides only which tensors live longer.

On a GPU a tensor is decoded beside the work on the one before it: after each decoding, the tensor that was decoded next
in the last pass is started. It is held beside the cache until it is read, or until another one is decoded instead.
"""

import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from birdie.errors import ConfigError
from birdie.runtime.device import dtype_name

_SKIPPED = 8  # tensors among which one is looked for that is not in memory and can be started
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


class Pending(Protocol):
    """A tensor that is being decoded beside other work."""

    def wait(self) -> Tensor:
        """Make all later work wait for the tensor, and return it."""


class Store:
    """Cache that decodes tensors and keeps at most `cache_bytes` of them; None: 1.5 times the largest layer (`fit`).

    A lock serializes threads. A tensor that was changed in place (a step counter, for example; torch's version counter
    shows it) is never decoded again: it is kept in addition to the cache from then on. `start`, if given, starts to
    decode a tensor beside other work; it returns None for one that it cannot start.
    """

    def __init__(
        self,
        decode: Callable[[str], Tensor],
        close: Callable[[], None],
        cache_bytes: int | None,
        start: Callable[[str], Pending | None] | None = None,
    ) -> None:
        self._decode, self._start = decode, start
        self._lock = threading.RLock()
        _stores.add(self)
        self._recent: dict[Slot, Tensor] = {}  # the oldest first
        self._settled: dict[Slot, Tensor] = {}  # evicted from the window, kept for good
        self._changed: dict[Slot, Tensor] = {}
        self._versions: dict[Slot, int] = {}
        self._alive: weakref.WeakValueDictionary[Slot, Tensor] = weakref.WeakValueDictionary()
        self._memory: dict[Slot, weakref.ref[torch.UntypedStorage]] = {}
        self._allowed = cache_bytes
        self.cache_bytes, self.window = cache_bytes or 0, 0
        self._followers: dict[Slot, Slot] = {}  # slot → the one that was decoded after it
        self._last: Slot | None = None
        self._started: dict[Slot, Pending] = {}  # at most one
        weakref.finalize(self, _finish, self._started, close)

    @property
    def cached_bytes(self) -> int:
        """Bytes of the tensors in the cache now, without changed ones."""
        return _bytes(self._recent) + _bytes(self._settled)

    def get(self, slot: Slot) -> Tensor:
        """Return the tensor of `slot`: the same object as long as anything refers to it."""
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
            self._start_next(slot)
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
                tensor = self._decoded(slot)
                for _, dtype in slot.casts:  # where they are computed changes no bit
                    tensor = tensor.to(dtype)
                tensor = tensor.to(slot.casts[-1][0])
            return nn.Parameter(tensor, requires_grad=False) if slot.parameter else tensor

    def _decoded(self, slot: Slot) -> Tensor:
        """Return the decoded tensor: the one that was started, if that was the right one."""
        pending = self._started.pop(slot, None)
        return self._decode(slot.stored.name) if pending is None else pending.wait()

    def _start_next(self, slot: Slot) -> None:
        """Note that `slot` was decoded, and start the tensor that followed it the last time."""
        if self._start is None:
            return
        if self._last is not None:
            self._followers[self._last] = slot
        self._last = slot
        upcoming = self._upcoming(slot)
        if any(one in self._started for one in upcoming):
            return
        for pending in self._started.values():  # started in vain: its memory is given to others
            pending.wait()
        self._started.clear()
        for one in upcoming:
            if not any(one in part for part in (self._recent, self._settled, self._changed, self._alive)):
                with torch.inference_mode(False), torch.no_grad():
                    started = self._start(one.stored.name)
                if started is not None:
                    self._started[one] = started
                    return

    def _upcoming(self, slot: Slot) -> list[Slot]:
        """Return the next slots in the order of the last pass, until this one comes again."""
        upcoming: list[Slot] = []
        follower = self._followers.get(slot)
        while follower is not None and follower != slot and len(upcoming) < _SKIPPED:
            upcoming.append(follower)
            follower = self._followers.get(follower)
        return upcoming

    def release(self, slot: Slot) -> Tensor | None:
        """Drop `slot` from the cache; return its tensor if that was changed, for it cannot be decoded again."""
        with self._lock:
            for part in (self._recent, self._settled):
                tensor = part.pop(slot, None)
                if tensor is not None and self._is_changed(slot, tensor):
                    self._changed[slot] = tensor
            return self._changed.get(slot)

    def fit(self, layer: Mapping[str, Slot]) -> None:
        """Widen the window to 1.5 times the tensors of a layer, within the limit on the cache."""
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


_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_held: list[Store] = []
_forking = threading.Lock()  # two threads may fork


def _before_fork() -> None:
    """Wait until no other thread is inside of a cache: the child has only the thread that forks."""
    _forking.acquire()
    _held[:] = list(_stores)
    for store in _held:
        store._lock.acquire()


def _after_fork() -> None:
    while _held:
        _held.pop()._lock.release()
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


def _finish(started: dict[Slot, Pending], close: Callable[[], None]) -> None:
    """Wait for what was started, whose memory others get next, and close the file."""
    for pending in started.values():
        pending.wait()
    close()


def _bytes(part: Mapping[Slot, Tensor]) -> int:
    return sum(slot.nbytes for slot in part)


def _require_frozen(slot: Slot, tensor: Tensor) -> None:
    if tensor.requires_grad and tensor.is_leaf:
        raise ConfigError(
            f"tensor {slot.stored.name!r} is lazily loaded and cannot be trained; load it without lazy to train"
        )
