"""Public names of `import birdie`, which imports nothing heavy before a name is used."""

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
    "SpectralTraining",
    "Summary",
    "WeightsError",
    "__version__",
    "calibrate",
    "compress_weights",
    "compressed_linear",
    "fine_tune",
    "from_pretrained",
    "inspect",
    "leaky_floor",
    "load",
    "load_compressed",
    "load_object",
    "load_weights",
    "plain",
    "quantization_loss",
    "quantize_",
    "save",
    "save_object",
    "schemes",
    "sensitivity",
    "spectral",
]


def test_the_public_names_are_pinned() -> None:
    assert dir(birdie) == PUBLIC
    for name in PUBLIC:
        assert getattr(birdie, name) is not None


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = getattr(birdie, "nothing")  # noqa: B009  type checkers see that it is missing


def test_importing_save_does_not_import_the_torch_compiler() -> None:
    code = "import sys, birdie; birdie.save; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "False"]
