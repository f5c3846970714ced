"""Tensors that stay compressed in the memory of a GPU and are decoded there.

    Product (side information and scales, on the CPU) ──► CompressedTensor ──kernel──► weights on the device
                                                                └─ compressed_linear ─► their product with tokens

Only the words of the coder "tiles" cross the bus, and what it takes to decode them: tables, classes and scales, about a
hundredth. Decoded weights equal those of the CPU bit for bit.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from birdie.compress.tiled import Product
from birdie.entropy import rans_tiles
from birdie.entropy.factors import Factors
from birdie.entropy.rans_tiles import TileTables
from birdie.entropy.tiles import OpenedTiles
from birdie.entropy.trellis_states import chunk_rows, machine
from birdie.errors import ArtifactError, ConfigError
from birdie.system.device import current

MOST_TOKENS = 8  # for which a product decodes into registers
_MOST_WORDS = (1 << 31) - (1 << 21)  # positions have 32 bits, also those in a damaged tile
_MOST_MATRICES = 1 << 15


class Form(NamedTuple):
    """Constants that a kernel is compiled for; `birdie.entropy.rans_tiles` describes them."""

    trellis: bool
    paired: bool
    halves: bool
    raw: int
    listed: bool
    grouped: bool
    columns: bool
    sparse: bool

    @classmethod
    def of(cls, product: Product) -> "Form":
        """Return the form of a product."""
        tables, factors = product.stream.tables, product.factors
        listed = bool((np.diff(tables.values) != 1 << tables.raw).any())
        grouped = factors.rows.shape[1] > 1
        states = len(tables.paths.odd)
        return cls(
            *(states > 1, tables.paired, factors.halves, tables.raw, listed, grouped),
            factors.columns.size > 0 and not grouped,
            bool(tables.kinds.max(initial=0) >= len(tables.frequencies) >> tables.paired),
        )


@dataclass(frozen=True, slots=True)
class Matrices:
    """Matrices of one form, which one launch decodes; the attributes are arguments of the kernel."""

    form: Form
    words: Tensor
    bounds: Tensor
    ends: Tensor
    matrices: Tensor
    tables: Tensor
    entries: Tensor
    values: Tensor
    by_row: Tensor
    by_column: Tensor

    @classmethod
    def of(cls, form: Form, products: Sequence[tuple[Product, int]]) -> "Matrices":
        """Return matrices on the CPU, each given with the index of its first weight in the tensor."""
        ends, matrices, tables, entries = [], [], [], []
        first_tile = row = table = factor = column = 0
        for number, (product, origin) in enumerate(products):
            stream, factors = product.stream, product.factors
            tiles, kinds, count = stream.tiles, stream.tables.kinds, len(stream.tables.frequencies) >> form.paired
            shift, flip, _ = stream.tables.rules()
            strides = (1, stream.rows) if stream.columns_first else (stream.columns, 1)
            groups = factors.rows.shape[1]
            matrices.append((
                *(first_tile, row, stream.rows, stream.columns),
                *(rans_tiles.height(stream.columns), chunk_rows(stream.columns), shift, flip),
                *(int(stream.tables.values[0]), groups, factors.group_size, factor, column, origin, *strides),
            ))  # fmt: skip
            ends.append(tiles.starts.astype(np.int32) | tiles.tails.astype(np.int32) << 8 | number << 16)
            size = 1 << rans_tiles.PRECISION + form.paired
            tables.append(np.where(kinds < count, kinds.astype(np.int32) * size + table, -1))
            entries.append(stream.tables.entries())
            first_tile, row, table = first_tile + tiles.lengths.size, row + stream.rows, table + entries[-1].size
            factor, column = factor + factors.rows.size, column + factors.columns.size
        values = [np.pad(product.stream.tables.values, (0, 256))[:256] for product, _ in products if form.listed]
        lengths = [np.zeros(1, np.int64), *(product.stream.tiles.lengths for product, _ in products)]
        data = [np.frombuffer(product.stream.data, np.uint8) for product, _ in products]
        last = products[-1][0].factors.rows
        arrays = (
            np.concatenate([*data, np.zeros(-sum(part.size for part in data) % 4, np.uint8)]).view(np.uint32),
            np.cumsum(np.concatenate(lengths)).astype(np.int32),
            np.concatenate(ends).astype(np.int32),
            np.array(matrices, np.int64),
            np.concatenate([*tables, tables[-1][-1:]]).astype(np.int32),
            np.concatenate(entries),
            np.concatenate([np.zeros(0, np.int32), *values]).astype(np.int32),
            np.concatenate([*(product.factors.rows.ravel() for product, _ in products), last[-1]]),
            np.concatenate([product.factors.columns for product, _ in products]),
        )
        return cls(form, *map(torch.from_numpy, arrays))

    @property
    def rows(self) -> int:
        """Rows of all matrices."""
        return len(self.tables) - 1

    def tensors(self) -> dict[str, Tensor]:
        """Return what lies in the memory of a device."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "form"}

    def launch(
        self, out: Tensor, dtype: torch.dtype, inputs: Tensor | None = None, tokens: int = 0, *, checked: bool = False
    ) -> Tensor:
        """Decode to `out`, or multiply by `inputs`; return numbers that are all 1 if no tile is damaged.

        With `checked` there are also numbers of rows, which are 0 if one is coded though it is all zeros.
        """
        import triton.language as tl

        from birdie.compress.device import decoding_kernels as kernels

        device, count = self.words.device, len(self.ends)
        sound = torch.zeros(count + (self.rows if checked else 0), dtype=torch.uint8, device=device)
        with current(device):
            kernels.decode[(count,)](
                *self.tensors().values(),
                sound,
                out.view(torch.uint16) if out.dtype is torch.bfloat16 else out,
                out if inputs is None else inputs,
                *(len(self.words), count, self.rows),
                min(torch.finfo(dtype).max, torch.finfo(torch.float32).max),
                *self.form,
                CHECKED=checked,
                dtype=getattr(tl, str(dtype).removeprefix("torch.")),
                TOKENS=tokens,
                num_warps=1,
                enable_fp_fusion=False,  # products are rounded one by one
            )
        return sound


@dataclass(frozen=True, slots=True)
class CompressedTensor:
    """A tensor in its coded form, in the memory of a device.

    Attributes:
        shape, dtype: of the tensor.
        parts: what it consists of, a launch each: matrices of blocks of rows.
        multiplies: whether the kernel multiplies by it: a matrix, in one part, and scanned along its rows.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Matrices, ...]
    multiplies: bool

    @classmethod
    def of(
        cls, shape: tuple[int, ...], dtype: torch.dtype, products: Sequence[tuple[Product, int]]
    ) -> "CompressedTensor | None":
        """Return a tensor, on the CPU, of products and the index of each one's first weight; None if it is too long."""
        words = sum(int(product.stream.tiles.lengths.sum()) + 2 for product, _ in products)
        if words > _MOST_WORDS or len(products) > _MOST_MATRICES:
            return None
        forms: dict[Form, list[tuple[Product, int]]] = {}
        for product, origin in products:
            forms.setdefault(Form.of(product), []).append((product, origin))
        along = not any(product.stream.columns_first for product, _ in products)
        parts = tuple(Matrices.of(form, some) for form, some in forms.items())
        return cls(shape, dtype, parts, along and len(shape) == 2 and len(parts) == 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the coded form."""
        return sum(tensor.nbytes for part in self.parts for tensor in part.tensors().values())

    @property
    def device(self) -> torch.device:
        """Device whose memory holds the coded form."""
        return self.parts[0].words.device

    def to(self, device: torch.device) -> "CompressedTensor":
        """Return the tensor in the memory of `device`."""
        parts = []
        for part in self.parts:
            moved = {name: tensor.to(device, non_blocking=True) for name, tensor in part.tensors().items()}
            parts.append(replace(part, **moved))  # type: ignore[arg-type]
        return replace(self, parts=tuple(parts))

    def decode(self, out: Tensor | None = None, *, checked: bool = True) -> tuple[Tensor, Tensor]:
        """Decode on the device, on its current stream.

        Args:
            out: contiguous memory for the tensor; default: new.
            checked: False for a tensor that is known to be sound, which takes less time.

        Returns:
            The tensor, and numbers on the device: 0 where a tile was damaged (see `require_sound`).
        """
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device) if out is None else out
        sound = [part.launch(out, self.dtype, checked=checked) for part in self.parts]
        return out, sound[0] if len(sound) == 1 else torch.cat(sound)


def compressed_linear(x: Tensor, weight: CompressedTensor, bias: Tensor | None = None) -> Tensor:
    """Return `torch.nn.functional.linear(x, weight, bias)` of a weight that stays compressed.

    For up to 8 tokens the weight is decoded in registers, and takes no memory; the sums of tiles are float32 and added
    in a fixed order, so that results do not depend on which tile comes first. For more tokens the weight is decoded and
    multiplied.

    Args:
        x: (…, in), on the device of the weight.
        weight: (out, in); `birdie.load_compressed` returns those of a file.
        bias: (out,).
    """
    if len(weight.shape) != 2 or x.shape[-1:] != weight.shape[1:] or x.device != weight.device:
        raise ConfigError(
            f"an input {tuple(x.shape)} on {x.device} cannot be multiplied by a weight {weight.shape} on "
            f"{weight.device}; both are on one device, and the last dimensions are equal"
        )
    count = math.prod(x.shape[:-1])
    if not 0 < count <= MOST_TOKENS or not weight.multiplies:
        return F.linear(x, weight.decode(checked=False)[0].to(x.dtype), bias)
    part, (rows, columns) = weight.parts[0], weight.shape
    tokens = 1 << (count - 1).bit_length()
    inputs = torch.zeros(tokens, columns, device=x.device)
    inputs[:count] = x.reshape(count, columns)
    # Sums of tiles lie apart: an atomic addition would add them in any order, and there are few.
    sums = torch.empty(-(-columns // rans_tiles.LANES), tokens, rows, device=x.device)
    part.launch(sums, weight.dtype, inputs, tokens)
    y = sums.sum(0)[:count]
    y = y if bias is None else y + bias
    return y.to(x.dtype).reshape(*x.shape[:-1], rows)


def require_sound(sound: Tensor) -> None:
    """Wait for the device, and check what `CompressedTensor.decode` returned beside the tensor."""
    if not bool(sound.all()):
        raise ArtifactError("a tile of a stream does not end where it should, or a row of zeros is coded; "
                            "the file is damaged")  # fmt: skip


@cache
def works(device: torch.device) -> bool:
    """Return whether the kernel decodes a small tensor on `device` as the CPU does; log once if it does not.

    An installed Triton also needs a C compiler, a driver and a GPU that it knows.
    """
    if device.type != "cuda":
        return False
    problem = "triton is not installed" if find_spec("triton") is None else trial(device)
    if problem is not None:
        logging.getLogger("birdie").warning("tensors are decoded on the CPU and moved to %s: %s", device, problem)
    return problem is None


def trial(device: torch.device) -> str | None:
    """Decode a small tensor on `device`, and return what went wrong, or None."""
    product, shape = _small_product(), (70, 40)
    try:
        compressed = CompressedTensor.of(shape, torch.bfloat16, [(product, 0)])
        assert compressed is not None
        out, sound = compressed.to(device).decode()
        require_sound(sound)
        expected = torch.empty(shape, dtype=torch.bfloat16, device="cpu")
        product.decode(expected, 1)
        same = torch.equal(out.cpu().view(torch.int16), expected.view(torch.int16))
        return None if same else "the kernel decodes other weights than the CPU"
    except Exception as error:  # whatever Triton and the driver raise
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _small_product() -> Product:
    """Return two tiles of a trellis, the second one narrow."""
    rng = np.random.default_rng(0)
    symbols = np.minimum(rng.geometric(0.5, (70, 40)) - 1, 7).astype(np.uint16)
    frequencies = np.array([[2048, 1024, 512, 256, 128, 64, 32, 32]])
    kinds, values = np.zeros(70, np.uint8), np.arange(-3, 5)
    words, tiles = rans_tiles.encode(symbols, kinds, frequencies, None)
    tables = TileTables(kinds, frequencies, values, 0, machine(32), False)
    by_row, by_column = (rng.uniform(0.5, 1, size).astype(np.float32) for size in ((70, 1), 40))
    stream = OpenedTiles(70, 40, -3, 4, False, tables, tiles, memoryview(words.tobytes()))
    return Product(stream, Factors(by_row, by_column, 40, True, float(torch.finfo(torch.bfloat16).max)))
