"""Quantization schemes, and everything needed to write one: the public names of `birdie.compress.schemes`.

    birdie.save(model, "model.birdie", scheme=[("*.mlp.*", birdie.schemes.Grid(bits=4, group_size=64))])

docs/extend.md shows a scheme of your own in fifty lines.
"""

from typing import Any

from birdie.compress import registry
from birdie.compress.registry import decode, import_scheme, names, parse_spec, register
from birdie.compress.scheme import (
    SCALES,
    SYMBOLS,
    Cost,
    Decoder,
    Encoded,
    Scheme,
    Sensitivity,
    Spec,
    StreamLayout,
    elementwise,
)
from birdie.entropy.hints import Hints

_SCHEMES = {scheme.__name__: scheme for scheme in registry.builtin()}

__all__ = [
    "SCALES",
    "SYMBOLS",
    "Cost",
    "Decoder",
    "Encoded",
    "Hints",
    "Scheme",
    "Sensitivity",
    "Spec",
    "StreamLayout",
    "decode",
    "elementwise",
    "import_scheme",
    "names",
    "parse_spec",
    "register",
    *_SCHEMES,
]


def __getattr__(name: str) -> Any:
    """Return one of birdie's own schemes by the name of its class."""
    if name not in _SCHEMES:
        raise AttributeError(f"module 'birdie.schemes' has no attribute {name!r}")
    return _SCHEMES[name]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
