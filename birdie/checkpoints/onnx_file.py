"""ONNX files as tensors and the bytes around them, so that a model comes back as it was but for its weights.

    model.onnx   ──onnx_graph──► where its tensors lie ──┬─► tensors, mapped, with a row for each output
    weights.bin, which it names ─────────────────────────┤
                                                         └─► pieces: the other bytes before each tensor, and its axes

Small tensors, which are mostly shapes and constants, and those whose elements are no plain run of words stay where they
are: the graph is compressed with its file. What other tensors are for tells the graph (birdie.checkpoints.onnx_roles).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from birdie.checkpoints.limits import MAX_DIMS, MAX_NAME_BYTES, require_names
from birdie.checkpoints.onnx_graph import DTYPES, OnnxGraph, OnnxTensor, read_graph
from birdie.checkpoints.onnx_roles import AS_IT_LIES, FIRST_TWO, GraphUses, Uses, roles_of
from birdie.checkpoints.weight_shards import own_file
from birdie.compress.exact import Roles
from birdie.compress.state import is_text
from birdie.compress.tensors import REAL_DTYPES
from birdie.errors import WeightsError
from birdie.system.names import is_name, is_part
from birdie.system.regular import regular_file

MODEL = "model.onnx"  # name of a model whose own cannot be stored
LEAST = 64  # bytes of a tensor of floats that is taken out of its file
LEAST_EXACT = 512  # the same of other tensors, of which no bit changes
_GAP = 1 << 16  # bytes of a file between tensors that are stored as a tensor
_MOST_NUMBER = 19  # digits


class GraphPart(NamedTuple):
    """A tensor in a file.

    Attributes:
        start, end: of its bytes.
        name: of the tensor.
        shape, dtype: of these bytes; those of kinds that torch lacks are bytes.
        sources: the tensors of the graph that have these bytes; none of bytes between tensors, and where some overlap.
    """

    start: int
    end: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[OnnxTensor, ...] = ()


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """An ONNX model in parts.

    Attributes:
        tensors: name → tensor, mapped where that is possible, in the order of the files; a weight has a row for each
            output.
        uses: what each is used for, as the graph tells.
        layout: field of the metadata: for each file its name and pieces (docs/format.md).
        names: name in the graph, outside of functions → name of the tensor.
        other: name of each file → the bytes that are in no tensor.
        paths: of the files, the model first.
    """

    tensors: dict[str, Tensor]
    uses: dict[str, Uses]
    layout: list[list[Any]]
    names: dict[str, str]
    other: dict[str, bytes]
    paths: list[Path]

    @property
    def roles(self) -> Roles:
        """Roles of the tensors of floats."""
        return roles_of(self.tensors, self.uses)

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> Path:
        """Write the files of the model with other values of some tensors into a folder; return the model's path."""
        names = iter(self.tensors)
        for file, *pieces in self.layout:
            path, position, rest = folder / file, 0, memoryview(self.other[file])
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as out:
                for piece in pieces:
                    gap, *axes = piece if isinstance(piece, list) else [piece]
                    name = next(names)
                    tensor = tensors.get(name, self.tensors[name])
                    out.write(rest[position : position + gap])
                    out.write(_words(tensor.permute(axes) if axes else tensor))
                    position += gap
                out.write(rest[position:])
        return folder / str(self.layout[0][0])


def read_onnx(path: Path) -> OnnxModel:
    """Read an ONNX file, and the files of external data beside it.

    Raises:
        WeightsError: it is no such file, is cut, or names a file that is missing or elsewhere.
    """
    data = _mapped(path)
    try:
        graph = read_graph(data.numpy().data)
    except ValueError as error:
        raise WeightsError(f"{path} is not a complete ONNX file ({error}); copy or export it again") from error
    names, files = _Names(), {path.name: (path, data)}
    pieces: dict[str, list[GraphPart]] = {}
    for where, spans in _spans(path, graph, files, names).items():
        apart = _apart(sorted(spans), where, names)
        pieces[where] = [*apart] if where == path.name else [*_complete(apart, where, names, len(files[where][1]))]
    return _in_parts(path, graph, files, pieces)


def _spans(
    path: Path, graph: OnnxGraph, files: dict[str, tuple[Path, Tensor]], names: "_Names"
) -> dict[str, list[GraphPart]]:
    """Return where tensors lie in the files of a model; files of external data are added to `files`."""
    spans: dict[str, list[GraphPart]] = {path.name: []}
    for tensor in graph.tensors:
        where = _location(tensor, path) if tensor.external else path.name
        if where not in files:
            file = own_file(path.parent / where, path.parent)
            files[where], spans[where] = (file, _mapped(file)), []
        if (size := tensor.bytes) is None:
            continue
        start, end = tensor.start, tensor.end
        if tensor.external:
            start, end = _range(tensor, size, path, where, len(files[where][1]))
        if end - start == size and size >= _least(tensor):
            spans[where].append(_piece(tensor, start, end, names))
    return spans


def _in_parts(
    path: Path, graph: OnnxGraph, files: Mapping[str, tuple[Path, Tensor]], pieces: Mapping[str, list[GraphPart]]
) -> OnnxModel:
    """Return the model whose files have these pieces."""
    users = GraphUses(graph, str(path))
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    uses: dict[str, Uses] = {}
    layout, other = [], {}
    for where, some in pieces.items():
        name = where if where != path.name or is_part(where) else MODEL
        _, data = files[where]
        rows: list[Any] = [name]
        rest, end = [], 0
        for piece in some:
            use = uses[piece.name] = users.of((source.scope, source.name) for source in piece.sources)
            names |= {source.name: piece.name for source in piece.sources if source.scope == 0}
            axes = _axes(len(piece.shape), use.swapped if piece.dtype in REAL_DTYPES else AS_IT_LIES)
            tensor = _tensor(data, piece).permute(axes)
            # to the kinds of weights, three dimensions are a convolution
            tensors[piece.name] = tensor.flatten(0, 1) if use.is_recurrent and tensor.ndim == 3 else tensor
            gap = piece.start - end
            rows.append([gap, *axes] if axes != sorted(axes) else gap)
            rest.append(data[end : piece.start])
            end = piece.end
        layout.append(rows)
        other[name] = torch.cat([*rest, data[end:]]).numpy().tobytes()
    require_names(tensors)
    return OnnxModel(tensors, uses, layout, names, other, [file for file, _ in files.values()])


def _words(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, row by row."""
    words: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return words


def _mapped(path: Path) -> Tensor:
    """Return the bytes of a file, mapped."""
    try:
        size = regular_file(path).stat().st_size
        return torch.from_file(str(path), size=size, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:  # torch raises the latter where it cannot map a file
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise WeightsError(f"cannot read {path}: {reason}; check the file") from error


def _location(tensor: OnnxTensor, path: Path) -> str:
    """Return the name of the file that holds a tensor, which has to lie in the folder of the model."""
    where = tensor.external.get("location", "").removeprefix("./")
    if not is_name(where) or where == path.name:
        raise WeightsError(
            f"{path} keeps {tensor.name!r} in {where!r}, which is no other file in its folder; do not trust this model"
        )
    if not (path.parent / where).exists():
        raise WeightsError(f"{path.parent / where} is missing, in which {path.name} keeps {tensor.name!r}; copy it too")
    return where


def _range(tensor: OnnxTensor, size: int, path: Path, where: str, room: int) -> tuple[int, int]:
    """Return where the bytes of a tensor lie in another file."""
    offset, length = tensor.external.get("offset", "0"), tensor.external.get("length", str(size))
    if not all(text.isdecimal() and text.isascii() and len(text) <= _MOST_NUMBER for text in (offset, length)):
        raise WeightsError(f"{path} says that {tensor.name!r} lies at {offset[:40]!r} of {where}; export it again")
    start, end = int(offset), int(offset) + int(length)
    if int(length) != size or end > room:
        raise WeightsError(
            f"{path} says that {tensor.name!r}, of {size:,} bytes, lies at {start:,} to {end:,} of {where}, which has "
            f"{room:,}; copy the files again"
        )
    return start, end


def _least(tensor: OnnxTensor) -> int:
    dtype = DTYPES.get(tensor.kind)
    return LEAST if dtype is not None and dtype.is_floating_point else LEAST_EXACT


def _piece(tensor: OnnxTensor, start: int, end: int, names: "_Names") -> GraphPart:
    dtype, shape = DTYPES.get(tensor.kind, torch.uint8), tensor.shape
    if prod(shape) * dtype.itemsize != end - start:  # several elements in a byte: rows of bytes, if they are complete
        shape = (*shape[:-1], (end - start) // prod(shape[:-1])) if (end - start) % prod(shape[:-1]) == 0 else ()
    if len(shape) > MAX_DIMS or prod(shape) * dtype.itemsize != end - start:
        shape, dtype = (end - start,), torch.uint8
    return GraphPart(start, end, names.new(tensor.name), shape, dtype, (tensor,))


class _Names:
    """Names of tensors, each given once: functions may have the names of others, and attributes may have none."""

    def __init__(self) -> None:
        self.taken: set[str] = set()

    def new(self, name: str) -> str:
        if not name or not is_text(name) or len(name.encode()) > MAX_NAME_BYTES - 16:
            name = "tensor"
        number, unique = 1, name
        while unique in self.taken:
            number += 1
            unique = f"{name}#{number}"
        self.taken.add(unique)
        return unique


def _apart(pieces: list[GraphPart], where: str, names: _Names) -> Iterator[GraphPart]:
    """Yield pieces in their order, one for several of the same bytes and kind; others that overlap become bytes."""
    group: list[GraphPart] = []
    for piece in [*pieces, None]:
        if group and (piece is None or piece.start >= max(one.end for one in group)):
            first, end = group[0], max(one.end for one in group)
            is_one = all((one.start, one.end, one.dtype) == (first.start, first.end, first.dtype) for one in group)
            sources = tuple(source for one in group for source in one.sources)
            yield first._replace(sources=sources) if is_one else _bytes(first.start, end, where, names)
            group = []
        if piece is not None:
            group.append(piece)


def _complete(pieces: Iterator[GraphPart], where: str, names: _Names, size: int) -> Iterator[GraphPart]:
    """Yield pieces, and as pieces also what of an external file is used by no tensor and is large."""
    end = 0
    for piece in [*pieces, None]:
        start = size if piece is None else piece.start
        if start - end > _GAP:
            yield _bytes(end, start, where, names)
        if piece is not None:
            yield piece
            end = piece.end


def _bytes(start: int, end: int, where: str, names: _Names) -> GraphPart:
    return GraphPart(start, end, names.new(f"{where}@{start}"), (end - start,), torch.uint8)


def _axes(dims: int, swapped: str) -> list[int]:
    """Return the permutation that brings the axis of the outputs to the front; it is its own inverse."""
    axes = [*range(dims)]
    if swapped != AS_IT_LIES and dims > 1:
        one, two = (0, 1) if swapped == FIRST_TWO else (dims - 2, dims - 1)
        axes[one], axes[two] = two, one
    return axes


def _tensor(data: Tensor, piece: GraphPart) -> Tensor:
    part = data[piece.start : piece.end]
    if (data.data_ptr() + piece.start) % piece.dtype.itemsize:  # torch reads aligned words only
        part = part.clone()
    return part.view(piece.dtype).reshape(piece.shape)
