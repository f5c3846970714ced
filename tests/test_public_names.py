"""Public names of `import birdie`, which imports nothing heavy before a name is used."""

import subprocess
import sys

import pytest

import birdie


def test_every_public_name_is_there() -> None:
    assert len(dir(birdie)) > 20
    for name in dir(birdie):
        assert getattr(birdie, name) is not None


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = getattr(birdie, "nothing")  # noqa: B009  type checkers see that it is missing


def test_importing_save_does_not_import_the_torch_compiler() -> None:
    code = "import sys, birdie; birdie.save; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "False"]
