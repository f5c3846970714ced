"""Laws of steering: the size arrives where it was told to, from above, and impossible targets are refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from birdie.errors import ConfigError
from birdie.small.spectral import size_control as spectral_control
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


def test_bits_that_are_ten_times_as_steep_as_their_gradient_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that gather at the boundaries between symbols make them so."""
    model = mlp()
    spectral(model, transform="dct")
    control = RateControl(model, 1.0, 100, settled=0.01)
    offset = control.network.offset

    def steep(_: object) -> Tensor:
        return 4.0 - 3.0 * offset.detach() - 0.3 * (offset - offset.detach())

    monkeypatch.setattr(spectral_control, "quantization_loss", steep)
    with torch.no_grad():
        offset.fill_(0.6)
    bits = []
    for _ in range(100):
        control.penalty()
        bits.append(control.bits)
    assert bits[-20:] == pytest.approx([1.0] * 20, rel=0.02)


def test_while_scales_are_fixed_a_bit_is_worth_less_and_less_below_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    spectral(model, transform="dct")
    control = RateControl(model, 1.0, 1000, settled=0.01)
    offset = control.network.offset
    monkeypatch.setattr(spectral_control, "quantization_loss", lambda _: 0.9 - offset + offset.detach())
    control.holding = True
    weights = []
    for _ in range(100):
        control._by_task = 1.0
        control.penalty()
        weights.append(control.weight)
    weights = weights[10:]  # from the target on
    assert weights == sorted(weights, reverse=True)
    assert weights[-1] < 0.2 * weights[0]
