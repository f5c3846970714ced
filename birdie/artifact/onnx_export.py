"""ONNX models written from .birdie files: other bytes and decoded tensors, in turns.

    kept file ──other bytes──┐
                             ├──► model.onnx, and the files of external data beside it
    tensors ─────────────────┘

What lies where is the metadata's `onnx` (docs/format.md, birdie.checkpoints.onnx_file).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from birdie.artifact import kept_files
from birdie.artifact.file import Data, File, decoded_bytes
from birdie.artifact.links import opened
from birdie.artifact.options import DEFAULT_LIMITS, Limits
from birdie.artifact.safetensors_export import bytes_of
from birdie.checkpoints.onnx_graph import OnnxGraph, read_graph
from birdie.compress import registry
from birdie.errors import ArtifactError, ConfigError
from birdie.system.files import Hidden, atomic_folder, atomic_path, log_hidden
from birdie.system.names import is_hidden, shown
from birdie.system.outputs import Kind, require_no_input, require_output, require_output_folder

ONNX = Kind("an ONNX file", rb"\x08[\x01-\x7f]")
_AT_ONCE = 1 << 28  # bytes of tensors that are decoded together


@dataclass(frozen=True, slots=True)
class OnnxPiece:
    """A tensor in a file of an ONNX model.

    Attributes:
        name: of the tensor.
        gap: the number of other bytes before it.
        axes: permutation of its axes; empty: none.
    """

    name: str
    gap: int
    axes: tuple[int, ...] = ()


def layout_of(reader: File) -> dict[str, list[OnnxPiece]]:
    """Return the pieces of each file of an ONNX model, the model's first.

    Raises:
        ArtifactError: the file holds no such model, or the field is not what birdie writes.
    """
    field, names = reader.fields.get("onnx"), iter(reader.keys)
    if field is None:
        raise ArtifactError(f"{reader.where} holds no ONNX model; birdie compress MODEL.onnx writes files that do")
    files: dict[str, list[OnnxPiece]] = {}
    try:
        for name, *rows in field:
            pieces = [_piece(row, next(names), reader) for row in rows]
            room = kept_files.listed(reader.fields, reader.where)[name]
            if name in files or sum(piece.gap for piece in pieces) > room:
                raise ValueError(name)
            files[name] = pieces
        if not files or next(names, None) is not None:
            raise ValueError("other tensors")
    except (TypeError, ValueError, KeyError, StopIteration) as error:
        raise ArtifactError(f"the ONNX model in the metadata of {reader.where} is not sound; it is damaged") from error
    return files


def _piece(row: Any, name: str, reader: File) -> OnnxPiece:
    gap, *axes = row if isinstance(row, list) else [row]
    if type(gap) is not int or gap < 0:
        raise ValueError(name)
    if axes and sorted(axes) != [*range(len(reader.entry(name).shape))]:
        raise ValueError(name)
    return OnnxPiece(name, gap, tuple(axes))


def write_onnx(
    file: Data,
    target: Path,
    limits: Limits = DEFAULT_LIMITS,
    *,
    overwrite: bool = False,
    as_folder: bool = False,
    hidden: Hidden = log_hidden,
) -> list[Path]:
    """Decode a .birdie file into an ONNX model, and return the files that were written, the model's first.

    Args:
        file: a .birdie file of an ONNX model, or its bytes.
        target: the model's file; files of external data are written beside it, under the names that the model has for
            them. Each appears complete or not at all, the model's last.
        limits: as in `birdie.load`.
        overwrite: replace files of other kinds; of external data any files.
        as_folder: the target is a folder to write, in which all files have their names.
        hidden: called with the names of hidden files, which are not written into a folder that has content.
    """
    registry.import_schemes(limits.schemes)
    inputs = [file] if isinstance(file, str | Path) else []
    with opened(file, limits) as reference, File(file, registry.decoder, reference) as reader, ExitStack() as stack:
        layout = layout_of(reader)
        reader.require(limits.max_bytes, limits.max_operations, shared=False)
        if as_folder:
            folder = require_output_folder(target, overwrite=overwrite)
            temporary = stack.enter_context(atomic_folder(folder, overwrite=overwrite, inputs=inputs, hidden=hidden))
            paths, parts = [folder / name for name in layout], [temporary / name for name in layout]
        else:
            if names := [name for name in [*layout][1:] if is_hidden(name)]:
                raise ConfigError(
                    f"{reader.where} has external data in the hidden file {shown(names[0])!r}, which is written into a "
                    "new folder alone: -o NAME/"
                )
            paths = [target, *(target.parent / name for name in [*layout][1:])]
            paths = [
                require_output(path, inputs, kind=None if index else ONNX, overwrite=overwrite)
                for index, path in enumerate(paths)
            ]
            for index, path in enumerate(paths):
                require_no_input(path, paths[:index])
            parts = [stack.enter_context(atomic_path(path)) for path in paths]  # the first one is renamed last
        other = kept_files.read(reader, limits.max_bytes)
        for (name, pieces), part in zip(layout.items(), parts, strict=True):
            part.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as out:
                _write(out, pieces, other[name], reader, limits.workers)
        return paths


def _write(out: BinaryIO, pieces: Sequence[OnnxPiece], other: bytes, reader: File, workers: int | None) -> None:
    position, rest = 0, memoryview(other)
    for group in _groups(pieces, reader):
        tensors = reader.decode_all([piece.name for piece in group], workers)
        for piece in group:
            out.write(rest[position : position + piece.gap])
            out.write(bytes_of(as_in_file(piece, tensors)))
            position += piece.gap
    out.write(rest[position:])


def as_in_file(piece: OnnxPiece, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor with its axes in the order of the file."""
    return tensors[piece.name].permute(piece.axes) if piece.axes else tensors[piece.name]


def _groups(pieces: Sequence[OnnxPiece], reader: File) -> Iterator[list[OnnxPiece]]:
    """Yield pieces in groups that are decoded together."""
    left = iter(pieces)
    for piece in left:
        group, size = [piece], decoded_bytes(reader.entry(piece.name))
        while size < _AT_ONCE and (more := [*islice(left, 1)]):
            group += more
            size += decoded_bytes(reader.entry(more[0].name))
        yield group


def graph_of(file: Data, limits: Limits = DEFAULT_LIMITS) -> OnnxGraph:
    """Return the graph of the ONNX model in a .birdie file, without decoding its weights."""
    with File(file, registry.decoder) as reader:
        where, (name, pieces) = reader.where, next(iter(layout_of(reader).items()))
        sizes = [decoded_bytes(reader.entry(piece.name)) for piece in pieces]
        rest = kept_files.read(reader, limits.max_bytes)[name]
        if sum(sizes) > (reader.default_limit if limits.max_bytes is None else limits.max_bytes):
            raise ArtifactError(f"{reader.where} decodes to more bytes than allowed; raise max_bytes (--max-size)")
    data, position, end = bytearray(len(rest) + sum(sizes)), 0, 0
    for piece, size in zip(pieces, sizes, strict=True):
        data[end : end + piece.gap] = rest[position : position + piece.gap]
        position, end = position + piece.gap, end + piece.gap + size
    data[end:] = rest[position:]
    try:
        return read_graph(memoryview(data))
    except ValueError as error:
        raise ArtifactError(f"the ONNX model in {where} is not sound ({error}); it is damaged") from error
