"""Lossless copies of complete checkpoints: every tensor bit for bit, and all other values (optimizer, step, arguments).

torch.load(…) ──pytree.flatten──► tensors, skeleton ──save(lossless)──► model.birdie
              ◄──pytree.rebuild── tensors, skeleton ◄──load, inspect──
"""

from collections.abc import Callable
from dataclasses import fields, replace
from io import BytesIO
from pathlib import Path
from typing import Any, ParamSpec, Protocol

from birdie.artifact.inspection import inspect
from birdie.artifact.loading import load, load_entries
from birdie.artifact.options import Limits, ObjectOptions, SaveOptions
from birdie.artifact.saving import write_model
from birdie.artifact.summary import Summary
from birdie.checkpoints import pytree
from birdie.checkpoints.checkpoint import Checkpoint
from birdie.errors import WeightsError
from birdie.system.distributed import World
from birdie.system.file_objects import Input, Output, source_of
from birdie.system.keywords import keywords

P = ParamSpec("P")

_PLAIN_STATE = ["tensors", []]  # the skeleton of what a file without a tree holds: a dict of tensors, sorted by name


class SaveObject(Protocol[P]):
    """Type of `save_object`: options are the fields of a dataclass."""

    def __call__(self, content: Any, path: Output, *args: P.args, **kwargs: P.kwargs) -> Summary: ...


def _save_takes(
    kind: Callable[P, ObjectOptions],
) -> Callable[[Callable[[Any, Output, ObjectOptions], Summary]], SaveObject[P]]:
    return keywords(kind)


@_save_takes(ObjectOptions)
def save_object(content: Any, path: Output, options: ObjectOptions) -> Summary:
    """Write a complete object losslessly, for example a training checkpoint, into one .birdie file.

    `birdie.load` returns its tensors by path ("optimizer/state/0/exp_avg"); `load_object` returns the complete object.

    Args:
        content: nested dicts, lists and tuples of tensors and plain values, as torch.save takes them; never changed.
        path: the file to write, which appears complete or not at all; or a binary file object.

    Raises:
        WeightsError: the content holds no tensor, or a value that cannot be stored; the message names its key path.
        ConfigError: an option is wrong.
        OutputError: the file cannot be written.
    """
    return write_object(content, path, options)


def write_object(
    content: Any,
    path: Output,
    options: ObjectOptions,
    *,
    overwrite: bool | None = None,
    world: World | None = None,
) -> Summary:
    """Write a complete object as `save_object` does; `overwrite` and `world` as for `write_model`."""
    tensors, skeleton = pytree.flatten(content)
    if not tensors:
        raise WeightsError("the checkpoint holds no tensor, so there is nothing to compress; check the file")
    tree = None if skeleton == _PLAIN_STATE else skeleton
    return write_model(
        tensors, path, SaveOptions(lossless=True, **vars(options)), overwrite=overwrite, tree=tree, world=world
    )


def write_checkpoint(
    checkpoint: Checkpoint,
    output: Path | BytesIO,
    options: SaveOptions,
    *,
    overwrite: bool = False,
    world: World | None = None,
) -> Summary:
    """Compress a checkpoint that was read, completely or its weights, into one .birdie file.

    Args:
        checkpoint: the file or folder.
        output: the file, or memory for it.
        options: those of `birdie.save`; of a complete object those of `save_object` count.
        overwrite, world: as for `write_model`.
    """
    options = replace(options, metadata={**checkpoint.metadata, **(options.metadata or {})} or None)
    if not checkpoint.is_object:
        return write_model(
            checkpoint.content,
            output,
            options,
            overwrite=overwrite,
            files=checkpoint.files,
            onnx=checkpoint.onnx,
            roles=checkpoint.roles,
            world=world,
        )
    kept = ObjectOptions(**{option.name: getattr(options, option.name) for option in fields(ObjectOptions)})
    return write_object(checkpoint.content, output, kept, overwrite=overwrite, world=world)


class LoadObject(Protocol[P]):
    """Type of `load_object`: options are the fields of a dataclass."""

    def __call__(self, path: Input, *args: P.args, **kwargs: P.kwargs) -> Any: ...


def _load_takes(kind: Callable[P, Limits]) -> Callable[[Callable[[Input, Limits], Any]], LoadObject[P]]:
    return keywords(kind)


@_load_takes(Limits)
def load_object(path: Input, options: Limits) -> Any:
    """Return the object that `save_object` wrote; for any other .birdie file, the dict that `birdie.load` returns.

    Args:
        path: a .birdie file, its bytes, or a binary file object, as for `birdie.load`.

    Raises:
        ArtifactError: the file is missing, corrupt, or takes more than `max_bytes` or `max_operations` to decode.
        ConfigError: an option is wrong.
    """
    source = source_of(path)
    skeleton = inspect(source).tree
    if skeleton is None:
        return load(source, **vars(options))
    return pytree.rebuild(skeleton, load_entries(source, options))
