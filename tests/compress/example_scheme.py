"""The scheme of examples/own_scheme.py, which is from outside birdie, for tests that register it themselves."""

import importlib

import pytest

from birdie.compress import registry
from birdie.compress.scheme import Scheme


def _import() -> type[Scheme]:
    """Import it, and leave the registry as it was for all other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_foreign", {})
        scheme: type[Scheme] = importlib.import_module("examples.own_scheme").Squares
    registry.words.cache_clear()
    return scheme


SQUARES = _import()
