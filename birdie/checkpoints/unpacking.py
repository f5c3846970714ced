"""Unpacking of general-purpose compressors (zlib, xz, zstd, brotli), in which checkpoints of others come."""

import importlib
import importlib.util
import lzma
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from birdie.errors import ArtifactError, ConfigError

_PIECE = 1 << 16  # bytes given to brotli at a time


@dataclass(frozen=True, slots=True)
class Compressor:
    """A general-purpose compressor."""

    name: str  # as users know it, with its highest level
    package: str | None  # its name on PyPI, or None where Python brings it
    # (compressed data, max_bytes) → data, or None where there would be more
    unpack: Callable[[bytes, int], bytes | None]
    errors: tuple[str, str]  # exceptions that `unpack` raises on damage, as names of module and class

    @property
    def installed(self) -> bool:
        """Return whether its package is installed."""
        return self.package is None or importlib.util.find_spec(self.package) is not None

    def decompress(self, data: bytes, max_bytes: int) -> bytes:
        """Return the data, if it is at most `max_bytes`."""
        if not self.installed:
            raise ConfigError(f"{self.name} needs the package {self.package}: pip install {self.package}")
        module, error_class = self.errors
        try:
            out = self.unpack(data, max_bytes)
        except (getattr(importlib.import_module(module), error_class), EOFError) as error:
            raise ArtifactError(f"{self.name} data is damaged ({error}); copy the file again") from error
        if out is None:
            raise ArtifactError(
                f"{self.name} data would grow beyond {max_bytes:,} bytes; raise the limit if you trust it"
            )
        return out


def _unpack_all(decompressor: Any, data: bytes, max_bytes: int) -> bytes | None:
    """Decompress with an object like zlib's, which takes a bound on its output."""
    out = decompressor.decompress(data, max_bytes + 1)
    if len(out) > max_bytes:
        return None
    if not decompressor.eof:
        raise EOFError("the data end too early")
    return bytes(out)


def _unpack_zstd(data: bytes, max_bytes: int) -> bytes | None:
    zstandard: Any = importlib.import_module("zstandard")
    with zstandard.ZstdDecompressor().stream_reader(data) as stream:
        out = bytes(stream.read(max_bytes + 1))
    if len(out) > max_bytes:
        return None
    # The stream reader takes a truncated frame for a complete one; the length that the frame states shows it.
    size = zstandard.frame_content_size(data)
    if size >= 0 and size != len(out):
        raise EOFError("the data end too early")
    return out


def _unpack_brotli(data: bytes, max_bytes: int) -> bytes | None:
    decompressor = importlib.import_module("brotli").Decompressor()
    out = bytearray()
    for start in range(0, len(data), _PIECE):
        out += decompressor.process(data[start : start + _PIECE], output_buffer_limit=max_bytes + 1 - len(out))
        while not decompressor.can_accept_more_data() and len(out) <= max_bytes:
            out += decompressor.process(b"", output_buffer_limit=max_bytes + 1 - len(out))
        if len(out) > max_bytes:
            return None
    if not decompressor.is_finished():
        raise EOFError("the data end too early")
    return bytes(out)


def _unpack_zlib(data: bytes, max_bytes: int) -> bytes | None:
    return _unpack_all(zlib.decompressobj(zlib.MAX_WBITS | 32), data, max_bytes)  # gzip as well


def _unpack_lzma(data: bytes, max_bytes: int) -> bytes | None:
    return _unpack_all(lzma.LZMADecompressor(), data, max_bytes)


COMPRESSORS: dict[str, Compressor] = {
    "zlib": Compressor("zlib -9", None, _unpack_zlib, ("zlib", "error")),
    "lzma": Compressor("xz -9e", None, _unpack_lzma, ("lzma", "LZMAError")),
    "zstd": Compressor("zstd -22", "zstandard", _unpack_zstd, ("zstandard", "ZstdError")),
    "brotli": Compressor("brotli -11", "brotli", _unpack_brotli, ("brotli", "error")),
}
