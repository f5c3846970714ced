"""Device of the tests of training, models and scoring: BIRDIE_TEST_DEVICE, the CPU by default.

With BIRDIE_TEST_DEVICE=cuda, whatever these tests create without naming a device is on the GPU, generators too.
"""

import os
from collections.abc import Iterator

import pytest
import torch

DEVICE = torch.device(os.environ.get("BIRDIE_TEST_DEVICE", "cpu"))


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make `DEVICE` torch's default device."""
    if DEVICE.type == "cpu":
        yield
        return
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device=DEVICE: generator(device))
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)
