"""Where the arithmetic runs: the device, the dtype that is fast on it, and torch.compile with a way back."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch._functorch import config as functorch

from birdie.errors import ConfigError

DeviceName = Literal["auto", "cuda", "mps", "cpu"]
DtypeName = Literal["auto", "float32", "bfloat16"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

M = TypeVar("M", bound=nn.Module)


def choose_device(name: str = "auto", local_rank: int = 0) -> torch.device:
    """The device called `name`; "auto" takes CUDA, then MPS, then the CPU.

    Raises:
        ConfigError: the device is not one of ours, or this machine does not have it or not one for each rank.
    """
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if has_cuda else "mps" if has_mps else "cpu"
    if name == "cuda" and has_cuda:
        if local_rank >= (count := torch.cuda.device_count()):
            raise ConfigError(
                f"local rank {local_rank} finds no GPU of its own, as this machine shows {count}; "
                "start one rank for each GPU"
            )
        return torch.device("cuda", local_rank)
    if (name == "mps" and has_mps) or name == "cpu":
        return torch.device(name)
    if name in ("cuda", "mps"):
        raise ConfigError(f"device {name!r} is not available on this machine; use 'cpu' or 'auto'")
    raise ConfigError(f"device {name!r} is unknown; choose auto, cuda, mps or cpu")


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 matrix products beat float32 ones: true on GPUs and on CPUs with AMX or AVX512-BF16."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))
    return False


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype called `name`; "auto" is bfloat16 where its matrix products are fast and float32 elsewhere.

    Raises:
        ConfigError: the name is not one of ours.
    """
    if name == "auto":
        return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; choose auto, float32 or bfloat16")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` → "bfloat16": what goes into logs and recipes."""
    return str(dtype).removeprefix("torch.")


GRAPHS = 64
"""Of one function at most: a run may have many lengths, with and without loops; beyond its limit, 8, torch runs what is
new eagerly and says nothing."""


def compile_or_eager(function: Callable[..., Any], notify: Callable[[str], None]) -> Callable[..., Any]:
    """torch.compile that falls back to eager, for good, when compiling fails; `notify` gets the one line that says so.

    Compilation happens inside a call, so that is where the fallback happens too; torch would leave the backward graph
    to the first `backward()`, beyond reach of the fallback, and is told to compile it with the forward.

    Raises (in use):
        torch.OutOfMemoryError: there is too little memory; eager would need more still.
    """
    from torch._dynamo import config as dynamo  # slow to import, and not needed by who compiles nothing

    compiled = torch.compile(function, dynamic=False)
    state = {"use": compiled}

    def call(*args: Any, **kwargs: Any) -> Any:
        if state["use"] is function:
            return function(*args, **kwargs)
        try:
            with functorch.patch("force_non_lazy_backward_lowering", True), dynamo.patch(recompile_limit=GRAPHS):
                return compiled(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler raises many kinds; a real error of `function` comes back in eager
            lines = str(error).strip().splitlines() or [type(error).__name__]
            notify(f"torch.compile does not work here ({lines[0][:120]}); going on without it")
            state["use"] = function
            return function(*args, **kwargs)

    return call


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given: before reading a clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
