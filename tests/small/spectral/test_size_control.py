"""Laws of steering: the size arrives where it was told to, from above, and impossible targets are refused."""

import pytest
import torch
import torch.nn.functional as F

from birdie.errors import ConfigError
from birdie.small.spectral.size_control import RateControl
from birdie.small.spectral.wrap import quantization_loss, spectral
from tests.small.spectral.test_wrap import data, mlp


def test_the_target_is_reached() -> None:
    torch.manual_seed(0)
    model, (x, y), bits, steps = mlp(), data(), 3.0, 100
    spectral(model, transform="dct")
    control = RateControl(model, bits, steps)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + control.penalty()).backward()
        optimizer.step()
        falling.step()
    assert float(quantization_loss(model).detach()) == pytest.approx(bits, rel=0.1)
    assert control.done == steps


def test_the_line_falls_to_the_target_and_stays() -> None:
    model = mlp()
    spectral(model, transform="dct")
    control = RateControl(model, 2.0, 100, settled=0.5)
    lines = [control.line(step) for step in range(0, 101, 10)]
    assert lines[0] == pytest.approx(10, abs=0.1)
    assert lines == sorted(lines, reverse=True)
    assert lines[5:] == pytest.approx([2.0] * 6)


@pytest.mark.parametrize(("bits", "steps", "settled"), [(0, 10, 0.5), (99, 10, 0.5), (2, 0, 0.5), (2, 10, 0)])
def test_what_cannot_be_is_refused(bits: float, steps: int, settled: float) -> None:
    model = mlp()
    spectral(model, transform="dct")
    with pytest.raises(ConfigError, match=r"out of range|not below"):
        RateControl(model, bits, steps, settled=settled)
