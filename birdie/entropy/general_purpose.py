"""General-purpose compressors (zlib, xz, zstd, brotli) behind one interface.

They see bytes, not weights. Benchmarks use them as baselines, and checkpoints of others come in them; a .birdie file
uses none of them.
"""

import importlib
import importlib.util
import lzma
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from birdie.errors import ArtifactError, ConfigError

_PIECE = 1 << 16  # bytes given to brotli at a time


@dataclass(frozen=True, slots=True)
class Compressor:
    """A general-purpose compressor at its strongest setting.

    Attributes:
        name: as users know it, with its level.
        package: its name on PyPI, or None where Python brings it.
        pack: (data) → compressed data.
        unpack: (compressed data, max_bytes) → data, or None where there would be more.
        errors: exceptions that `unpack` raises on damage, as names of module and class.
    """

    name: str
    package: str | None
    pack: Callable[[bytes], bytes]
    unpack: Callable[[bytes, int], bytes | None]
    errors: tuple[tuple[str, str], ...]

    @property
    def installed(self) -> bool:
        """Return whether its package is installed."""
        return self.package is None or importlib.util.find_spec(self.package) is not None

    @property
    def version(self) -> str:
        """Version of the library behind it, or "not installed"."""
        if self.package is None:
            return zlib.ZLIB_RUNTIME_VERSION if self.name.startswith("zlib") else "liblzma of Python"
        return metadata.version(self.package) if self.installed else "not installed"

    def compress(self, data: bytes) -> bytes:
        """Return the compressed data."""
        self._require()
        return self.pack(data)

    def decompress(self, data: bytes, max_bytes: int) -> bytes:
        """Undo `compress`, for at most `max_bytes` of data."""
        self._require()
        damage = tuple(getattr(importlib.import_module(module), name) for module, name in self.errors)
        try:
            out = self.unpack(data, max_bytes)
        except (*damage, EOFError) as error:
            raise ArtifactError(f"{self.name} data is damaged ({error}); copy the file again") from error
        if out is None:
            raise ArtifactError(
                f"{self.name} data would grow beyond {max_bytes:,} bytes; raise the limit if you trust it"
            )
        return out

    def _require(self) -> None:
        if not self.installed:
            raise ConfigError(f"{self.name} needs the package {self.package}: pip install {self.package}")


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _unpack_all(decompressor: Any, data: bytes, max_bytes: int) -> bytes | None:
    """Decompress with an object like zlib's, which takes a bound on its output."""
    out = decompressor.decompress(data, max_bytes + 1)
    if len(out) > max_bytes:
        return None
    if not decompressor.eof:
        raise EOFError("the data end too early")
    return bytes(out)


def _unpack_zstd(data: bytes, max_bytes: int) -> bytes | None:
    zstandard = _module("zstandard")
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
    decompressor = _module("brotli").Decompressor()
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


COMPRESSORS: dict[str, Compressor] = {
    "zlib": Compressor(
        "zlib -9",
        None,
        lambda data: zlib.compress(data, 9),
        lambda data, most: _unpack_all(zlib.decompressobj(zlib.MAX_WBITS | 32), data, most),  # gzip as well
        (("zlib", "error"),),
    ),
    "lzma": Compressor(
        "xz -9e",
        None,
        lambda data: lzma.compress(data, preset=9 | lzma.PRESET_EXTREME),
        lambda data, most: _unpack_all(lzma.LZMADecompressor(), data, most),
        (("lzma", "LZMAError"),),
    ),
    "zstd": Compressor(
        "zstd -22",
        "zstandard",
        lambda data: bytes(_module("zstandard").ZstdCompressor(level=22).compress(data)),
        _unpack_zstd,
        (("zstandard", "ZstdError"),),
    ),
    "brotli": Compressor(
        "brotli -11",
        "brotli",
        lambda data: bytes(_module("brotli").compress(data, quality=11, lgwin=24)),
        _unpack_brotli,
        (("brotli", "error"),),
    ),
}
