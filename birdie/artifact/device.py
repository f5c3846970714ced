"""Decoding of the tensors of a file on a GPU: by kernels where these can, otherwise on the CPU and then moved.

entry ──► CompressedTensor ──payload──► device ──kernel──► tensor          (birdie.compress.device)
  └─────► decode_entry ──► tensor ──────────────────────►  tensor
"""

import threading

import torch
from torch import Tensor, nn

from birdie.artifact.container import Reader
from birdie.artifact.decoding import DecoderOf, decode_entry, dtype_of, layout_of
from birdie.compress.device.compressed import CompressedTensor, may_decode, works
from birdie.errors import ArtifactError


class DeviceDecoder:
    """Decodes tensors in the memory of a GPU, from any thread.

    Attributes:
        device: where tensors are decoded.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()  # Triton compiles kernels at their first call
        self._damaged: dict[str, Tensor] = {}

    def decode(self, reader: Reader, name: str, decoder_of: DecoderOf, threads: int = 1) -> Tensor:
        """Return a stored tensor on the device. If a kernel decodes it, `require_sound` tells whether it is sound.

        Raises:
            ArtifactError: the entry is corrupt, as far as that is known without waiting for the device.
        """
        compressed = compressed_entry(reader, name, decoder_of, threads)
        if compressed is None:
            return decode_entry(reader, name, decoder_of, threads).to(self.device)
        with self._lock:
            tensor, self._damaged[name] = compressed.to(self.device).decode()
        return tensor

    def require_sound(self, where: str) -> None:
        """Wait for the device, and check the tensors of the file `where` that kernels decoded since the last call.

        Raises:
            ArtifactError: one is damaged.
        """
        damaged, self._damaged = self._damaged, {}
        if not damaged:
            return
        flags = torch.stack([chunks.any() for chunks in damaged.values()]).tolist()  # one wait for all of them
        for name, flag in zip(damaged, flags, strict=True):
            if flag:
                raise ArtifactError(
                    f"tensor {name!r} of {where}: a lane of a coded chunk does not end where it should; "
                    "the file is damaged"
                )


def compressed_entry(reader: Reader, name: str, decoder_of: DecoderOf, threads: int = 1) -> CompressedTensor | None:
    """Read a stored tensor in its coded form, to memory of the CPU; None if the kernels do not decode it.

    Raises:
        ArtifactError: the entry is corrupt, or uses a code of a newer version.
    """
    entry = reader.entry(name)
    decoder, dtype = decoder_of(entry), dtype_of(entry)
    layout = layout_of(reader, entry, decoder)
    if not may_decode(decoder.name, dtype, entry.params, [stream.coder for stream in entry.streams]):
        return None
    payloads = [(stream.coder, stream.payload) for stream in reader.read(name).streams]
    try:
        return CompressedTensor.of(decoder.name, entry.shape, dtype, entry.params, layout, payloads, threads)
    except ArtifactError as error:
        raise ArtifactError(f"tensor {name!r} of {reader.where}: {error}") from error


def device_decoder(device: torch.device | str | None, module: nn.Module | None) -> DeviceDecoder | None:
    """Return a decoder to `device`, by default to the only one of the module's; None if kernels do not work there."""
    target = target_of(device, module)
    return DeviceDecoder(target) if target is not None and works(target) else None


def target_of(device: torch.device | str | None, module: nn.Module | None) -> torch.device | None:
    """Return the GPU that `device` names, by default the one that has all tensors of the module; None for others."""
    if device is None and module is not None:
        devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
        device = devices.pop() if len(devices) == 1 else None
    if device is None or torch.device(device).type != "cuda":
        return None
    index = torch.device(device).index
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)
