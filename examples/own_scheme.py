"""A scheme of your own, used in rules, under budgets and in training: levels at signed squares, fine near zero."""

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
    values, limit = symbols * np.abs(symbols) * units, torch.finfo(encoded.dtype).max
    return torch.from_numpy(values.clip(-limit, limit).reshape(encoded.shape)).to(encoded.dtype)


@register
@dataclass(frozen=True)
class Squares(Scheme):
    """Levels at 0, ±1, ±4, ±9, … times `scale` standard deviations of a row."""

    decoder = Decoder("squares", 64, layout, decode)
    specs = (Spec("squares", "levels at the signed squares", example="squares:0.1"),)
    scale: float = 0.1

    def at_scale(self, sigma):
        return Squares(sigma)

    def encode(self, name, weight, *, sensitivity=None):
        bad = (~weight.isfinite()).sum()
        if bad or weight.numel() == 0 or not weight.is_floating_point():
            raise birdie.WeightsError(f"{weight.dtype} tensor {name!r} has {bad} values not finite, or none at all")
        rows = weight.detach().double().numpy().reshape(len(weight) if weight.ndim > 1 else 1, -1)
        units = np.fmax(self.scale * rows.std(1), abs(rows).max(1) / 2**16).clip(1e-30).astype(np.float32)[:, None]
        symbols = np.rint(np.sign(rows) * np.sqrt(np.abs(rows) / units)).astype(np.int32)
        return Encoded("squares", tuple(weight.shape), weight.dtype, (), (symbols, units.view(np.int32)))


if __name__ == "__main__":
    print(birdie.save({"w": torch.randn(256, 256)}, "squares.birdie", scheme="squares", budget=30_000))
