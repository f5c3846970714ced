"""A quantization scheme of your own: levels at the signed squares, fine near zero and coarse far out.

    python examples/own_scheme.py

Once imported it is used like birdie's own: in rules, under a byte budget (`at_scale`), simulated in training.
"""

from dataclasses import dataclass

import numpy as np
import torch

import birdie
from birdie.schemes import SCALES, SYMBOLS, Decoder, Encoded, Scheme, Spec, StreamLayout, register


def layout(shape, dtype, params):
    """Symbols in the shape of the weight as a matrix, and the unit of each row as the bits of a float32."""
    if params or 0 in shape or not dtype.is_floating_point:  # a file may say anything
        raise birdie.ArtifactError(f"scheme squares has parameters {params} for {dtype} of shape {shape}")
    rows = shape[0] if len(shape) > 1 else 1
    return StreamLayout(rows, int(np.prod(shape)) // rows, SYMBOLS), StreamLayout(rows, 1, SCALES)


def decode(encoded):
    """Return symbol · |symbol| · unit: only products, which are the same bits on every machine."""
    symbols, units = encoded.streams[0].astype(np.float64), encoded.streams[1].view(np.float32)
    limit = torch.finfo(encoded.dtype).max
    values = torch.from_numpy(symbols * np.abs(symbols) * units).clamp(-limit, limit)
    return values.to(encoded.dtype).reshape(encoded.shape)


@register
@dataclass(frozen=True)
class Squares(Scheme):
    """Levels at 0, ±1, ±4, ±9, … times `scale` standard deviations of a row."""

    decoder = Decoder("squares", None, layout, decode)
    specs = (Spec("squares", "levels at the signed squares", example="squares:0.1"),)
    scale: float = 0.1

    def at_scale(self, sigma):
        return Squares(sigma)

    def encode(self, name, weight, *, sensitivity=None, lam=0.0):
        bad = int((~weight.isfinite()).sum())
        if bad or weight.numel() == 0 or not weight.is_floating_point():
            raise birdie.WeightsError(f"tensor {name!r} ({weight.dtype}) has {bad} values that are not finite, or none")
        rows = weight.detach().double().contiguous().numpy()
        rows = rows.reshape(len(weight) if weight.ndim > 1 else 1, -1)
        smallest = np.abs(rows).max(axis=1, keepdims=True) / 2**16  # of a row that hardly varies
        units = np.maximum(self.scale * rows.std(axis=1, keepdims=True), smallest).clip(1e-30).astype(np.float32)
        symbols = np.rint(np.sign(rows) * np.sqrt(np.abs(rows) / units)).astype(np.int32)
        return Encoded("squares", tuple(weight.shape), weight.dtype, (), (symbols, units.view(np.int32)))


if __name__ == "__main__":
    print(birdie.save({"w": torch.randn(256, 256)}, "squares.birdie", scheme="squares", budget=30_000))
