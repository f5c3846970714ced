"""A mode for a while: of the parts named alone, and undone part by part, whatever happens."""

import pytest
from torch import nn

from birdie.compress.calibration.modes import in_mode


def modes(module: nn.Module) -> list[bool]:
    return [part.training for part in module.modules()]


@pytest.mark.parametrize("training", [True, False])
def test_each_part_comes_back_to_its_own_mode(training: bool) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2)))
    net[1].eval()
    original = modes(net)
    with in_mode(net.modules(), training=training):
        assert modes(net) == [training] * 5
    assert modes(net) == original
    with pytest.raises(ZeroDivisionError), in_mode(net.modules(), training=training):
        raise ZeroDivisionError
    assert modes(net) == original


def test_what_is_not_named_keeps_its_mode() -> None:
    net = nn.Sequential(nn.Sequential(nn.Dropout()))
    with in_mode([net[0], net[0]], training=False):
        assert modes(net) == [True, False, True]
    assert modes(net) == [True, True, True]
