"""Small tensors keep about ten bits of every value, and quantizers get only what gains from them."""

import math

import pytest
import torch

from birdie.compress.scheme import Scheme
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.small_tensors import small_scheme
from birdie.compress.tensors import has_nonfinite, parts


@pytest.mark.parametrize(
    ("weight", "scheme"),
    [
        (torch.randn(10), Cast()),
        (torch.tensor([1.0, 0.0, -2.0]), Cast()),
        (torch.full((10,), 1e-7), Lossless()),  # float16 would keep three bits of it
        (torch.full((10,), 1e6), Lossless()),
        (torch.arange(3), Lossless()),
        (torch.tensor([1.0, 1e-9, 2e-8]), Lossless()),  # one would become zero, one subnormal
        (torch.tensor([1.0, 1e-60], dtype=torch.float64), Lossless()),
        (torch.tensor([1.0, float("nan")]), Cast()),  # which refuses it: only a rule may keep it losslessly
    ],
)
def test_small_tensors_keep_their_precision(weight: torch.Tensor, scheme: Scheme) -> None:
    assert small_scheme(weight) == scheme


SHAPES = [(), (0,), (0, 3), (3, 0), (1,), (5_000_000,), (2, 2_500_000), (2_500_000, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_parts_are_the_tensor(shape: tuple[int, ...], transposed: bool) -> None:
    """Checks look at a few million elements at a time: of one tensor of 4 GB they made three more."""
    weight = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    weight = weight.T if transposed and weight.ndim == 2 else weight
    pieces = list(parts(weight))
    assert all(piece.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr() for piece in pieces)
    assert torch.equal(torch.cat([piece.reshape(-1) for piece in pieces]), weight.reshape(-1))
    assert max(piece.numel() for piece in pieces) <= 1 << 22


def test_one_value_in_any_part_decides() -> None:
    weight = torch.ones(5_000_000)
    assert isinstance(small_scheme(weight), Cast)
    assert not has_nonfinite(weight)
    weight[-1] = 1e-9
    assert isinstance(small_scheme(weight), Lossless)
    weight[-1] = torch.inf
    assert has_nonfinite(weight)
