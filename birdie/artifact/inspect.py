"""Summary of a file, as `save` returns it or from the header alone, without torch: names for dtypes and schemes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from birdie.artifact import kept_files
from birdie.artifact.codes import dtype_name, scheme_name
from birdie.artifact.container import ALIAS, Entry, Reader
from birdie.runtime.outputs import Source, require_path


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """A tensor of a file; `scheme` is fp16, bf16, alias (a second name without bytes) or the name of a scheme."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    scheme: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Size, tensors and metadata of a .birdie file.

    Attributes:
        path: of the file; "the data" of one in memory.
        bytes: size of the complete file.
        budget: byte budget of the file, or None.
        weights: number of elements of all tensors, tied ones counted once and complex ones as two.
        tensors: sorted by name.
        metadata: JSON of the caller of `save`.
        files: name → bytes of the files kept beside the tensors, unpacked; `file_bytes`: what they take together.
        tree: how the tensors nest, if the file holds a complete checkpoint (birdie.artifact.pytree); else None.
        error: after a compression with calibration, the difference from the float model on held-out inputs: mean KL
            in nats, or relative error (`quality` of `birdie.save`); not stored in the file.
        uncalibrated: after a compression with calibration, names of the matrices that no data reached; not stored.
    """

    path: str
    bytes: int
    budget: int | None
    weights: int
    tensors: tuple[TensorSummary, ...]
    metadata: Mapping[str, Any]
    tree: Any = None
    files: Mapping[str, int] = field(default_factory=dict)
    file_bytes: int = 0
    error: float | None = None
    uncalibrated: tuple[str, ...] = ()

    @property
    def bits_per_weight(self) -> float:
        """Bits of the file per weight; 0 if there are no weights."""
        return 8 * self.bytes / self.weights if self.weights else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that `--json` prints: everything but metadata, and what is known of a calibration."""
        rows = [
            {"name": row.name, "shape": list(row.shape), "dtype": row.dtype, "scheme": row.scheme, "bytes": row.bytes}
            for row in self.tensors
        ]
        return {
            "path": self.path,
            "bytes": self.bytes,
            "budget": self.budget,
            "weights": self.weights,
            "bits_per_weight": self.bits_per_weight,
            "tensors": rows,
            "files": dict(self.files),
        }


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
        fields = reader.fields
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


def stored_as(entry: Entry, foreign: Mapping[str, str]) -> str:
    """Return the name of an entry's scheme in summaries: fp16 and bf16 for casts, alias for a second name."""
    if entry.scheme == ALIAS:
        return "alias"
    name = scheme_name(entry, foreign)
    return CASTS.get(entry.params, name) if name == "cast" else name
