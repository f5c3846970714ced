"""The example of spectral compression runs: a GPT-2-shaped model with Conv1D, a tied head and learned positions."""

from importlib import util
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "spectral_gpt2.py"
SMALL = ("--width=32", "--layers=1", "--heads=2", "--context=24", "--steps=15", "--smaller=3")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = util.spec_from_file_location("spectral_gpt2", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_example_makes_a_smaller_model_that_loads(
    example: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(torch.__file__).parent.parent  # any text: the whole library takes a second to read
    monkeypatch.setattr(example.sysconfig, "get_path", lambda _: str(source / "torch" / "nn"))
    outcome = example.main([*SMALL])
    output = capsys.readouterr().out
    assert f"{outcome['small']:,} bytes" in output
    assert outcome["small"] <= outcome["bytes"] / 3
    assert outcome["apart"] < 1e-4
    assert outcome["tied"]
    assert outcome["after"] < 8  # bits of a byte of which nothing is known
