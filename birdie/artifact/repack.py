"""Lossless copies of complete checkpoints: every tensor bit for bit, and all other values (optimizer, step, arguments).

torch.load(…) ──pytree.flatten──► tensors, skeleton ──save(lossless)──► model.birdie
              ◄──pytree.rebuild── tensors, skeleton ◄──load, inspect──
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack, cast

from birdie.artifact.base import BaseOption
from birdie.artifact.inspect import inspect
from birdie.artifact.load import Limits, load, load_entries
from birdie.artifact.options import SaveOptions
from birdie.artifact.save import write_model
from birdie.artifact.summary import Summary
from birdie.checkpoints import pytree
from birdie.checkpoints.checkpoint import Checkpoint
from birdie.entropy.hints import EffortOption
from birdie.errors import WeightsError
from birdie.system.callbacks import Progress
from birdie.system.distributed import World
from birdie.system.file_objects import Input, Output, source_of

_PLAIN_STATE = ["tensors", []]  # the skeleton of what a file without a tree holds: a dict of tensors, sorted by name


def save_object(
    content: Any,
    path: Output,
    *,
    base: BaseOption | None = None,
    coder: EffortOption = "auto",
    metadata: Mapping[str, Any] | None = None,
    progress: Progress | bool | None = None,
    workers: int | None = None,
) -> Summary:
    """Write a complete object losslessly, for example a training checkpoint, into one .birdie file.

    `birdie.load` returns its tensors by path ("optimizer/state/0/exp_avg"); `load_object` returns the complete object.

    Args:
        content: nested dicts, lists and tuples of tensors and plain values, as torch.save takes them; never changed.
        path: the file to write, which appears complete or not at all; or a binary file object.
        base, coder, metadata, progress, workers: as for `birdie.save`.

    Raises:
        WeightsError: the content holds no tensor, or a value that cannot be stored; the message names its key path.
        ConfigError: a setting is wrong.
        OutputError: the file cannot be written.
    """
    return write_object(content, path, base=base, coder=coder, metadata=metadata, progress=progress, workers=workers)


def write_object(
    content: Any,
    path: Output,
    *,
    overwrite: bool | None = None,
    world: World | None = None,
    **options: Unpack[SaveOptions],
) -> Summary:
    """Write a complete object as `save_object` does; `overwrite` and `world` as for `write_model`."""
    tensors, skeleton = pytree.flatten(content)
    if not tensors:
        raise WeightsError("the checkpoint holds no tensor, so there is nothing to compress; check the file")
    tree = None if skeleton == _PLAIN_STATE else skeleton
    options["lossless"] = True
    return write_model(tensors, path, overwrite=overwrite, tree=tree, world=world, **options)


def write_checkpoint(
    checkpoint: Checkpoint,
    output: Path,
    *,
    overwrite: bool = False,
    world: World | None = None,
    **options: Unpack[SaveOptions],
) -> Summary:
    """Compress a checkpoint that was read, completely or its weights, into one .birdie file.

    Args:
        checkpoint: the file or folder.
        output: the file.
        overwrite, world: as for `write_model`.
        options: those of `birdie.save`; of a complete object those of `save_object`.
    """
    options["metadata"] = {**checkpoint.metadata, **(options.get("metadata") or {})} or None
    if not checkpoint.is_object:
        return write_model(
            checkpoint.content, output, files=checkpoint.files, overwrite=overwrite, world=world, **options
        )
    kept = {name: options.get(name) for name in ("base", "coder", "metadata", "progress") if name in options}
    return write_object(checkpoint.content, output, overwrite=overwrite, world=world, **cast(SaveOptions, kept))


def load_object(path: Input, **limits: Unpack[Limits]) -> Any:
    """Return the object that `save_object` wrote; for any other .birdie file, the dict that `birdie.load` returns.

    Args:
        path: a .birdie file, its bytes, or a binary file object, as for `birdie.load`.
        limits: base, max_bytes, max_operations, schemes and workers, as in `birdie.load`.

    Raises:
        ArtifactError: the file is missing, corrupt, or takes more than `max_bytes` or `max_operations` to decode.
        ConfigError: a setting is wrong.
    """
    source = source_of(path)
    skeleton = inspect(source).tree
    return load(source, **limits) if skeleton is None else pytree.rebuild(skeleton, load_entries(source, **limits))
