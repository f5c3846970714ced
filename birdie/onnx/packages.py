"""The packages onnx and onnxruntime, which the extra `onnx` installs; files are read and written without them."""

from importlib import import_module
from typing import Any

from birdie.errors import ConfigError


def imported(name: str) -> Any:
    """Return the module onnx or onnxruntime; ConfigError, if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name} is not installed; pip install 'birdie-compress[onnx]'") from error
