"""Attention kernels besides torch's scaled_dot_product_attention (SDPA): which are installed, and how to call them.

- FlashAttention-3 (package flash_attn_interface, Hopper): plain, variable-length and windowed attention;
- torch's variable-length attention (torch.nn.attention.varlen, from 2.10), which is FlashAttention-2 inside.

Both need CUDA and a 16-bit dtype. Without them documents and windows are masks for SDPA, which is the reference.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from birdie.gpt.model.documents import Bounds

PlainAttention = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(q, k, v, window) → y, in the shapes of `attention_functions.AttentionFunction`; window 0: no limit."""
VarlenAttention = Callable[[Tensor, Tensor, Tensor, Bounds, int], Tensor]
"""(q, k, v, bounds, window) → y: the same within the segments of a flattened batch."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Attention kernels for one device and dtype.

    Attributes:
        name: for the log.
        plain: for rows without documents; None: SDPA.
        varlen: for documents; None: a mask for SDPA.
        windows: whether `varlen` supports windows.
    """

    name: str = "SDPA"
    plain: PlainAttention | None = None
    varlen: VarlenAttention | None = None
    windows: bool = True


def best_kernels(device: torch.device, dtype: torch.dtype, head_dim: int = 64) -> Kernels:
    """Return the fastest installed kernels for tensors of `dtype` on `device`, with heads of `head_dim`."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or head_dim % 8 or head_dim > 256:
        return Kernels()
    major = torch.cuda.get_device_capability(device)[0]
    if major == 9 and (flash := _module("flash_attn_interface")) is not None:
        return flash3(flash)
    varlen = _module("torch.nn.attention.varlen")
    return Kernels() if major < 8 or varlen is None else torch_varlen(varlen.varlen_attn)


def flash3(module: Any) -> Kernels:
    """Return the kernels of FlashAttention-3, given its package."""
    plain_function, varlen_function = module.flash_attn_func, module.flash_attn_varlen_func

    def plain(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return _output(plain_function(q, k, v, causal=True, window_size=_window_size(window))).transpose(1, 2)

    def varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, window: int) -> Tensor:
        offsets, longest = bounds
        flat = (_flatten(x) for x in (q, k, v))
        y = varlen_function(*flat, offsets, offsets, longest, longest, causal=True, window_size=_window_size(window))
        return _unflatten(_output(y), q)

    return Kernels("FlashAttention-3", plain, varlen)


def torch_varlen(function: Callable[..., Any]) -> Kernels:
    """Return the kernels of torch.nn.attention.varlen, whose arguments differ between releases."""
    arguments = inspect.signature(function).parameters
    windows, grouped = "window_size" in arguments, "enable_gqa" in arguments

    def varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, window: int) -> Tensor:
        offsets, longest = bounds
        if not grouped and q.shape[1] != k.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        options: dict[str, Any] = {"window_size": (_window_size(window)[0], 0)} if windows else {"is_causal": True}
        if grouped:
            options["enable_gqa"] = q.shape[1] != k.shape[1]
        flat = (_flatten(x) for x in (q, k, v))
        return _unflatten(_output(function(*flat, offsets, offsets, longest, longest, **options)), q)

    return Kernels("torch varlen", None, varlen, windows)


def _module(name: str) -> Any:
    """Import a module; None where it is missing or its build is broken."""
    try:
        return importlib.import_module(name)
    except Exception:  # a package for another torch raises what it likes
        return None


def _window_size(window: int) -> tuple[int, int]:
    """Return (left, right) as the kernels count: the position itself excluded, −1 for no limit."""
    return (window - 1, 0) if window else (-1, -1)


def _flatten(x: Tensor) -> Tensor:
    """(batch, heads, length, d) → (batch · length, heads, d)."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _unflatten(y: Tensor, q: Tensor) -> Tensor:
    """Undo `_flatten`, to the shape of q."""
    return y.view(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)


def _output(result: Any) -> Tensor:
    """Return y alone: some releases return the log-sum-exp as well."""
    y: Tensor = result[0] if isinstance(result, tuple) else result
    return y
