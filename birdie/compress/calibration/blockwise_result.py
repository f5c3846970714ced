"""Calibration result of a model that does not fit in memory, with all of its parts in files.

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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from birdie.compress.calibration.blockwise import calibrate_blockwise
from birdie.compress.calibration.criterion import batch_loss
from birdie.compress.calibration.mapped_module import MappedHeldOut
from birdie.compress.calibration.result import (
    CalibrationResult,
    held_out_batches,
    require_match,
    require_triple,
    unreached,
)
from birdie.compress.calibration.sensitivity import Calibration
from birdie.compress.calibration.shrinkage import floored, shrunk
from birdie.compress.calibration.stored import SUFFIX, StoredFactors, StoredSensitivities, read_tensors
from birdie.compress.calibration.symmetry import canonical, carried
from birdie.compress.calibration.symmetry_units import Symmetry, symmetries_of
from birdie.compress.calibration.work_folder import together
from birdie.compress.registry import decode
from birdie.compress.scheme import Encoded, Sensitivity
from birdie.compress.state import EncodedState
from birdie.compress.wrappers import unwrapped
from birdie.errors import ConfigError
from birdie.runtime.distributed import World, owners
from birdie.runtime.files import temporary_folder
from birdie.runtime.mapped import release
from birdie.runtime.outputs import Source, require_writable
from birdie.runtime.tensor_files import write_tensors

_INDEX = "sorted.json"


def refit_error() -> ConfigError:
    """Return the error of a blockwise calibration that a refit is to follow."""
    return ConfigError(
        "refit has the complete model in memory, which a blockwise calibration avoids; drop one of the two"
    )


def as_encoded(encoded: Encoded) -> Encoded:
    """Return a tensor unchanged: it has its integers."""
    return encoded


@dataclass(slots=True)
class BlockwiseResult(CalibrationResult):
    """Calibration result in files; `birdie.save` takes it like any other, but does not refit it.

    Attributes:
        files: of sorted tensors; pages of these can be released (`birdie.runtime.mapped`).
        opened: turns a tensor as it was encoded into one with its integers; a file in the making holds them coded.
    """

    files: Sequence[Path] = ()
    opened: Callable[[Encoded], Encoded] = as_encoded

    def divergence(self, encoded: EncodedState) -> float:
        """Return the mean KL or the relative error, as `CalibrationResult` does, decoding one tensor at a time."""
        assert self.held_out is not None
        return self.held_out(DecodedTensors(encoded.tensors, self.opened))

    def _require_batches(self) -> NoReturn:
        raise refit_error()


class DecodedTensors(Mapping[str, Tensor]):
    """Tensors by name, each decoded when it is looked up, so that one is in memory at a time.

    Args:
        tensors: by name.
        opened: turns one into one with its integers.
    """

    def __init__(self, tensors: Mapping[str, Encoded], opened: Callable[[Encoded], Encoded]) -> None:
        self._tensors, self._opened = tensors, opened

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor, decoded now."""
        return decode(self._opened(self._tensors[name]))

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self._tensors)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._tensors)


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


@contextmanager
def work_folder(path: Source, blockwise: bool | Source, world: World | None) -> Iterator[Source | None]:
    """Yield the folder of a blockwise calibration, None if there is no such calibration.

    Args:
        path: of a file; a temporary folder is beside it.
        blockwise: the folder; True: a temporary one; False: none.
        world: ranks that use it.
    """
    if not isinstance(blockwise, bool):
        yield blockwise
        return
    if not blockwise:
        yield None
        return
    scratch = Scratch(Path(path).parent, world or World())
    try:
        yield scratch.path / "calibration"
    finally:
        scratch.close()


def calibrate_in_blocks(
    state: Mapping[str, Tensor],
    calibration: Calibration,
    *,
    folder: Source | None = None,
    blocks: Collection[str] | None = None,
    symmetries: bool = True,
    world: World | None = None,
    progress: Callable[[int], None] | None = None,
) -> BlockwiseResult:
    """Return what `CalibrationResult.of` returns, up to rounding, with the memory of one block.

    Args:
        state: tensors to compress, under the names of the module's state dict.
        calibration: the module, batches, and loss: (module, batch) → any differentiable number, the same whenever it is
            called with a batch.
        folder: to work in; a calibration that was stopped resumes there, and one that is complete is not repeated.
            None: a temporary one, where the system has these.
        blocks: names of the modules to take as blocks; None: the members of `nn.ModuleList` and its like.
        symmetries: whether units may be permuted.
        world: ranks that share the batches out; all call this with the same arguments and see the folder.
        progress: called with the number of batches done.
    """
    require_triple(calibration)
    world = world or World()
    module, batches, loss = calibration
    module, loss = unwrapped(module), batch_loss(loss)
    batches = batches if isinstance(batches, Sequence) else list(batches)
    require_match(module, state)
    count = held_out_batches(len(batches))
    used, kept = (batches[:-count], batches[-count:]) if count else (batches, batches)
    scratch = None if folder is not None else Scratch(Path(tempfile.gettempdir()), world)
    root = scratch.path / "calibration" if scratch is not None else Path(str(folder))

    def report(done: int) -> None:
        if progress is not None:
            progress(min(done * world.size, len(used)))

    mine = used[world.rank :: world.size]
    measured = calibrate_blockwise(module, mine, loss, root, blocks=blocks, world=world, progress=report)
    scratch = scratch or Scratch(root, world)
    numbers = {name: number for number, name in enumerate(measured)}
    sensitivities = _shrunk(measured, state, numbers, scratch, world)
    groups = symmetries_of(module) if symmetries else ()
    together(world, lambda: _sort(state, groups, sensitivities, scratch) if world.is_main else None)
    tensors, files = _sorted(state, scratch)
    held_out = MappedHeldOut(module, kept, loss, scratch.path / "decoded", world)
    factors = StoredFactors(scratch.path, numbers, scratch)
    missing = unreached(module, state, sensitivities)
    return BlockwiseResult(tensors, sensitivities, held_out, used, factors, unreached=missing, files=files)


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
        for name, sensitivity in shrunk(measured, state, mine):
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
