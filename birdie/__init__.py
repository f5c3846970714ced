"""birdie trains, compresses, packs and scores models under a byte budget.

    import birdie

    birdie.save(model, "model.birdie", budget=16_000_000)
    state = birdie.load("model.birdie")
    birdie.inspect("model.birdie").bits_per_weight

Names are imported when they are first used, so that `import birdie` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from birdie import schemes as schemes
    from birdie.artifact.device import load_compressed
    from birdie.artifact.in_memory import compress_weights, load_weights, quantize_
    from birdie.artifact.inspect import inspect
    from birdie.artifact.load import load
    from birdie.artifact.repack import load_object, save_object
    from birdie.artifact.save import save
    from birdie.artifact.summary import Summary
    from birdie.compress.calibration.calibrate import calibrate
    from birdie.compress.calibration.table import sensitivity
    from birdie.compress.device.compressed import compressed_linear
    from birdie.errors import (
        ArtifactError,
        BirdieError,
        BudgetError,
        ConfigError,
        DataError,
        OutputError,
        RuleError,
        WeightsError,
    )
    from birdie.gpt.train.muon import Muon
    from birdie.hub.pretrained import from_pretrained
    from birdie.small.fine_tuning import FineTuneStep, fine_tune
    from birdie.small.qat.stored import plain
    from birdie.small.spectral.wrap import SpectralTraining, leaky_floor, quantization_loss, spectral
    from birdie.system.provenance import VERSION as __version__  # noqa: N811

_HOMES = {
    "birdie.artifact.device": ("load_compressed",),
    "birdie.artifact.in_memory": ("compress_weights", "load_weights", "quantize_"),
    "birdie.artifact.inspect": ("inspect",),
    "birdie.artifact.load": ("load",),
    "birdie.artifact.repack": ("load_object", "save_object"),
    "birdie.artifact.save": ("save",),
    "birdie.artifact.summary": ("Summary",),
    "birdie.compress.calibration.calibrate": ("calibrate",),
    "birdie.compress.calibration.table": ("sensitivity",),
    "birdie.compress.device.compressed": ("compressed_linear",),
    "birdie.small.qat.stored": ("plain",),
    "birdie.small.spectral.wrap": ("SpectralTraining", "leaky_floor", "quantization_loss", "spectral"),
    "birdie.errors": (
        "ArtifactError",
        "BirdieError",
        "BudgetError",
        "ConfigError",
        "DataError",
        "OutputError",
        "RuleError",
        "WeightsError",
    ),
    "birdie.hub.pretrained": ("from_pretrained",),
    "birdie.small.fine_tuning": ("FineTuneStep", "fine_tune"),
    "birdie.gpt.train.muon": ("Muon",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
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


def __getattr__(name: str) -> Any:
    """Return a public name, imported now (PEP 562)."""
    if name == "__version__":
        return import_module("birdie.system.provenance").VERSION
    if name == "schemes":
        return import_module("birdie.schemes")
    if name not in _HOME:
        raise AttributeError(f"module 'birdie' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
