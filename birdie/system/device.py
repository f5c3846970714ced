"""Choice of the device and of the dtype in which matrix products run fast on it."""

from contextlib import AbstractContextManager, nullcontext

import torch

from birdie.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_device(name: str = "auto", local_rank: int = 0) -> torch.device:
    """Return the device `name`; "auto" takes CUDA, then MPS, then the CPU."""
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if has_cuda else "mps" if has_mps else "cpu"
    if name == "cuda" and has_cuda:
        if local_rank >= (count := torch.cuda.device_count()):
            raise ConfigError(
                f"local rank {local_rank} has no GPU: this machine has {count}; start one rank for each GPU"
            )
        # cuDNN's attention builds a plan for every shape, of which windows have thousands, and has had wrong gradients
        torch.backends.cuda.enable_cudnn_sdp(False)
        return torch.device("cuda", local_rank)
    if (name == "mps" and has_mps) or name == "cpu":
        return torch.device(name)
    if name in ("cuda", "mps"):
        raise ConfigError(f"device {name!r} is not available on this machine; use 'cpu' or 'auto'")
    raise ConfigError(f"device {name!r} is unknown; choose auto, cuda, mps or cpu")


def require_device(device: torch.device | str) -> None:
    """Check that torch can use a device on this machine."""
    try:
        torch.empty(0, device=device)
    except Exception as error:  # torch raises a different kind for every kind of device
        raise ConfigError(
            f"device {device if isinstance(device, torch.device) else repr(device)} is unknown or not available on "
            "this machine; use 'cpu', or leave it out"
        ) from error


def has_fast_bfloat16(device: torch.device) -> bool:
    """Return whether bfloat16 matrix products beat float32: true on GPUs and on CPUs with AMX or AVX512-BF16."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))
    return False


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype `name`; "auto" is bfloat16 where its matrix products are fast and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; choose auto, float32 or bfloat16")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype for logs and recipes, such as "bfloat16" for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work; call it before reading a clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one for a while: kernels of Triton run on that."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def make_current(device: torch.device) -> None:
    """Make a GPU the current one: kernels of Triton, CUDA graphs and the random generator are those of the current."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
