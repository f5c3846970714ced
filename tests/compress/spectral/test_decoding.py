"""Decoding of spectral coefficients: the sums that the format describes, in their order."""

import numpy as np
import torch

from birdie.compress.log_scales import scales_of
from birdie.compress.registry import decode
from birdie.compress.schemes.spectral import encode_symbols
from birdie.compress.spectral.inverse import cosines
from birdie.compress.spectral.transforms import Transform


def test_a_block_is_the_sum_that_the_format_describes() -> None:
    """Frequencies rise and axes run from the last to the first, in float64; here in plain Python."""
    transform, shape = Transform("dct", 3), (3, 3)
    symbols = np.array([[5, -2, 1], [3, 0, -1], [1, 2, 4]])
    decoded = decode(encode_symbols(shape, torch.float64, symbols, np.full((), -33), transform, "none")).numpy()
    basis, scale = cosines(3).tolist(), float(scales_of(np.array(-33)))
    block = [[float(symbol) * scale for symbol in row] for row in symbols.tolist()]
    for axis in (1, 0):
        lines = block if axis == 1 else [list(line) for line in zip(*block, strict=True)]
        inverted = []
        for line in lines:
            total = [basis[0][sample] * line[0] for sample in range(3)]
            for k in (1, 2):
                total = [total[sample] + basis[k][sample] * line[k] for sample in range(3)]
            inverted.append(total)
        block = inverted if axis == 1 else [list(line) for line in zip(*inverted, strict=True)]
    np.testing.assert_array_equal(decoded, np.array(block).astype(np.float32).astype(np.float64))
