"""Named sets of tensors that coders are compared on: a checkpoint after quantization, or its float tensors.

    stored     the integers of a quantized file
    uniform    one step per tensor, 0.41 of its standard deviation
    sdclip6    the records' SDClip: row step = 12.85 σ / 31, clipped to ±31; embeddings 20 σ / 127, clipped to ±127
    rowmax6    row step = largest magnitude / 31
    resnet     NNCodec's grid at qp -32 on every weight tensor, rounded to nearest
    bf16 fp32  all float tensors, cast or unchanged
    gaussian   no file: ten million normal values on the grid of uniform, for speed

The steps that a decoder would need count for no coder: only integers are compared.
"""

import io
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.checkpoints.checkpoints import read_state_dict
from birdie.errors import WeightsError

Integers = NDArray[np.integer]
INTEGER_DTYPES = (torch.int8, torch.int16)
FLOAT_DTYPES = (torch.float32, torch.bfloat16)
MAX_UNPACKED = 1 << 30

UNIFORM_STEP = 0.41  # of the tensor's standard deviation
MATRIX_CLIP, EMBEDDING_CLIP = 12.85, 20.0  # of the row's standard deviation
NNC_QP, NNC_DENSITY = -32, 2


@dataclass(frozen=True, slots=True)
class SymbolSet:
    """Tensors by name, all of `INTEGER_DTYPES` or all of `FLOAT_DTYPES`.

    Attributes:
        name: name of the set.
        tensors: contiguous tensors of any shape.
    """

    name: str
    tensors: Mapping[str, Tensor]

    @property
    def is_integer(self) -> bool:
        """True if the tensors are integers, not floats."""
        return all(tensor.dtype in INTEGER_DTYPES for tensor in self.tensors.values())

    @property
    def arrays(self) -> dict[str, Integers]:
        """Symbols by tensor name; floats as 16- or 32-bit words."""
        words = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
        return {
            name: tensor.view(words.get(tensor.dtype, tensor.dtype)).numpy() for name, tensor in self.tensors.items()
        }

    @property
    def symbols(self) -> int:
        """Number of elements of all tensors."""
        return sum(tensor.numel() for tensor in self.tensors.values())

    @property
    def bytes(self) -> int:
        """Uncompressed bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def make(name: str, path: Path | None) -> SymbolSet:
    """Return the set `name` of the checkpoint `path`; "auto" is "stored" if the file has integers, else "bf16".

    Raises:
        WeightsError: the file is unreadable, or has no tensor for this set.
    """
    if name == "gaussian":
        return gaussian()
    if path is None:
        raise WeightsError(f"the set {name!r} needs a checkpoint; give its file")
    if name in ("auto", "stored"):
        integers = stored(path)
        if integers.tensors or name == "stored":
            return _require_tensors(integers, path)
        name = "bf16"
    return _require_tensors(FLOAT_SETS[name](floats(path)), path)


def _require_tensors(symbols: SymbolSet, path: Path) -> SymbolSet:
    if not symbols.tensors:
        raise WeightsError(f"{path} has no tensor for the set {symbols.name!r}; choose another set or file")
    return symbols


def stored(path: Path) -> SymbolSet:
    """Return the int8 and int16 tensors of a file; of the challenge's .ptz those under the key "quantized"."""
    if path.suffix == ".ptz":
        data = zlib.decompressobj().decompress(path.read_bytes(), MAX_UNPACKED)
        content = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        state: Mapping[str, object] = content.get("quantized", content)
    else:
        state = read_state_dict(path)
    integers = {
        name: tensor.contiguous()
        for name, tensor in state.items()
        if isinstance(tensor, Tensor) and tensor.dtype in INTEGER_DTYPES and tensor.numel()
    }
    return SymbolSet("stored", integers)


def floats(path: Path) -> dict[str, Tensor]:
    """Return the float tensors of a checkpoint as float32; tied tensors once."""
    state: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in read_state_dict(path).items():
        if tensor.is_floating_point() and tensor.numel() and (tensor.data_ptr(), tensor.shape) not in seen:
            seen.add((tensor.data_ptr(), tensor.shape))
            state[name] = tensor.detach().float().contiguous()
    return state


def matrices(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with two or more dimensions, which are quantized."""
    return {name: tensor for name, tensor in state.items() if tensor.ndim >= 2}


def uniform(state: Mapping[str, Tensor]) -> SymbolSet:
    """Return the set with one step per tensor, rounded to nearest and clipped to int16."""
    tensors = {}
    for name, weight in matrices(state).items():
        step = UNIFORM_STEP * weight.std(correction=0)
        tensors[name] = _narrow(_quantize(weight, step if step > 0 else torch.ones_like(step), (1 << 15) - 1))
    return SymbolSet("uniform", tensors)


def sdclip6(state: Mapping[str, Tensor]) -> SymbolSet:
    """Return the set with steps from each row's standard deviation, in fp16 as in the records; embeddings in 8 bits."""

    def step(name: str, rows: Tensor) -> tuple[Tensor, int]:
        clip, top = (EMBEDDING_CLIP, 127) if "emb" in name else (MATRIX_CLIP, 31)
        return clip * rows.std(1, correction=0) / top, top

    return _by_rows("sdclip6", state, step)


def rowmax6(state: Mapping[str, Tensor]) -> SymbolSet:
    """Return the set with steps from each row's largest magnitude, in fp16."""
    return _by_rows("rowmax6", state, lambda _, rows: (rows.abs().amax(1) / 31, 31))


def _by_rows(
    set_name: str, state: Mapping[str, Tensor], step_of: Callable[[str, Tensor], tuple[Tensor, int]]
) -> SymbolSet:
    tensors = {}
    for name, weight in matrices(state).items():
        rows = weight.flatten(1)
        step, top = step_of(name, rows)
        step = step.half()
        step[step == 0] = 1  # a row of zeros, or nearly
        tensors[name] = _quantize(rows, step.float()[:, None], top).reshape(weight.shape).to(torch.int8)
    return SymbolSet(set_name, tensors)


def nnc_step(qp: int = NNC_QP, density: int = NNC_DENSITY) -> float:
    """Return NNCodec's step (bindings.cpp): (2^d + (qp mod 2^d)) · 2^(floor(qp / 2^d) - d); default 2^-8."""
    return float(((1 << density) + (qp & ((1 << density) - 1))) * 2.0 ** ((qp >> density) - density))


def resnet(state: Mapping[str, Tensor]) -> SymbolSet:
    """Return the weights on NNCodec's grid, without its trellis."""
    step = torch.tensor(nnc_step())
    tensors = {name: _narrow(_quantize(weight, step, (1 << 15) - 1)) for name, weight in matrices(state).items()}
    return SymbolSet("resnet", tensors)


def bf16(state: Mapping[str, Tensor]) -> SymbolSet:
    """Return every float tensor in bfloat16."""
    return SymbolSet("bf16", {name: tensor.to(torch.bfloat16) for name, tensor in state.items()})


def fp32(state: Mapping[str, Tensor]) -> SymbolSet:
    """Return every float tensor unchanged."""
    return SymbolSet("fp32", dict(state))


def gaussian(matrices: int = 10, side: int = 1024, seed: int = 0) -> SymbolSet:
    """Return normal matrices (side, side) with log-normal row scales, on the grid of `uniform`."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for index in range(matrices):
        scales = torch.exp(0.3 * torch.randn(side, 1, generator=generator))
        state[f"matrix.{index}"] = scales * torch.randn(side, side, generator=generator)
    return SymbolSet("gaussian", uniform(state).tensors)


def _quantize(weight: Tensor, step: Tensor, top: int) -> Tensor:
    return torch.round(weight.double() / step.double()).clamp(-top, top).to(torch.int16)


def _narrow(symbols: Tensor) -> Tensor:
    """Return `symbols` as int8 if all values fit, else as int16."""
    fits = int(symbols.min()) >= -128 and int(symbols.max()) <= 127
    return symbols.to(torch.int8) if fits else symbols


FLOAT_SETS: dict[str, Callable[[Mapping[str, Tensor]], SymbolSet]] = {
    "uniform": uniform,
    "sdclip6": sdclip6,
    "rowmax6": rowmax6,
    "resnet": resnet,
    "bf16": bf16,
    "fp32": fp32,
}
SETS = ("auto", "stored", *FLOAT_SETS, "gaussian")
