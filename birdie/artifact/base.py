"""Base of a file: another checkpoint, to which its tensors are stored as deltas.

    checkpoint, folder, .birdie file, module, dict ──► Base ──► tensor of the same name, or of one that differs by a
                                                                prefix, or with the same values ──► delta

A base is read tensor by tensor: files are mapped, .birdie files are decoded. The metadata of the file with the
deltas name those tensors of the base that are called otherwise there: {"base": {"of": FILE, "names": {NAME: BASE'S
NAME}}}. Kept files that are those of the base are listed there as well (birdie.artifact.kept_files). With "inside":
true the base is the file itself, and "names" has every tensor that is a delta.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from birdie.artifact import kept_files
from birdie.artifact.container import MAGIC
from birdie.artifact.file import DECODED_PER_BYTE, Data, File, decoded_bytes, dtype_of
from birdie.artifact.metadata import base_in
from birdie.checkpoints import pytree
from birdie.checkpoints.checkpoint import open_checkpoint
from birdie.compress import registry
from birdie.compress.state import named_tensors
from birdie.compress.wrappers import unwrapped
from birdie.delta.delta_coding import DECODER, digest
from birdie.errors import ConfigError, WeightsError
from birdie.system.mapped import complete, releasing

Part = Callable[[slice], Tensor]
"""Elements in row-major order → these of a tensor of the base, in the dtype of the other tensor."""
_KEPT = 4  # tensors of a .birdie file that stay decoded: deltas are decoded in the order of their bases


class Base:
    """Tensors of a base by name.

    Args:
        where: the base, for messages.
        shapes: name → (shape, dtype) of its tensors.
        read: name → tensor.
        files: that are mapped.
        close: gives back what is open.
        kept: gives name → content of the files that it has beside its tensors.

    Attributes:
        bytes: of all tensors, or fewer: operations and memory in proportion are allowed.
        is_given: whether the reader has it in addition to the file; its bytes then allow for larger tensors, too.
    """

    decoder = DECODER
    is_given = True

    def __init__(
        self,
        where: str,
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        read: Callable[[str], Tensor],
        files: Collection[Path] = (),
        close: Callable[[], None] = lambda: None,
        kept: Callable[[], Mapping[str, bytes]] = dict,
    ) -> None:
        self.where, self.close, self.shapes, self._read, self._files = where, close, shapes, read, files
        self.kept = kept
        self.bytes = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes.values())

    @classmethod
    def open(cls, source: "BaseOption") -> "Base":
        """Open a base.

        Raises:
            ConfigError: it is none of what a base may be, or a file that needs a base itself.
            WeightsError, ArtifactError: it cannot be read.
        """
        if isinstance(source, Base):
            return source
        if isinstance(source, nn.Module | Mapping):
            return cls.of("the base", named_tensors(unwrapped(source)))
        if not isinstance(source, str | Path):
            raise ConfigError(f"base is a {type(source).__name__}; give a checkpoint, a folder, a module or a dict")
        path = Path(source)
        if not path.exists():
            raise ConfigError(f"there is no base {path}; give the checkpoint that the deltas are to")
        if _is_birdie(path):
            return cls._of_file(path)
        try:
            checkpoint = open_checkpoint(path, complete=not path.is_dir())
        except WeightsError:  # objects of other programs, which only the weights do without
            checkpoint = open_checkpoint(path, weights_only=True)
        tensors = pytree.flatten(checkpoint.content)[0] if checkpoint.is_object else checkpoint.content
        base = cls.of(str(path), tensors, checkpoint.paths)
        base.kept = lambda: checkpoint.files
        return base

    @classmethod
    def of(cls, where: str, tensors: Mapping[str, Tensor], files: Collection[Path] = ()) -> "Base":
        """Return the base that these tensors are; `files` as of the class."""
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        return cls(where, shapes, lambda name: tensors[name].detach(), files)

    @classmethod
    def _of_file(cls, path: Path) -> "Base":
        file = File(path, registry.decoder)
        if file.needs_base:
            file.close()
            raise ConfigError(f"base {path} is stored as deltas itself; decompress it, then give that as the base")
        file.require(max_bytes=sum(decoded_bytes(file.entry(name)) for name in file.names))
        base = cls._decoded(file, file.names, str(path))
        base.kept = lambda: kept_files.read(file)
        return base

    @classmethod
    def inside(cls, source: Data, max_bytes: int | None = None, max_operations: int | None = None) -> "Base":
        """Return the base of a file whose tensors are deltas to others in it.

        Raises:
            ArtifactError: they take more than that to decode.
        """
        file = File(source, registry.decoder)
        try:
            names = {*file.names} & {*base_in(file.fields)[1].values()}
            stored = sorted(name for name in names if not file.is_delta(name))
            file.require(max_bytes, max_operations, stored)
        except BaseException:
            file.close()
            raise
        base = cls._decoded(file, stored, file.where)
        base.bytes, base.is_given = min(base.bytes, DECODED_PER_BYTE * file.size), False
        return base

    @classmethod
    def _decoded(cls, file: File, names: Collection[str], where: str) -> "Base":
        """Return the base that some tensors of an open file are."""
        kept, lock = dict[str, Tensor](), threading.Lock()
        decoding = {name: threading.Lock() for name in names}
        shapes = {name: (entry.shape, dtype_of(entry)) for name in names for entry in [file.entry(name)]}

        def read(name: str) -> Tensor:
            with decoding[name]:  # once, if several threads need it
                with lock:
                    if name in kept:
                        return kept[name]
                tensor = file.decode(name)
                with lock:
                    kept[name] = tensor
                    while len(kept) > _KEPT:
                        del kept[next(iter(kept))]
                return tensor

        return cls(where, shapes, read, close=file.close)

    @property
    def name(self) -> str:
        """Name of the base for the metadata of a file: without folders, which are not the reader's."""
        return Path(self.where).name

    @contextmanager
    def mapped(self) -> Iterator[None]:
        """Let pages of its files be released, let a file that is cut in the meantime be an error, and close it."""
        try:
            with complete(self._files), releasing(self._files):
                yield
        finally:
            self.close()

    def __call__(self, name: str) -> Tensor | None:
        """Return a tensor; None if there is none of that name."""
        return self._read(name) if name in self.shapes else None

    def pairs(self, names: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, Part]:
        """Return what gives the tensor to subtract from each of some, whose names in the base are known."""
        return {name: partial(self._part, other, tensors[name].dtype) for name, other in names.items()}

    def matching(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Part], dict[str, str]]:
        """Return what gives the tensor to subtract from each that has one, and the names that are others here.

        That is the tensor of the same name and number of elements; else the only one whose name ends in the other's, as
        wrappers add prefixes; else one of the same shape and values.
        """
        counterparts = {name: name for name, tensor in tensors.items() if self._fits(name, tensor)}
        left = [name for name in tensors if name not in counterparts]
        free = [name for name in self.shapes if name not in counterparts]
        if left and free:
            counterparts |= self._by_suffix(left, free, tensors)
            used = {*counterparts.values()}
            left = [name for name in left if name not in counterparts]
            counterparts |= self._by_values(left, [name for name in free if name not in used], tensors)
        return self.pairs(counterparts, tensors), {
            name: other for name, other in sorted(counterparts.items()) if name != other
        }

    def _part(self, name: str, dtype: torch.dtype, elements: slice) -> Tensor:
        return self._read(name).cpu().reshape(-1)[elements].to(dtype)

    def _fits(self, name: str, tensor: Tensor) -> bool:
        if name not in self.shapes:
            return False
        shape, dtype = self.shapes[name]
        alike = dtype == tensor.dtype or (dtype.is_floating_point and tensor.dtype.is_floating_point)
        return alike and torch.Size(shape).numel() == tensor.numel() and tensor.numel() > 0

    def _by_suffix(self, left: Collection[str], free: Collection[str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
        counterparts: dict[str, str] = {}
        ends: dict[str, list[str]] = {}
        for name in free:
            for end in _ends(name):
                ends.setdefault(end, []).append(name)
        known = {*free}
        for name in left:
            longer = [other for other in ends.get(name, []) if self._fits(other, tensors[name])]
            shorter = [end for end in _ends(name) if end in known and self._fits(end, tensors[name])]
            if len(longer) + len(shorter[:1]) == 1:
                counterparts[name] = (longer + shorter)[0]
        return counterparts

    def _by_values(self, left: Collection[str], free: Collection[str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
        kinds = {(tuple(tensors[name].shape), tensors[name].dtype) for name in left if tensors[name].numel() > 1}
        values = {digest(self._read(name)): name for name in free if self.shapes[name] in kinds}
        if not values:
            return {}
        hits = {name: values.get(digest(tensors[name])) for name in left}
        return {name: other for name, other in hits.items() if other is not None and self._fits(other, tensors[name])}


BaseOption = str | Path | nn.Module | Mapping[str, Tensor] | Base
"""A checkpoint file, the folder of a model, a .birdie file, tensors in memory, or an open base."""


def _ends(name: str) -> Iterator[str]:
    """Yield the parts of a name after each of its separators."""
    for index, letter in enumerate(name):
        if letter in "./":
            yield name[index + 1 :]


def _is_birdie(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
