"""Parameters of tests of which daily runs take a few."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_nightly(values: Iterable[Any], daily: Collection[Any]) -> list[Any]:
    """Return all values as parameters of a test, a tuple as several; those not in `daily` run at night."""
    values = list(values)
    assert all(value in values for value in daily), daily
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if value in daily else pytest.mark.nightly
        )
        for value in values
    ]
