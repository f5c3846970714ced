"""Tensors of a file that a module holds as pieces of one parameter, such as the experts of a layer.

    q, k, v of a file ──loaded──► one parameter (3 · heads · size, inputs) ──► F.linear: rows of the output by piece
    w1, w3 of each expert ──────► one parameter (experts, 2 · inner, inputs) ──► its gradient, cut into pieces

An element (i, j, …) of a piece is number start + offsets[0][i] + offsets[1][j] + … of its parameter, which covers
slices, transposes, and rows in another order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

Rows = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Piece:
    """Elements of a parameter that are one tensor of a file.

    Attributes:
        name: of the tensor in the file.
        start: number of its first element in the parameter.
        offsets: of each dimension: what its index adds to the number of an element, int64.
    """

    name: str
    start: int
    offsets: tuple[Tensor, ...]

    @classmethod
    def at(cls, name: str, numbers: Tensor) -> "Piece | None":
        """Return the piece whose elements have these numbers; None if dimensions do not add up to them."""
        if not numbers.numel():
            return None
        start = int(numbers.reshape(-1)[0])
        offsets = []
        for dim in range(numbers.ndim):
            first = tuple(slice(None) if other == dim else 0 for other in range(numbers.ndim))
            offsets.append((numbers[first] - start).clone())
        piece = cls(name, start, tuple(offsets))
        return piece if torch.equal(piece.numbers, numbers) else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(len(offset) for offset in self.offsets)

    @property
    def numbers(self) -> Tensor:
        """Number of each element in the parameter, int64."""
        total = torch.tensor(self.start)
        for offset in self.offsets:
            total = total[..., None] + offset
        return total

    @cached_property
    def strides(self) -> tuple[int, ...] | None:
        """Steps between elements of the parameter along each dimension; None if a dimension has several."""
        steps = []
        for offset in self.offsets:
            step = int(offset[1]) if len(offset) > 1 else 1
            if step < 1 or not torch.equal(offset, torch.arange(len(offset)) * step):
                return None
            steps.append(step)
        return tuple(steps)

    def of(self, parameter: Tensor) -> Tensor:
        """Return the piece of a contiguous parameter or of its gradient: a view if one exists, else a copy."""
        if self.strides is not None:
            return parameter.as_strided(self.shape, self.strides, parameter.storage_offset() + self.start)
        return parameter.reshape(-1)[self.numbers.to(parameter.device)]

    def rows(self, columns: int) -> Tensor | None:
        """Return which rows of the parameter, as a matrix of so many columns, the piece has; None if of parts of rows.

        They are in the order of the piece.
        """
        within = torch.zeros(1, dtype=torch.int64)
        for offset in self.offsets[1:]:
            within = (within[:, None] + offset).reshape(-1)
        if not torch.equal(within, torch.arange(columns)):
            return None
        starts = self.start + self.offsets[0]
        return None if bool((starts % columns).any()) else starts // columns


@dataclass(frozen=True)
class Fused:
    """A parameter with its name in the module, and the pieces that it consists of."""

    name: str
    parameter: Tensor
    pieces: Sequence[Piece]

    def rows_of(self, weight: Tensor) -> Rows | None:
        """Return name and rows of each piece of a matrix, which is a part of the parameter; None if pieces are cut."""
        columns = weight.shape[-1]
        if weight.ndim != 2 or not weight.is_contiguous() or columns != self.parameter.shape[-1]:
            return None
        first, rest = divmod(int(weight.storage_offset()) - int(self.parameter.storage_offset()), columns)
        pairs: Rows = []
        for piece in self.pieces:
            rows = piece.rows(columns)
            inside = None if rows is None else (rows >= first) & (rows < first + len(weight))
            if rows is not None and inside is not None and bool(inside.all()):
                pairs.append((piece.name, rows - first))
            elif inside is None or bool(inside.any()):
                return None
        return pairs if not rest and sum(len(rows) for _, rows in pairs) == len(weight) else None


def fused_weights(module: nn.Module) -> list[Fused]:
    """Return the parameters of a module that are several tensors of its state dict, if it says so."""
    listed: Any = getattr(module, "fused_weights", None)
    return list(listed()) if callable(listed) else []


class FusedWeights:
    """Fused parameters by their memory.

    Args:
        fused: as `fused_weights` returns them.
    """

    def __init__(self, fused: Sequence[Fused] = ()) -> None:
        self.by_name: Mapping[str, Fused] = {one.name: one for one in fused}
        self._by_storage = {one.parameter.untyped_storage().data_ptr(): one for one in fused}
        self._rows: dict[tuple[int, int, tuple[int, ...]], Rows | None] = {}

    def name(self, weight: Tensor) -> str | None:
        """Return the name of a complete parameter."""
        one = self._by_storage.get(weight.untyped_storage().data_ptr()) if self._by_storage else None
        return one.name if one is not None and weight.numel() == one.parameter.numel() else None

    def pieces(self, name: str) -> list[str]:
        """Return the names of the pieces of a parameter; of any other weight its own name."""
        return [piece.name for piece in self.by_name[name].pieces] if name in self.by_name else [name]

    def rows(self, weight: Tensor) -> Rows:
        """Return name and rows of each piece of a matrix; none if it is not one of complete pieces."""
        if not self._by_storage:
            return []
        storage = weight.untyped_storage().data_ptr()
        if (one := self._by_storage.get(storage)) is None:
            return []
        key = storage, int(weight.storage_offset()), tuple(weight.shape)
        if key not in self._rows:
            self._rows[key] = one.rows_of(weight)
        return self._rows[key] or []
