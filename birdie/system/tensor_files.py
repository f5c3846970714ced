"""Writing of safetensors files: full disks and other failures of a system are errors of birdie's, in one sentence."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from birdie.errors import OutputError


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str] | None = None, *, target: Path | None = None
) -> None:
    """Write tensors, and texts that describe them, into a file that is not complete until this returns.

    Args:
        path: of a temporary file, or of a file in a folder that is not complete yet.
        tensors: on any device; they may share memory.
        target: what errors name; None: `path`.
    """
    memory: set[int] = set()
    dense = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        pointer = tensor.untyped_storage().data_ptr()
        dense[name] = tensor.clone() if pointer in memory else tensor  # safetensors refuses tensors that share memory
        memory.add(pointer)
    try:
        save_file(dense, path, dict(facts or {}) or None)
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split()).lower()
        raise OutputError(
            f"cannot write {target or path}: {reason}; free some space, or choose another folder"
        ) from error
