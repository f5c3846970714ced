"""Decoding of the tensors of a file on a GPU: by a kernel where it can, otherwise on the CPU and then moved.

    entry ──► Product ──► CompressedTensor ──► device ──kernel──► tensor          (birdie.compress.device)
      └─────► File.decode ──► tensor ──────────────────────────►  tensor

Lazy loading keeps tensors in their coded form in the memory of the device. One launch decodes the tensor that is read
and those beside it, because a matrix alone has too few tiles for a GPU.
"""

import math
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from birdie.artifact.container import ALIAS, Entry
from birdie.artifact.file import BaseTensors, Data, File, decoded_bytes, dtype_of
from birdie.compress import registry
from birdie.compress.device.compressed import CompressedTensor, require_sound, works
from birdie.compress.scheme import Decoder, StreamLayout
from birdie.compress.tiled import Payload, Product
from birdie.compress.wrappers import unwrapped
from birdie.entropy import coder, tiles
from birdie.entropy import coding_plan as plan
from birdie.entropy.raw import Bytes
from birdie.errors import ArtifactError, ConfigError
from birdie.system.device import require_device
from birdie.system.file_objects import Input, source_of

_RESIDENT = 1 << 20  # bytes of a tensor that the CPU decodes and that stays decoded on the device in any case
_RESIDENT_PER_CODED = 2  # the same for each byte of its coded form: lossless tensors are not much smaller
_LEAST_RECODED = 1 << 16  # weights of an entry in another coder that the kernel is to decode
_TOGETHER = 1 << 26  # weights that a launch decodes: 2,000 tiles, half of those that an H100 runs at a time


class DeviceFile(File):
    """A file whose tensors are decoded in the memory of a GPU."""

    def __init__(
        self, source: Data, decoder: Callable[[str], Decoder], device: torch.device, base: BaseTensors | None = None
    ) -> None:
        super().__init__(source, decoder, base)
        self.device = device
        self._lock = threading.Lock()  # Triton compiles kernels at their first call
        self._sound: dict[str, Tensor] = {}

    def decode_all(self, names: Collection[str] | None = None, workers: int | None = None) -> dict[str, Tensor]:
        """Decode tensors, as `File.decode_all`, wait for the device, and check those that the kernel decoded."""
        tensors = super().decode_all(names, workers)
        if self._sound:
            flags = torch.stack([sound.all() for sound in self._sound.values()]).tolist()  # one wait for all
            for name, flag in zip(self._sound, flags, strict=True):
                if not flag:
                    with self.naming(name):
                        require_sound(self._sound[name])
        return tensors

    def decode_entry(self, name: str, threads: int | None = None) -> Tensor:
        """Return an entry's tensor on the device; `decode_all` checks that it is sound if the kernel decoded it."""
        out = torch.empty(self.entry(name).shape, dtype=dtype_of(self.entry(name)), device=self.device)
        return out if self._decode(out, name, threads) else super().decode_entry(name, threads).to(self.device)

    def decode_into(self, out: Tensor, name: str, threads: int | None = None) -> None:
        """Decode an entry into `out`, as `decode_entry`."""
        if not self._decode(out, name, threads):
            super().decode_into(out, name, threads)

    def _decode(self, out: Tensor, name: str, threads: int | None) -> bool:
        entry = self.entry(name)
        product = self.product(self.read(name), threads) if may_decode(entry) and out.dtype == dtype_of(entry) else None
        compressed = None if product is None else CompressedTensor.of(entry.shape, out.dtype, [(product, 0)])
        if compressed is not None:
            with self._lock:
                _, self._sound[name] = compressed.to(self.device).decode(out)
        return compressed is not None


@dataclass(slots=True)
class _TileGroup:
    """Tensors of one dtype that are decoded together, each with its first weight."""

    tensor: CompressedTensor
    first: dict[str, int]
    sound: bool = False


class CompressedTensors:
    """The tensors of a file in their coded form on a device, decoded there when they are read.

    Numbers in another coder than "tiles" are coded anew. What the kernel does not decode stays decoded on the device if
    it is small or hardly smaller in the file; else it is read from the file and decoded on the CPU each time.

    Args:
        file: whose tensors they are.
        device: where tensors are decoded.
        workers: threads that read the file.
    """

    def __init__(self, file: File, device: torch.device, workers: int) -> None:
        self._file, self._device, self._workers = file, device, workers
        self._resident: dict[str, Tensor] = {}
        self._ready: dict[str, Tensor] = {}  # decoded beside the tensor that was read

        def read(names: Sequence[str]) -> _TileGroup | None:
            products: list[tuple[Product, int]] = []
            first, count = {}, 0
            for name in names:
                if (some := products_of(file, name)) is not None:
                    products += [(product, count + origin) for product, origin in some]
                    first[name], count = count, count + math.prod(file.entry(name).shape)
            tensor = CompressedTensor.of((count,), dtype_of(file.entry(names[0])), products)
            return None if tensor is None else _TileGroup(tensor.to(device), first)

        with ThreadPoolExecutor(workers) as pool:
            groups = [group for group in pool.map(read, _groups(file)) if group is not None]
        self._groups = {name: group for group in groups for name in group.first}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in their coded form."""
        return sum(group.tensor.nbytes for group in {id(group): group for group in self._groups.values()}.values())

    def decode(self, name: str) -> Tensor:
        """Return a stored tensor, decoded on the current stream; the first time wait until it is known to be sound."""
        if name not in self._groups:
            return self._decoded_on_cpu(name)
        if name not in self._ready:
            self._decode(self._groups[name])
        return self._ready.pop(name)

    def _decode(self, group: _TileGroup) -> None:
        """Add the tensors of a group to those that are ready; beyond a limit drop the oldest, which nobody has read."""
        count = math.prod(group.tensor.shape)
        while self._ready and sum(tensor.numel() for tensor in self._ready.values()) + count > 2 * _TOGETHER:
            del self._ready[next(iter(self._ready))]
        flat, sound = group.tensor.decode(checked=not group.sound)
        if not group.sound:
            try:
                require_sound(sound)
            except ArtifactError as error:
                names = ", ".join(map(repr, group.first))
                raise ArtifactError(f"of the tensors {names} of {self._file.where}: {error}") from error
            group.sound = True
        for name, first in group.first.items():
            shape = self._file.entry(name).shape
            # A view would have the version of all, by which a cache sees that a tensor was changed; data has its own.
            self._ready[name] = flat[first : first + math.prod(shape)].view(shape).data

    def _decoded_on_cpu(self, name: str) -> Tensor:
        if name in self._resident:
            return self._resident[name]
        tensor = self._file.decode(name, self._workers).to(self._device)
        coded = sum(self._file.header(block).length for block, _ in self._file.parts(name))
        if decoded_bytes(self._file.entry(name)) <= max(_RESIDENT, _RESIDENT_PER_CODED * coded):
            self._resident[name] = tensor
        return tensor


def may_decode(entry: Entry) -> bool:
    """Return whether the kernel may decode an entry; its side information may still be beyond it."""
    return bool(entry.streams) and entry.streams[0].coder == coder.TILES


def products_of(file: File, name: str) -> list[tuple[Product, int]] | None:
    """Read a stored tensor as products, each with its first weight; None if its scheme multiplies no numbers.

    Numbers in another coder than "tiles" are coded anew, on the CPU, which takes longer than loading them.
    """
    products = []
    for block, part in file.parts(name):
        product = file.product(file.read(block), 1, _in_tiles)
        if product is None:
            return None
        products.append((product, part.start or 0))
    return products


def _in_tiles(layout: StreamLayout, stream: Payload) -> Bytes | None:
    numbers = coder.decode(*stream, layout.rows, layout.columns, layout.hints, layout.dtype, 1)
    if numbers.size == 0 or numbers.min() == numbers.max():
        return None
    hints = layout.hints
    return tiles.encode(plan.search(numbers, hints.kernel, hints.states, plan.FEW_CLASSES), hints.states)


def _may_recode(file: File, entry: Entry) -> bool:
    large = math.prod(entry.shape) >= _LEAST_RECODED and bool(entry.streams)
    return may_decode(entry) or (large and file.decoder_of(entry).factors is not None)


def _groups(file: File) -> Iterator[list[str]]:
    """Yield names of tensors that may be decoded together: neighbors in the file."""
    names: list[str] = []
    count, dtype = 0, None
    for name in file.names:
        entry = file.entry(name)
        if entry.kind == ALIAS or file.holder(name) != name or file.is_planes(name):
            continue
        if not all(_may_recode(file, file.entry(block)) for block, _ in file.parts(name)):
            continue
        if names and (dtype_of(entry) != dtype or count + math.prod(entry.shape) > _TOGETHER):
            yield names
            names, count = [], 0
        names.append(name)
        count, dtype = count + math.prod(entry.shape), dtype_of(entry)
    if names:
        yield names


def load_compressed(
    path: Input, device: torch.device | str = "cuda", *, workers: int | None = None
) -> dict[str, CompressedTensor]:
    """Read the tensors of a file to the memory of a GPU in their coded form, for `birdie.compressed_linear`.

    Each is decoded once, to see that it is sound. Those that the kernel does not decode are left out.

    Args:
        path: a .birdie file, its bytes, or a binary file object; one of effort "fast" loads fastest.
        device: a GPU on which Triton works.
        workers: threads that read the file; None uses every core.
    """
    require_device(device)
    target = target_of(device, None)
    if target is None or not works(target):
        raise ConfigError(f"the kernel that decodes weights does not run on {device}; load the file with birdie.load")
    with File(source_of(path), registry.decoder) as file:
        file.require()

        def read(name: str) -> CompressedTensor | None:
            products, entry = products_of(file, name), file.entry(name)
            return None if products is None else CompressedTensor.of(entry.shape, dtype_of(entry), products)

        together = {name for names in _groups(file) for name in names}
        names = [name for name in file.ordered if name in together]
        with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
            known = zip(names, pool.map(read, names), strict=True)
            tensors = {name: tensor.to(target) for name, tensor in known if tensor is not None}
        for name, tensor in tensors.items():
            with file.naming(name):
                require_sound(tensor.decode()[1])
    return tensors


def open_file(
    source: Data,
    device: torch.device | str | None = None,
    module: nn.Module | None = None,
    base: BaseTensors | None = None,
) -> File:
    """Open a file for decoding on `device`, by default the only one of the module's; on the CPU if kernels do not work.

    Args:
        source: a path, or the bytes of a file.
        device, module: as for `target_of`.
    """
    target = target_of(device, None if module is None else unwrapped(module))
    if target is None or not works(target):
        return File(source, registry.decoder, base)
    return DeviceFile(source, registry.decoder, target, base)


def target_of(device: torch.device | str | None, module: nn.Module | None) -> torch.device | None:
    """Return the GPU that `device` names, by default the one that has all tensors of the module; None for others."""
    if device is None and module is not None:
        devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
        device = devices.pop() if len(devices) == 1 else None
    if device is None or torch.device(device).type != "cuda":
        return None
    index = torch.device(device).index
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)
