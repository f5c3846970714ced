"""Small tensors keep about ten bits of every value, and quantizers get only what gains from them."""

import math

import pytest
import torch

from birdie.compress.scheme import Scheme
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.small_tensors import SMALL, applicable, is_gate, is_worth_coarsening, small_scheme
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


def test_a_quantizer_takes_vectors_from_as_many_elements_as_matrices_of_the_default() -> None:
    assert applicable(Grid(bits=4), torch.randn(SMALL)) == Grid(bits=4)
    assert applicable(Grid(bits=4), torch.ones(SMALL - 1)) == Cast()
    assert applicable(Grid(bits=4), torch.randn(2, 2)) == Grid(bits=4)


def test_a_scheme_that_loses_nothing_for_size_takes_any_tensor() -> None:
    assert applicable(Lossless(), torch.arange(3)) == Lossless()
    assert applicable(Cast("bf16"), torch.ones(3)) == Cast("bf16")
    assert applicable(Cast("bf16"), torch.arange(3)) == Lossless()


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


@pytest.mark.parametrize("shape", [(2, 384), (768, 4), (1, 768), (1, 768, 1, 1), (1, 1, 768), (3, 1, 500)])
def test_gates_are_no_matrices_that_a_search_coarsens(shape: tuple[int, ...]) -> None:
    assert is_gate(torch.zeros(shape))
    assert not is_worth_coarsening(torch.randn(shape))


@pytest.mark.parametrize("shape", [(8, 96), (1, 197, 768), (96, 32, 1, 1), (64, 3, 7, 7), (256, 1, 3, 3)])
def test_matrices_kernels_and_tables_are_no_gates(shape: tuple[int, ...]) -> None:
    assert not is_gate(torch.zeros(shape))
    assert is_worth_coarsening(torch.randn(shape))
