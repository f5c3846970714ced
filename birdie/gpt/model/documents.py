"""Document boundaries in a batch, computed once per micro-batch for all layers, and the masks that keep them apart.

    ids ─► Bounds: 0, each BOS, each row, every `longest` tokens of a document, the end, … the end again
             ├─► a variable-length attention kernel takes them as they are (cu_seqlens)
             └─► AttentionMask, full or in bands, for every other kernel

Offsets are padded with the end to a multiple of 64 entries that only grows, so that a compiler meets few shapes.
Positions stay those of the row: rotary attention depends on differences of positions only.

Source: openai/parameter-golf #1530.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from birdie.gpt.model.attention_functions import grouped_attention
from birdie.system.callbacks import Notify, no_message

PADDING = 64  # the number of offsets is a multiple of it
HEADROOM = 1.5  # allocated offsets over those that the first batch needs


class Bounds(NamedTuple):
    """Segments of a flattened batch that do not attend to one another.

    Attributes:
        offsets: int32, 0 first, the number of tokens last, any number of times (FlashAttention's cu_seqlens).
        longest: upper bound of the tokens of a segment (max_seqlen).
    """

    offsets: Tensor
    longest: int


def segment_offsets(ids: NDArray[np.int64], bos_id: int, longest: int) -> NDArray[np.int32]:
    """Return the strictly ascending first tokens of all segments, and the end, of flattened `ids` (rows, length).

    A segment begins with a row, with a BOS, and after `longest` tokens of a document.
    """
    first = ids == bos_id
    first[:, 0] = True
    documents = np.flatnonzero(first)
    lengths = np.diff(documents, append=ids.size)
    parts = -(-lengths // longest)
    part = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    return np.append(np.repeat(documents, parts) + longest * part, ids.size).astype(np.int32)


class DocumentFinder:
    """Callable that returns the `Bounds` of each micro-batch.

    Args:
        bos_id: the token that begins a document.
        device: of the returned offsets.
        packed: whether rows are contiguous text longer than a sequence, which the bounds then cut.
        notify: called with a line whenever the number of allocated offsets grows.
    """

    def __init__(self, bos_id: int, device: torch.device, *, packed: bool, notify: Notify = no_message) -> None:
        self.packed = packed
        self._bos_id, self._device, self._notify = bos_id, device, notify
        self._sizes: dict[tuple[int, int], int] = {}  # allocated offsets by (tokens, longest)

    def __call__(self, ids: Tensor, longest: int) -> Bounds:
        """Return the bounds of ids, (rows, length) int64 on the CPU, in segments of at most `longest` tokens."""
        offsets = segment_offsets(ids.numpy(), self._bos_id, longest)
        key = ids.numel(), longest
        size = self._sizes.get(key, 0)
        if len(offsets) > size:
            size = self._sizes[key] = PADDING * -(-int(HEADROOM * len(offsets)) // PADDING)
            self._notify(
                f"documents: {len(offsets) - 1:,} segments of at most {longest:,} tokens in {ids.numel():,}; "
                f"room for {size - 1:,}"
            )
        padded = torch.full((size,), ids.numel(), dtype=torch.int32, device="cpu")
        padded[: len(offsets)] = torch.from_numpy(offsets)
        if self._device.type == "cuda":
            padded = padded.pin_memory()
        return Bounds(padded.to(self._device, non_blocking=True), longest)


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """Mask of the keys that each position may attend to.

    Attributes:
        mask: bool; None: all positions up to its own. Without bands (batch, 1, length, length).
        band: 0: no bands. Otherwise no position looks further back than `band` positions, its own included, and the
            mask is that of blocks of `band` queries, each over its own and the previous block of keys:
            (batch · blocks, 1, band, 2 · band).
    """

    mask: Tensor | None = None
    band: int = 0


def attention_mask(
    documents: Tensor | None, shape: torch.Size, device: torch.device, *, window: int, bands: bool
) -> AttentionMask:
    """Return the causal mask for documents and a window.

    Args:
        documents: (batch, length) document numbers; None: each row is one document.
        shape: batch and length.
        window: how far back positions look, their own included.
        bands: whether a mask in bands is usable where the window is shorter than the row.
    """
    length = shape[1]
    if window >= length:
        if documents is None:
            return AttentionMask()
        return AttentionMask((documents[:, :, None] == documents[:, None]).tril()[:, None])
    if documents is None:
        documents = torch.zeros(shape, dtype=torch.int64, device=device)
    if not bands:
        near = torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)
        return AttentionMask(((documents[:, :, None] == documents[:, None]) & near)[:, None])
    blocks = -(-length // window)
    padded = F.pad(documents + 1, (window, blocks * window - length))  # number 0 belongs to no document
    current = padded[:, window:].reshape(-1, window)
    previous = padded[:, : blocks * window].reshape(-1, window)
    near = torch.ones(window, 2 * window, dtype=torch.bool, device=device).tril(window).triu(1)
    keys = torch.cat((previous, current), dim=1)
    return AttentionMask(((current[:, :, None] == keys[:, None]) & near)[:, None], window)


def segment_numbers(bounds: Bounds, shape: torch.Size) -> Tensor:
    """Return the number of the segment of each position, in `shape`."""
    positions = torch.arange(shape.numel(), dtype=torch.int32, device=bounds.offsets.device)
    return torch.searchsorted(bounds.offsets, positions, right=True).view(shape)


def banded_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """Softmax attention in bands, in time and memory proportional to length · band.

    Args:
        q: (batch, heads, length, d).
        k: (batch, kv heads, length, d).
        v: like k.
        mask: with a band.

    Returns:
        (batch, heads, length, d).
    """
    batch, heads, length, d = q.shape
    band = mask.band
    blocks = -(-length // band)
    padding = blocks * band - length

    def cut(x: Tensor) -> Tensor:  # (batch, heads, blocks · band, d) → (batch · blocks, heads, band, d)
        return x.reshape(batch, -1, blocks, band, d).transpose(1, 2).reshape(batch * blocks, -1, band, d)

    def with_previous(x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, band, padding))
        return torch.cat((cut(x[:, :, :-band]), cut(x[:, :, band:])), dim=2)

    y = grouped_attention(cut(F.pad(q, (0, 0, 0, padding))), with_previous(k), with_previous(v), mask.mask)
    return y.view(batch, blocks, heads, band, d).transpose(1, 2).reshape(batch, heads, -1, d)[:, :, :length]
