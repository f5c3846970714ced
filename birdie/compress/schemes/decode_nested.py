"""Tensors that a scheme holds inside another: each as its code in the file, its number of parameters and these.

They are decoded to float32; what is built on them sums in float64, in a fixed order, and casts once.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.compress.scheme import Decoder, Encoded, Integers, StreamLayout
from birdie.compress.schemes.decode_codebook import CODEBOOK
from birdie.compress.schemes.dequantize import GRID, TERNARY
from birdie.errors import ArtifactError

INNER: dict[int, Decoder] = {2: GRID, 5: TERNARY, 6: CODEBOOK}  # by their codes in birdie.artifact.files.SCHEMES
NAMES = {"grid": 2, "ternary": 5, "codebook": 6}
Part = tuple[int, tuple[int, ...], tuple[StreamLayout, ...]]  # code, parameters, layout


def parts(shape: tuple[int, ...], params: Sequence[int]) -> list[Part]:
    """The tensors of `shape` that `params` tell of, one after another.

    Raises:
        ArtifactError: there is none, one has another scheme than `INNER` has, or its parameters are impossible.
    """
    found: list[Part] = []
    while params:
        code, count = (*params, 0)[:2]
        own = tuple(params[2 : 2 + max(count, 0)])
        if code not in INNER or len(own) != count:
            raise ArtifactError(
                f"a tensor inside another has scheme {code}, unknown here; the file is corrupt or newer"
            )
        found.append((code, own, INNER[code].layout(shape, torch.float32, own)))
        params = params[2 + count :]
    return found


def decoded(shape: tuple[int, ...], found: Sequence[Part], streams: Sequence[Integers]) -> list[NDArray[np.float32]]:
    """Each of `found` as (rows, columns) from its streams, which stand in `streams` one after another."""
    out: list[NDArray[np.float32]] = []
    for code, own, layout in found:
        inner = Encoded("", shape, torch.float32, own, tuple(streams[: len(layout)]))
        out.append(INNER[code].decode(inner).numpy().reshape(layout[0].rows, layout[0].columns))
        streams = streams[len(layout) :]
    return out
