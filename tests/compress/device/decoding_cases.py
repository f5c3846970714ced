"""Tensors decoded by the kernels under Triton's interpreter, against the CPU."""

import random
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.compress import registry
from birdie.compress.device import compressed
from birdie.compress.device.compressed import CompressedTensor
from birdie.compress.scheme import Encoded
from birdie.entropy import coder, static, trellis
from birdie.errors import ArtifactError
from tests.artifact.states import same_bits
from tests.reference.streams import on_paths

Integers = NDArray[np.integer]
CPU = torch.device("cpu")


@dataclass
class Case:
    """A tensor: its scheme, its numbers and the indices of its scales."""

    scheme: str
    numbers: Integers
    scales: tuple[Integers, ...]
    dtype: torch.dtype = torch.bfloat16
    params: tuple[int, ...] = ()
    lanes: int = 16
    chunk: int = trellis.CHUNK
    facts: dict[str, object] = field(default_factory=dict)

    def run(self, flips: int = 0, seed: int = 0) -> dict[str, object]:
        """Return whether the kernels give the bits of the CPU, and notice `flips` damaged bits where it does."""
        with mock.patch.object(trellis, "CHUNK", self.chunk):
            rows, columns = shape = self.numbers.shape
            decoder = registry.decoder(self.scheme)
            layout = decoder.layout(shape, self.dtype, self.params)
            states = layout[0].hints.states
            data = bytearray(static.encode(self.numbers, (1, 1), states, self.lanes))
            stream = static.open_stream(bytes(data), rows, columns, states, in_lanes=True)
            rng = random.Random(seed)
            for _ in range(flips):
                data[-1 - rng.randrange(len(stream.data))] ^= 1 << rng.randrange(8)
            coded = [coder.encode(one, expected.hints) for one, expected in zip(self.scales, layout[1:], strict=True)]
            payloads = [(coder.LANES, bytes(data)), *((one.coder, one.payload) for one in coded)]
            tensor = CompressedTensor.of(self.scheme, shape, self.dtype, self.params, layout, payloads)
            assert tensor is not None, (stream.alphabet.kind, stream.predictor)
            facts = {
                "paired": tensor.paired,
                "precision": tensor.precision,
                "chunks": tensor.chunks,
                "transposed": tensor.strides[0] == 1,
                "tables": len(tensor.entries),
            }
            assert facts.items() >= self.facts.items(), facts
            out, damaged = tensor.to(CPU).decode()
            noticed = bool(damaged.any())
            try:
                numbers = coder.decode(coder.LANES, bytes(data), rows, columns, layout[0].hints, layout[0].dtype)
            except ArtifactError:
                return {"same": noticed, "damaged": True}
            weight = decoder.decode(Encoded(self.scheme, shape, self.dtype, self.params, (numbers, *self.scales)))
            return {"same": same_bits(out, weight) and not noticed, "damaged": False}


def indices(count: int, seed: int, low: int = -60, high: int = 20) -> Integers:
    return np.random.default_rng(seed).integers(low, high, (count, 1)).astype(np.int32)


def normal(rows: int, columns: int, deviation: float, seed: int = 0) -> Integers:
    values = np.random.default_rng(seed).normal(0, deviation, (rows, columns))
    return np.rint(values * np.geomspace(0.5, 2, rows)[:, None]).astype(np.int32)


def sparse(rows: int, columns: int) -> Integers:
    """Return numbers with some rows of zeros, some of them odd states."""
    numbers = normal(rows, columns, 1.5)
    numbers[::3] = 0
    numbers[1] = 1
    return numbers


def of_two_classes(rows: int, columns: int) -> Integers:
    """Return numbers of narrow and of wide rows in turn, from which no row is predicted."""
    wide = np.where(np.arange(rows) % 2, 30, 1)[:, None]
    return np.rint(np.random.default_rng(1).normal(0, 1, (rows, columns)) * wide).astype(np.int32)


CASES: dict[str, Case] = {
    "grid, float32": Case("grid", normal(9, 37, 3), (indices(9, 1),), torch.float32),
    "grid, bfloat16": Case("grid", normal(9, 37, 3), (indices(9, 1),)),
    "grid, float16": Case("grid", normal(9, 37, 3), (indices(9, 1),), torch.float16),
    "grid, beyond float16": Case("grid", normal(6, 20, 900), (indices(6, 2, 100, 300),), torch.float16, lanes=4),
    "grid, beyond bfloat16": Case("grid", normal(6, 20, 900), (indices(6, 2, 1990, 2040),), lanes=4),
    "grid, subnormal": Case("grid", normal(6, 20, 3), (indices(6, 3, -2016, -1950),), torch.float32, lanes=4),
    "grid, groups": Case(
        "grid", normal(9, 37, 3), (indices(54, 4).reshape(9, 6),), params=(7,), facts={"transposed": False}
    ),
    "grid, row classes": Case("grid", of_two_classes(60, 64), (indices(60, 5),), lanes=64, facts={"tables": 3}),
    "grid, column classes": Case(
        "grid", of_two_classes(64, 60).T, (indices(60, 5),), lanes=32, facts={"transposed": True}
    ),
    "grid, listed": Case("grid", np.array([-5000, 3, 5, 100_000])[normal(9, 37, 1).clip(0, 3)], (indices(9, 1),)),
    "grid, chunks": Case("grid", normal(11, 30, 3), (indices(11, 6),), chunk=100, lanes=8, facts={"chunks": 4}),
    "ternary": Case("ternary", normal(9, 37, 0.5).clip(-1, 1), (indices(45, 7).reshape(9, 5),), params=(8,)),
    "trellis, 1 state": Case("trellis", normal(9, 37, 3), (indices(9, 8),), params=(1, 16, 0, 7, 3)),
    "trellis, 4 states": Case(
        "trellis", on_paths(40, 64, 4, 0.7), (indices(40, 8, -9, 9),), params=(4, 4, 0, -50, 5), facts={"paired": True}
    ),
    "trellis, 64 states, columns": Case(
        "trellis",
        normal(16, 37, 1),
        (indices(16, 8, -9, 9), indices(37, 9, -9, 9)),
        torch.float32,
        params=(64, 4, 4, -50, 5),
    ),
    "trellis, rows of zeros": Case(
        "trellis", sparse(15, 20), (indices(15, 8, -9, 9),), params=(8, 4, 0, 0, 0), lanes=16
    ),
    "trellis, narrow rows of zeros": Case(
        "trellis", sparse(15, 15), (indices(15, 8, -9, 9),), params=(8, 4, 0, 0, 0), lanes=8
    ),
    "trellis, zeros, 1 state": Case("trellis", sparse(15, 20), (indices(15, 8, -9, 9),), params=(1, 4, 0, 0, 0)),
    "trellis, chunks": Case(
        "trellis", normal(20, 33, 1), (indices(20, 8, -9, 9),), params=(32, 4, 0, 0, 0), chunk=200, facts={"chunks": 4}
    ),
    "trellis, unpaired": Case(
        "trellis", normal(12, 40, 1), (indices(12, 8, -9, 9),), params=(8, 4, 0, 0, 0), facts={"paired": False}
    ),
    "trellis, high precision": Case(
        "trellis",
        on_paths(100, 8, 8, 0.7),
        (indices(100, 8, -9, 9),),
        params=(8, 4, 0, 0, 0),
        lanes=8,
        facts={"precision": 14, "paired": True},
    ),
    "trellis, row classes": Case(
        "trellis", on_paths(72, 64, 16, 0.6), (indices(72, 8, -9, 9),), params=(16, 4, 0, 0, 0), lanes=32
    ),
}


def any_case(seed: int) -> Case:
    """Return a small tensor with anything in it."""
    rng = np.random.default_rng(seed)
    rows, columns = int(rng.integers(2, 12)), int(rng.integers(4, 40))
    lanes = int(rng.choice([one for one in (4, 8, 16, 32) if one <= columns]))
    numbers = normal(rows, columns, float(rng.choice([0.3, 1, 5, 700])), seed)
    numbers[rng.random(rows) < 0.2] = 0
    numbers[0, 0], numbers[-1, -1] = -1, 2  # a constant has another coder
    dtype = (torch.float16, torch.bfloat16, torch.float32)[int(rng.integers(3))]
    chunk = int(rng.choice([1 << 20, 64]))
    if rng.random() < 0.4:
        group = int(rng.integers(1, columns + 1))
        scales = indices(rows * -(-columns // group), seed).reshape(rows, -1)
        return Case("grid", numbers, (scales,), dtype, (group,), lanes, chunk)
    by_column = (indices(columns, seed, -9, 9),) if rng.random() < 0.5 else ()
    params = (int(rng.choice(trellis.STATES)), 4, 4 if by_column else 0, -40, int(rng.integers(rows)))
    return Case("trellis", numbers, (indices(rows, seed, -9, 9), *by_column), dtype, params, lanes, chunk)


def results() -> dict[str, dict[str, object]]:
    """Return what the kernels made of every case, of any tensors, and of damaged ones."""
    outcomes = {name: case.run() for name, case in CASES.items()}
    outcomes |= {f"any {seed}": any_case(seed).run() for seed in range(12)}
    outcomes |= {f"damaged {seed}": any_case(seed).run(1 + seed % 3, seed) for seed in range(14)}
    return outcomes | {"trial": {"same": compressed.trial(CPU) is None}}
