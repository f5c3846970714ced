"""One array for each feature of coded streams, with the coder that has the feature: the golden file pins them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from birdie.entropy import coder, mixed, numbers, raw, static, tiles
from birdie.entropy import coding_plan as plan
from birdie.entropy.hints import Hints, Stream
from tests.reference import decoder as reference
from tests.reference import mixed as reference_mixed
from tests.reference import tiles as reference_tiles
from tests.reference.side_information import Bits, opened, words_of
from tests.reference.trellis import after

GOLDEN = Path(__file__).parents[1] / "golden" / "streams.json"
Integers = NDArray[np.integer]


@dataclass(frozen=True)
class Feature:
    """An array, the coder to code it with, and the facts that its side information must then state."""

    coder: int
    values: Integers
    facts: dict[str, object] = field(default_factory=dict)
    kernel: tuple[int, int] = (1, 1)
    states: int = 1

    @property
    def hints(self) -> Hints:
        """Hints that encoder and decoder share."""
        return Hints(kernel=self.kernel, states=self.states)

    def coded(self) -> Stream:
        """Code the array."""
        low, high = int(self.values.min()), int(self.values.max())
        write: dict[int, Callable[[], bytes | None]] = {
            coder.CONSTANT: lambda: raw.encode_constant(low),
            coder.BYTES: lambda: self.values.astype(np.uint8).tobytes(),
            coder.PACKED: lambda: raw.encode_packed(self.values, low, high),
            coder.NUMBERS: lambda: numbers.encode(self.values),
            coder.STATIC: lambda: static.encode(self.values, self.kernel, self.states),
            coder.MIXED: lambda: mixed.encode(self.values, self.kernel, self.states),
            coder.TILES: lambda: tiles.encode(plan.search(self.values, self.kernel, self.states), self.states),
        }
        payload = write[self.coder]()
        assert payload is not None
        return Stream(self.coder, payload)


def facts(coded: Stream, rows: int, columns: int) -> dict[str, object]:
    """Return the facts that the side information of a coder from 3 on states."""
    if coded.coder == coder.NUMBERS:
        return {"running": Bits(words_of(coded.payload)).number(0) == 1}
    if coded.coder < coder.NUMBERS:
        return {}
    bits, _ = opened(coded.payload)
    side: reference.Side | reference_mixed.Side | reference_tiles.TiledSide
    more: dict[str, object]
    if coded.coder == coder.STATIC:
        side = static_side = reference.described(bits, rows, columns)
        more = {"classes": max(static_side.kinds) > 0, "paired": bool(static_side.paired)}
        more |= {"predicted": side.predicted[0], "chunks": len(side.words)}
    elif coded.coder == coder.TILES:
        side = tiled = reference_tiles.described(bits, rows, columns)
        more = {"classes": tiled.classes, "paired": bool(tiled.paired), "raw": tiled.raw}
        more |= {"left out": tiled.kinds.count(tiled.classes), "tiles": len(tiled.words)}
    else:
        side = mixed_side = reference_mixed.described(bits, rows, columns)
        more = {"low": mixed_side.low, "prior": mixed_side.prior}
        more |= {"predicted": side.predicted[0], "chunks": len(side.words)}
    gaps = {b - a for a, b in zip(side.values[:-1], side.values[1:], strict=True)} if side.values else set()
    kind = "split" if side.values is None else "listed" if len(gaps) > 1 else f"step {gaps.pop()}"
    return {"alphabet": kind, "transposed": bool(side.transposed), **more}


def gaussian(rows: int, columns: int, low: float, high: float, seed: int = 0) -> Integers:
    """Return symbols whose rows have scales from `low` to `high`."""
    rng = np.random.default_rng(seed)
    return np.rint(rng.normal(size=(rows, columns)) * np.geomspace(low, high, rows)[:, None]).astype(np.int32)


def near_copies(rows: int = 64, columns: int = 24) -> Integers:
    """Return `rows` rows that nearly agree, and half as many that do not."""
    rng = np.random.default_rng(1)
    base = np.repeat(rng.normal(0, 40, (1, columns)), rows, 0) + rng.normal(0, 0.7, (rows, columns))
    values: Integers = np.rint(np.concatenate([base, rng.normal(0, 40, (rows // 2, columns))])).astype(np.int32)
    return values


def smooth_kernels(outputs: int = 24, inputs: int = 12, side: int = 3) -> Integers:
    """Return weights of a convolution (outputs, inputs · side²) whose kernels are nearly flat."""
    rng = np.random.default_rng(2)
    flat = rng.normal(0, 30, (outputs, inputs, 1, 1)) + rng.normal(0, 4, (outputs, inputs, side, side))
    return np.rint(flat).astype(np.int32).reshape(outputs, -1)


def some_zeros(values: NDArray[Any]) -> NDArray[Any]:
    """Return the array with zeros in every third row."""
    return np.where((np.arange(len(values)) % 3 == 2)[:, None], 0, values)


def on_paths(rows: int, columns: int, states: int, deviation: float, *, gaps: bool = False) -> Integers:
    """Return the numbers m of normal weights, rounded to the grids of a trellis along the paths that they take.

    Each column is a path; with a negative number of states there is one path, row after row. With gaps every third row
    is zero.
    """
    weights = np.random.default_rng(5).normal(0, deviation, (rows, columns)) * np.geomspace(0.5, 2, rows)[:, None]
    weights = some_zeros(weights) if gaps else weights
    out, state = np.empty((rows, columns), np.int32), [0] * columns
    for r in range(rows):
        for c in range(columns):
            path = c if states > 0 else 0
            out[r, c] = np.rint(weights[r, c] - 0.5 * (state[path] % 2))
            state[path] = after(states, state[path], int(out[r, c]))
    return out


def mostly_zero(rows: int, columns: int) -> Integers:
    """Return an array of more than one chunk that takes few bytes."""
    values = np.zeros((rows, columns), np.int8)
    values[:: rows // 5, 7] = 1
    return values


NEAR = np.array([-90_000, 3, 5, 1 << 17])
LISTED = np.array([-900000, 3, 5, 1 << 30])[np.abs(gaussian(40, 60, 1, 1)).clip(0, 3)]
FAR = (np.random.default_rng(3).standard_cauchy((50, 40)) * 100).clip(-(2**31), 2**31 - 1).astype(np.int32)
HEAVY = np.rint(np.random.default_rng(4).laplace(0, 9, (40, 50))).astype(np.int32)

FEATURES: dict[str, Feature] = {
    "constant": Feature(coder.CONSTANT, np.full((3, 4), -7)),
    "bytes": Feature(coder.BYTES, np.arange(64).reshape(8, 8) * 37 % 256),
    "packed": Feature(coder.PACKED, np.arange(64).reshape(8, 8) * 2654435761 % 2**32 - 2**31),
    "numbers plain": Feature(coder.NUMBERS, gaussian(5, 6, 2, 2), {"running": False}),
    "numbers running": Feature(coder.NUMBERS, np.cumsum(gaussian(60, 1, 2, 2), axis=0), {"running": True}),
    "static plain": Feature(coder.STATIC, gaussian(40, 30, 5, 5), {"classes": False, "predicted": "none"}),
    "static step": Feature(coder.STATIC, gaussian(40, 60, 3, 9) * 4, {"alphabet": "step 4"}),
    "static listed": Feature(coder.STATIC, LISTED, {"alphabet": "listed"}),
    "static split": Feature(coder.STATIC, FAR, {"alphabet": "split"}),
    "static spikes": Feature(coder.STATIC, gaussian(64, 80, 40, 60).clip(-60, 60)),
    "static row classes": Feature(coder.STATIC, gaussian(96, 48, 1, 40), {"classes": True, "transposed": False}),
    "static column classes": Feature(coder.STATIC, gaussian(96, 48, 1, 40).T, {"classes": True, "transposed": True}),
    "static rows": Feature(coder.STATIC, near_copies(), {"predicted": "rows"}),
    "static taps": Feature(coder.STATIC, smooth_kernels(), {"predicted": "taps"}, (3, 3)),
    "static chunks": Feature(coder.STATIC, mostly_zero(1100, 1024), {"chunks": 2}),
    "mixed plain": Feature(coder.MIXED, gaussian(40, 30, 5, 5), {"predicted": "none", "prior": "Gaussian"}),
    "mixed Laplace": Feature(coder.MIXED, HEAVY, {"prior": "Laplace"}),
    "mixed step": Feature(coder.MIXED, gaussian(40, 60, 3, 9) * 4, {"alphabet": "step 4"}),
    "mixed listed": Feature(coder.MIXED, LISTED, {"alphabet": "listed"}),
    "mixed low bits": Feature(coder.MIXED, gaussian(24, 40, 300, 500), {"low": 3}),
    "mixed rows": Feature(coder.MIXED, near_copies(), {"predicted": "rows"}),
    "mixed taps": Feature(coder.MIXED, smooth_kernels(), {"predicted": "taps"}, (3, 3)),
    "mixed columns first": Feature(coder.MIXED, gaussian(96, 48, 1, 40).T, {"transposed": True}),
    "mixed 4 states": Feature(coder.MIXED, on_paths(40, 30, 4, 0.8), {"predicted": "none"}, states=4),
    "mixed 64 states": Feature(coder.MIXED, on_paths(30, 40, 64, 9), {"alphabet": "step 1"}, states=64),
    "mixed 256 states": Feature(coder.MIXED, on_paths(30, 40, 256, 9), {"alphabet": "step 1"}, states=256),
    "mixed listed states": Feature(coder.MIXED, on_paths(8, 24, 8, 400), {"alphabet": "listed"}, states=8),
    "mixed along rows": Feature(coder.MIXED, on_paths(24, 30, -8, 0.8), {"predicted": "none"}, states=-8),
    "static 8 states": Feature(coder.STATIC, on_paths(64, 60, 8, 0.6), {"paired": True}, states=8),
    "static along rows": Feature(coder.STATIC, on_paths(30, 70, -4, 0.6), {"paired": True}, states=-4),
    "mixed chunks": Feature(coder.MIXED, mostly_zero(1100, 1024), {"chunks": 2}),
    "tiles plain": Feature(coder.TILES, gaussian(40, 37, 5, 5), {"classes": 1, "tiles": 2, "left out": 0}),
    "tiles narrow": Feature(coder.TILES, gaussian(60, 32, 5, 5), {"tiles": 1}),
    "tiles row classes": Feature(coder.TILES, gaussian(96, 48, 1, 40), {"classes": 4, "transposed": False}),
    "tiles column classes": Feature(coder.TILES, gaussian(96, 48, 1, 40).T, {"classes": 4, "transposed": True}),
    "tiles step": Feature(coder.TILES, gaussian(40, 60, 3, 9) * 4, {"alphabet": "step 4"}),
    "tiles listed": Feature(coder.TILES, NEAR[np.abs(gaussian(40, 60, 1, 1)).clip(0, 3)], {"alphabet": "listed"}),
    "tiles without rows of zeros": Feature(coder.TILES, some_zeros(gaussian(40, 50, 1, 9)), {"left out": 13}),
    "tiles of raw bits": Feature(coder.TILES, gaussian(50, 40, 400, 400), {"raw": 4}),
    "tiles 4 states": Feature(
        coder.TILES, on_paths(90, 40, 4, 0.8, gaps=True), {"paired": True, "left out": 30}, states=4
    ),
    "tiles 32 states": Feature(coder.TILES, on_paths(70, 66, 32, 0.6), {"paired": True, "tiles": 3}, states=32),
    "tiles 128 states": Feature(coder.TILES, on_paths(70, 40, 128, 0.6), {"paired": True, "tiles": 2}, states=128),
    "tiles below each other": Feature(coder.TILES, mostly_zero(8300, 128), {"tiles": 8, "left out": 8295}),
}


@cache
def stream(name: str) -> Stream:
    """Return the stream of a feature, coded once."""
    return FEATURES[name].coded()
