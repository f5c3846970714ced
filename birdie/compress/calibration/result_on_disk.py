"""Calibration of a model that does not fit in memory: what a `CalibrationResult` holds, in files.

    module, batches, loss ──► calibrate_blockwise ──► sensitivities, shrunk one at a time ──► units sorted, a group
                                                                                              of tensors at a time

The folder of the calibration keeps what was measured. All else is in a temporary folder inside, for as long as the
result is in use: shrunk sensitivities, sorted tensors, factors of error feedback, and the weights of the module that
decoded weights are tried in. Each rank shrinks the sensitivities of its own matrices, and all read them.
"""

import json
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from birdie.compress.calibration.blockwise import calibrate_blockwise
from birdie.compress.calibration.mapped_module import MappedHeldOut
from birdie.compress.calibration.sensitivity import Batch, Loss
from birdie.compress.calibration.shrinkage import each_shrunk, floored
from birdie.compress.calibration.stored import SUFFIX, StoredFactors, StoredSensitivities, read_tensors, write_tensors
from birdie.compress.calibration.symmetry import canonical, carried
from birdie.compress.calibration.symmetry_units import Symmetry
from birdie.compress.calibration.work_folder import together
from birdie.compress.scheme import Sensitivity
from birdie.runtime.distributed import World, owners
from birdie.runtime.files import Source, require_writable, temporary_folder
from birdie.runtime.mapped import release, releasing

_INDEX = "sorted.json"


@dataclass(frozen=True, slots=True)
class Storage:
    """Files of a calibration result.

    Attributes:
        factors: of error feedback, of the matrices that were calibrated.
        files: of sorted tensors; pages of these can be released (`birdie.runtime.mapped`).
    """

    factors: StoredFactors
    files: Sequence[Path]


class ResultOnDisk(NamedTuple):
    """Attributes of a `CalibrationResult`."""

    state: dict[str, Tensor]
    sensitivities: StoredSensitivities
    held_out: MappedHeldOut
    storage: Storage


class Scratch:
    """Temporary folder of all ranks, which rank 0 removes when nobody refers to this object any more.

    Args:
        parent: folder to create it in.
        world: the ranks.

    Attributes:
        path: of the folder.
        close: removes it now.

    Raises:
        OutputError: it cannot be created.
    """

    def __init__(self, parent: Path, world: World) -> None:
        stack, path = ExitStack(), [""]

        def create() -> None:
            if world.is_main:
                path[0] = str(stack.enter_context(temporary_folder(require_writable(parent))))

        together(world, create)
        self.path = Path(world.broadcast_string(path[0]))
        self.close = weakref.finalize(self, stack.close)


@contextmanager
def work_folder(path: Source, blockwise: bool | Source, world: World | None) -> Iterator[bool | Source]:
    """Yield the folder for a blockwise calibration; it is temporary, and beside a file, if none is named.

    Args:
        path: the file.
        blockwise: False: there is no such calibration; True: name no folder; or the folder.
        world: ranks that use it.

    Raises:
        OutputError: the folder cannot be created.
    """
    if blockwise is not True:
        yield blockwise
        return
    scratch = Scratch(Path(path).parent, world or World())
    try:
        yield scratch.path / "calibration"
    finally:
        scratch.close()


def released(storage: Storage | None) -> AbstractContextManager[None]:
    """Return a context in which pages of sorted tensors can be released (`birdie.runtime.mapped`)."""
    return nullcontext() if storage is None else releasing(storage.files)


def calibrate_on_disk(
    module: nn.Module,
    state: Mapping[str, Tensor],
    used: Sequence[Batch],
    kept: Sequence[Batch],
    loss: Loss,
    symmetries: Sequence[Symmetry],
    *,
    folder: Source | None,
    blocks: Collection[str] | None,
    world: World,
    progress: Callable[[int], None] | None,
) -> ResultOnDisk:
    """Calibrate a module one block at a time.

    Args:
        module: to calibrate.
        state: its tensors by name.
        used: batches to calibrate on, of all ranks.
        kept: batches to measure decoded weights on.
        loss: (module, batch) → any differentiable number.
        symmetries: units to sort.
        folder: to work in, and to resume in; None: a temporary one, in the system's folder for these.
        blocks, world, progress: as in `calibrate_blockwise`.

    Raises:
        ConfigError, DataError, WeightsError, OutputError: as `calibrate_blockwise`.
    """
    scratch = None if folder is not None else Scratch(Path(tempfile.gettempdir()), world)
    root = scratch.path / "calibration" if scratch is not None else Path(str(folder))
    batches = used[world.rank :: world.size]
    measured = calibrate_blockwise(module, batches, loss, root, blocks=blocks, world=world, progress=progress)
    scratch = scratch or Scratch(root, world)
    numbers = {name: number for number, name in enumerate(measured)}
    sensitivities = _shrunk(measured, state, numbers, scratch, world)
    together(world, lambda: _sort(state, symmetries, sensitivities, scratch) if world.is_main else None)
    tensors, files = _sorted(state, scratch)
    held_out = MappedHeldOut(module, kept, loss, scratch.path / "decoded", world)
    return ResultOnDisk(tensors, sensitivities, held_out, Storage(StoredFactors(scratch.path, numbers, scratch), files))


def _shrunk(
    measured: Mapping[str, Sensitivity],
    state: Mapping[str, Tensor],
    numbers: Mapping[str, int],
    scratch: Scratch,
    world: World,
) -> StoredSensitivities:
    """Return the sensitivities as `birdie.compress.calibration.result` uses them, in new files."""
    files = {name: scratch.path / f"sensitivity-{number}{SUFFIX}" for name, number in numbers.items()}
    ranks = owners(world.size, {name: state[name].numel() if name in state else 0 for name in measured})
    mine = [name for name in measured if ranks[name] == world.rank]
    stored = StoredSensitivities(files, scratch)

    def write() -> None:
        for name, sensitivity in each_shrunk(measured, state, mine):
            stored.store(name, floored(sensitivity))
            if name in state:
                release(state[name])

    together(world, write)
    return stored


def _sort(
    state: Mapping[str, Tensor], symmetries: Sequence[Symmetry], sensitivities: StoredSensitivities, scratch: Scratch
) -> None:
    """Sort the units of each group of tensors that symmetries join; write tensors and sensitivities that change."""
    files: dict[str, str] = {}
    for group in groups_of(symmetries):
        tensors, report = canonical(state, group, sensitivities=sensitivities)
        written: dict[int, str] = {}
        for name in sorted(name for name in tensors if tensors[name] is not state[name]):
            tensor = tensors[name]
            if id(tensor) not in written:
                written[id(tensor)] = f"tensor-{len(files)}{SUFFIX}"
                write_tensors(scratch.path / written[id(tensor)], {"": tensor})
            files[name] = written[id(tensor)]
            release(state[name])
            if name in sensitivities:
                sensitivities.store(name, carried(name, sensitivities[name], report))
    (scratch.path / _INDEX).write_text(json.dumps(files), encoding="utf-8")


def groups_of(symmetries: Sequence[Symmetry]) -> list[list[Symmetry]]:
    """Return the symmetries in groups, each in their order, such that no two groups have a tensor in common."""
    groups: list[tuple[set[str], list[Symmetry]]] = []
    for symmetry in symmetries:
        names = {str(member[0]) for member in symmetry}
        joined = [group for group in groups if group[0] & names]
        merged = (names.union(*(group[0] for group in joined)), [one for group in joined for one in group[1]])
        merged[1].append(symmetry)
        groups = [*(group for group in groups if group not in joined), merged]
    return [group for _, group in groups]


def _sorted(state: Mapping[str, Tensor], scratch: Scratch) -> tuple[dict[str, Tensor], list[Path]]:
    """Return the state with the tensors that `_sort` wrote, mapped, and their files; tied names stay tied."""
    files = json.loads((scratch.path / _INDEX).read_text(encoding="utf-8"))
    paths = {file: scratch.path / file for file in sorted(set(files.values()))}
    tensors = {file: read_tensors(path)[0][""] for file, path in paths.items()}
    sorted_state = {name: tensors[files[name]] if name in files else tensor for name, tensor in state.items()}
    return sorted_state, list(paths.values())
