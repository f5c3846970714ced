"""Tensors of a file that a module holds in other portions, such as the experts of a layer in one parameter.

    w1, w3 of each expert ──fused──► one parameter (experts, 2 · inner, inputs): products and gradients cut into pieces
    qkv of a file ─────────divided──► three parameters (inputs, inputs): products and gradients put at their rows

An element (i, j, …) of a piece is number start + offsets[0][i] + offsets[1][j] + … of its parameter, which covers
slices, transposes, and rows in another order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Use:
    """Use of some rows of a tensor in a product with a matrix."""

    name: str  # of the tensor
    outputs: Tensor  # rows of the matrix
    rows: Tensor | None = None  # of the tensor, if the matrix has but some of them; else None
    count: int = 0  # of all rows of the tensor

    @property
    def share(self) -> float:
        """Share of the tensor's rows that the matrix has."""
        return 1.0 if self.rows is None else len(self.rows) / self.count

    def of(self, gradient: Tensor) -> Tensor:
        """Return a gradient (outputs of the matrix, …) as one of the tensor's rows, zero for rows of other matrices."""
        chosen = gradient[self.outputs.to(gradient.device)]
        if self.rows is None:
            return chosen
        return chosen.new_zeros((self.count, *chosen.shape[1:])).index_copy_(0, self.rows.to(chosen.device), chosen)


@dataclass(frozen=True)
class Piece:
    """Elements of a parameter that are one tensor of a file."""

    name: str  # of the tensor in the file
    start: int  # number of its first element in the parameter
    offsets: tuple[Tensor, ...]  # of each dimension: what its index adds to the number of an element, int64

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

    def uses(self, weight: Tensor) -> list[Use]:
        """Return the uses of the pieces in a matrix, which is a part of the parameter; none if pieces are cut."""
        columns = weight.shape[-1]
        if weight.ndim != 2 or not weight.is_contiguous() or columns != self.parameter.shape[-1]:
            return []
        first, rest = divmod(int(weight.storage_offset()) - int(self.parameter.storage_offset()), columns)
        uses: list[Use] = []
        for piece in self.pieces:
            rows = piece.rows(columns)
            inside = None if rows is None else (rows >= first) & (rows < first + len(weight))
            if rows is not None and inside is not None and bool(inside.all()):
                uses.append(Use(piece.name, rows - first))
            elif inside is None or bool(inside.any()):
                return []
        return uses if not rest and sum(len(use.outputs) for use in uses) == len(weight) else []

    def gradients(self, gradient: Tensor) -> Iterator[tuple[str, Tensor, float]]:
        """Yield name, gradient and share of each piece, of the gradient of the parameter."""
        for piece in self.pieces:
            yield piece.name, piece.of(gradient.contiguous()), 1.0

    @property
    def names(self) -> list[str]:
        """Names of the pieces."""
        return [piece.name for piece in self.pieces]


@dataclass(frozen=True)
class Divided:
    """A parameter with its name in the module, which has some rows of a tensor of the file."""

    # name, parameter: in the module
    name: str
    parameter: Tensor
    tensor: str  # name of the tensor
    shape: tuple[int, ...]  # of the tensor
    rows: Tensor  # of the tensor, in the order of the parameter's rows

    @property
    def names(self) -> list[str]:
        """Name of the tensor."""
        return [self.tensor]

    @property
    def use(self) -> Use:
        """Use of the complete parameter."""
        return Use(self.tensor, torch.arange(len(self.parameter)), self.rows, self.shape[0])

    def uses(self, weight: Tensor) -> list[Use]:
        """Return the use of the tensor in a matrix that is the parameter; none in another."""
        return [self.use] if weight.shape == self.parameter.shape and weight.is_contiguous() else []

    def gradients(self, gradient: Tensor) -> Iterator[tuple[str, Tensor, float]]:
        """Yield name, gradient and share of the tensor, of the gradient of the parameter."""
        yield self.tensor, self.use.of(gradient), self.use.share


Portion = Fused | Divided


def portions(module: nn.Module) -> list[Portion]:
    """Return the parameters of a module that are no tensors of its state dict but pieces of some or several, if any."""
    listed: Any = getattr(module, "portions", None)
    return list(listed()) if callable(listed) else []


class Portions:
    """Parameters in other portions than the tensors of the file, by their memory.

    Args:
        listed: as `portions` returns them.
    """

    def __init__(self, listed: Sequence[Portion] = ()) -> None:
        self.by_name: Mapping[str, Portion] = {one.name: one for one in listed}
        self._by_storage = {one.parameter.untyped_storage().data_ptr(): one for one in listed}
        self._uses: dict[tuple[int, int, tuple[int, ...]], list[Use]] = {}

    def name(self, weight: Tensor) -> str | None:
        """Return the name of a complete parameter."""
        one = self._by_storage.get(weight.untyped_storage().data_ptr()) if self._by_storage else None
        return one.name if one is not None and weight.numel() == one.parameter.numel() else None

    def names(self, name: str) -> list[str]:
        """Return the names of the tensors of a parameter; of any other weight its own name."""
        return self.by_name[name].names if name in self.by_name else [name]

    def with_siblings(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights by name, and the other parameters of divided tensors that have one of them."""
        tensors = {one.tensor for name in weights if isinstance(one := self.by_name.get(name), Divided)}
        others = [one for one in self.by_name.values() if isinstance(one, Divided) and one.tensor in tensors]
        return {**weights, **{one.name: one.parameter for one in others}}

    def uses(self, weight: Tensor) -> list[Use]:
        """Return the uses of tensors in a product with a matrix; none if it is not one of complete pieces."""
        if not self._by_storage:
            return []
        storage = weight.untyped_storage().data_ptr()
        if (one := self._by_storage.get(storage)) is None:
            return []
        key = storage, int(weight.storage_offset()), tuple(weight.shape)
        if key not in self._uses:
            self._uses[key] = one.uses(weight)
        return self._uses[key]
