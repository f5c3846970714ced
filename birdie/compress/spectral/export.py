"""Export of trained spectral weights: a scheme that stores symbols and scales as trained, without new quantization."""

import numpy as np
import torch
from torch import Tensor

from birdie.compress.parametrized import Stored
from birdie.compress.scheme import Scheme
from birdie.compress.schemes.grid import MAX_SYMBOL
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.schemes.spectral import encode_symbols
from birdie.compress.spectral.transforms import Transform
from birdie.errors import WeightsError


def trained_scheme(
    name: str,
    symbols: Tensor,
    scale_indices: Tensor,
    transform: Transform,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Scheme:
    """Return the scheme that stores `symbols`, coefficients divided by scales; lossless if symbols are too large."""
    if not bool(torch.isfinite(symbols).all()):
        raise WeightsError(f"tensor {name!r} holds NaN or infinite coefficients; train on from an earlier checkpoint")
    if float(symbols.abs().max()) > MAX_SYMBOL:
        return Lossless()
    integers = symbols.cpu().numpy().astype(np.int32)
    indices = scale_indices.cpu().numpy().astype(np.int32)
    return Stored(encode_symbols(shape, dtype, integers, indices, transform))
