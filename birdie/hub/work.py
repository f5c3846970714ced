"""Work of a forward pass: counted, so that files do not depend on clocks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from birdie.compress.calibration.modes import in_mode
from birdie.compress.calibration.synthetic import Inputs, forward

_ELEMENT, _CALL = 30, 200_000  # work of an element that is computed, and of a call, in that of FLOPs of a product


@dataclass(slots=True)
class Work:
    """Work of a forward pass, in FLOPs of products that take as long; a count, so that files do not depend on clocks.

    Attributes:
        calls: of functions, whatever the samples.
        samples: grows with the samples.
    """

    calls: float = 0.0
    samples: float = 0.0

    @property
    def total(self) -> float:
        """Work of both kinds."""
        return self.calls + self.samples


def work_of(model: nn.Module, keywords: Mapping[str, Any], spent: Work | None = None) -> Work:
    """Return the work of a forward pass, and add it to what was spent before, even if it fails."""
    counter = _WorkCounter()
    try:
        with in_mode(model.modules(), training=False), torch.no_grad(), counter:
            forward(model, Inputs(keywords=keywords))
    finally:
        if spent is not None:
            spent.calls += counter.work.calls
            spent.samples += counter.work.samples
    return counter.work


class _WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.work.calls += _CALL
        self.work.samples += _ELEMENT * sum(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        if (flops := flop_registry.get(func._overloadpacket)) is not None:
            self.work.samples += flops(*args, **(kwargs or {}), out_val=out)
        return out
