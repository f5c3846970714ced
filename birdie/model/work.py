"""What one forward and backward pass of a GPT takes, counted without computing anything.

    GPT on the meta device ──loss, backward──► every operation passes by ──► FLOPs, bytes moved, kernels, bytes kept

Shapes alone go through the model, so whatever techniques it has are counted as they run. Conventions: a product of
(m, k) and (k, n) is 2·m·k·n FLOPs; attention is counted apart, by its causal half, and without what a fused kernel
computes again in the backward pass; moved bytes are all that operations other than products read and write, each by
itself, as they are without a compiler; kept bytes are what the forward pass leaves for the backward pass.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from birdie.model.config import GPTConfig
from birdie.model.gpt import GPT

_FREE = ("aten::_unsafe_view", "aten::empty", "aten::detach")  # besides views: nothing is read or written
_PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")


@dataclass(frozen=True, slots=True)
class Work:
    """Of a forward and a backward pass over one batch.

    Attributes:
        matrix_flops: of products with weights.
        attention_flops: of queries with keys and of shares with values, the causal half.
        moved_bytes: read and written by all that is not a product.
        kernels: operations that compute something.
        kept_bytes: held from forward to backward, weights left out.
    """

    matrix_flops: int
    attention_flops: int
    moved_bytes: int
    kernels: int
    kept_bytes: int

    @property
    def flops(self) -> int:
        """Of products and attention."""
        return self.matrix_flops + self.attention_flops


@lru_cache(maxsize=8)
def work(config: GPTConfig, sequences: int, length: int, dtype: torch.dtype, *, looping: bool) -> Work:
    """What `GPT(config).loss` and its backward pass take for `sequences` of `length` tokens, activations in `dtype`."""
    with torch.device("meta"):
        model = GPT(config)
        ids = torch.zeros((sequences, length), dtype=torch.int64)
    model.compute_dtype, model.looping = dtype, looping
    model.attend = _attend
    weights = {_storage(p) for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(_storage(tensor), tensor)  # holding it keeps the number of its storage from being given again
        return tensor

    with _Count() as count:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model.loss(ids, ids)
        held = sum(t.untyped_storage().nbytes() for storage, t in kept.items() if storage not in weights)
        loss.backward()  # type: ignore[no-untyped-call]
    layers = sum(map(len, config.layers(looping)))
    # two products forward and four backward, each of 2 · length² · dim FLOPs a sequence; half of it lies ahead in time
    attention = layers * sequences * 6 * 2 * length * length * config.model_dim // 2
    return Work(count.flops, attention, count.moved, count.kernels, held)


def moved_bytes(run: Callable[[], object]) -> int:
    """What `run` reads and writes by all that is not a product, by the same count."""
    with _Count() as count:
        run()
    moved: int = count.moved
    return moved


class _Fused(torch.autograd.Function):
    """The shapes of fused attention: the matrix of shares is never there."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        del gradients
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


def _attend(q: Tensor, k: Tensor, v: Tensor, _mask: Tensor | None) -> Tensor:
    out: Tensor = _Fused.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what every operation takes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.moved = self.kernels = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        run: Callable[..., Any] = func
        out = run(*args, **(kwargs or {}))
        name = func._schema.name
        if func.is_view or name.startswith(_FREE):
            return out
        self.kernels += 1
        if name in _PRODUCTS:
            left = args[-2]
            self.flops += 2 * prod(out.shape) * left.shape[-1]
        else:
            tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor)]
            self.moved += sum(each.numel() * each.element_size() for each in tensors)
        return out


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number
