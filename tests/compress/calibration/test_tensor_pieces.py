"""Pieces of a parameter: any part, in any order of rows; fused and divided weights are measured as others are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.compress.calibration.sensitivity import measure
from birdie.compress.calibration.tensor_pieces import Divided, Fused, Piece

PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "an expert": lambda x: x[1],
    "half an expert": lambda x: x[1, 4:],
    "every second row": lambda x: x[1, ::2],
    "columns": lambda x: x[0, :, 3:7],
    "transposed": lambda x: x[1].T,
    "rows in the order of rotary embeddings": lambda x: x[0].view(2, 2, 2, 12).transpose(1, 2).reshape(8, 12),
    "a kernel": lambda x: x[1].reshape(8, 3, 4),
    "one element": lambda x: x[1, 2, 3].reshape(1, 1),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_piece_is_that_part_of_any_tensor_of_the_shape(part: str) -> None:
    values = torch.randn(2, 8, 12)
    piece = Piece.at("x", PARTS[part](torch.arange(values.numel()).view(values.shape)))
    assert piece is not None
    assert torch.equal(piece.of(values), PARTS[part](values))
    if piece.strides is not None:
        piece.of(values).zero_()
        assert not PARTS[part](values).any()


def test_numbers_that_no_slice_has_are_no_piece() -> None:
    numbers = torch.arange(12).view(3, 4)
    assert (
        Piece.at("x", numbers.clone().view(-1)[torch.randperm(12, generator=torch.manual_seed(0))].view(3, 4)) is None
    )
    assert Piece.at("x", numbers[:0]) is None


class Separate(nn.Module):
    """Two projections of the same inputs, in one parameter or in two; `apart` uses the first half on its own."""

    def __init__(self, fused: bool, way: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(32, 12, generator=generator) / 4)
        self.first, self.second = (nn.Parameter(half.clone()) for half in self.weight.detach().chunk(2))
        self.fused, self.way = fused, way
        self.pieces = [
            piece
            for name, numbers in zip(("first", "second"), torch.arange(384).view(32, 12).chunk(2), strict=True)
            if (piece := Piece.at(name, numbers)) is not None
        ]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.fused else torch.cat((self.first, self.second))
        if self.way == "matmul":
            a, b = (x @ weight.T).chunk(2, -1)
        elif self.fused and self.way == "one product":
            a, b = F.linear(x, weight).chunk(2, -1)
        else:
            a, b = (
                F.linear(x, weight[:16] if self.fused else self.first),
                F.linear(x, weight[16:] if self.fused else self.second),
            )
        return F.silu(a) * b

    def portions(self) -> list[Fused]:
        return [Fused("weight", self.weight, self.pieces)] if self.fused else []

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:  # type: ignore[override]
        if not self.fused:
            return {"first": self.first, "second": self.second}
        return {piece.name: piece.of(self.weight.detach()) for piece in self.pieces}


@pytest.mark.parametrize("way", ["one product", "two products", "matmul"])
def test_a_fused_weight_is_measured_as_its_pieces(way: str) -> None:
    batches = [torch.randn(40, 12, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(module(x), torch.zeros(len(x), dtype=torch.long))

    fused, separate = (measure(Separate(kind, way), batches, loss) for kind in (True, False))
    assert fused.keys() == separate.keys() == {"first", "second"}
    for name, expected in separate.items():
        measured = fused[name]
        assert measured.hessian is not None
        assert expected.hessian is not None
        torch.testing.assert_close(measured.hessian, expected.hessian)
        torch.testing.assert_close(measured.row_fisher, expected.row_fisher)
        assert (measured.samples, measured.gradients) == pytest.approx((expected.samples, expected.gradients))


class Joined(nn.Module):
    """One tensor of the file, of which the module has even and odd rows as two parameters, or which it has as it is."""

    def __init__(self, divided: bool, way: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(32, 12, generator=generator) / 4
        self.divided, self.way = divided, way
        self.weight = nn.Parameter(weight)
        self.even, self.odd = nn.Parameter(weight[::2].clone()), nn.Parameter(weight[1::2].clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "matmul":
            even, odd = (self.even, self.odd) if self.divided else (self.weight[::2], self.weight[1::2])
            return F.silu(x @ even.T) * (x @ odd.T)
        if self.divided:
            return F.silu(F.linear(x, self.even)) * F.linear(x, self.odd)
        out = F.linear(x, self.weight)
        return F.silu(out[:, ::2]) * out[:, 1::2]

    def portions(self) -> list[Divided]:
        rows = {"even": torch.arange(0, 32, 2), "odd": torch.arange(1, 32, 2)}
        parts = [Divided(name, getattr(self, name), "weight", (32, 12), rows[name]) for name in rows]
        return parts if self.divided else []

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:  # type: ignore[override]
        return {"weight": self.weight}


@pytest.mark.parametrize("way", ["one product", "matmul"])
def test_a_divided_weight_is_measured_as_the_tensor_of_the_file(way: str) -> None:
    batches = [torch.randn(40, 12, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(module(x), torch.zeros(len(x), dtype=torch.long))

    divided, joined = (measure(Joined(kind, way), batches, loss) for kind in (True, False))
    assert divided.keys() == joined.keys() == {"weight"}
    measured, expected = divided["weight"], joined["weight"]
    assert measured.hessian is not None
    assert expected.hessian is not None
    torch.testing.assert_close(measured.hessian, expected.hessian)
    torch.testing.assert_close(measured.row_fisher, expected.row_fisher)
    if way == "one product":
        assert (measured.samples, measured.gradients) == pytest.approx((expected.samples, expected.gradients))
