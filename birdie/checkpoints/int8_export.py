"""Reader of the challenge's int8 export, the dict in its .ptz files (birdie.golf.int8_zlib writes it)."""

from typing import Any

import torch
from torch import Tensor

from birdie.errors import WeightsError

FORMAT = "int8_clean_per_row_v1"


def dequantize(content: Any) -> dict[str, Tensor]:
    """Return the tensors of an export's dict, each in its original dtype."""
    if not isinstance(content, dict) or content.get("__quant_format__") != FORMAT:
        raise WeightsError(f"this is not an {FORMAT} export; give the .ptz of the challenge's script")
    try:
        state = {
            name: _dequantized(symbols, content["scales"][name], getattr(torch, content["dtypes"][name]))
            for name, symbols in content["quantized"].items()
        }
        original = content.get("passthrough_orig_dtypes", {})
        for name, weight in content["passthrough"].items():
            state[name] = weight.to(getattr(torch, original[name]) if name in original else weight.dtype)
    except (KeyError, AttributeError, TypeError, RuntimeError) as error:
        raise WeightsError(f"the {FORMAT} export is inconsistent ({error}); export it again") from error
    return state


def _dequantized(symbols: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return symbols times scales, computed in float32 and cast once."""
    if scale.ndim and scale.shape != symbols.shape[:1]:  # broadcast, a few bytes would become gigabytes
        raise RuntimeError(f"{len(scale)} scales of {tuple(symbols.shape)} symbols")
    shape = (-1, *[1] * (symbols.ndim - 1)) if scale.ndim else ()
    return (symbols.float() * scale.float().reshape(shape)).to(dtype).contiguous()
