"""JPEG as a function: flat images stay, better quality changes less, and compressing twice changes little."""

import torch

from benchmarks.jpeg import compressed


def images() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(4, 3, 4, 4, generator=generator) * 255
    return torch.nn.functional.interpolate(coarse, size=32, mode="bilinear").round()


def test_a_flat_image_stays_within_a_level() -> None:
    flat = torch.tensor([200.0, 30.0, 90.0]).view(1, 3, 1, 1).expand(1, 3, 32, 32)
    assert (compressed(flat, 90) - flat).abs().max() <= 2


def test_better_quality_changes_less() -> None:
    pixels = images()
    changes = [float((compressed(pixels, quality) - pixels).square().mean()) for quality in (10, 40, 75, 100)]
    assert changes == sorted(changes, reverse=True)
    assert changes[-1] < 10  # half the resolution of chroma
    assert changes[0] > 5 * changes[-1]


def test_a_second_time_changes_little() -> None:
    once = compressed(images(), 50)
    assert (compressed(once, 50) - once).square().mean() < (once - images()).square().mean() / 2
    assert once.min() >= 0
    assert once.max() <= 255
