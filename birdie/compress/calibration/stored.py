"""Files of a blockwise calibration: sensitivities, feedback factors, and the folder of one that can be stopped.

    sensitivity, factors ──► one .safetensors each ──mapped──► the same again, for as long as someone holds it

A mapped tensor takes memory only where it is read, and gives it back when it is dropped. So look a name up when it is
needed and do not collect the values: a dictionary of them all would fill with every page that was read.

    FOLDER/
    ├── .lock                        held by the process that calibrates, which `.lock.holder` names
    ├── calibration.json             identity of the calibration on each rank: another one is refused
    ├── progress.json                what is finished on all ranks
    └── rank-0/ …                    work of each rank; every folder in it appears complete or not at all
"""

import json
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from birdie.compress.scheme import BlockDiagonal, Sensitivity
from birdie.compress.trellis.feedback import Block, BlockFeedback, Feedback, TapFeedback
from birdie.errors import ConfigError, DataError
from birdie.system.callbacks import no_message
from birdie.system.distributed import World, together
from birdie.system.files import atomic_path, write_bytes
from birdie.system.locks import HOLDER, LOCK, locked_folder
from birdie.system.outputs import require_own_folder, require_writable
from birdie.system.parsing import parse_json
from birdie.system.structured import read_bytes, read_json
from birdie.system.tensor_files import write_tensors

SUFFIX = ".safetensors"


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file, mapped, and the texts that describe them.

    Changes of the tensors never reach the file.
    """
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} cannot be read ({error}); remove its folder and calibrate again") from error


def read_list(path: Path) -> list[Any]:
    """Return the list in a JSON file."""
    try:
        values = parse_json(read_bytes(path))
        if not isinstance(values, list):
            raise ValueError("it is no list")
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); remove its folder and calibrate again") from error
    return values


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
    write_tensors(path, {name: part for name, part in parts.items() if part is not None}, facts)


def read_sensitivity(path: Path) -> Sensitivity:
    """Return the sensitivity of a file, its tensors mapped."""
    parts, facts = read_tensors(path)
    return Sensitivity(
        parts.get("hessian"),
        parts.get("row_fisher"),
        parts.get("output"),
        blocks=BlockDiagonal(parts["columns"], parts["blocks"]) if "blocks" in parts else None,
        samples=float(facts["samples"]),
        gradients=float(facts["gradients"]),
    )


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
        parts, _ = read_tensors(self._path(name))
        arrays: dict[str, NDArray[Any]] = {key: part.numpy() for key, part in parts.items()}
        blocks = tuple(
            Block(arrays[f"coefficients.{index}"], arrays[f"pivots.{index}"])
            for index in range(sum(key.startswith("pivots.") for key in arrays))
        )
        columns = BlockFeedback(blocks) if blocks else None
        return Feedback(arrays["order"], columns, arrays["rows"], arrays["column_weight"], arrays["row_weight"])

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
            write_tensors(temporary, {key: torch.from_numpy(part) for key, part in parts.items()})

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


T = TypeVar("T")
_IDENTITY, _PROGRESS = "calibration.json", "progress.json"


class WorkFolder:
    """Folder of one calibration, as one rank sees it.

    Args:
        root: of all ranks.
        world: the ranks.

    Attributes:
        rank: folder of this rank.
    """

    def __init__(self, root: Path, world: World) -> None:
        self.root, self.world = root, world
        self.rank = root / f"rank-{world.rank}"

    @classmethod
    @contextmanager
    def opened(cls, root: Path, identity: Mapping[str, str], world: World) -> "Iterator[WorkFolder]":
        """Yield the folder of a calibration, new or as it was when it stopped, and hold its lock meanwhile.

        Args:
            root: an empty or missing folder, or one of a calibration with the same identity.
            identity: difference between two calibrations, in words for a message → value that they do not share then.
            world: the ranks.
        """
        folder = cls(root, world)
        identities = [json.loads(text) for text in world.all_gather_strings(json.dumps(dict(identity)))]

        def claim() -> None:
            if world.is_main:
                require_writable(require_own_folder(root, _IDENTITY, beside=[LOCK, HOLDER]))
                stack.enter_context(locked_folder(root, no_message))
                folder._identify(identities)

        with ExitStack() as stack:
            together(world, claim)
            together(world, folder._require_shared)
            yield folder

    def progress(self) -> dict[str, Any]:
        """Return what `save_progress` saved last; an empty dict at the beginning."""
        try:
            return read_json(self.root / _PROGRESS)
        except FileNotFoundError:
            return {}

    def save_progress(self, progress: Mapping[str, Any]) -> None:
        """Save what is finished, once all ranks have reached this call; they go on when it is saved."""
        self.world.barrier()

        def write() -> None:
            if self.world.is_main:
                write_bytes(self.root / _PROGRESS, _json(progress))

        together(self.world, write)

    def _identify(self, identities: list[dict[str, str]]) -> None:
        """Write whose folder this is, or compare."""
        path = self.root / _IDENTITY
        if not path.exists():
            write_bytes(path, _json(identities))
            return
        known = read_list(path)
        if len(known) != len(identities):
            raise ConfigError(
                f"{self.root} holds a calibration on {len(known)} ranks, not on {len(identities)}; use as many ranks, "
                "or choose another folder"
            )
        for ours, theirs in zip(identities, known, strict=True):
            for kind, value in ours.items():
                if not isinstance(theirs, dict) or theirs.get(kind) != value:
                    raise ConfigError(
                        f"{self.root} holds a calibration of {kind}; choose another folder, or remove this one"
                    )

    def _require_shared(self) -> None:
        if not (self.root / _IDENTITY).exists():
            raise ConfigError(f"rank {self.world.rank} does not see {self.root}; choose a folder that all ranks share")


def _json(values: Any) -> bytes:
    return json.dumps(values, indent=1).encode()
