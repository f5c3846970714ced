"""General-purpose compressors (zlib, xz, zstd, brotli) at their strongest settings, as baselines: they see bytes."""

import importlib
import lzma
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from birdie.artifact import unpacking


def _module(name: str) -> Any:
    return importlib.import_module(name)


_PACK: dict[str, Callable[[bytes], bytes]] = {
    "zlib": lambda data: zlib.compress(data, 9),
    "lzma": lambda data: lzma.compress(data, preset=9 | lzma.PRESET_EXTREME),
    "zstd": lambda data: bytes(_module("zstandard").ZstdCompressor(level=22).compress(data)),
    "brotli": lambda data: bytes(_module("brotli").compress(data, quality=11, lgwin=24)),
}


@dataclass(frozen=True, slots=True)
class Compressor(unpacking.Compressor):
    """A compressor that packs as well.

    Attributes:
        compress: undoes `decompress`.
    """

    compress: Callable[[bytes], bytes]

    @property
    def version(self) -> str:
        """Version of the library behind it, or "not installed"."""
        if self.package is None:
            return zlib.ZLIB_RUNTIME_VERSION if self.name.startswith("zlib") else "liblzma of Python"
        return metadata.version(self.package) if self.installed else "not installed"


COMPRESSORS = {
    name: Compressor(one.name, one.package, one.unpack, one.errors, _PACK[name])
    for name, one in unpacking.COMPRESSORS.items()
}
