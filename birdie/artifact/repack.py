"""Lossless copies of complete checkpoints: every tensor bit for bit, and all other values of the object.

torch.load(…) ──pytree.flatten──► tensors, skeleton ──save(lossless)──► model.birdie
              ◄──pytree.rebuild── tensors, skeleton ◄──load, inspect──
"""

from collections.abc import Collection
from typing import Any

from birdie.artifact import pytree
from birdie.artifact.load import inspect, load
from birdie.artifact.save import save
from birdie.artifact.summary import Summary
from birdie.entropy.hints import Effort
from birdie.errors import WeightsError
from birdie.runtime.callbacks import Progress
from birdie.runtime.files import Source


def save_object(
    content: Any,
    path: Source,
    *,
    coder: Effort = "max",
    progress: Progress | None = None,
    workers: int | None = None,
) -> Summary:
    """Write `content` losslessly: nested dicts, lists and tuples of tensors and plain values.

    `birdie.load` returns its tensors by path ("quantized/w"); `load_object` returns the complete object.

    Raises:
        WeightsError: the content holds no tensor, or a value that cannot be stored.
        OutputError: the file cannot be written.
    """
    tensors, skeleton = pytree.flatten(content)
    if not tensors:
        raise WeightsError("the checkpoint holds no tensor, so there is nothing to compress; check the file")
    return save(tensors, path, coder=coder, lossless=True, tree=skeleton, progress=progress, workers=workers)


def load_object(
    path: Source,
    *,
    max_bytes: int | None = None,
    max_operations: int | None = None,
    schemes: Collection[str] = (),
    workers: int | None = None,
) -> Any:
    """Return the object that `save_object` wrote; for any other .birdie file, the dict that `birdie.load` returns.

    Raises:
        ArtifactError: the file is missing, corrupt, or takes more than `max_bytes` or `max_operations` to decode.
    """
    skeleton = inspect(path).tree
    tensors = load(path, max_bytes=max_bytes, max_operations=max_operations, schemes=schemes, workers=workers)
    return tensors if skeleton is None else pytree.rebuild(skeleton, tensors)
