"""Quantization schemes, and everything needed to write one: the public names of `birdie.compress.schemes`.

    birdie.save(model, "model.birdie", scheme=[("*.mlp.*", birdie.schemes.Grid(bits=4, group_size=64))])

docs/extend.md shows a scheme of your own in fifty lines.
"""

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
from birdie.compress.schemes.cast import Cast
from birdie.compress.schemes.codebook import Codebook
from birdie.compress.schemes.grid import Grid
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.schemes.lowrank import LowRank
from birdie.compress.schemes.rotation import Rotation
from birdie.compress.schemes.spectral import Spectral
from birdie.compress.schemes.ternary import Ternary
from birdie.compress.schemes.trellis import Trellis
from birdie.compress.schemes.tucker import Tucker
from birdie.entropy.hints import Hints

__all__ = [
    "SCALES",
    "SYMBOLS",
    "Cast",
    "Codebook",
    "Cost",
    "Decoder",
    "Encoded",
    "Grid",
    "Hints",
    "Lossless",
    "LowRank",
    "Rotation",
    "Scheme",
    "Sensitivity",
    "Spec",
    "Spectral",
    "StreamLayout",
    "Ternary",
    "Trellis",
    "Tucker",
    "decode",
    "elementwise",
    "import_scheme",
    "names",
    "parse_spec",
    "register",
]
