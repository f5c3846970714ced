"""Tiles decoded and multiplied by the kernel under Triton's interpreter, against the CPU."""

import random
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from birdie.compress.device import compressed
from birdie.compress.device.compressed import CompressedTensor, compressed_linear
from birdie.compress.tiled import Product
from birdie.entropy import rans_tiles
from birdie.entropy import trellis_states as trellis
from birdie.entropy.factors import Factors
from birdie.entropy.rans_tiles import PRECISION, TileTables
from birdie.entropy.tiles import OpenedTiles
from birdie.errors import ArtifactError
from tests.artifact.states import same_bits

Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A matrix in scan order, and what it is coded and multiplied with.

    Attributes:
        groups: columns that share a factor of a row; 0 for one factor a row.
        by_column: whether columns have factors.
        scale: of the factors of rows.
        height, chunk: of tiles in rows, and of paths in weights.
        left_out: every so many rows are zeros, and not coded.
        zeros: the first row is zeros, but coded, which is an error.
    """

    rows: int = 10
    columns: int = 40
    dtype: torch.dtype = torch.bfloat16
    states: int = 1
    paired: bool = False
    classes: int = 1
    raw: int = 0
    values: tuple[int, ...] = tuple(range(-3, 5))
    groups: int = 0
    by_column: bool = False
    columns_first: bool = False
    left_out: int = 0
    zeros: bool = False
    scale: float = 1.0
    height: int = 8
    chunk: int = 1 << 20
    seed: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the tensor."""
        return (self.columns, self.rows) if self.columns_first else (self.rows, self.columns)

    def product(self) -> Product:
        """Return the coded matrix."""
        rng, size = np.random.default_rng(self.seed), len(self.values)
        symbols = rng.integers(0, size << self.raw, (self.rows, self.columns)).astype(np.uint16)
        if self.zeros:
            symbols[0] = self.values.index(0)
        values = np.array(self.values) << self.raw
        numbers = values[symbols >> self.raw] + (symbols & (1 << self.raw) - 1)
        kinds = rng.integers(0, self.classes, self.rows).astype(np.uint8)
        if self.left_out:
            kinds[:: self.left_out], numbers[:: self.left_out] = self.classes, 0
        odd = trellis.odd_states(numbers, self.states) if self.paired else None
        frequencies = rng.multinomial(
            (1 << PRECISION) - size, rng.dirichlet(np.ones(size)), self.classes << self.paired
        )
        words, tiles = rans_tiles.encode(symbols, kinds, frequencies + 1, odd, self.raw)
        tables = TileTables(kinds, frequencies + 1, values, self.raw, trellis.machine(self.states), self.paired)
        limit = float(min(torch.finfo(self.dtype).max, torch.finfo(torch.float32).max))
        most = int(np.abs(numbers).max())
        groups = self.groups or self.columns
        by_row = self.scale * rng.uniform(0.5, 1, (self.rows, -(-self.columns // groups)))
        by_column = rng.uniform(0.5, 1, self.columns if self.by_column else 0)
        factors = Factors(by_row.astype(np.float32), by_column.astype(np.float32), groups, self.states > 1, limit)
        data = memoryview(words.tobytes())
        return Product(
            OpenedTiles(self.rows, self.columns, -most, most, self.columns_first, tables, tiles, data), factors
        )


def expected(products: list[tuple[Product, int]], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return what the CPU decodes."""
    out = torch.empty(shape, dtype=dtype)
    for product, origin in products:
        product.decode(out.view(-1)[origin : origin + product.stream.rows * product.stream.columns], 1)
    return out


def of(*cases: Case) -> tuple[list[tuple[Product, int]], tuple[int, ...], torch.dtype]:
    """Return blocks of rows of one tensor."""
    sizes = [case.rows * case.columns for case in cases]
    products = [(case.product(), sum(sizes[:index])) for index, case in enumerate(cases)]
    return products, (sum(case.shape[0] for case in cases), cases[0].shape[1]), cases[0].dtype


def run(*cases: Case, flips: int = 0, launches: int = 1) -> dict[str, Any]:
    """Return whether the kernel gives the bits of the CPU, and notices `flips` damaged bits where that does."""
    with (
        mock.patch.object(trellis, "CHUNK", cases[0].chunk),
        mock.patch.object(rans_tiles, "_ROWS", cases[0].height),
    ):
        products, shape, dtype = of(*cases)
        if flips:
            (product, _), rng = products[0], random.Random(cases[0].seed)
            data = bytearray(product.stream.data)
            for _ in range(flips):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            products = [(replace(product, stream=replace(product.stream, data=memoryview(bytes(data)))), 0)]
        tensor = CompressedTensor.of(shape, dtype, products)
        assert tensor is not None
        assert len(tensor.parts) == launches
        out, sound = tensor.to(torch.device("cpu")).decode()
        try:
            weights = expected(products, shape, dtype)
        except ArtifactError:
            return {"same": not bool(sound.all()), "damaged": True}
        return {"same": bool(sound.all()) and same_bits(out, weights)}


LISTED = (-5000, 0, 3, 5, 100_000)
CASES: dict[str, tuple[Case, ...]] = {
    "one scale": (Case(),),
    "float16": (Case(dtype=torch.float16, scale=0.1),),
    "float32, three rows of tiles": (Case(rows=18, dtype=torch.float32),),
    "float16, subnormal": (Case(dtype=torch.float16, scale=1e-6),),
    "float32, subnormal": (Case(dtype=torch.float32, scale=1e-39),),
    "float16, clamped": (Case(dtype=torch.float16, scale=3e4),),
    "bfloat16, clamped": (Case(scale=1.5e38),),
    "groups": (Case(groups=7, raw=1),),
    "ternary": (Case(values=(-1, 0, 1), groups=8),),
    "columns first": (Case(columns_first=True, by_column=True, dtype=torch.float16),),
    "classes": (Case(classes=3, rows=12, columns=64),),
    "listed": (Case(values=LISTED, classes=2),),
    "listed, rows left out": (Case(values=LISTED, left_out=3, dtype=torch.float32),),
    "raw bits": (Case(raw=4, dtype=torch.float32, left_out=5),),
    "no tail column": (Case(columns=32),),
    "one column in a tile": (Case(columns=33, rows=9),),
    "trellis, 1 state": (replace(Case(by_column=True), states=1, left_out=4),),
    "trellis, 4 states": (Case(states=4, paired=True, left_out=3),),
    "trellis, 32 states": (Case(states=32, paired=True, by_column=True, classes=2, rows=12, columns=70),),
    "trellis, 64 states, unpaired": (Case(states=64, by_column=True, dtype=torch.float32),),
    "trellis, unpaired, rows left out": (Case(states=8, left_out=2),),
    "trellis, paths restart in tiles": (Case(states=32, paired=True, chunk=200, rows=22),),
    "trellis, raw bits": (Case(states=256, raw=2, left_out=6, paired=True),),
    "blocks of rows": (Case(states=8, paired=True), Case(states=8, paired=True, rows=5, classes=2, seed=1)),
    "blocks, listed": (Case(values=LISTED), Case(rows=5, values=(1, 2, 4), seed=1)),
}


def any_case(seed: int) -> Case:
    """Return a matrix with anything in it."""
    rng = np.random.default_rng(seed)
    states = int(rng.choice(trellis.STATES))
    trellis_or_groups = {"by_column": bool(rng.random() < 0.5)} if states > 1 else {"groups": int(rng.integers(0, 50))}
    return Case(
        int(rng.integers(2, 10)),
        int(rng.integers(32, 70)),
        (torch.float16, torch.bfloat16, torch.float32)[seed % 3],
        states,
        states > 1 and bool(rng.random() < 0.5),
        int(rng.integers(1, 4)),
        int(rng.integers(0, 3)),
        left_out=int(rng.integers(0, 4)) if rng.random() < 0.5 else 0,
        chunk=int(rng.choice([1 << 20, 300])),
        seed=seed,
        **trellis_or_groups,
    )


def linear(*cases: Case, tokens: tuple[int, ...] = (1,), bias: bool = False) -> dict[str, Any]:
    """Return the largest error of a product in shares of the sum of magnitudes, and whether it wrote no weights."""
    with mock.patch.object(rans_tiles, "_ROWS", cases[0].height):
        products, shape, dtype = of(*cases)
        tensor = CompressedTensor.of(shape, dtype, products)
        assert tensor is not None
        weight = expected(products, shape, dtype).double()
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(*tokens, shape[1], generator=generator)
        offset = torch.randn(shape[0], generator=generator) if bias else None
        with mock.patch.object(
            CompressedTensor, "decode", autospec=True, side_effect=CompressedTensor.decode
        ) as decode:
            y = compressed_linear(x, tensor, offset).double()
    exact = F.linear(x.double(), weight, None if offset is None else offset.double())
    error = (y - exact).abs() / (F.linear(x.double().abs(), weight.abs()) + 1e-30)  # rows left out are 0
    return {"error": float(error.max()), "registers": not decode.called}


def products() -> Results:
    """Return the errors of products."""
    path = Case(states=32, paired=True, by_column=True, columns=70, left_out=5)
    return {
        "1 token": linear(path),
        "3 tokens, bias": linear(path, tokens=(3,), bias=True),
        "2 × 4 tokens, tiles below each other": linear(replace(path, columns=32), tokens=(2, 4)),
        "float16": linear(Case(dtype=torch.float16, groups=9), tokens=(2,)),
        "float32, raw bits": linear(Case(dtype=torch.float32, raw=2)),
        "blocks of rows": linear(path, replace(path, rows=7, seed=1)),
        "9 tokens, decoded": linear(path, tokens=(9,)),
        "columns first, decoded": linear(Case(columns_first=True)),
    }


def results() -> Results:
    """Return what the kernel made of every case, of any matrices, of damaged ones, and of products."""
    outcomes = {name: run(*cases) for name, cases in CASES.items()}
    outcomes["blocks of two forms"] = run(Case(), Case(rows=6, values=LISTED), launches=2)
    outcomes |= {f"any {seed}": run(any_case(seed)) for seed in range(8)}
    outcomes |= {f"damaged {seed}": run(any_case(seed), flips=1 + seed % 3) for seed in range(12)}
    outcomes |= {
        "damaged, zeros": run(Case(rows=3, zeros=True)),
        "trial": {"same": compressed.trial(torch.device("cpu")) is None},
    }
    return outcomes
