"""Summary of a file from its header alone, without torch: names instead of dtypes and schemes."""

import math
from collections.abc import Mapping

from birdie.artifact import kept_files
from birdie.artifact.codes import SCHEMES, dtype_name, scheme_name
from birdie.artifact.container import ALIAS, DELTA, Entry, Reader
from birdie.artifact.metadata import base_in, is_inside
from birdie.artifact.summary import Summary, TensorSummary
from birdie.system.file_objects import Input, source_of

# Values that a core decodes to weights in a microsecond, by the coder of their stream (birdie.entropy.coder).
SPEEDS = {0: 10_000, 1: 2_000, 2: 200, 3: 15, 4: 100, 5: 5, 6: 160}
_MIXED, _TILES = 5, 6  # those that "max" and "fast" choose for large matrices
_DELTAS = 3  # the same, of exact deltas
_SCALED, _TABLES = 7, 8  # forms of weights that are quantized already (birdie.compress.schemes.lossless)
_UNKNOWN = 100  # speed of a coder that another version may have written
_NEAR = (2,)  # form of a delta that is not exact (birdie.compress.delta)
CASTS: dict[tuple[int, ...], str] = {(0,): "fp16", (1,): "bf16"}  # by the parameters in the file


def inspect(path: Input) -> Summary:
    """Return the summary of a file, reading only its header.

    Args:
        path: a .birdie file, its bytes, or a binary file object, as for `birdie.load`.

    Raises:
        ArtifactError: the file is missing or its header is corrupt.
        ConfigError: the path is not valid.
    """
    with Reader(source_of(path)) as reader:
        fields = reader.fields
        sizes, foreign = reader.table(), fields.get("schemes", {})
        entries = [reader.entry(name) for name in reader.ordered]
        blocks = (block for name in reader.names for block in reader.blocks(reader.holder(name)))
        coded = [reader.entry(block) for block in dict.fromkeys(blocks)]
        rows = tuple(
            TensorSummary(
                entry.name,
                entry.shape,
                dtype_name(entry),
                stored_as(reader.entry(reader.blocks(reader.holder(entry.name))[0]), foreign),
                sizes[entry.name],
            )
            for entry in entries
        )
        weights = sum(
            math.prod(row.shape) * (2 if row.dtype.startswith("complex") else 1)
            for row in rows
            if row.scheme != "alias"
        )
        kept, theirs = kept_files.listed(fields, reader.where), kept_files.in_base(fields, reader.where)
        return Summary(
            reader.where,
            reader.size,
            fields.get("budget"),
            weights,
            rows,
            fields.get("metadata", {}),
            fields.get("tree"),
            dict(sorted({**kept, **theirs}.items())),
            reader.header(kept_files.ENTRY).length if kept else 0,
            "max" if any(stream.coder == _MIXED for entry in coded for stream in entry.streams) else "fast",
            sum(map(_seconds, coded)),
            base=base_in(fields)[0] if theirs or (DELTA in reader.kinds and not is_inside(fields)) else None,
            base_files=tuple(theirs),
            is_onnx="onnx" in fields,
        )


def load_seconds(effort: str, weights: int) -> float:
    """Return about the time that loading large matrices of an effort takes one core."""
    return 1e-6 * weights / SPEEDS[_MIXED if effort == "max" else _TILES]


def _seconds(entry: Entry) -> float:
    """Return about the time that decoding takes one core."""
    if entry.kind == DELTA and entry.params[1:2] != _NEAR:
        return 1e-6 * math.prod(entry.shape) / _DELTAS if entry.streams else 0.0
    planes = SCHEMES.get(entry.scheme) in ("lossless", "cast")
    coders = [stream.coder for stream in (entry.streams if planes else entry.streams[:1])]
    return 1e-6 * math.prod(entry.shape) * sum(1 / SPEEDS.get(coder, _UNKNOWN) for coder in coders)


_PARAMS = {_SCALED: 5, _TABLES: 2}  # number of parameters of these forms; a hostile header may have others


def stored_as(entry: Entry, foreign: Mapping[str, str]) -> str:
    """Return the name of an entry's scheme in summaries: fp16 and bf16 for casts, alias, delta, levels."""
    if entry.kind == ALIAS:
        return "alias"
    if entry.kind == DELTA:
        return "delta"
    name = scheme_name(entry, foreign)
    if name == "lossless" and _PARAMS.get(next(iter(entry.params), 0)) == len(entry.params) and 0 not in entry.shape:
        return _levels(entry.shape, entry.params)
    return CASTS.get(entry.params, name) if name == "cast" else name


def _levels(shape: tuple[int, ...], params: tuple[int, ...]) -> str:
    """Return a text such as "int4 by 64, exact": levels and blocks of weights that are quantized already."""
    if params[0] == _TABLES:
        return f"{params[1]} levels by row, exact"
    _, height, width, count, kind = params
    rows = shape[0] if len(shape) > 1 else 1
    columns = math.prod(shape) // rows
    # Of n bits a signed grid leaves out one level, and may have −0.0 and the largest one besides.
    bits = next((bits for bits in range(3, 9) if -1 <= count - 2**bits <= 2), 0) if kind < 3 else 0
    levels = f"int{bits}" if bits else f"{count} levels"
    if height == 1:
        return f"{levels} by {'row' if width >= columns else width}, exact"
    if width == 1:
        return f"{levels} by {'column' if height >= rows else f'{height} in a column'}, exact"
    return f"{levels} by {height} × {width}, exact"
