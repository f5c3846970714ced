"""Tensors as one byte string, the form in which general compressors do best.

Names and shapes are not included, in favor of the compressors. The values of each tensor are scanned by rows or by
columns. Symbols beyond int8 are written as the escape -128, and follow in 16 bits after all tensors; without int16
tensors -128 is an ordinary value. Floats are the bytes of their words.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Order = Literal["rows", "columns"]
ORDERS: tuple[Order, ...] = ("rows", "columns")
ESCAPE = -128


def join(tensors: Mapping[str, Tensor], order: Order) -> bytes:
    """Return `tensors` as one byte string; they are all integers of at most 16 bits, or all floats."""
    parts: list[bytes] = []
    escaped: list[NDArray[np.int16]] = []
    for tensor in tensors.values():
        if tensor.is_floating_point():
            parts.append(_scan(tensor, order).view(torch.uint8).numpy().tobytes())
        elif tensor.dtype == torch.int8:
            parts.append(_scan(tensor, order).numpy().tobytes())
        else:
            values = _scan(tensor, order).numpy()
            wide = (values <= ESCAPE) | (values > 127)
            parts.append(np.where(wide, ESCAPE, values).astype(np.int8).tobytes())
            escaped.append(values[wide])
    return b"".join(parts) + b"".join(values.astype("<i2").tobytes() for values in escaped)


def part(stream: bytes, like: Mapping[str, Tensor], order: Order) -> dict[str, Tensor]:
    """Invert `join`; `like` has tensors of the same names, shapes and dtypes."""
    sizes = {name: tensor.numel() * _width(tensor) for name, tensor in like.items()}
    rest = np.frombuffer(stream, "<i2", offset=sum(sizes.values()))
    tensors: dict[str, Tensor] = {}
    offset = 0
    for name, tensor in like.items():
        data = np.frombuffer(stream, np.int8, sizes[name], offset).copy()
        offset += sizes[name]
        if tensor.dtype == torch.int16:
            values = data.astype(np.int16)
            wide = values == ESCAPE
            count = int(wide.sum())
            values[wide], rest = rest[:count], rest[count:]
            flat = torch.from_numpy(values)
        else:
            flat = torch.from_numpy(data).view(tensor.dtype)
        rows = tensor.shape[0] if tensor.ndim > 1 else 1
        columns = tensor.numel() // rows
        grid = flat.reshape(rows, columns) if order == "rows" else flat.reshape(columns, rows).T
        tensors[name] = grid.reshape(tensor.shape).contiguous()
    return tensors


def _width(tensor: Tensor) -> int:
    return tensor.element_size() if tensor.is_floating_point() else 1


def _scan(tensor: Tensor, order: Order) -> Tensor:
    grid = tensor.reshape(tensor.shape[0] if tensor.ndim > 1 else 1, -1)
    return (grid if order == "rows" else grid.T).contiguous().reshape(-1)
