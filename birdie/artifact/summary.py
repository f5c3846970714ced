"""What is in a file, as `inspect` and `save` tell it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """A tensor of a file; `scheme` is fp16, bf16, alias (a second name, no bytes of its own) or a key of `SCHEMES`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    scheme: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What is in a .birdie file.

    Attributes:
        path: of the file.
        bytes: of the whole file.
        budget: bytes it was allowed, or None.
        weights: elements of all tensors, tied ones once.
        tensors: sorted by name.
        metadata: what the caller of `save` had to say.
        tree: how the tensors nest, where the file holds a whole checkpoint (birdie.artifact.pytree); else None.
    """

    path: str
    bytes: int
    budget: int | None
    weights: int
    tensors: tuple[TensorSummary, ...]
    metadata: Mapping[str, Any]
    tree: Any = None

    @property
    def bits_per_weight(self) -> float:
        """Bits of the file per weight; 0 when there are no weights."""
        return 8 * self.bytes / self.weights if self.weights else 0.0

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints: all but the metadata."""
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
        }
