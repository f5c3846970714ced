"""`birdie decompress`: convert a .birdie file back into .safetensors, .pt, .ptz or a Hugging Face folder."""

import io
import zlib
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from birdie.cli.chain import decompress_link, link_of
from birdie.cli.console import (
    Json,
    Overwrite,
    compiling_notice,
    into_folder,
    print_written,
    size,
)
from birdie.compress.rate.target import parse_size
from birdie.errors import ConfigError, OutputError
from birdie.runtime.files import atomic_path
from birdie.runtime.outputs import Kind, require_output, require_output_folder

GROUP = "Compress"

_PICKLED = Kind("what torch.save writes", rb"PK\x03\x04|\x80\x02")
_KINDS = {
    ".safetensors": Kind("a .safetensors file", rb"(?s:.{8})\{"),
    ".pt": _PICKLED,
    ".pth": _PICKLED,
    ".ptz": Kind("what torch.save writes, packed", rb"\x78|\xfd7zXZ|\x28\xb5\x2f\xfd|\x5d\x00\x00"),
}
SUFFIXES = tuple(_KINDS)


def command(
    file: Path,
    /,
    *,
    output: Annotated[
        Path,
        Parameter(name=["-o", "--output"], help="The .safetensors, .pt, .pth, .ptz or folder (no suffix) to write."),
    ],
    overwrite: Overwrite = False,
    step: Annotated[int | None, Parameter(help="Of the folder of a chain: step of the checkpoint to restore.")] = None,
    max_shard_size: Annotated[
        str | None,
        Parameter(
            help="Of a folder: most bytes of a file of weights, all of them safetensors. Default: the files that the "
            "folder had; else 5GB."
        ),
    ] = None,
    base: Annotated[
        Path | None,
        Parameter(
            help="Checkpoint, folder or .birdie file that a file of differences was made with (compress --base)."
        ),
    ] = None,
    max_size: Annotated[
        str | None, Parameter(help="Largest decoded size; default: 1 GiB, 64 × the file or 2 × its base.")
    ] = None,
    max_operations: Annotated[
        int | None,
        Parameter(
            help="Most operations, of about a nanosecond; default: 2 a decoded byte allowed, 65,536 a byte of file."
        ),
    ] = None,
    schemes: Annotated[
        tuple[str, ...],
        Parameter(negative=(), help="Schemes of other packages that the file may use. Their code is imported and run."),
    ] = (),
    json: Json = False,
) -> None:
    """Convert a .birdie file back into .safetensors, .pt, .ptz (torch.save under zlib), or a folder.

    A file of `birdie compress --lossless` restores nested values too, except in .safetensors: it holds only the
    tensors, named by their paths. A folder has the weights and all files that `birdie compress FOLDER` kept: what
    from_pretrained of the library loads that wrote it.

    A link of a chain of checkpoints (birdie compress CHECKPOINTS) restores all files of its checkpoint bit for bit,
    from the links beside it.
    """
    if file.is_dir():
        file = link_of(file, step)
    elif step is not None:
        raise ConfigError(f"--step is for the folder of a chain, and {file} is none; drop it, or give the folder")
    is_known = not output.suffix or output.suffix in SUFFIXES or output.is_dir()
    from birdie.artifact.links import is_link

    limit = None if max_size is None else parse_size(max_size)
    if is_link(file):
        if base is not None:
            raise ConfigError(f"{file} is a link of a chain, whose base is beside it; drop --base")
        limits: dict[str, Any] = {"max_bytes": limit, "max_operations": max_operations}
        if decompress_link(file, output, overwrite=overwrite, json=json, **limits):
            return
    if not is_known:
        raise ConfigError(
            f"cannot write {output.name}: its name must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}; "
            "the name of a folder has no suffix"
        )
    from birdie.artifact.folders import write_folder
    from birdie.artifact.inspect import inspect
    from birdie.artifact.repack import load_object
    from birdie.artifact.to_safetensors import to_safetensors

    limits = {"base": base, "max_bytes": limit, "max_operations": max_operations, "schemes": schemes}
    left: list[str] = []
    if output.is_dir() or not output.suffix:
        output = require_output_folder(output, overwrite=True)  # write_folder looks at what is there
        with compiling_notice(), into_folder(output) as left:
            most = None if max_shard_size is None else parse_size(max_shard_size)
            write_folder(file, output, overwrite=overwrite, max_shard_bytes=most, **limits)
        written = {path.relative_to(output).as_posix(): path for path in output.rglob("*") if path.is_file()}
        total = sum(path.stat().st_size for name, path in written.items() if name not in left)
    else:
        suffix = output.suffix
        output = require_output(output, [file], kind=_KINDS[suffix], overwrite=overwrite)
        with compiling_notice(), atomic_path(output) as path:
            try:
                if suffix == ".safetensors":
                    to_safetensors(file, path, **limits)
                else:
                    _write(load_object(file, **limits), path, suffix)
            except RuntimeError as error:  # a full disk is one in torch
                raise OutputError(f"cannot write {output}: {error}; is the disk full?") from error
        total = output.stat().st_size
    tensors = len(inspect(file).tensors)
    print_written(output, f"{tensors} tensors, {size(total)}", {"bytes": total, "tensors": tensors}, left, as_json=json)


def _write(content: Any, path: Path, suffix: str) -> None:
    import torch

    if suffix == ".ptz":
        buffer = io.BytesIO()
        torch.save(content, buffer)
        path.write_bytes(zlib.compress(buffer.getvalue(), 9))
    else:
        with path.open("wb") as file:  # from a path, torch would store the name of the temporary file
            torch.save(content, file)
