"""Matrices to compress, their sensitivities, and what compressing them cost: for the tests of every scheme."""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from birdie.compress.registry import decode, decoder
from birdie.compress.scheme import Encoded
from birdie.compress.spectral.transforms import Transform
from birdie.compress.tensors import kernel, rows_columns
from birdie.entropy import coder
from birdie.entropy.hints import Effort

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_weight(*shape: int, seed: int = 0) -> Tensor:
    """Return Gaussian rows whose scales differ by a few octaves."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.exp2(4 * torch.rand(shape[0], *[1] * (len(shape) - 1), generator=generator) - 6)
    return torch.randn(shape, generator=generator) * scales


def smooth_kernels(*shape: int, seed: int = 0) -> Tensor:
    """Return convolution kernels that are little but their mean and slope."""
    weight = Transform(axes="kernel").forward(gaussian(*shape, seed=seed))
    for axis in (2, 3):
        falling = torch.tensor([0.05**frequency for frequency in range(shape[axis])])
        weight = weight * falling.reshape([-1 if other == axis else 1 for other in range(4)])
    return Transform(axes="kernel").inverse(weight)


def few_components(*shape: int, rank: int = 3, seed: int = 0) -> Tensor:
    """Return a sum of few outer products, of falling size, and a little noise."""
    generator = torch.Generator().manual_seed(seed)
    total = 0.01 * torch.randn(shape, generator=generator)
    for k in range(rank):
        product = torch.ones(())
        for size in shape:
            product = product[..., None] * torch.randn(size, generator=generator)
        total = total + product / (k + 1)
    return total


def covariance(size: int, seed: int = 0) -> Tensor:
    """Return the covariance (size, size), float64, of correlated variables of different deviations."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(size, size, generator=generator, dtype=torch.float64) / math.sqrt(size)
    mixed = (torch.eye(size) + mixed) * torch.exp(0.5 * torch.randn(size, generator=generator))
    return mixed.T @ mixed


def squared_error(weight: Tensor, encoded: Encoded, columns: Tensor | None = None) -> float:
    """Return the squared error of the decoded matrix, summed; weighted by columns where these are given."""
    squares = (decode(encoded).double() - weight.double()).reshape(rows_columns(tuple(weight.shape))) ** 2
    return float((squares if columns is None else squares * columns).sum())


def relative_error(weight: Tensor, encoded: Encoded) -> float:
    """Return the squared error as a share of the squared weights."""
    return squared_error(weight, encoded) / float(weight.double().square().sum())


def assert_matches_layout(encoded: Encoded) -> None:
    """Require streams of the shapes and within the integer types that the decoder will expect."""
    layout = decoder(encoded.scheme).layout(encoded.shape, encoded.dtype, encoded.params)
    for stream, expected in zip(encoded.streams, layout, strict=True):
        assert stream.shape == (expected.rows, expected.columns)
        limits = np.iinfo(expected.dtype)
        assert stream.size == 0 or limits.min <= int(stream.min()) <= int(stream.max()) <= limits.max


def coded_bytes(encoded: Encoded, effort: Effort = "fast") -> int:
    """Return the bytes of all streams as a file holds them."""
    layout = decoder(encoded.scheme).layout(encoded.shape, encoded.dtype, encoded.params)
    total = 0
    for stream, expected in zip(encoded.streams, layout, strict=True):
        hints = replace(expected.hints, kernel=kernel(encoded.shape, expected.columns))
        total += len(coder.encode(np.ascontiguousarray(stream), hints, effort).payload)
    return total
