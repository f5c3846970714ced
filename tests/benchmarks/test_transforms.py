"""The benchmark of transforms: sizes read at equal error, what few components and smooth taps show, layers by name."""

from pathlib import Path

import pytest
import torch

from benchmarks import transforms
from birdie.compress.schemes.grid import Grid
from tests.compress.matrices import few_components, smooth_kernels


def test_bytes_at_an_error_lie_between_those_of_the_steps_around_it() -> None:
    weight = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    fine, middle, coarse = (Grid(sigma=step).encode("w", weight) for step in (0.3, 0.4, 0.5))
    found = transforms.bytes_at(weight, lambda step: Grid(sigma=step), 0.4, transforms.error(weight, middle))
    assert found is not None
    assert transforms.coded_bytes(coarse) < found < transforms.coded_bytes(fine)
    assert found == pytest.approx(transforms.coded_bytes(middle), rel=0.02)
    assert transforms.bytes_at(weight, lambda _: Grid(sigma=2.0), 0.4, 1e-4) is None


def test_each_wins_where_it_should() -> None:
    components = transforms.row("few", few_components(32, 40), 0.3)
    assert components["tucker"] < 0.6 < components["dct"]
    smooth = transforms.row("smooth", smooth_kernels(16, 12, 3, 3), 0.5)
    assert smooth["dct"] < 0.8
    noise = transforms.row("noise", torch.randn(24, 24, generator=torch.Generator().manual_seed(0)), 0.3)
    assert (noise["tucker"], noise["ranks"]) == (None, "not cut")


def test_layers_are_found_by_name(tmp_path: Path) -> None:
    torch.save(
        {"a.weight": torch.ones(3, 4).half(), "b.weight": torch.ones(2, 2), "a.bias": torch.ones(4)}, tmp_path / "x.pt"
    )
    options = transforms.options(["--weights", str(tmp_path / "x.pt"), "--tensors", "a.*"])
    found = transforms.layers(options)
    assert list(found) == ["x a.weight"]
    assert found["x a.weight"].dtype is torch.float32
