"""ONNX models as .birdie files, in Python: what `birdie compress` and `birdie decompress` do with .onnx files.

path, bytes or ModelProto ──save──► model.birdie ──load──► onnx.ModelProto
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol

from birdie.artifact.onnx_export import write_onnx
from birdie.artifact.options import Limits, SaveOptions
from birdie.artifact.repack import write_checkpoint
from birdie.artifact.summary import Summary
from birdie.checkpoints.checkpoint import open_checkpoint
from birdie.checkpoints.onnx_file import MODEL
from birdie.errors import ConfigError
from birdie.onnx.packages import imported
from birdie.system.file_objects import Input, source_of
from birdie.system.keywords import keywords
from birdie.system.outputs import Source

if TYPE_CHECKING:
    import onnx

P = ParamSpec("P")
Model = Source | bytes
"""The path of an ONNX file, or its bytes; or an `onnx.ModelProto`."""


class SaveOnnx(Protocol[P]):
    """Type of `save`: options are the fields of a dataclass."""

    def __call__(
        self, model: "Model | onnx.ModelProto", path: Source, *args: P.args, **kwargs: P.kwargs
    ) -> Summary: ...


def _save_takes(
    kind: Callable[P, SaveOptions],
) -> Callable[[Callable[[Any, Source, SaveOptions], Summary]], SaveOnnx[P]]:
    return keywords(kind)


@_save_takes(SaveOptions)
def save(model: Any, path: Source, options: SaveOptions) -> Summary:
    """Compress an ONNX model into one .birdie file.

    Nodes, names, metadata and integers keep every byte, as do scales and zero points; weights follow the options, with
    a row for each output. External data is read from beside the model's file.

    Args:
        model: the path of an ONNX file, its bytes, or an `onnx.ModelProto`; never changed.
        path: the file to write, which appears complete or not at all, also in place of another .birdie file.

    Raises:
        ConfigError: options contradict one another, or a spec or pattern is wrong.
        WeightsError: the model is damaged, or a tensor holds NaN or infinite values and is not kept losslessly.
        BudgetError: nothing fits the budget.
        OutputError: the file cannot be written.
    """
    with _on_disk(model) as file:
        checkpoint = open_checkpoint(file)
        if checkpoint.onnx is None:
            raise ConfigError(f"{file} is no ONNX file; birdie.save and birdie compress take other models")
        with checkpoint.mapped():
            return write_checkpoint(checkpoint, Path(path), options)


class LoadOnnx(Protocol[P]):
    """Type of `load`: options are the fields of a dataclass."""

    def __call__(self, path: Input, *args: P.args, **kwargs: P.kwargs) -> "onnx.ModelProto": ...


def _load_takes(kind: Callable[P, Limits]) -> Callable[[Callable[[Input, Limits], Any]], LoadOnnx[P]]:
    return keywords(kind)


@_load_takes(Limits)
def load(path: Input, options: Limits) -> Any:
    """Decode a .birdie file to an ONNX model, with all external data in it. Needs the package onnx.

    Args:
        path: a .birdie file of an ONNX model, its bytes, or a binary file object.

    Raises:
        ArtifactError: the file is missing, corrupt, holds no ONNX model, or takes more than `max_bytes` or
            `max_operations` to decode.
        ConfigError: an option is wrong, or onnx is not installed.
    """
    package, source = imported("onnx"), source_of(path)
    file = source if isinstance(source, memoryview) else Path(source)
    with tempfile.TemporaryDirectory() as folder:
        return package.load(str(write_onnx(file, Path(folder) / MODEL, options)[0]))


@contextmanager
def _on_disk(model: Any) -> Iterator[Path]:
    """Yield the path of a model, written to a temporary folder if it is in memory."""
    if isinstance(model, str | os.PathLike):
        yield Path(model)
        return
    if hasattr(model, "SerializeToString"):
        try:
            model = model.SerializeToString()
        except Exception as error:  # classes of protobuf's implementations differ
            raise ConfigError(f"the model cannot be written ({error}); save it, and give its path") from error
    if not isinstance(model, bytes | bytearray | memoryview):
        raise ConfigError(f"the model is a {type(model).__name__}; give the path of an ONNX file, or a ModelProto")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / MODEL
        path.write_bytes(model)
        yield path
