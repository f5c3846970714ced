"""Effort "fast" as the default of whatever saves: context mixing, the default, is most of the time of a small save.

A conftest.py imports the fixture. Golden files, the tests of `entropy` and whoever tests the coder name their effort.
"""

import inspect
from typing import Any

import pytest

from birdie.artifact.options import ObjectOptions, QuantizeOptions, SaveOptions

_KINDS = (SaveOptions, ObjectOptions, QuantizeOptions)
DEFAULTS = [inspect.signature(kind).parameters["effort"].default for kind in _KINDS]
"""Defaults of the library."""


@pytest.fixture(autouse=True)
def fast_coder(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in _KINDS:
        defaults: Any = kind.__init__.__kwdefaults__
        monkeypatch.setitem(defaults, "effort", "fast")
