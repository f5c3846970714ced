"""Device of the tests of training, models and scoring: BIRDIE_TEST_DEVICE, the CPU by default.

With BIRDIE_TEST_DEVICE=cuda, whatever these tests create without naming a device is on the GPU. Generators stay on the
CPU, as in birdie: what they draw is moved.
"""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = torch.device(os.environ.get("BIRDIE_TEST_DEVICE", "cpu"))
_DRAWS = ("normal", "rand", "randint", "randn", "randperm")


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make `DEVICE` torch's default device."""
    if DEVICE.type == "cpu":
        yield
        return
    for name in _DRAWS:
        monkeypatch.setattr(torch, name, moved_draw(getattr(torch, name), DEVICE))
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)


def moved_draw(draw: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    """Return `draw` that moves what a generator draws to `device`, unless the call names a device."""

    @functools.wraps(draw)
    def moved(*args: Any, generator: torch.Generator | None = None, **settings: Any) -> Tensor:
        if generator is None:
            return draw(*args, **settings)
        if settings.get("device") is not None:
            return draw(*args, generator=generator, **settings)
        gradient = settings.pop("requires_grad", False)
        values = draw(*args, generator=generator, **settings | {"device": generator.device})
        return values.to(device).requires_grad_(gradient)

    return moved
