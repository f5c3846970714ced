"""A stand-in for CUDA graphs on the CPU: it records torch's operations with their tensors, and repeats them.

As a CUDA graph it repeats addresses and numbers, runs nothing of what it records, and refuses to read a value of a
tensor while it records.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
READS = ("_local_scalar_dense", "item", "equal", "nonzero", "masked_select", "unique", "is_nonzero")


class RecordedGraphs:
    """Graphs of recorded operations.

    Attributes:
        calls: names of all operations of each graph.
    """

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Record `work`; every tensor from before has its old content afterwards."""
        recorder = _Recorder()
        with recorder:
            result = work()
        recorder.undo()
        self.calls.append([str(call[0]) for call in recorder.recorded])
        return recorder.replay, result


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self._created: set[int] = set()
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in inputs:
            self._keep(tensor)
        known = {_storage(tensor) for tensor in inputs}
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._created.update(_storage(tensor) for tensor in outputs if _storage(tensor) not in known)
        self.recorded.append((func, args, kwargs, outputs))
        return result

    def _keep(self, tensor: Tensor) -> None:
        key = _storage(tensor)
        if key not in self._created and key not in self._saved:
            values = tensor.detach().new_empty(0).set_(tensor.untyped_storage())
            self._saved[key] = values, values.clone()

    def undo(self) -> None:
        for values, saved in self._saved.values():
            values.copy_(saved)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, outputs in self.recorded:
            shared = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for old, new in zip(outputs, again, strict=True):
                if _storage(old) not in shared:
                    old.copy_(new)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
