"""Kernels compiled ahead: code small arrays that together call every kernel with every type of argument.

An image of a container or an installation for many users runs this once (`birdie kernels`), and no process that loads
or saves a file compiles anything afterwards. A test compares it with what files of every kind call.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from birdie.entropy import coder, differences, mixed, numbers, plan, planes, static, tiles
from birdie.entropy.factors import Factors
from birdie.entropy.hints import Hints
from birdie.entropy.rans_tiles import Kind

Integers = NDArray[np.integer]


def compile_kernels() -> None:
    """Compile every kernel of this package that the cache does not have."""
    for values, kernel, states in _arrays():
        hints, shape = Hints(kernel=kernel, states=states), (values.shape[0], values.shape[1])
        streams = {
            coder.NUMBERS: numbers.encode(values),
            coder.STATIC: static.encode(values, kernel, states),
            coder.TILES: tiles.encode(plan.search(values, kernel, states), states),
            coder.MIXED: mixed.encode(values, kernel, states),
        }
        for dtype in coder.DTYPES:
            range_of = np.iinfo(dtype)
            if range_of.min <= values.min() and values.max() <= range_of.max:
                coder.encode(values.astype(dtype), hints, "fast")
                for code, payload in streams.items():
                    if payload is not None:
                        coder.decode(code, payload, *shape, hints, dtype)
        tiled = streams[coder.TILES]
        if tiled is not None:
            _decode_weights(tiles.open_stream(tiled, *shape, states))
        coder.estimate(values, hints)
    for form in planes.FORMATS:
        words = np.zeros((2, 1), planes.word_dtype(form))
        differences.decode(differences.encode(words, words, form), words, form)
        planes.join(planes.split(words, form), form)


def _decode_weights(stream: tiles.Opened) -> None:
    """Decode the numbers of a stream as weights of each dtype, for which words have two sizes."""
    shape = stream.rows, stream.columns
    factors = Factors(np.ones((stream.rows, 1), np.float32), np.empty(0, np.float32), stream.columns, False, 1.0)
    kinds: tuple[Kind, ...] = ("bfloat16", "float16", "float32")
    for kind in kinds:
        words = np.empty(shape, np.uint32 if kind == "float32" else np.uint16)
        tiles.decode_weights(stream, factors, words, kind, 1)


def _arrays() -> Iterator[tuple[Integers, tuple[int, int], int]]:
    """Yield arrays, kernels of convolutions and states of trellises, one for each kind of alphabet and prediction."""
    rng = np.random.default_rng(0)
    normal = rng.normal(size=(96, 48))
    scales = np.geomspace(1, 40, 96)[:, None]
    rows = np.repeat(rng.normal(0, 40, (1, 24)), 96, 0) + normal[:, :24]
    smooth = rng.normal(0, 30, (24, 12, 1, 1)) + rng.normal(0, 4, (24, 12, 3, 3))
    for values, kernel, states in (
        (normal[:, :40] * 3, (1, 1), 1),  # one table
        (np.abs(normal) * scales, (1, 1), 1),  # classes of rows
        (normal * scales, (1, 1), 1),
        ((normal * scales).T, (1, 1), 1),  # classes of columns
        (np.array([-900_000, 3, 5, 1 << 30])[np.abs(normal).clip(0, 3).astype(int)], (1, 1), 1),  # listed
        ((rng.standard_cauchy((50, 40)) * 100).clip(-(2**31), 2**31 - 1), (1, 1), 1),  # split
        (rows, (1, 1), 1),  # predicted from other rows
        (smooth.reshape(24, -1), (3, 3), 1),  # predicted within kernels
        (normal, (1, 1), 4),  # paths of a trellis, down the columns and along the rows
        (normal, (1, 1), -4),
    ):
        yield np.rint(values).astype(np.int32), kernel, states
