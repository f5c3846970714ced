"""Summary of a file, as `inspect` and `save` return it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from birdie.artifact.summary_table import SummaryTable, by_scheme, by_tensor
from birdie.system.names import shown
from birdie.system.text_table import as_html, as_text

if TYPE_CHECKING:
    from birdie.compress.rate.control import Control


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """A tensor of a file.

    `scheme` is fp16, bf16, alias (a second name without bytes), what a lossless tensor that was quantized already is
    ("int4 by 64, exact"), or the name of a scheme.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    scheme: str
    bytes: int


_SIXTEEN_BITS = ("fp16", "bf16")  # schemes
_NARROW = ("float16", "bfloat16")  # dtypes, which these schemes leave as they are
_MOST_ROWS = 40  # of a table that `print` shows with a row for each tensor
_MOST_LISTED = 20  # names
_LEFT = 128  # bytes of a budget, and a hundredth of it, that are left without a word


@dataclass(frozen=True, slots=True, repr=False)
class Summary:
    """Size, tensors and metadata of a .birdie file; print it for a table, or show it in a notebook.

    Attributes:
        path: of the file; "the data" of one in memory.
        bytes: size of the complete file.
        budget: byte budget of the file, or None.
        weights: number of elements of all tensors, tied ones counted once and complex ones as two.
        tensors: in the order of the saved state dict.
        metadata: JSON of the caller of `save`.
        files: name → bytes of the files beside the tensors, unpacked; `file_bytes`: what those in the file take.
        tree: how the tensors nest, if the file holds a complete checkpoint (birdie.checkpoints.pytree); else None.
        error: after a compression with calibration, the delta from the float model on held-out inputs: mean KL
            in nats, or relative error (`quality` of `birdie.save`); not stored in the file.
        untuned: after tuning, the same delta without it.
        nothing_to_tune: tuning was asked for, but no weights are left to train beside the matrix that is encoded last.
        fuller: after a compression with calibration, the error of a file that fills the budget, if this smaller one has
            a lower error; not stored in the file.
        control: after a compression with calibration to `budget` or `bits`, which sensitivities the file follows, and
            the errors of each on held-out inputs (`birdie.compress.rate.control`); not stored in the file.
        effort: "max" or "fast", of the entropy coding.
        load_seconds: about the time that loading takes one core of a server.
        uncalibrated: after a compression with calibration, names of the matrices that no data reached; not stored.
        otherwise: after a compression, names of large tensors that were to be quantized and are lossless or in 16
            bits; not stored.
        not_kept: after a lossless compression of tensors alone, what only `birdie.save_object` keeps of them:
            attributes, layout in memory, shared memory; not stored.
        base: file name of the checkpoint to which tensors are stored as deltas, "" if it had none; None: none.
        base_files: names of those of `files` that are not in the file, but the same in its base.
        is_onnx: the file holds an ONNX model, which `birdie.onnx.load` returns.
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
    effort: str = "fast"
    load_seconds: float = 0.0
    error: float | None = None
    untuned: float | None = None
    nothing_to_tune: bool = False
    fuller: float | None = None
    control: "Control | None" = None
    uncalibrated: tuple[str, ...] = ()
    otherwise: tuple[str, ...] = ()
    not_kept: tuple[str, ...] = ()
    base: str | None = None
    base_files: tuple[str, ...] = ()
    is_onnx: bool = False

    @property
    def bits_per_weight(self) -> float:
        """Bits of the file per weight; 0 if there are no weights."""
        return 8 * self.bytes / self.weights if self.weights else 0.0

    @property
    def rounded(self) -> int:
        """Number of tensors of 32 bits and more that are rounded to 16."""
        return sum(row.scheme in _SIXTEEN_BITS and row.dtype not in _NARROW for row in self.tensors)

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
            "effort": self.effort,
            "load_seconds": round(self.load_seconds, 3),
            "tensors": rows,
            "files": dict(self.files),
            "base": self.base,
            "base_files": list(self.base_files),
            "not_kept": list(self.not_kept),
        }

    @property
    def _leaves_budget(self) -> bool:
        """True if more of a budget is left than a search usually leaves, and something was searched."""
        searched = any(row.scheme not in ("lossless", "alias", "delta") for row in self.tensors)
        left = 0 if self.budget is None else self.budget - self.bytes
        return searched and left > max(_LEFT, (self.budget or 0) // 100)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about a compression: its errors, and what is not as it was asked for."""
        notes = []
        if self.untuned is not None and self.error is not None:
            won = self.error < self.untuned or self.nothing_to_tune
            kept = "" if won else "; tuning won no more than chance, so the file is without it"
            notes.append(f"error on inputs kept apart: {self.error:.4g}, without tuning {self.untuned:.4g}{kept}")
        elif self.error is not None and self.control is None:
            notes.append(f"error on inputs kept apart: {self.error:.4g}")
        if self.nothing_to_tune:
            notes.append("nothing to tune: no weights are left to train beside the matrix that is encoded last")
        if self.fuller is not None and self.budget is not None and self.error is not None:
            left = f"of the budget {self.budget - self.bytes:,} B are left"
            notes.append(f"{left}: the error is {self.error:.3g}, with all of them {self.fuller:.3g}")
        elif self._leaves_budget:
            notes.append(
                f"of the budget {self.budget or 0:,} B {(self.budget or 0) - self.bytes:,} are left: no scales fill it"
            )
        if self.control is not None:
            notes.append(str(self.control))
        if self.uncalibrated:
            notes.append(f"no data reached: {_listed(self.uncalibrated)}")
        if self.otherwise:
            stored = {row.name: row.bytes for row in self.tensors if row.name in self.otherwise}
            names = sorted(stored, key=lambda name: -stored[name])
            texts = [f"{name} {stored[name]:,} B" if stored[name] else name for name in names]
            notes.append(f"lossless or in 16 bits, not quantized: {_listed(texts)}")
        if self.not_kept:
            notes.append(f"not kept with weights alone: {', '.join(self.not_kept)}")
        if self.rounded:
            notes.append(f"rounded to 16 bits: {self.rounded:,} of {len(self.tensors):,} tensors")
        return tuple(notes)

    @property
    def _title(self) -> str:
        return f"{shown(self.path)}: {self.bytes:,} B, {self.bits_per_weight:.3f} bits per weight"

    @property
    def _table(self) -> SummaryTable:
        return by_tensor(self) if len(self.tensors) <= _MOST_ROWS else by_scheme(self)

    def __repr__(self) -> str:
        return f"<{self._title}, {self.weights:,} weights, {len(self.tensors):,} tensors>"

    def __str__(self) -> str:
        header, rows, totals, left = self._table
        return "\n".join([self._title, as_text([header, *rows, *totals], left), *self.notes])

    def _repr_html_(self) -> str:
        header, rows, totals, left = self._table
        return as_html(self._title, [header, *rows, *totals], self.notes, left)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_LISTED:,} more" * (len(names) > _MOST_LISTED)
    return ", ".join(shown(name)[:80] for name in names[:_MOST_LISTED]) + more
