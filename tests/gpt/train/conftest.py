"""Fixtures for every test of training: the device, and one thread."""

from collections.abc import Iterator

import pytest
import torch

from tests.device import on_device as on_device


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from two threads; and the number of threads decides the order of sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
