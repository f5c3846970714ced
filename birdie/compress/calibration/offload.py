"""Calibration of models larger than memory: what it holds goes to files, by the hooks that autograd has for that.

    forward  ──► tensors that the backward pass needs, inputs of products ──► activations   (of one batch)
    backward ──► read one at a time, as autograd comes to them
             ──► sums of a matrix: read, added to, written ───────────────► sums
    sums ──► sensitivities ──► shrunk ──► units sorted, a group of tensors at a time ──► `CalibrationResult`

Weights stay where they are: those of a mapped checkpoint give back their pages when the pass comes to the next layer.
So memory is that of one layer, whatever the module computes, and the sums are those of `measure`, to the bit. What is
measured, sorted tensors, factors of error feedback, and the weights of the module that decoded weights are tried in
are in a temporary folder for as long as the result is in use.

    FOLDER/.birdie-…/                temporary, of all ranks
    ├── rank-0/activations, sums     while it calibrates
    ├── measured-NUMBER              a sensitivity of each matrix, written by the rank that owns it
    └── sensitivity-NUMBER, factors-NUMBER, tensor-NUMBER, decoded
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from birdie.compress.calibration.calibration_file import (
    SUFFIX,
    Scratch,
    StoredFactors,
    StoredSensitivities,
    read_tensors,
)
from birdie.compress.calibration.held_out import HeldOut
from birdie.compress.calibration.result import CalibrationResult, checked_data, unreached
from birdie.compress.calibration.sensitivity import (
    Batch,
    Calibration,
    Loss,
    measure_batches,
    require_examples,
)
from birdie.compress.calibration.shrinkage import shrink, with_row_floor
from birdie.compress.calibration.sums import Sums
from birdie.compress.calibration.symmetry import Symmetry, permute_sensitivity, sort_units, symmetries_of
from birdie.compress.state import embeddings_of
from birdie.errors import ConfigError, OutputError
from birdie.system.distributed import World, owners, together
from birdie.system.mapped import release
from birdie.system.outputs import Source
from birdie.system.parsing import to_json
from birdie.system.platform import trim_memory
from birdie.system.tensor_files import write_tensors

_LEAST = 1 << 16  # bytes of a tensor that goes to a file
_FEW = 4  # times the elements of a tensor up to which what lies between them is written as well
_TRIMMED = 1 << 25  # bytes written or read, after which freed memory is given back
_INDEX = "sorted.json"


class Offload:
    """Files of one calibration on one rank, in place of the memory of its batches and sums.

    Args:
        folder: to create.
        module: that is calibrated, whose weights are not written.
        least: bytes of a tensor that is worth writing.
    """

    def __init__(self, folder: Path, module: nn.Module, least: int = _LEAST) -> None:
        folder.mkdir()
        self._module, self._least = module, least
        self._file, self._sums = _TensorFile(folder / "activations"), _TensorFile(folder / "sums")
        self.sums: MutableMapping[str, Sums] = _SumsOnDisk(self._sums)
        self._weights = {weight.untyped_storage().data_ptr() for weight in chain(module.parameters(), module.buffers())}
        self._written: dict[tuple[Any, ...], tuple[StorageWeakRef, int]] = {}
        self._last: Tensor | None = None  # weight that a pass has come to

    def __enter__(self) -> "Offload":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._sums.close()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Let autograd keep the tensors of its graph in files, in the body of the context."""
        try:
            with saved_tensors_hooks(self.hold, lambda held: held()):
                yield
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise ConfigError(
                "the loss differentiates by torch.func, whose tensors cannot be in files; calibrate without offload"
            ) from error

    def hold(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Write a tensor, once as long as nobody changes it, and return what reads it."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            tensor = tensor.detach()
            try:
                storage = tensor.untyped_storage()
            except (RuntimeError, NotImplementedError):  # it has no memory of its own
                return lambda: tensor
            if storage.data_ptr() in self._weights:
                self._come_to(tensor)
                return partial(self._come_to, tensor)
            if tensor.nbytes < self._least or not tensor.nbytes or tensor.is_conj() or tensor.is_neg():
                return lambda: tensor
            strides = zip(tensor.shape, tensor.stride(), strict=True)
            reach = 1 + sum((size - 1) * stride for size, stride in strides)  # elements from the first to the last
            if reach > _FEW * tensor.numel():
                tensor = tensor.contiguous()
                storage, reach = tensor.untyped_storage(), tensor.numel()
            # what shares memory may have another count of versions, so the part of the memory counts as well
            key = storage._cdata, tensor._version, tensor.storage_offset() * tensor.itemsize, reach * tensor.itemsize
            known = self._written.get(key)
            if known is None or known[0].expired():  # type: ignore[no-untyped-call]
                part = tensor.as_strided((reach,), (1,))
                known = StorageWeakRef(storage), self._file.write(part)  # type: ignore[no-untyped-call]
                self._written[key] = known
            view = tuple(tensor.shape), tuple(tensor.stride())
            return partial(self._view, known[1], reach, view, tensor.dtype, tensor.device)

    def forget(self) -> None:
        """Drop the tensors of a batch."""
        self._written.clear()
        self._file.clear()
        self._last = None
        for weight in self._module.parameters():
            release(weight)
        trim_memory()

    def _view(self, offset: int, size: int, view: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return self._file.read(offset, (size,), dtype, device).as_strided(*view)

    def _come_to(self, weight: Tensor) -> Tensor:
        """Return a weight, after the pages of the one before were given back."""
        if self._last is not None and self._last.data_ptr() != weight.data_ptr():
            release(self._last)
        self._last = weight
        return weight


class _TensorFile:
    """File of tensors that are read by their offset and shape."""

    def __init__(self, path: Path) -> None:
        self.path, self._end, self._lock = path, 0, Lock()  # other devices pass backward in threads of their own
        self._file = path.open("x+b", buffering=0)
        self._passed = 0  # bytes since memory was given back

    def write(self, tensor: Tensor, offset: int | None = None) -> int:
        """Write a tensor at an offset, else at the end, and return the offset."""
        content = _bytes(tensor.detach().cpu().contiguous())
        self._pass(len(content))
        with self._lock:
            offset = self._end if offset is None else offset
            self._end = max(self._end, offset + len(content))
            try:
                self._file.seek(offset)
                while content:
                    content = content[self._file.write(content) :]
            except OSError as error:
                raise OutputError(
                    f"cannot write {self.path}: {(error.strerror or str(error)).lower()}; free some space, or choose "
                    "another folder"
                ) from error
        return offset

    def read(self, offset: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of the file."""
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        self._pass(tensor.nbytes)
        content = _bytes(tensor)
        with self._lock:
            self._file.seek(offset)
            while content:
                count = self._file.readinto(content)
                if not count:
                    raise OutputError(f"{self.path} was cut by another process; calibrate again")
                content = content[count:]
        return tensor.to(device)

    def close(self) -> None:
        """Close the file, which must not be used any more."""
        self._file.close()

    def _pass(self, size: int) -> None:
        """Give back memory now and then: allocators keep what is freed between what is not."""
        self._passed += size
        if self._passed > _TRIMMED:
            self._passed = 0
            trim_memory()

    def clear(self) -> None:
        """Remove all tensors."""
        self._file.truncate(0)
        self._end = 0


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)


class _SumsOnDisk(MutableMapping[str, Sums]):
    """Sums by name, whose tensors are in a file: change what is looked up, and set it again."""

    def __init__(self, file: _TensorFile) -> None:
        self._file = file
        self._known: dict[str, tuple[Sums, dict[str, tuple[int, torch.Size, torch.device]]]] = {}

    def __getitem__(self, name: str) -> Sums:
        sums, slots = self._known[name]
        parts: dict[str, Any] = {
            part: self._file.read(at, shape, torch.float32, on) for part, (at, shape, on) in slots.items()
        }
        return replace(sums, exponents=dict(sums.exponents), **parts)

    def __setitem__(self, name: str, sums: Sums) -> None:
        earlier = self._known[name][1] if name in self._known else {}
        slots = {}
        for part, tensor in sums.named_tensors().items():
            offset = earlier[part][0] if part in earlier and earlier[part][1] == tensor.shape else None
            slots[part] = self._file.write(tensor, offset), tensor.shape, tensor.device
        nothing: dict[str, Any] = dict.fromkeys(slots)
        self._known[name] = replace(sums, **nothing), slots

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def calibrate_offloaded(
    state: Mapping[str, Tensor],
    calibration: Calibration,
    *,
    folder: Source | None = None,
    symmetries: bool = True,
    world: World | None = None,
    progress: Callable[[int], None] | None = None,
) -> CalibrationResult:
    """Return what `CalibrationResult.of` returns, with the memory of one layer.

    Args:
        state: tensors to compress, under the names of the module's state dict.
        calibration: the module, batches, and loss: (module, batch) → any differentiable number.
        folder: takes the temporary files, several times the bytes of the model; None: that of the system.
        symmetries: whether units may be permuted.
        world: ranks that share the batches out; all call this with the same arguments and see the folder.
        progress: called with the number of batches done.
    """
    world = world or World()
    module, loss, used, kept = checked_data(calibration, state)
    scratch = Scratch(Path(tempfile.gettempdir() if folder is None else str(folder)), world)

    def report(done: int) -> None:
        if progress is not None:
            progress(min(done * world.size, len(used)))

    measured = _measured(module, used[world.rank :: world.size], loss, scratch, world, report)
    numbers = {name: number for number, name in enumerate(measured)}
    sensitivities = _shrunk(measured, state, embeddings_of(module), numbers, scratch, world)
    groups = symmetries_of(module) if symmetries else ()
    together(world, lambda: _sort(state, groups, sensitivities, scratch) if world.is_main else None)
    tensors, files = _sorted(state, scratch)
    held_out = HeldOut(module, kept, loss, file=scratch.path / "decoded", world=world)
    factors = StoredFactors(scratch.path, numbers, scratch)
    missing = unreached(module, state, sensitivities)
    return CalibrationResult(tensors, sensitivities, held_out, used, factors, unreached=missing, files=files)


def _measured(
    module: nn.Module,
    batches: Sequence[Batch],
    loss: Loss,
    scratch: Scratch,
    world: World,
    progress: Callable[[int], None],
) -> StoredSensitivities:
    """Return the sensitivities in files; each rank writes those of the matrices that it owns."""
    folder = scratch.path / f"rank-{world.rank}"
    with Offload(folder, module) as offload:
        recorder = together(world, lambda: measure_batches(module, batches, loss, offload=offload, progress=progress))
        names = recorder.share(world)
        files = {name: scratch.path / f"measured-{number}{SUFFIX}" for number, name in enumerate(names)}

        def write() -> None:
            stored = StoredSensitivities(files)
            for name, sensitivity in recorder.finish():
                stored.store(name, sensitivity)

        together(world, write)
    shutil.rmtree(folder)
    measured = StoredSensitivities({name: file for name, file in files.items() if file.exists()})
    require_examples(measured)
    return measured


def _shrunk(
    measured: StoredSensitivities,
    state: Mapping[str, Tensor],
    embeddings: Collection[str],
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
        for name, sensitivity in shrink(measured, state, mine, embeddings=embeddings):
            stored.store(name, with_row_floor(sensitivity))
            if name in state:
                release(state[name])

    together(world, write)
    if world.is_main:
        for file in measured.files.values():
            file.unlink()
    return stored


def _sort(
    state: Mapping[str, Tensor], symmetries: Sequence[Symmetry], sensitivities: StoredSensitivities, scratch: Scratch
) -> None:
    """Sort the units of each group of tensors that symmetries join; write tensors and sensitivities that change."""
    files: dict[str, str] = {}
    for group in groups_of(symmetries):
        tensors, orders = sort_units(state, group, sensitivities)
        written: dict[int, str] = {}
        for name in sorted(name for name in tensors if tensors[name] is not state[name]):
            tensor = tensors[name]
            if id(tensor) not in written:
                written[id(tensor)] = f"tensor-{len(files)}{SUFFIX}"
                write_tensors(scratch.path / written[id(tensor)], {"": tensor})
            files[name] = written[id(tensor)]
            release(state[name])
            if name in sensitivities:
                sensitivities.store(name, permute_sensitivity(name, sensitivities[name], orders))
    (scratch.path / _INDEX).write_text(to_json(files), encoding="utf-8")


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
