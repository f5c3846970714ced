"""Entry module of the one-file decoder: read a .birdie file from a path or from bytes, or run as a script.

The one-file decoder is this module and the modules that it imports (`birdie.golf.packed`). Container, streams and
schemes are decoded by the functions that `birdie.load` calls; modules, devices, dtypes and lazy loading are left out.
"""

import os
import sys
from typing import Any

import torch
from torch import Tensor

from birdie.artifact import metadata, pytree
from birdie.artifact.container import Entry, Reader
from birdie.artifact.decoding import decode_all, require_limits, stored_name
from birdie.compress.scheme import Decoder
from birdie.compress.schemes import (
    cast,
    codebook,
    grid,
    lossless,
    lowrank,
    rotation,
    spectral,
    ternary,
    trellis,
    tucker,
)
from birdie.errors import ArtifactError
from birdie.runtime.provenance import VERSION

__all__ = ["ArtifactError", "__version__", "load", "load_object", "main"]

__version__ = VERSION
Source = str | os.PathLike[str] | bytes

# Every scheme, in the order of the codes in the file, from 1.
DECODERS: dict[str, Decoder] = {
    "lossless": lossless.DECODER,
    "grid": grid.DECODER,
    "cast": cast.DECODER,
    "trellis": trellis.DECODER,
    "ternary": ternary.DECODER,
    "codebook": codebook.DECODER,
    "rotation": rotation.DECODER,
    "lowrank": lowrank.DECODER,
    "spectral": spectral.DECODER,
    "tucker": tucker.DECODER,
}


def decoder_of(entry: Entry) -> Decoder:
    """Return the decoder of an entry."""
    if not 0 < entry.scheme <= len(DECODERS):
        raise ArtifactError(f"tensor {entry.name!r} has scheme code {entry.scheme}, unknown here; load it with birdie")
    return list(DECODERS.values())[entry.scheme - 1]


def load(source: Source, max_bytes: int | None = None, max_operations: int | None = None) -> dict[str, Tensor]:
    """Decode a file.

    Args:
        source: a path, or the bytes of a .birdie file.
        max_bytes: refuse to decode more than this; default the larger of 1 GiB and 64 × the file.
        max_operations: refuse to take more operations, of about a nanosecond; default 2 for each byte that may be
            decoded, and 65,536 for each of the file.

    Returns:
        name → tensor on the CPU; tied names share one tensor.
    """
    with Reader(source) as reader:
        return _tensors(reader, max_bytes, max_operations)


def load_object(source: Source, max_bytes: int | None = None, max_operations: int | None = None) -> Any:
    """Return the checkpoint that `birdie.artifact.repack` stored, nested as it was, or else what `load` returns."""
    with Reader(source) as reader:
        skeleton = metadata.parse(bytes(reader.metadata), reader.where).get("tree")
        tensors = _tensors(reader, max_bytes, max_operations)
    return tensors if skeleton is None else pytree.rebuild(skeleton, tensors)


def _tensors(reader: Reader, max_bytes: int | None, max_operations: int | None) -> dict[str, Tensor]:
    require_limits(reader, decoder_of, max_bytes, max_operations, shared=True)
    tensors = decode_all(reader, decoder_of, os.cpu_count() or 1)
    return {name: tensors[stored_name(reader, name)] for name in reader.names}


def main() -> None:
    """Run `python decode.py MODEL.birdie OUT.pt`; exit with status 1 and one line if that fails."""
    try:
        source, target = sys.argv[1:]
        torch.save(load_object(source), target)
    except (ValueError, OSError, RuntimeError) as error:  # ValueError: ArtifactError, or arguments other than two
        sys.exit(f"usage: decode.py MODEL.birdie OUT.pt ({type(error).__name__}: {error.__cause__ or error})")
