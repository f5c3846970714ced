"""`birdie decompress`: an artifact back into a checkpoint other tools read."""

from pathlib import Path
from typing import Annotated

import torch
from cyclopts import Parameter
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from birdie import artifact
from birdie.cli.console import Json, emit, say, size
from birdie.compress.size import parse_size
from birdie.errors import ConfigError, OutputError, WeightsError
from birdie.files import atomic_path, require_file


def decompress(
    file: Path,
    /,
    *,
    output: Annotated[Path, Parameter(name=["-o", "--output"], help="The .safetensors or .pt file to write.")],
    max_size: Annotated[
        str | None, Parameter(help="Refuse to decode more than this; default the larger of 1 GiB and 64 × the file.")
    ] = None,
    json: Json = False,
) -> None:
    """Turn a .birdie file back into .safetensors or .pt."""
    if output.suffix not in (".safetensors", ".pt", ".pth"):
        raise ConfigError(f"cannot write {output.name}: its name must end in .safetensors, .pt or .pth")
    require_file(output)
    state = artifact.load(file, max_bytes=None if max_size is None else parse_size(max_size))
    if not isinstance(state, dict):  # load without `into` gives a dict; this tells the type checker
        raise WeightsError(f"{file} did not decode to tensors")
    with atomic_path(output) as path:
        try:
            _write(state, path, output.suffix)
        except (RuntimeError, SafetensorError) as error:  # how torch and safetensors say that the disk is full
            raise OutputError(f"cannot write {output}: {error}; is the disk full?") from error
    written = output.stat().st_size
    if json:
        emit({"path": str(output), "bytes": written, "tensors": len(state)})
    else:
        say(f"{len(state)} tensors, {size(written)}: {output}")


def _write(state: dict[str, Tensor], path: Path, suffix: str) -> None:
    if suffix != ".safetensors":
        torch.save(state, path)
        return
    if "__metadata__" in state:
        raise WeightsError("safetensors cannot hold a tensor named __metadata__; write a .pt file instead")
    try:
        # safetensors has no ties: each name gets its own copy
        save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, path)
    except (KeyError, ValueError, TypeError) as error:
        raise WeightsError(
            f"safetensors cannot hold one of these dtypes ({error}); write a .pt file instead"
        ) from error
