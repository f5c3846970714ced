"""Decoders of tiles under test: numbers, and weights in each dtype that the kernel of tiles writes.

Weights are compared with the numbers times the same factors, so that the kernels that skip the numbers agree with them.
"""

import zlib
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.artifact import container
from birdie.entropy import coder, tiles
from birdie.entropy.factors import Factors
from birdie.entropy.hints import Hints
from birdie.entropy.rans_tiles import Kind
from birdie.entropy.trellis_states import STATES
from birdie.errors import ArtifactError
from tests.hostile import seeds
from tests.hostile.seeds import Seed

MAX_VALUES = 1 << 20
_KINDS = tuple(kind for kind in get_args(Kind) if kind != "int")


def sound() -> list[Seed]:
    """Return the seeds whose stream is of tiles."""
    return [seed for seed in seeds.streams() if seed.entries[0].streams[0].coder == coder.TILES]


def decode(data: bytes, _: Path) -> Any:
    """Return the numbers of every stream of tiles, and the bits of weights made of them."""
    reader, out = container.Reader(data), []
    for name in reader.names:
        entry = reader.read(name)
        rows, columns = (*entry.shape, 1, 1)[:2]
        if rows * columns > MAX_VALUES:
            raise ArtifactError("refused by the bound of the test")
        states = next((number for number in entry.params if abs(number) in STATES), 1)
        for stream in entry.streams:
            if stream.coder == coder.TILES:
                numbers = coder.decode(coder.TILES, stream.payload, rows, columns, Hints(states=states), threads=1)
                noise = np.random.default_rng(zlib.crc32(stream.payload))
                out.append((name, numbers.shape, numbers.tobytes(), _weights(stream.payload, numbers, states, noise)))
    return out


def _weights(payload: bytes, numbers: NDArray[np.integer], states: int, noise: np.random.Generator) -> list[bytes]:
    """Return the bits of weights in each dtype, which are `numbers` times their factors."""
    rows, columns = numbers.shape
    stream, out = tiles.open_stream(payload, rows, columns, states), []
    if not stream.exact:
        return []
    scanned = numbers.T if stream.columns_first else numbers
    for kind in _KINDS:
        factors = _factors(stream, states, noise)
        dtype: torch.dtype = getattr(torch, kind)
        filled = torch.zeros(stream.rows, stream.columns, dtype=dtype)
        words = filled.view(getattr(torch, f"uint{8 * dtype.itemsize}")).numpy()
        tiles.decode_weights(stream, factors, words, kind, 1)
        if not factors.halves:
            by_row = np.repeat(factors.rows, factors.group_size, 1)[:, : stream.columns]
            product = scanned.astype(np.float32) * by_row * (factors.columns if factors.columns.size else np.float32(1))
            expected = torch.from_numpy(np.clip(product, -factors.limit, factors.limit)).to(dtype)
            if not torch.equal(filled, expected):
                raise AssertionError(f"weights in {kind} are not the numbers times their factors")
        out.append(words.tobytes())
    return out


def _factors(stream: tiles.OpenedTiles, states: int, noise: np.random.Generator) -> Factors:
    """Return factors of groups, or of rows and columns."""
    group = int(noise.choice([stream.columns, stream.columns, 32, 7, 1]))
    rows = noise.uniform(0.001, 3, (stream.rows, -(-stream.columns // group))).astype(np.float32)
    count = stream.columns if group == stream.columns and noise.integers(2) else 0
    columns = noise.uniform(0.1, 2, count).astype(np.float32)
    return Factors(rows, columns, group, states != 1, float(noise.choice([1.0, 300.0, 60_000.0])))
