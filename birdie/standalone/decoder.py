"""Entry module of the one-file decoder: read a .birdie file from a path or from bytes, or run as a script.

The one-file decoder is this module and the modules that it imports, all schemes among them (`golf/packed_script.py`).
Container, streams and schemes are decoded by the functions that `birdie.load` calls; modules, devices, dtypes and lazy
loading are left out.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from birdie.artifact.file import File
from birdie.checkpoints.rebuild import has_views, rebuild, with_views
from birdie.compress.scheme import Decoder
from birdie.compress.schemes import decoders
from birdie.errors import ArtifactError
from birdie.system.outputs import Source
from birdie.system.provenance import __version__

__all__ = ["ArtifactError", "__version__", "load", "load_object", "main"]


def decoder_of(name: str) -> Decoder:
    """Return the decoder of a scheme."""
    decoder = decoders().get(name)
    if decoder is None:
        raise ArtifactError(f"scheme {name!r} is not one of birdie's; load the file with birdie")
    return decoder


def load(source: Source | bytes, max_bytes: int | None = None, max_operations: int | None = None) -> dict[str, Tensor]:
    """Decode a file.

    Args:
        source: a path, or the bytes of a .birdie file.
        max_bytes: refuse to decode more than this; default the larger of 1 GiB and 64 × the file.
        max_operations: refuse to take more operations, of about a nanosecond; default 2 for each byte that may be
            decoded, and 65,536 for each of the file.

    Returns:
        name → tensor on the CPU; tied names share one tensor.
    """
    with File(source, decoder_of) as file:
        file.require(max_bytes, max_operations)
        tree, tensors = file.fields.get("tree"), file.decode_all()
    return with_views(tree, tensors) if has_views(tree) else tensors


def load_object(source: Source | bytes, max_bytes: int | None = None, max_operations: int | None = None) -> Any:
    """Return the checkpoint that `birdie.artifact.repack` stored, nested as it was, or else what `load` returns."""
    with File(source, decoder_of) as file:
        skeleton = file.fields.get("tree")
        file.require(max_bytes, max_operations)
        tensors = file.decode_all()
    return tensors if skeleton is None else rebuild(skeleton, tensors)


def main() -> None:
    """Run `python decode.py MODEL.birdie -o OUT.pt`; exit with status 1 and one line if that fails."""
    try:
        source, target = (value for value in sys.argv[1:] if value not in ("-o", "--output"))
        torch.save(load_object(source), target)
    except (ValueError, OSError, RuntimeError) as error:  # ValueError: ArtifactError, or arguments other than two
        sys.exit(f"usage: decode.py MODEL.birdie -o OUT.pt ({type(error).__name__}: {error.__cause__ or error})")
