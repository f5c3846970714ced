"""Files of an offloaded calibration: sensitivities and factors of error feedback, in a temporary folder.

    sensitivity, factors ──► one .safetensors each ──mapped──► the same again, for as long as someone holds it

A mapped tensor takes memory only where it is read, and gives it back when it is dropped. So look a name up when it is
needed and do not collect the values: a dictionary of them all would fill with every page that was read.
"""

import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from birdie.compress.scheme import BlockDiagonal, Sensitivity
from birdie.compress.trellis.feedback import BlockFeedback, ColumnBlock, Feedback, TapFeedback
from birdie.errors import DataError
from birdie.system.distributed import World, together
from birdie.system.files import atomic_path, temporary_folder
from birdie.system.outputs import require_writable
from birdie.system.tensor_files import write_tensors

SUFFIX = ".safetensors"
# facts that stand in a file where they are true: of a sensitivity, of factors
_OF_SENSITIVITY, _OF_FACTORS = ("rows_have_inputs", "rows_are_inputs", "at_large"), ("along", "at_large")


class Scratch:
    """Temporary folder of all ranks, which rank 0 removes when nobody refers to this object any more.

    Args:
        parent: folder to create it in.
        world: the ranks.

    Attributes:
        path: of the folder.
        close: removes it now.
    """

    def __init__(self, parent: Path, world: World) -> None:
        stack, path = ExitStack(), [""]

        def create() -> None:
            if world.is_main:
                path[0] = str(stack.enter_context(temporary_folder(require_writable(parent))))

        together(world, create)
        self.path = Path(world.broadcast(path[0]))
        self.close = weakref.finalize(self, stack.close)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file, mapped, and the texts that describe them.

    Changes of the tensors never reach the file.
    """
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} cannot be read ({error}); remove its folder and calibrate again") from error


class StoredSensitivities(Mapping[str, Sensitivity]):
    """Sensitivities by name, in one file each.

    Args:
        files: name → file.
        owner: of the files, which must exist as long as this object.
    """

    def __init__(self, files: Mapping[str, Path], owner: object = None) -> None:
        self.files, self._owner = dict(files), owner

    def __getitem__(self, name: str) -> Sensitivity:
        """Return a sensitivity whose tensors are mapped."""
        return read_sensitivity(self.files[name])

    def __contains__(self, name: object) -> bool:
        """Return whether there is a sensitivity of that name, without reading it."""
        return name in self.files

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self.files)

    def __len__(self) -> int:
        """Return the number of sensitivities."""
        return len(self.files)

    def store(self, name: str, sensitivity: Sensitivity) -> None:
        """Write a sensitivity into the file of its name."""
        with atomic_path(self.files[name]) as temporary:
            write_sensitivity(temporary, sensitivity)


def write_sensitivity(path: Path, sensitivity: Sensitivity) -> None:
    """Write a measured sensitivity into a file."""
    blocks = sensitivity.blocks
    parts = {
        "hessian": sensitivity.hessian,
        "row_fisher": sensitivity.row_fisher,
        "output": sensitivity.output,
        "columns": None if blocks is None else blocks.columns,
        "blocks": None if blocks is None else blocks.blocks,
    }
    facts = {"samples": repr(sensitivity.samples), "gradients": repr(sensitivity.gradients)}
    facts |= {flag: "" for flag in _OF_SENSITIVITY if getattr(sensitivity, flag)}
    write_tensors(path, {name: part for name, part in parts.items() if part is not None}, facts)


def read_sensitivity(path: Path) -> Sensitivity:
    """Return the sensitivity of a file, its tensors mapped."""
    parts, facts = read_tensors(path)
    known = Sensitivity(
        parts.get("hessian"),
        parts.get("row_fisher"),
        parts.get("output"),
        blocks=BlockDiagonal(parts["columns"], parts["blocks"]) if "blocks" in parts else None,
        samples=float(facts["samples"]),
        gradients=float(facts["gradients"]),
    )
    flags: dict[str, Any] = {flag: flag in facts for flag in _OF_SENSITIVITY}
    return replace(known, **flags)


class StoredFactors(MutableMapping[str, Feedback]):
    """Feedback factors by name, in one file each; another process that opens the same folder sees them, too.

    Args:
        folder: an existing folder.
        numbers: name → number of its file.
        owner: of the folder, which must exist as long as this object.
    """

    def __init__(self, folder: Path, numbers: Mapping[str, int], owner: object = None) -> None:
        self.folder, self.numbers, self._owner = folder, numbers, owner

    def __getitem__(self, name: str) -> Feedback:
        """Return factors whose arrays are mapped."""
        if name not in self:
            raise KeyError(name)
        parts, facts = read_tensors(self._path(name))
        arrays: dict[str, NDArray[Any]] = {key: part.numpy() for key, part in parts.items()}
        blocks = tuple(
            ColumnBlock(arrays[f"coefficients.{index}"], arrays[f"pivots.{index}"])
            for index in range(sum(key.startswith("pivots.") for key in arrays))
        )
        columns = BlockFeedback(blocks) if blocks else None
        factors = Feedback(arrays["order"], columns, arrays["rows"], arrays["column_weight"], arrays["row_weight"])
        flags: dict[str, Any] = {flag: flag in facts for flag in _OF_FACTORS}
        return replace(factors, **flags)

    def __setitem__(self, name: str, factors: Feedback) -> None:
        """Write factors into the file of their name."""
        columns = factors.columns
        assert not isinstance(columns, TapFeedback)  # assumed inputs, never measured ones
        parts: dict[str, NDArray[Any]] = {
            "order": factors.order,
            "rows": factors.rows,
            "column_weight": factors.column_weight,
            "row_weight": factors.row_weight,
        }
        for index, block in enumerate(() if columns is None else columns.blocks):
            parts |= {f"coefficients.{index}": block.coefficients, f"pivots.{index}": block.pivots}
        with atomic_path(self._path(name)) as temporary:
            facts = {flag: "" for flag in _OF_FACTORS if getattr(factors, flag)}
            write_tensors(temporary, {key: torch.from_numpy(part) for key, part in parts.items()}, facts)

    def __delitem__(self, name: str) -> None:
        """Remove the file of a name."""
        if name not in self:
            raise KeyError(name)
        self._path(name).unlink()

    def __contains__(self, name: object) -> bool:
        """Return whether the factors of a name are stored."""
        return isinstance(name, str) and name in self.numbers and self._path(name).exists()

    def __iter__(self) -> Iterator[str]:
        """Yield the names of stored factors."""
        return (name for name in self.numbers if name in self)

    def __len__(self) -> int:
        """Return how many factors are stored."""
        return sum(1 for _ in self)

    def _path(self, name: str) -> Path:
        return self.folder / f"factors-{self.numbers[name]}{SUFFIX}"
