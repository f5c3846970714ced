"""Attention of a batch, shared by all layers: rotary tables, and the attention function with its mask or kernel.

Two techniques limit what a position attends to:

- windows (openai/parameter-golf #1212): the layers of `attn_window_layers` attend to the last `attn_window` positions;
- isolated documents (#1530): attention does not cross the beginning of a document, by a variable-length kernel where
  one is installed (`attention_kernels`), otherwise by masks (`documents`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from birdie.gpt.model.attention_functions import AttentionFunction, softmax
from birdie.gpt.model.attention_kernels import Kernels, PlainAttention, VarlenAttention
from birdie.gpt.model.documents import AttentionMask, Bounds, attention_mask, banded_attention, segment_numbers
from birdie.gpt.model.technique import Technique

if TYPE_CHECKING:
    from birdie.gpt.model.gpt import GPT


@dataclass(frozen=True, slots=True)
class BoundAttention:
    """An attention function together with its mask or kernel.

    Attributes:
        function: (q, k, v) → y.
        takes_last_queries: whether there may be fewer queries than keys: those of the last positions.
    """

    function: Callable[[Tensor, Tensor, Tensor], Tensor]
    takes_last_queries: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (batch, heads, length, d), k and v (batch, kv heads, length, d) → (batch, heads, length, d)."""
        return self.function(q, k, v)


def bind(
    function: AttentionFunction, kernels: Kernels, ids: Tensor, bounds: Bounds | None, bos_id: int | None, window: int
) -> BoundAttention:
    """Bind `function` to the mask of a batch or, for softmax, return the fastest kernel that fits.

    Args:
        function: as registered.
        kernels: the installed ones.
        ids: (batch, length).
        bounds: of the documents; None: documents begin where a row has `bos_id`.
        bos_id: the token that begins a document; None: documents are not isolated.
        window: how far back positions look, their own included; 0: no limit.
    """
    fusable = function is softmax and ids.shape[1] > 1  # a single position has its past elsewhere, in a KV cache
    if fusable and bounds is not None and kernels.varlen is not None and (kernels.windows or not window):
        return BoundAttention(partial(_varlen, kernels.varlen, bounds, window))
    if fusable and bos_id is None and bounds is None and kernels.plain is not None:
        return BoundAttention(partial(_plain, kernels.plain, window), takes_last_queries=True)
    if bounds is not None:
        documents: Tensor | None = segment_numbers(bounds, ids.shape)
    else:
        documents = None if bos_id is None else (ids == bos_id).cumsum(1)
    width = min(window or ids.shape[1], ids.shape[1] if bounds is None else bounds.longest)
    mask = attention_mask(documents, ids.shape, ids.device, window=width, bands=fusable)
    if mask.band:
        return BoundAttention(partial(_banded, mask))
    return BoundAttention(partial(_masked, function, mask.mask), takes_last_queries=fusable)


def _varlen(kernel: VarlenAttention, bounds: Bounds, window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return kernel(q, k, v, bounds, window)


def _plain(kernel: PlainAttention, window: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return kernel(q, k, v, window)


def _banded(mask: AttentionMask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return banded_attention(q, k, v, mask)


def _masked(function: AttentionFunction, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if mask is not None and q.shape[2] < k.shape[2]:
        mask = mask[:, :, -q.shape[2] :]
    return function(q, k, v, mask)


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """Tensors and attention that all layers of one forward pass share.

    Attributes:
        cos, sin: rotary tables of the positions.
        attention: of layers without a window and of layers with one; index it by `Attention.windowed`.
        extra_values: by layer, the tensor to add to its values, (batch, length, kv_dim).
    """

    cos: Tensor
    sin: Tensor
    attention: tuple[BoundAttention, BoundAttention]
    extra_values: dict[int, Tensor]


class PastKeyValues(Protocol):
    """Keys and values of earlier positions, kept from earlier forward passes (`birdie.gpt.model.cache`)."""

    def attend(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[BoundAttention, BoundAttention]]:
        """Return cos, sin and attention, as in `AttentionContext`, for the next positions, ids (batch, length)."""
        ...


def _diagnostics(model: "GPT") -> Iterator[str]:
    config = model.config
    if config.attention != "softmax":
        yield f"attention function: {config.attention} in {config.num_layers} layers"
    if config.isolate_documents:
        yield f"isolated documents: attention restarts at each BOS, kernel {model.kernels.name}"
    if config.attn_window:
        layers = [index for index, block in enumerate(model.blocks) if block.attn.windowed]  # type: ignore[union-attr]
        names = ", ".join(map(str, layers))
        yield f"attention window: layers {names} attend to the last {config.attn_window:,} positions"


ATTENTION_CONTEXT = Technique(diagnostics=_diagnostics)
