"""Tensors that stay compressed in the memory of a GPU and are decoded there.

    streams of a tensor ──side information, scales: CPU──► CompressedTensor ──one kernel──► weights on the device

Only the payload crosses the bus, and what it takes to decode it: tables of frequencies, classes and scales, about a
hundredth. Decoded weights equal those of the CPU bit for bit. Kernels decode streams of the coder "lanes" (files of the
coder "fast", from 65,536 weights on) of the schemes grid, ternary and trellis, the latter with paths down the columns;
`CompressedTensor.of` returns None for all others, which the CPU decodes.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress.log_scales import scales_of
from birdie.compress.scheme import Encoded, StreamLayout
from birdie.compress.schemes import grid, ternary, trellis
from birdie.entropy import coder, static
from birdie.entropy.raw import check_range
from birdie.entropy.trellis import chunk_rows, machine
from birdie.errors import ArtifactError
from birdie.runtime.device import current

Payload = tuple[int, bytes]  # coder and bytes of a stream
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST = 1 << 23  # magnitude of a number: twice it and one is exact in float32 arithmetic
_MOST_WORDS = (1 << 31) - 1  # positions have 32 bits
_SCHEMES = {decoder.name: decoder for decoder in (grid.DECODER, ternary.DECODER, trellis.DECODER)}


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors of a matrix of numbers, float32.

    Attributes:
        rows: (rows, groups); a row's factor comes first.
        columns: (columns,), or empty.
        group_size: columns that share a factor of a row.
    """

    rows: NDArray[np.float32]
    columns: NDArray[np.float32]
    group_size: int


@dataclass(frozen=True, slots=True)
class CompressedTensor:
    """A tensor in its coded form, in the memory of a device.

    Attributes:
        shape, dtype: of the tensor.
        matrix: rows and columns in scan order; strides: of the tensor's memory along these.
        states: of the trellis whose paths run down the columns, 1 for a grid.
        paired: tables come in pairs, for even and for odd states.
        zero_rows: a row of nothing but zeros decodes to zeros, also in odd states.
        precision: log2 of the slots of a table.
        lanes: of a chunk.
        group_size: columns that share a factor of a row.
        words: (words,) uint16, lane after lane; bounds: (chunks · lanes + 1,) int32, where lanes begin.
        classes: (rows,) uint8.
        entries: (tables, symbols) int64: frequency, from bit 16 on first slot, from bit 32 on the number.
        rows, columns: factors, (rows, groups) and (columns,) or (0,) float32.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    matrix: tuple[int, int]
    strides: tuple[int, int]
    states: int
    paired: bool
    zero_rows: bool
    precision: int
    lanes: int
    group_size: int
    words: Tensor
    bounds: Tensor
    classes: Tensor
    entries: Tensor
    rows: Tensor
    columns: Tensor

    @classmethod
    def of(
        cls,
        scheme: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        params: tuple[int, ...],
        layout: Sequence[StreamLayout],
        payloads: Sequence[Payload],
        threads: int = 1,
    ) -> "CompressedTensor | None":
        """Return a tensor of a file, on the CPU; None if the kernels do not decode it.

        Args:
            scheme: name of its scheme.
            shape, dtype, params: as the file has them.
            layout: of its streams, by the scheme's decoder.
            payloads: coder and payload of each stream.
            threads: that decode the scales.
        """
        if not may_decode(scheme, dtype, params, [code for code, _ in payloads]):
            return None
        symbols = layout[0]
        states = symbols.hints.states
        stream = static.open_stream(payloads[0][1], symbols.rows, symbols.columns, states, in_lanes=True)
        values = stream.alphabet.values
        if not stream.direct or int(np.abs(values).max()) > _LARGEST or int(stream.lengths.sum()) > _MOST_WORDS:
            return None
        if len(stream.data) != 2 * int(stream.lengths.sum()):
            raise ArtifactError("bytes follow the last chunk of a stream; the file is damaged")
        check_range(int(values[0]), int(values[-1]), symbols.dtype)
        scales = [
            coder.decode(code, payload, one.rows, one.columns, one.hints, one.dtype, threads)
            for one, (code, payload) in zip(layout[1:], payloads[1:], strict=True)
        ]
        # The symbols are not decoded here; of an array for all of them only the shape is looked at.
        nothing = np.broadcast_to(np.zeros((), np.int8), (symbols.rows, symbols.columns))
        factors = _scales(Encoded(scheme, shape, dtype, params, (nothing, *scales)))
        if scheme == "ternary" and (int(values[0]) < -1 or int(values[-1]) > 1):
            raise ArtifactError("a ternary symbol is not -1, 0 or 1; the file is corrupt")
        strides = symbols.columns, 1
        if stream.columns_first:
            if scheme == "trellis" or factors.rows.shape[1] > 1:
                return None
            # Transposed, a row's factor is that of a column; another of 1 before it changes no bit.
            factors = Scales(np.ones((stream.rows, 1), np.float32), factors.rows[:, 0], stream.columns)
            strides = 1, symbols.columns
        if scheme == "trellis" and states == 1:
            values = 2 * values
        frequencies = stream.frequencies
        starts = np.cumsum(frequencies, axis=1) - frequencies
        bounds = np.concatenate([[0], np.cumsum(stream.lengths)])
        words = np.frombuffer(stream.data, "<u2").astype(np.uint16)
        return cls(
            shape,
            dtype,
            (stream.rows, stream.columns),
            strides,
            states,
            stream.paths.odd.size > 1,
            scheme == "trellis" and symbols.columns >= trellis.ZERO_ROW_COLUMNS,
            stream.precision,
            stream.lengths.shape[1],
            factors.group_size,
            torch.from_numpy(words if words.size else np.zeros(1, np.uint16)),
            torch.from_numpy(bounds.astype(np.int32)),
            torch.from_numpy(stream.classes),
            torch.from_numpy(frequencies | starts << 16 | values << 32),
            torch.from_numpy(np.ascontiguousarray(factors.rows)),
            torch.from_numpy(np.ascontiguousarray(factors.columns)),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the coded form."""
        return sum(part.nbytes for part in self._parts().values())

    @property
    def chunks(self) -> int:
        """Number of chunks, which decode independently."""
        return -(-self.matrix[0] // chunk_rows(self.matrix[1]))

    def _parts(self) -> dict[str, Tensor]:
        names = ("words", "bounds", "classes", "entries", "rows", "columns")
        return {name: getattr(self, name) for name in names}

    def to(self, device: torch.device) -> "CompressedTensor":
        """Return the tensor in the memory of `device`."""
        moved = {name: part.to(device, non_blocking=True) for name, part in self._parts().items()}
        return replace(self, **moved)  # type: ignore[arg-type]

    def decode(self, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Decode on the device, on its current stream.

        Args:
            out: contiguous memory for the tensor; default: new.

        Returns:
            The tensor, and (chunks,) int32 on the device: not 0 where a chunk was damaged (see `require_sound`).
        """
        from birdie.compress.device import decoding_kernels as kernels

        device = self.bounds.device
        out = torch.empty(self.shape, dtype=self.dtype, device=device) if out is None else out
        (rows, columns), (tables, size) = self.matrix, self.entries.shape
        with current(device):
            kind = torch.uint8 if size <= 256 else torch.uint16
            symbols = torch.empty((tables, 1 << self.precision), dtype=kind, device=device)
            blocks = -(-(1 << self.precision) // kernels.SLOTS)
            kernels.expand[(tables, blocks)](self.entries, symbols, size, self.precision, kernels.SLOTS)
            trellis_states = self.states > 1
            paths = machine(self.states)
            states = torch.empty(self.chunks * columns if trellis_states else 1, dtype=torch.uint8, device=device)
            bfloat16 = self.dtype is torch.bfloat16
            damaged = torch.empty(self.chunks, dtype=torch.int32, device=device)
            kernels.decode[(self.chunks,)](
                *(self.words, self.bounds, self.classes, symbols, self.entries, self.rows, self.columns, states),
                *(
                    out.view(torch.uint16) if bfloat16 else out,
                    damaged,
                    rows,
                    columns,
                    chunk_rows(columns),
                    size,
                    self.rows.shape[1],
                    self.group_size,
                ),
                min(torch.finfo(self.dtype).max, torch.finfo(torch.float32).max),
                int(paths.next_state[-1, 0]) ^ (abs(self.states) - 1) >> 1,
                int(paths.next_state[0, 1]),
                *self.strides,
                PRECISION=self.precision,
                PAIRED=self.paired,
                TRELLIS=trellis_states,
                ZERO_ROWS=self.zero_rows,
                GROUPED=self.rows.shape[1] > 1,
                COLUMN_SCALES=self.columns.numel() > 0,
                BFLOAT16=bfloat16,
                LANES=self.lanes,
                num_warps=max(1, self.lanes // 32),
                enable_fp_fusion=False,  # products are rounded one by one
            )
        return out, damaged


def may_decode(scheme: str, dtype: torch.dtype, params: tuple[int, ...], coders: Sequence[int]) -> bool:
    """Return whether kernels may decode a tensor of these streams; its side information may still be beyond them."""
    down = scheme != "trellis" or params[0] > 0
    return scheme in _SCHEMES and down and dtype in DTYPES and coders[0] == coder.LANES


def _scales(encoded: Encoded) -> Scales:
    """Return the factors of a tensor, whose symbols are not looked at."""
    columns = encoded.streams[0].shape[1]
    if encoded.scheme != "trellis":
        group_size = encoded.params[0] if encoded.params else columns
        return Scales(scales_of(encoded.streams[1]), np.empty(0, np.float32), group_size)
    by_column = trellis.column_scales(encoded) if encoded.params[2] else np.empty(0, np.float32)
    return Scales(trellis.row_scales(encoded)[:, None] * np.float32(0.5), by_column, columns)


def require_sound(damaged: Tensor) -> None:
    """Wait for the device, and check what `CompressedTensor.decode` returned beside the tensor."""
    if bool(damaged.any()):
        raise ArtifactError("a lane of a coded chunk does not end where it should; the file is damaged")


@cache
def works(device: torch.device) -> bool:
    """Return whether the kernels decode a small tensor on `device` as the CPU does; log once if they do not.

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
    numbers = np.random.default_rng(0).normal(0, 2, (40, 70)).round().astype(np.int32)
    scales = np.zeros((40, 1), np.int32)
    params = (8, 16, 0, 0, 0)
    layout = trellis.layout((40, 70), torch.bfloat16, params)
    payloads = [(coder.LANES, static.encode(numbers, (1, 1), 8, 32)), (coder.CONSTANT, b"")]
    try:
        compressed = CompressedTensor.of("trellis", (40, 70), torch.bfloat16, params, layout, payloads)
        assert compressed is not None
        out, damaged = compressed.to(device).decode()
        require_sound(damaged)
        expected = trellis.decode(Encoded("trellis", (40, 70), torch.bfloat16, params, (numbers, scales)))
        same = torch.equal(out.cpu().view(torch.int16), expected.view(torch.int16))
        return None if same else "the kernels decode other weights than the CPU"
    except Exception as error:  # whatever Triton and the driver raise
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
