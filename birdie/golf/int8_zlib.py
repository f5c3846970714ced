"""The challenge's own int8 export, kept for comparison: per-row int8, torch.save, zlib level 9.

The arithmetic is copied exactly, including its lower limit: a row's scale is never below 1/127, so a row of weights
under 1 is rounded to multiples of 1/127 whatever its range. That is coarse and compresses well, and the challenge's
scores are measured so. Nothing else in birdie uses it. Source: the int8_clean_per_row_v1 format of parameter-golf's
train_gpt.py, and the INT4_LAYERS / INT4_STEP option of its 10-layer mixed-precision record.
"""

import io
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from birdie.checkpoints import FORMAT, dequantize
from birdie.compress import quantiles
from birdie.errors import ConfigError, WeightsError
from birdie.system.device import dtype_name

CLIP_QUANTILE = 0.9999984
KEPT_ELEMENTS = 65_536  # floating tensors up to this size are not quantized
CONTROL_NAMES = ("attn_scale", "mlp_scale", "resid_mix", "q_gain", "skip_weight")
_BLOCK_NAME = re.compile(r"blocks\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class PackedInt8:
    """The export and the figures of its log line.

    Attributes:
        blob: the bytes that the challenge writes to final_model.int8.ptz.
        payload_bytes: size of all quantized tensors, before torch.save.
        raw_bytes: size of torch.save's output, before zlib.
        tensor_bytes: size of all tensors before quantization.
    """

    blob: bytes
    payload_bytes: int
    raw_bytes: int
    tensor_bytes: int

    @property
    def payload_ratio(self) -> float:
        """Ratio of the bytes before quantization to those after."""
        return self.tensor_bytes / max(self.payload_bytes, 1)


def pack(state: Mapping[str, Tensor], *, int4_layers: Collection[int] = (), int4_step: int = 1) -> PackedInt8:
    """Export `state`; in the blocks listed in `int4_layers`, int8 symbols are rounded to multiples of `int4_step`."""
    if not 1 <= int4_step <= 127:
        raise ConfigError(f"INT4_STEP={int4_step} is out of range; choose 1 to 127")
    groups: dict[str, dict[str, Any]] = {
        key: {} for key in ("quantized", "scales", "dtypes", "passthrough", "qmeta", "passthrough_orig_dtypes")
    }
    for name, weight in state.items():
        weight = weight.detach().cpu().contiguous()
        if not weight.is_floating_point() or weight.numel() <= KEPT_ELEMENTS:
            groups["passthrough"][name] = _kept(name, weight, groups["passthrough_orig_dtypes"])
            continue
        step = int4_step if _in_layers(name, int4_layers) else 1
        symbols, scale = _quantize(name, weight.float(), step)
        groups["quantized"][name], groups["scales"][name] = symbols, scale
        groups["dtypes"][name] = dtype_name(weight.dtype)
        if scale.ndim:
            groups["qmeta"][name] = {"scheme": "per_row", "axis": 0}
    optional = {key for key in ("qmeta", "passthrough_orig_dtypes") if not groups[key]}
    content = {"__quant_format__": FORMAT} | {key: value for key, value in groups.items() if key not in optional}
    buffer = io.BytesIO()
    torch.save(content, buffer)
    raw = buffer.getvalue()
    stored = [weight for key in ("quantized", "scales", "passthrough") for weight in groups[key].values()]
    return PackedInt8(
        blob=zlib.compress(raw, 9),
        payload_bytes=sum(weight.nbytes for weight in stored),
        raw_bytes=len(raw),
        tensor_bytes=sum(weight.nbytes for weight in state.values()),
    )


def _kept(name: str, weight: Tensor, original: dict[str, str]) -> Tensor:
    """Return the stored form of a tensor that is not quantized: float16, but float32 for the control tensors."""
    if not weight.is_floating_point():
        return weight
    if any(part in name for part in CONTROL_NAMES):
        return weight.float()
    if weight.dtype in (torch.float32, torch.bfloat16):
        original[name] = dtype_name(weight.dtype)
        return weight.to(torch.float16)
    return weight


def _in_layers(name: str, layers: Collection[int]) -> bool:
    match = _BLOCK_NAME.search(name)
    return match is not None and int(match[1]) in layers


def _quantize(name: str, weight: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return (int8 symbols, scales): a float16 scale per row of a matrix, one float32 scale for any other tensor."""
    if not bool(torch.isfinite(weight).all()):
        raise WeightsError(
            f"tensor {name!r} holds NaN or infinite values; the challenge's int8 export cannot store them"
        )
    rows = weight if weight.ndim == 2 else weight.reshape(1, -1)
    clip = torch.from_numpy(quantiles(rows.abs().numpy(), CLIP_QUANTILE))[:, None]
    scale = (clip / 127).clamp_min(1 / 127) if weight.ndim == 2 else torch.where(clip > 0, clip / 127, 1.0)
    symbols = (rows.clamp(-clip, clip) / scale).round()
    if step > 1:
        symbols = (symbols / step).round() * step
    symbols = symbols.clamp(-127, 127).to(torch.int8).reshape(weight.shape)
    return symbols, scale[:, 0].to(torch.float16) if weight.ndim == 2 else scale.reshape(())


def unpack(blob: bytes, max_bytes: int) -> dict[str, Tensor]:
    """Return the tensors of an export that `pack` made: dequantized, in the dtypes they had."""
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(blob, max_bytes + 1)
    except zlib.error as error:
        raise WeightsError(f"the int8+zlib export is damaged ({error}); export it again") from error
    if len(raw) > max_bytes:
        raise WeightsError(
            f"the int8+zlib export unpacks to more than {max_bytes:,} bytes; raise the limit if you trust it"
        )
    try:
        content = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds for damaged input
        raise WeightsError("the int8+zlib export holds no file of torch.save; export it again") from error
    return dequantize(content)
