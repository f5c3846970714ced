"""The benchmark of a normal source: the bound is Shannon's, and the measured excess of a grid is the known one."""

import math

import pytest

from benchmarks import gaussian_source
from birdie.compress.registry import parse_spec


def test_the_bound_is_shannons() -> None:
    assert gaussian_source.bound(1.0, 0.25) == 1
    assert gaussian_source.bound(2.0, 2.0) == 0
    assert gaussian_source.bound(1.0, 4.0) == 0


def test_a_scalar_grid_is_a_quarter_of_a_bit_above_the_bound_plus_overhead() -> None:
    source = gaussian_source.normal(256)
    row = gaussian_source.at_rate(gaussian_source.scheme_of_step("sigma:{step}"), 4.0, source, "grid")
    assert row["bits"] == pytest.approx(4, abs=gaussian_source.TOLERANCE)
    assert row["gap"] == pytest.approx(row["bits"] - 0.5 * math.log2(1 / row["distortion"]), abs=0.02)
    assert 0.2 < row["gap"] < 0.4  # 0.25 with an ideal coder and without row scales
    assert row["bytes"] * 8 / source.numel() == row["bits"]
    assert row["distortion"] == pytest.approx(row["step"] ** 2 / 12, rel=0.05)


def test_no_file_of_a_normal_source_beats_the_bound() -> None:
    source = gaussian_source.normal(64, seed=3)
    for spec in ("sigma:0.5", "int4", "int8", "fp16"):
        assert gaussian_source.coded(parse_spec(spec), source, spec)["gap"] > 0.2
