"""Decoding of the tensors of a file on a GPU: by kernels where these can, otherwise on the CPU and then moved.

    entry ──► CompressedTensor ──payload──► device ──kernel──► tensor          (birdie.compress.device)
      └─────► File.decode ──► tensor ───────────────────────►  tensor

Lazy loading keeps tensors in their coded form in the memory of the device, and decodes each when it is read.
"""

import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from birdie.artifact.container import ALIAS
from birdie.artifact.file import Data, File, decoded_bytes, dtype_of
from birdie.compress import registry
from birdie.compress.device.compressed import CompressedTensor, may_decode, require_sound, works
from birdie.compress.scheme import Decoder
from birdie.compress.wrappers import unwrapped
from birdie.errors import ArtifactError

_RESIDENT = 1 << 20  # bytes of a tensor that the CPU decodes and that stays decoded on the device in any case
_RESIDENT_PER_CODED = 2  # the same for each byte of its coded form: lossless tensors are not much smaller
_Blocks = list[tuple[CompressedTensor, slice]]  # of a tensor, each with its elements in row-major order


class DeviceFile(File):
    """A file whose tensors are decoded in the memory of a GPU."""

    def __init__(self, source: Data, decoder: Callable[[str], Decoder], device: torch.device) -> None:
        super().__init__(source, decoder)
        self.device = device
        self._lock = threading.Lock()  # Triton compiles kernels at their first call
        self._damaged: dict[str, Tensor] = {}

    def decode_all(self, names: Collection[str] | None = None, workers: int | None = None) -> dict[str, Tensor]:
        """Decode tensors, as `File.decode_all`, wait for the device, and check those that kernels decoded."""
        tensors = super().decode_all(names, workers)
        if self._damaged:
            flags = torch.stack([chunks.any() for chunks in self._damaged.values()]).tolist()  # one wait for all
            for name, flag in zip(self._damaged, flags, strict=True):
                if flag:
                    raise ArtifactError(
                        f"tensor {name!r} of {self.where}: a lane of a coded chunk does not end where it should; "
                        "the file is damaged"
                    )
        return tensors

    def decode_entry(self, name: str, threads: int | None = None) -> Tensor:
        """Return an entry's tensor on the device; `decode_all` checks that it is sound if a kernel decoded it."""
        compressed = compressed_entry(self, name, threads or 1)
        if compressed is None:
            return super().decode_entry(name, threads).to(self.device)
        with self._lock:
            tensor, self._damaged[name] = compressed.to(self.device).decode()
        return tensor


class CompressedTensors:
    """The tensors of a file in their coded form on a device, decoded there one by one.

    Those that kernels do not decode stay decoded on the device if they are small or hardly smaller in the file; others
    are read from the file and decoded on the CPU each time.

    Args:
        file: whose tensors they are.
        device: where tensors are decoded.
        workers: threads that read the file.
    """

    def __init__(self, file: File, device: torch.device, workers: int) -> None:
        self._file, self._device, self._workers = file, device, workers
        self._resident: dict[str, Tensor] = {}
        self._sound: set[str] = set()
        stored = [name for name in file.names if file.entry(name).scheme != ALIAS]

        def read(name: str) -> _Blocks | None:
            if file.holder(name) != name or file.is_planes(name):
                return None
            blocks = []
            for block, part in file.parts(name):
                compressed = compressed_entry(file, block)
                if compressed is None:
                    return None
                blocks.append((compressed.to(device), part))
            return blocks

        with ThreadPoolExecutor(workers) as pool:
            tensors = dict(zip(stored, pool.map(read, stored), strict=True))
        self._compressed = {name: blocks for name, blocks in tensors.items() if blocks is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in their coded form."""
        return sum(tensor.nbytes for blocks in self._compressed.values() for tensor, _ in blocks)

    def decode(self, name: str) -> Tensor:
        """Return a stored tensor, decoded on the current stream; the first time wait until it is known to be sound."""
        if name not in self._compressed:
            return self._decoded_on_cpu(name)
        entry = self._file.entry(name)
        tensor = torch.empty(entry.shape, dtype=dtype_of(entry), device=self._device)
        damaged = [compressed.decode(tensor.view(-1)[part])[1] for compressed, part in self._compressed[name]]
        if name not in self._sound:
            try:
                require_sound(torch.cat(damaged))
            except ArtifactError as error:
                raise ArtifactError(f"tensor {name!r} of {self._file.where}: {error}") from error
            self._sound.add(name)
        return tensor

    def _decoded_on_cpu(self, name: str) -> Tensor:
        if name in self._resident:
            return self._resident[name]
        tensor = self._file.decode(name, self._workers).to(self._device)
        coded = sum(self._file.header(block).length for block, _ in self._file.parts(name))
        if decoded_bytes(self._file.entry(name)) <= max(_RESIDENT, _RESIDENT_PER_CODED * coded):
            self._resident[name] = tensor
        return tensor


def compressed_entry(file: File, name: str, threads: int = 1) -> CompressedTensor | None:
    """Read an entry in its coded form, to memory of the CPU; None if the kernels do not decode it."""
    entry = file.entry(name)
    scheme, dtype, layout = file.decoder_of(entry).name, dtype_of(entry), file.layout(entry)
    if not may_decode(scheme, dtype, entry.params, [stream.coder for stream in entry.streams]):
        return None
    payloads = [(stream.coder, stream.payload) for stream in file.read(name).streams]
    try:
        return CompressedTensor.of(scheme, entry.shape, dtype, entry.params, layout, payloads, threads)
    except ArtifactError as error:
        raise ArtifactError(f"tensor {name!r} of {file.where}: {error}") from error


def open_file(source: Data, device: torch.device | str | None = None, module: nn.Module | None = None) -> File:
    """Open a file for decoding on `device`, by default the only one of the module's; on the CPU if kernels do not work.

    Args:
        source: a path, or the bytes of a file.
        device, module: as for `target_of`.
    """
    target = target_of(device, None if module is None else unwrapped(module))
    if target is None or not works(target):
        return File(source, registry.decoder)
    return DeviceFile(source, registry.decoder, target)


def target_of(device: torch.device | str | None, module: nn.Module | None) -> torch.device | None:
    """Return the GPU that `device` names, by default the one that has all tensors of the module; None for others."""
    if device is None and module is not None:
        devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
        device = devices.pop() if len(devices) == 1 else None
    if device is None or torch.device(device).type != "cuda":
        return None
    index = torch.device(device).index
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)
