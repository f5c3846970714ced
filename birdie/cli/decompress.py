"""`birdie decompress`: an artifact back into a checkpoint other tools read."""

import io
import zlib
from pathlib import Path
from typing import Annotated, Any

import torch
from cyclopts import Parameter
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from birdie.artifact.load import inspect, load
from birdie.artifact.repack import load_object
from birdie.cli.console import Json, compiling_told, emit, say, size
from birdie.compress.rate.size import parse_size
from birdie.errors import ConfigError, OutputError, WeightsError
from birdie.runtime.files import atomic_path, require_file

WRITTEN = (".safetensors", ".pt", ".pth", ".ptz")


def decompress(
    file: Path,
    /,
    *,
    output: Annotated[Path, Parameter(name=["-o", "--output"], help="The .safetensors, .pt, .pth or .ptz to write.")],
    max_size: Annotated[
        str | None, Parameter(help="Refuse to decode more than this; default the larger of 1 GiB and 64 × the file.")
    ] = None,
    schemes: Annotated[
        tuple[str, ...],
        Parameter(negative=(), help="Schemes of other packages that the file may use; they are imported: it is code."),
    ] = (),
    json: Json = False,
) -> None:
    """Turn a .birdie file back into .safetensors, .pt, or .ptz (torch.save under zlib).

    What was compressed whole comes back whole, but for .safetensors, which gets its tensors by path.
    """
    if output.suffix not in WRITTEN:
        raise ConfigError(
            f"cannot write {output.name}: its name must end in {', '.join(WRITTEN[:-1])} or {WRITTEN[-1]}"
        )
    require_file(output)
    limit = None if max_size is None else parse_size(max_size)
    flat = output.suffix == ".safetensors"
    with compiling_told():
        content = (load if flat else load_object)(file, max_bytes=limit, schemes=schemes)
    with atomic_path(output) as path:
        try:
            _write(content, path, output.suffix)
        except (RuntimeError, SafetensorError) as error:  # how torch and safetensors say that the disk is full
            raise OutputError(f"cannot write {output}: {error}; is the disk full?") from error
    written, tensors = output.stat().st_size, len(inspect(file).tensors)
    if json:
        emit({"path": str(output), "bytes": written, "tensors": tensors})
    else:
        say(f"{tensors} tensors, {size(written)}: {output}")


def _write(content: Any, path: Path, suffix: str) -> None:
    if suffix == ".safetensors":
        _write_safetensors(content, path)
    elif suffix == ".ptz":
        buffer = io.BytesIO()
        torch.save(content, buffer)
        path.write_bytes(zlib.compress(buffer.getvalue(), 9))
    else:
        torch.save(content, path)


def _write_safetensors(state: dict[str, Tensor], path: Path) -> None:
    if "__metadata__" in state:
        raise WeightsError("safetensors cannot hold a tensor named __metadata__; write a .pt file instead")
    try:
        # safetensors has no ties: each name gets its own copy
        save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, path)
    except (KeyError, ValueError, TypeError) as error:
        raise WeightsError(
            f"safetensors cannot hold one of these dtypes ({error}); write a .pt file instead"
        ) from error
