"""Errors are given as the integers by row that err as much, which those integers themselves are."""

import pytest
import torch

from birdie.compress.distortion import as_near_as, decibels, integer_bits, integer_errors


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    scales = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    nearest: torch.Tensor = (weight / scales).round() * scales
    return nearest


@pytest.mark.parametrize("bits", range(3, 13))
@pytest.mark.parametrize("tails", [0.0, 0.5])
def test_integers_by_row_are_as_near_as_themselves(bits: int, tails: float) -> None:
    torch.manual_seed(0)
    rows = torch.randn(64, 1).exp()
    weight = rows * torch.randn(64, 256, dtype=torch.float64) * (tails * torch.randn(64, 256)).exp()
    error = float((rounded(weight, bits) - weight).square().sum())
    known = integer_errors(weight).tolist()
    assert integer_bits(error, known) == pytest.approx(bits, abs=0.2)
    assert integer_bits(error * 2, known) < integer_bits(error, known) < integer_bits(error / 2, known)


def test_texts_name_the_integers_on_both_sides() -> None:
    texts = {2.0: "below int2", 5.03: "int5", 5.5: "int5–int6", 5.95: "int6", 16.0: "int16 or finer"}
    assert {bits: as_near_as(bits) for bits in texts} == texts
    assert decibels(100.0, 1.0) == pytest.approx(20)
    assert integer_errors(torch.zeros(0, 4)).sum() == 0
    assert integer_bits(1.0, integer_errors(torch.zeros(3, 4)).tolist()) == 2
