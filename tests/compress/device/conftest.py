"""One process of Triton's interpreter for all tests of the kernels: its imports take seconds."""

from typing import Any

import pytest

from tests.interpreted_kernels import run_interpreted


@pytest.fixture(scope="session")
def interpreted() -> dict[str, dict[str, Any]]:
    """Return the results of all cases of decoding and of encoding."""
    return run_interpreted("compress/device/interpreted.py")
