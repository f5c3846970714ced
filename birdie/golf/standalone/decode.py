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
from birdie.artifact.container import Reader
from birdie.artifact.files import _check_size, _decode_all, _owner

Source = str | os.PathLike[str] | bytes


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
    _check_size(reader, max_bytes)
    tensors = _decode_all(reader, os.cpu_count() or 1)
    return {name: tensors[_owner(reader, name)] for name in reader.names}


def main() -> None:
    """`python decode.py MODEL.birdie OUT.pt`."""
    torch.save(load_object(sys.argv[1]), sys.argv[2])
