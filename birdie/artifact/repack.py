"""A whole checkpoint as one .birdie file and back: every tensor bit for bit, and all that lies around them.

torch.load(…) ──tree.flatten──► tensors, skeleton ──artifact.save(lossless)──► model.birdie
              ◄──tree.rebuild── tensors, skeleton ◄──artifact.load, inspect──
"""

from typing import Any

from birdie.artifact import files as artifact
from birdie.artifact import pytree as tree
from birdie.artifact.files import Source, Summary
from birdie.entropy.hints import Effort
from birdie.errors import WeightsError
from birdie.runtime.callbacks import Progress


def save_object(
    content: Any,
    path: Source,
    *,
    coder: Effort = "max",
    progress: Progress | None = None,
    workers: int | None = None,
) -> Summary:
    """Write `content`, nested dicts, lists and tuples of tensors and plain values, losslessly; it is never changed.

    `birdie.load` gives its tensors by path ("quantized/w"); `load_object` gives all of it.

    Raises:
        WeightsError: it holds no tensor, or something that cannot be stored.
        OutputError: the file cannot be written.
    """
    tensors, skeleton = tree.flatten(content)
    if not tensors:
        raise WeightsError("the checkpoint holds no tensor, so there is nothing to compress; check the file")
    return artifact.save(tensors, path, coder=coder, lossless=True, tree=skeleton, progress=progress, workers=workers)


def load_object(path: Source, *, max_bytes: int | None = None, workers: int | None = None) -> Any:
    """What `save_object` was given; of any other .birdie file the dict that `birdie.load` gives.

    Raises:
        ArtifactError: the file is missing, corrupt, or decodes to more than `max_bytes`.
    """
    skeleton = artifact.inspect(path).tree
    tensors = artifact.load(path, max_bytes=max_bytes, workers=workers)
    return tensors if skeleton is None else tree.rebuild(skeleton, tensors)
