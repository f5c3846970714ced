"""What `import birdie` offers, and that it costs nothing until used."""

import subprocess
import sys

import pytest

import birdie

PUBLIC = [
    "ArtifactError",
    "BirdieError",
    "BudgetError",
    "ConfigError",
    "DataError",
    "FineTuneStep",
    "Muon",
    "OutputError",
    "RuleError",
    "Spectral",
    "Summary",
    "WeightsError",
    "__version__",
    "compress_weights",
    "fine_tune",
    "inspect",
    "leaky_floor",
    "load",
    "load_weights",
    "quantization_loss",
    "save",
    "schemes",
    "spectral",
]


def test_the_public_names_are_these() -> None:
    assert birdie.__all__ == PUBLIC
    assert dir(birdie) == PUBLIC
    for name in PUBLIC:
        assert getattr(birdie, name) is not None


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = birdie.nothing  # type: ignore[attr-defined]


def test_importing_is_light() -> None:
    heavy = "[m for m in ('torch', 'numba', 'numpy') if m in sys.modules]"
    code = f"import sys, birdie; assert birdie.ArtifactError; print({heavy})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_saving_and_loading_compile_nothing_at_import() -> None:
    code = "import sys, birdie; birdie.save; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "False"]
