"""The fast coder as the default of whatever saves: context mixing, the default, is most of the time of a small save.

A conftest.py imports the fixture. Golden files, the tests of `entropy` and whoever tests the coder name their coder.
"""

import inspect

import pytest

import birdie
from birdie.artifact.options import SaveRequest

_SAVERS = [inspect.unwrap(saver) for saver in (birdie.save, birdie.save_object, SaveRequest.__init__)]
DEFAULTS = {saver.__qualname__: saver.__kwdefaults__["coder"] for saver in _SAVERS}
"""Function → its own default."""


@pytest.fixture(autouse=True)
def fast_coder(monkeypatch: pytest.MonkeyPatch) -> None:
    for saver in _SAVERS:
        monkeypatch.setitem(saver.__kwdefaults__, "coder", "fast")
