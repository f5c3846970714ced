"""Attention kernels beside torch's scaled_dot_product_attention (SDPA): which are installed, and how they are called.

- FlashAttention-3 (package flash_attn_interface, Hopper): plain, variable-length and windowed attention;
- torch's own variable-length attention (torch.nn.attention.varlen, from 2.10), which is FlashAttention-2 inside.

Both want CUDA and 16 bits. Without them documents and windows are masks for SDPA, which is the reference.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from birdie.model.documents import Bounds

Plain = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""q, k, v as `birdie.model.attention.Attend` has them, and how far back places see (0: to the beginning)."""
Varlen = Callable[[Tensor, Tensor, Tensor, Bounds, int], Tensor]
"""The same within the segments of a flattened batch."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What attends.

    Attributes:
        name: as the log has it.
        plain: for whole rows; None: SDPA.
        varlen: for documents; None: a mask for SDPA.
        windows: whether `varlen` knows windows.
    """

    name: str = "SDPA"
    plain: Plain | None = None
    varlen: Varlen | None = None
    windows: bool = True


def installed(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The best there are for tensors of this dtype on this device."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return Kernels()
    major = torch.cuda.get_device_capability(device)[0]
    if major == 9 and (flash := _module("flash_attn_interface")) is not None:
        return flash3(flash)
    varlen = _module("torch.nn.attention.varlen")
    return Kernels() if major < 8 or varlen is None else torch_varlen(varlen.varlen_attn)


def flash3(module: Any) -> Kernels:
    """FlashAttention-3 as its package offers it."""
    whole, parts = module.flash_attn_func, module.flash_attn_varlen_func

    def plain(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return _first(whole(q, k, v, causal=True, window_size=_sides(window))).transpose(1, 2)

    def varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, window: int) -> Tensor:
        places, longest = bounds
        flat = (_flat(x) for x in (q, k, v))
        y = parts(*flat, places, places, longest, longest, causal=True, window_size=_sides(window))
        return _rows(_first(y), q)

    return Kernels("FlashAttention-3", plain, varlen)


def torch_varlen(attend: Callable[..., Any]) -> Kernels:
    """torch.nn.attention.varlen, whose arguments have changed between releases."""
    known = inspect.signature(attend).parameters
    windows, grouped = "window_size" in known, "enable_gqa" in known

    def varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, window: int) -> Tensor:
        places, longest = bounds
        if not grouped and q.shape[1] != k.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        how: dict[str, Any] = {"window_size": (_sides(window)[0], 0)} if windows else {"is_causal": True}
        if grouped:
            how["enable_gqa"] = q.shape[1] != k.shape[1]
        return _rows(_first(attend(*(_flat(x) for x in (q, k, v)), places, places, longest, longest, **how)), q)

    return Kernels("torch varlen", None, varlen, windows)


def _module(name: str) -> Any:
    """The module, or None where there is none that can be imported: a broken build is as good as none."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):
        return None


def _sides(window: int) -> tuple[int, int]:
    """(left, right) as the kernels count: themselves not included, −1 without end."""
    return (window - 1, 0) if window else (-1, -1)


def _flat(x: Tensor) -> Tensor:
    """(batch, heads, length, d) → (batch · length, heads, d)."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _rows(y: Tensor, q: Tensor) -> Tensor:
    """The way back, to the shape of q."""
    return y.view(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)


def _first(answer: Any) -> Tensor:
    """Some releases return the logarithms of the sums, too."""
    out: Tensor = answer[0] if isinstance(answer, tuple) else answer
    return out
