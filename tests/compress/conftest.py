"""Fixtures of these tests: the fast coder, a scheme from outside birdie, and a single thread."""

from collections.abc import Iterator

import pytest
import torch

from birdie.compress import registry
from tests.coders import fast_coder  # noqa: F401
from tests.compress.example_scheme import SQUARES


@pytest.fixture(scope="module")
def squares() -> Iterator[None]:
    """Register the scheme of examples/own_scheme.py for the tests of a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_foreign", {})
        registry.register(SQUARES)
        yield
    registry.words.cache_clear()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute in one thread, in which sums always have the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
