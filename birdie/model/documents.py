"""Where documents begin in a batch, and what places may see because of it: made once a batch, for all layers.

    ids ─► bounds: 0, each BOS, each row, every `longest` tokens of a document, the end, … the end again
             ├─► a kernel of variable length takes them as they are
             └─► Sight: masks, of all places or of bands, for those that do not

The bounds are padded with the end to a number of entries that only grows, in steps of 64, so that a compiler meets few
shapes. Positions stay those of the row: rotary attention only knows differences. Source: openai/parameter-golf #1530.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

ENTRIES = 64  # the bounds' number of entries is a multiple of it
HEADROOM = 1.5  # of entries over those first needed


class Bounds(NamedTuple):
    """Segments of a flattened batch, none of which sees another.

    Attributes:
        places: int32, 0 first, the number of tokens last, any number of times.
        longest: no segment has more tokens.
    """

    places: Tensor
    longest: int


def bounds_of(ids: NDArray[np.int64], bos_id: int, longest: int) -> NDArray[np.int32]:
    """Begins of segments and the end, ascending, none twice: of (rows, length) tokens, flattened."""
    begins = ids == bos_id
    begins[:, 0] = True
    documents = np.flatnonzero(begins)
    lengths = np.diff(documents, append=ids.size)
    parts = -(-lengths // longest)
    within = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    return np.append(np.repeat(documents, parts) + longest * within, ids.size).astype(np.int32)


class Documents:
    """Gives each micro-batch its bounds.

    Args:
        bos_id: the token a document begins with.
        device: where the bounds go.
        packed: whether rows are contiguous text that is longer than a sequence, which the bounds then cut.
        notify: gets a line for each number of entries that is new.
    """

    def __init__(
        self, bos_id: int, device: torch.device, *, packed: bool, notify: Callable[[str], None] = lambda _: None
    ) -> None:
        self.packed = packed
        self._bos_id, self._device, self._notify = bos_id, device, notify
        self._entries: dict[tuple[int, int], int] = {}  # by tokens and longest

    def __call__(self, ids: Tensor, longest: int) -> Bounds:
        """Bounds of ids, (rows, length) int64 on the CPU, in segments of up to `longest`."""
        found = bounds_of(ids.numpy(), self._bos_id, longest)
        key = ids.numel(), longest
        entries = self._entries.get(key, 0)
        if len(found) > entries:
            entries = self._entries[key] = ENTRIES * -(-int(HEADROOM * len(found)) // ENTRIES)
            self._notify(
                f"documents: {len(found) - 1:,} segments of at most {longest:,} tokens in {ids.numel():,}; "
                f"room for {entries - 1:,}"
            )
        places = torch.full((entries,), ids.numel(), dtype=torch.int32)
        places[: len(found)] = torch.from_numpy(found)
        if self._device.type == "cuda":
            places = places.pin_memory()
        return Bounds(places.to(self._device, non_blocking=True), longest)


@dataclass(frozen=True, slots=True)
class Sight:
    """What places may see.

    Attributes:
        mask: bool; None: themselves and all before. Without bands (batch, 1, length, length).
        band: places see no further back than this, themselves included, and the mask is that of blocks of so many
            places, each seeing its own and the last: (batch · blocks, 1, band, 2 · band). 0: no bands.
    """

    mask: Tensor | None = None
    band: int = 0


def sight(documents: Tensor | None, shape: torch.Size, device: torch.device, *, reach: int, bands: bool) -> Sight:
    """The mask for documents, numbered by place, and a reach.

    Args:
        documents: (batch, length) numbers, alike within a document; None: all is one.
        shape: batch and length.
        device: where the mask is to be.
        reach: how far back places see, themselves included.
        bands: whether bands will do where the reach is shorter than the row.
    """
    length = shape[1]
    if reach >= length:
        if documents is None:
            return Sight()
        return Sight((documents[:, :, None] == documents[:, None]).tril()[:, None])
    if documents is None:
        documents = torch.zeros(shape, dtype=torch.int64, device=device)
    if not bands:
        near = torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - reach)
        return Sight(((documents[:, :, None] == documents[:, None]) & near)[:, None])
    blocks = -(-length // reach)
    padded = F.pad(documents + 1, (reach, blocks * reach - length))  # 0 is nobody's document
    own = padded[:, reach:].reshape(-1, reach)
    last = padded[:, : blocks * reach].reshape(-1, reach)
    near = torch.ones(reach, 2 * reach, dtype=torch.bool, device=device).tril(reach).triu(1)
    return Sight(((own[:, :, None] == torch.cat((last, own), dim=1)[:, None]) & near)[:, None], reach)


def numbered(bounds: Bounds, shape: torch.Size) -> Tensor:
    """The number of each place's segment, of `shape`."""
    places = torch.arange(shape.numel(), dtype=torch.int32, device=bounds.places.device)
    return torch.searchsorted(bounds.places, places, right=True).view(shape)


def banded(q: Tensor, k: Tensor, v: Tensor, seen: Sight) -> Tensor:
    """Softmax attention in bands, in time and memory that grow with length · band; shapes as an `Attend` has them."""
    batch, heads, length, d = q.shape
    band = seen.band
    blocks = -(-length // band)
    rest = blocks * band - length

    def cut(x: Tensor) -> Tensor:  # (batch, heads, blocks · band, d) → (batch · blocks, heads, band, d)
        return x.reshape(batch, -1, blocks, band, d).transpose(1, 2).reshape(batch * blocks, -1, band, d)

    def doubled(x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, band, rest))
        return torch.cat((cut(x[:, :, :-band]), cut(x[:, :, band:])), dim=2)

    y = F.scaled_dot_product_attention(
        cut(F.pad(q, (0, 0, 0, rest))),
        doubled(k),
        doubled(v),
        attn_mask=seen.mask,
        enable_gqa=heads != k.shape[1],
    )
    return y.view(batch, blocks, heads, band, d).transpose(1, 2).reshape(batch, heads, -1, d)[:, :, :length]
