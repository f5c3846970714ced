"""What the one-file decoder does: read a .birdie file from a path or from bytes. Nothing here writes, trains or fills.

The building blocks are those of `files` and `birdie.artifact.repack`; only what surrounds them is left out: modules,
devices, dtypes and a choice of threads.
"""

import os
import sys
from typing import Any

import torch
from torch import Tensor

from birdie.artifact import metadata
from birdie.artifact import pytree as tree
from birdie.artifact.container import Entry, Reader
from birdie.artifact.decoding import decode_all, require_size, stored_name
from birdie.compress.scheme import Decoder
from birdie.compress.schemes import cast, codebook, grid, lossless, lowrank, rotation, ternary, trellis, tucker
from birdie.compress.spectral import decoding as spectral
from birdie.errors import ArtifactError

Source = str | os.PathLike[str] | bytes

DECODERS: dict[int, Decoder] = {
    1: lossless.DECODER,
    2: grid.DECODER,
    3: cast.DECODER,
    4: trellis.DECODER,
    5: ternary.DECODER,
    6: codebook.DECODER,
    7: rotation.DECODER,
    8: lowrank.DECODER,
    9: spectral.DECODER,
    10: tucker.DECODER,
}


def decoder_of(entry: Entry) -> Decoder:
    """Return the decoder of an entry.

    Raises:
        ArtifactError: its scheme is not birdie's own, or newer.
    """
    if entry.scheme not in DECODERS:
        raise ArtifactError(
            f"tensor {entry.name!r} has scheme code {entry.scheme}, unknown here; use birdie to load it"
        )
    return DECODERS[entry.scheme]


def load(source: Source, max_bytes: int | None = None) -> dict[str, Tensor]:
    """Decode a file.

    Args:
        source: a path, or the bytes of a .birdie file.
        max_bytes: refuse to decode more than this; default the larger of 1 GiB and 64 × the file.

    Returns:
        name → tensor on the CPU, tied names sharing one tensor.

    Raises:
        ArtifactError: the file is missing, corrupt, or decodes to more than `max_bytes`.
    """
    with Reader(source) as reader:
        return _tensors(reader, max_bytes)


def load_object(source: Source, max_bytes: int | None = None) -> Any:
    """The whole checkpoint that `repack` stored; of any other file what `load` gives. Raises as `load`."""
    with Reader(source) as reader:
        skeleton = metadata.parse(bytes(reader.metadata), reader.where).get("tree")
        tensors = _tensors(reader, max_bytes)
    return tensors if skeleton is None else tree.rebuild(skeleton, tensors)


def _tensors(reader: Reader, max_bytes: int | None) -> dict[str, Tensor]:
    require_size(reader, max_bytes)
    tensors = decode_all(reader, decoder_of, os.cpu_count() or 1)
    return {name: tensors[stored_name(reader, name)] for name in reader.names}


def main() -> None:
    """`python decode.py MODEL.birdie OUT.pt`."""
    torch.save(load_object(sys.argv[1]), sys.argv[2])
