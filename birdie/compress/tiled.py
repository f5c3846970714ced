"""Weights straight from the words of a file: the coder "tiles" writes number · row · column in the tensor's dtype.

Schemes whose tensors are such products say so by `Decoder.factors`. For all others, and other coders, integers are
decoded first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.scheme import Decoder, Encoded, StreamLayout
from birdie.compress.tensors import empty
from birdie.entropy import coder, tiles
from birdie.entropy.factors import Factors
from birdie.entropy.rans_tiles import Kind
from birdie.entropy.raw import Bytes, check_range

Payload = tuple[int, Bytes]  # coder and bytes of a stream
Recode = Callable[[StreamLayout, Payload], Bytes | None]
"""Returns a payload of the coder "tiles" for the numbers of a stream; None where they have none."""
KINDS: dict[torch.dtype, Kind] = {getattr(torch, kind): kind for kind in get_args(Kind) if kind != "int"}


@dataclass(frozen=True, slots=True)
class Product:
    """A tensor of a file as its numbers, still coded, and what they are multiplied by, in scan order."""

    stream: tiles.OpenedTiles
    factors: Factors

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        params: tuple[int, ...],
        layout: Sequence[StreamLayout],
        payloads: Sequence[Payload],
        threads: int = 1,
        *,
        recode: Recode | None = None,
    ) -> "Product | None":
        """Return a tensor of a file; None if it is not such a product in the coder "tiles".

        Args:
            decoder: of its scheme.
            shape, dtype, params: as the file has them.
            layout: of its streams.
            payloads: of its streams.
            threads: that decode the scales.
            recode: of numbers in another coder; None: there is no product of them.
        """
        if decoder.factors is None or dtype not in KINDS:
            return None
        symbols, (code, payload) = layout[0], payloads[0]
        coded = payload if code == coder.TILES else None if recode is None else recode(symbols, payloads[0])
        if coded is None:
            return None
        stream = tiles.open_stream(coded, symbols.rows, symbols.columns, symbols.hints.states)
        check_range(stream.lowest, stream.highest, symbols.dtype)
        others = [
            coder.decode(code, payload, one.rows, one.columns, one.hints, one.dtype, threads)
            for one, (code, payload) in zip(layout[1:], payloads[1:], strict=True)
        ]
        # Of the symbols, which are not decoded here, only the shape is looked at.
        nothing = np.broadcast_to(np.zeros((), np.int8), (symbols.rows, symbols.columns))
        factors = decoder.factors(Encoded(decoder.name, shape, dtype, params, (nothing, *others)))
        if not stream.exact or (stream.columns_first and (factors.rows.shape[1] > 1 or factors.columns.size)):
            return None
        if stream.columns_first:  # a factor of 1 before another changes no bit
            ones = np.ones((stream.rows, 1), np.float32)
            factors = replace(factors, rows=ones, columns=factors.rows[:, 0], group_size=stream.columns)
        return cls(stream, factors)

    def decode(self, out: Tensor, threads: int) -> None:
        """Fill `out`, a contiguous tensor on the CPU, of as many elements."""
        stream = self.stream
        if stream.columns_first:
            scanned = empty((stream.rows, stream.columns), out.dtype)
            self._fill(scanned, threads)
            out.view(stream.columns, stream.rows).copy_(scanned.T)
        else:
            self._fill(out.view(stream.rows, stream.columns), threads)

    def _fill(self, out: Tensor, threads: int) -> None:
        words: NDArray[np.unsignedinteger] = out.view(getattr(torch, f"uint{8 * out.itemsize}")).numpy()
        tiles.decode_weights(self.stream, self.factors, words, KINDS[out.dtype], threads)
