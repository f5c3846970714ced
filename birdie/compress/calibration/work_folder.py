"""Folder of a calibration that can be stopped: whose it is, how far it is, and whether its files are undamaged.

FOLDER/
├── .lock                        held by the process that calibrates
├── calibration.json             identity of the calibration on each rank: another one is refused
├── progress.json                what is finished on all ranks
└── rank-0/ …                    work of each rank; every folder in it appears complete or not at all
    └── …/checksums.json         CRC-32 of each file, compared when a calibration resumes
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from birdie.errors import ConfigError, DataError
from birdie.runtime.callbacks import no_message
from birdie.runtime.distributed import World
from birdie.runtime.files import atomic_folder, write_bytes
from birdie.runtime.locks import LOCK, locked_folder
from birdie.runtime.mapped import release
from birdie.runtime.outputs import require_own_folder, require_writable
from birdie.runtime.parsing import parse_json
from birdie.runtime.structured import read_bytes, read_json

T = TypeVar("T")
_CHECKSUMS, _IDENTITY, _PROGRESS = "checksums.json", "calibration.json", "progress.json"
_SAMPLE = 1024  # elements of each weight in a module's digest
_DEPTH = 3  # of objects in objects whose attributes count
_BLOCK = 1 << 22  # bytes of a file that are read at a time


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
                require_writable(require_own_folder(root, _IDENTITY, beside=[LOCK]))
                stack.enter_context(locked_folder(root, LOCK, no_message))
                folder._identify(identities)

        with ExitStack() as stack:
            together(world, claim)
            together(world, folder._require_undamaged)
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

    @contextmanager
    def committed(self, path: Path) -> Iterator[Path]:
        """Yield an empty folder; at the end it becomes `path` as a unit, with checksums of its files."""
        with atomic_folder(path, replace=True) as part:  # a step that was stopped is done again
            yield part
            sums = {file.name: _checksum(file) for file in sorted(part.iterdir())}
            (part / _CHECKSUMS).write_bytes(_json(sums))

    def _identify(self, identities: list[dict[str, str]]) -> None:
        """Write whose folder this is, or compare."""
        path = self.root / _IDENTITY
        if not path.exists():
            write_bytes(path, _json(identities))
            return
        try:
            known = parse_json(read_bytes(path))
            if not isinstance(known, list) or not all(isinstance(theirs, dict) for theirs in known):
                raise ValueError("no list of objects")
        except ValueError as error:
            raise DataError(f"{path} is damaged ({error}); remove {self.root} and calibrate again") from error
        if len(known) != len(identities):
            raise ConfigError(
                f"{self.root} holds a calibration on {len(known)} ranks, not on {len(identities)}; use as many ranks, "
                "or choose another folder"
            )
        for ours, theirs in zip(identities, known, strict=True):
            for kind, value in ours.items():
                if theirs.get(kind) != value:
                    raise ConfigError(
                        f"{self.root} holds a calibration of {kind}; choose another folder, or remove this one"
                    )

    def _require_undamaged(self) -> None:
        """Compare the checksums of all files that are left."""
        if not (self.root / _IDENTITY).exists():
            raise ConfigError(f"rank {self.world.rank} does not see {self.root}; choose a folder that all ranks share")
        if links := [path for path in (self.rank, *self.rank.rglob("*")) if path.is_symlink()]:
            raise DataError(f"{links[0]} is a link, which no calibration makes; remove {self.root} and calibrate again")
        for sums in self.rank.glob(f"*/*/{_CHECKSUMS}"):
            for name, checksum in read_json(sums).items():
                file = sums.parent / Path(name).name
                if file.exists() and _checksum(file) != checksum:  # what is not needed any more is removed
                    raise DataError(f"{file} is damaged; remove {self.root} and calibrate again")


def together(world: World, work: Callable[[], T]) -> T:
    """Return the result of work that every rank does; if it fails on one, the others end without a message."""
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    failed = [rank for rank, text in enumerate(world.all_gather_strings("x" if failure else "")) if text]
    if failure is not None:
        raise failure
    if failed:
        raise SystemExit(1)
    return result


def _json(values: Any) -> bytes:
    return json.dumps(values, indent=1).encode()


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while data := file.read(_BLOCK):
            checksum = zlib.crc32(data, checksum)
    return checksum


def digest_of_module(module: nn.Module) -> str:
    """Return a digest of names, shapes and dtypes of a module's state, and of some elements of each tensor.

    Training changes every weight, so a thousand of each tell models apart, and mapped weights need not be read.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(module.state_dict().items()):
        if isinstance(weight, Tensor):
            flat = weight.detach().reshape(-1)
            sample = flat[:: max(1, len(flat) // _SAMPLE)]
            _update(digest, (name, str(tuple(weight.shape)), sample))
            release(weight)
    return digest.hexdigest()


def digest_of(values: Any) -> str:
    """Return a digest of tensors, arrays and plain values in containers and in the attributes of objects."""
    digest = hashlib.sha256()
    _update(digest, values)
    return digest.hexdigest()


def _update(digest: "hashlib._Hash", values: Any, depth: int = 0) -> None:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            data = leaf.detach().cpu().contiguous().reshape(-1)
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            digest.update(f"{leaf.dtype} {leaf.shape}".encode())
            digest.update(np.ascontiguousarray(leaf).tobytes())
        elif isinstance(leaf, Mapping):
            _update(digest, dict(leaf), depth)
        elif leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes):
            digest.update(f"{type(leaf).__name__} {leaf!r}\0".encode())
        else:
            digest.update(f"{type(leaf).__module__}.{type(leaf).__qualname__}\0".encode())
            if depth < _DEPTH:
                _update(digest, _attributes(leaf), depth + 1)


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, with and without slots."""
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(value, name) for name in names if hasattr(value, name)} | getattr(value, "__dict__", {})
