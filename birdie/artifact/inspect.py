"""Summary of a file from its header alone, without torch: names instead of dtypes and schemes."""

import math
from collections.abc import Mapping
from io import BytesIO

from birdie.artifact import kept_files
from birdie.artifact import metadata as file_metadata
from birdie.artifact.container import ALIAS, Entry, Reader
from birdie.artifact.summary import Summary, TensorSummary
from birdie.errors import ArtifactError
from birdie.runtime.outputs import Source, require_path

# The index of a name is the code of the dtype in the file. Never change one; new dtypes go at the end.
DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
)  # fmt: skip
SCHEMES = {
    1: "lossless", 2: "grid", 3: "cast", 4: "trellis", 5: "ternary", 6: "codebook", 7: "rotation", 8: "lowrank",
    9: "spectral", 10: "tucker",
}  # fmt: skip
CASTS: dict[tuple[int, ...], str] = {(0,): "fp16", (1,): "bf16"}  # by the parameters in the file


def inspect(path: Source | BytesIO) -> Summary:
    """Return the summary of a file, reading only its header.

    Raises:
        ArtifactError: the file is missing or its header is corrupt.
        ConfigError: the path is not valid.
    """
    source = path.getbuffer() if isinstance(path, BytesIO) else path
    if not isinstance(source, bytes | memoryview):  # the bytes of a file are accepted in place of its path
        require_path(source)
    with Reader(source) as reader:
        fields = file_metadata.parse(bytes(reader.metadata), reader.where)
        sizes, foreign = reader.table(), fields.get("schemes", {})
        entries = [reader.entry(name) for name in reader.names]
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
        kept = kept_files.listed(fields, reader.where)
        return Summary(
            reader.where,
            reader.size,
            fields.get("budget"),
            weights,
            rows,
            fields.get("metadata", {}),
            fields.get("tree"),
            kept,
            reader.header(kept_files.ENTRY).length if kept else 0,
        )


def dtype_name(entry: Entry) -> str:
    """Return the name of the dtype of an entry's tensor."""
    if entry.dtype >= len(DTYPES):
        raise ArtifactError(
            f"tensor {entry.name!r} has dtype code {entry.dtype}, unknown to this version; update birdie"
        )
    return DTYPES[entry.dtype]


def scheme_name(entry: Entry, foreign: Mapping[str, str]) -> str:
    """Return the name of an entry's scheme.

    Args:
        entry: of a file.
        foreign: code → name of the schemes that the file names in its metadata.
    """
    name = SCHEMES.get(entry.scheme) or foreign.get(str(entry.scheme))
    if name is None:
        raise ArtifactError(
            f"tensor {entry.name!r} has scheme code {entry.scheme}, unknown to this version; update birdie"
        )
    return name


def stored_as(entry: Entry, foreign: Mapping[str, str]) -> str:
    """Return the name of an entry's scheme in summaries: fp16 and bf16 for casts, alias for a second name."""
    if entry.scheme == ALIAS:
        return "alias"
    name = scheme_name(entry, foreign)
    return CASTS.get(entry.params, name) if name == "cast" else name
