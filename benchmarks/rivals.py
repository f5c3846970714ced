"""Lossless coders that birdie is compared with, each in its best form, as functions from a set of tensors to
`Measured`.

General compressors get the tensors as one byte string (`join`), by rows and by columns, and the smaller result counts;
"torch.save + …" is the form that the Parameter Golf challenge ships. A coder that is not installed raises
`NotInstalledError`, whose text says how to install it. The output of every coder is decoded and compared.
"""

import importlib
import io
import json
import lzma
import os
import shutil
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.processes import run_command
from benchmarks.symbols import SymbolSet
from birdie.checkpoints import unpacking

HERE = Path(__file__).resolve().parent
RIVALS = HERE.parent / ".venv-rivals" / "bin" / "python"
TIMEOUT_S = 3600
Order = Literal["rows", "columns"]
ORDERS: tuple[Order, ...] = ("rows", "columns")
ESCAPE = -128


class NotInstalledError(Exception):
    """A coder is not installed; the text says how to install it."""


class NotApplicableError(Exception):
    """A coder cannot code such tensors; the text says why."""


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
    """A general-purpose compressor at its strongest setting: it sees bytes.

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


def join(tensors: Mapping[str, Tensor], order: Order) -> bytes:
    """Return `tensors`, all integers of at most 16 bits or all floats, as one byte string without names and shapes.

    Values are scanned by rows or by columns. Symbols beyond int8 are written as the escape -128 and follow in 16 bits
    after all tensors; without int16 tensors -128 is an ordinary value.
    """
    parts: list[bytes] = []
    escaped: list[NDArray[np.int16]] = []
    for tensor in tensors.values():
        if tensor.is_floating_point():
            parts.append(_scan(tensor, order).view(torch.uint8).numpy().tobytes())
        elif tensor.dtype == torch.int8:
            parts.append(_scan(tensor, order).numpy().tobytes())
        else:
            values = _scan(tensor, order).numpy()
            wide = (values <= ESCAPE) | (values > 127)
            parts.append(np.where(wide, ESCAPE, values).astype(np.int8).tobytes())
            escaped.append(values[wide])
    return b"".join(parts) + b"".join(values.astype("<i2").tobytes() for values in escaped)


def separate(stream: bytes, like: Mapping[str, Tensor], order: Order) -> dict[str, Tensor]:
    """Invert `join`; `like` has tensors of the same names, shapes and dtypes."""
    sizes = {name: tensor.numel() * _width(tensor) for name, tensor in like.items()}
    rest = np.frombuffer(stream, "<i2", offset=sum(sizes.values()))
    tensors: dict[str, Tensor] = {}
    offset = 0
    for name, tensor in like.items():
        data = np.frombuffer(stream, np.int8, sizes[name], offset).copy()
        offset += sizes[name]
        if tensor.dtype == torch.int16:
            values = data.astype(np.int16)
            wide = values == ESCAPE
            count = int(wide.sum())
            values[wide], rest = rest[:count], rest[count:]
            flat = torch.from_numpy(values)
        else:
            flat = torch.from_numpy(data).view(tensor.dtype)
        rows = tensor.shape[0] if tensor.ndim > 1 else 1
        columns = tensor.numel() // rows
        grid = flat.reshape(rows, columns) if order == "rows" else flat.reshape(columns, rows).T
        tensors[name] = grid.reshape(tensor.shape).contiguous()
    return tensors


def _width(tensor: Tensor) -> int:
    return tensor.element_size() if tensor.is_floating_point() else 1


def _scan(tensor: Tensor, order: Order) -> Tensor:
    grid = tensor.reshape(tensor.shape[0] if tensor.ndim > 1 else 1, -1)
    return (grid if order == "rows" else grid.T).contiguous().reshape(-1)


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of one coder on one set of tensors.

    Attributes:
        bytes: all bytes that a decoder needs, without names and shapes (which "torch.save + …" and birdie count).
        encode_s: seconds to encode, in the smallest form.
        decode_s: seconds to decode.
        exact: all tensors are restored bit for bit.
        version: version of the coder.
        form: name of the smallest form.
        decode_mb: peak memory of the decoding process in 10^6 bytes, if the coder is a separate process.
    """

    bytes: int
    encode_s: float
    decode_s: float
    exact: bool
    version: str
    form: str = ""
    decode_mb: float | None = None


Measure = Callable[[SymbolSet], Measured]


def smallest(forms: list[Measured]) -> Measured:
    """Return the smallest form, or a form that is not exact if there is one."""
    return next((form for form in forms if not form.exact), min(forms, key=lambda form: form.bytes))


def saved(name: str) -> Measure:
    """Return the measurement of torch.save of the dict of tensors, compressed with the general compressor `name`."""

    def measure(symbols: SymbolSet) -> Measured:
        _require(name)
        buffer = io.BytesIO()
        torch.save(dict(symbols.tensors), buffer)
        return _general(name, buffer.getvalue(), "torch.save", lambda data: data == buffer.getvalue())

    return measure


def streamed(name: str) -> Measure:
    """Return the measurement of the byte string under the general compressor `name`."""

    def measure(symbols: SymbolSet) -> Measured:
        _require(name)
        return smallest(
            [_general(name, join(symbols.tensors, order), order, _restores(symbols, order)) for order in ORDERS]
        )

    return measure


def _require(name: str) -> None:
    if not COMPRESSORS[name].installed:
        raise NotInstalledError(f"not installed: pip install {COMPRESSORS[name].package}")


def _general(name: str, data: bytes, form: str, is_exact: Callable[[bytes], bool]) -> Measured:
    compressor = COMPRESSORS[name]
    start = time.perf_counter()
    packed = compressor.compress(data)
    middle = time.perf_counter()
    unpacked = compressor.decompress(packed, len(data))
    end = time.perf_counter()
    return Measured(len(packed), middle - start, end - middle, is_exact(unpacked), compressor.version, form)


def _restores(symbols: SymbolSet, order: Order) -> Callable[[bytes], bool]:
    """Return the check that a byte string has exactly these tensors."""

    def check(stream: bytes) -> bool:
        if stream != join(symbols.tensors, order):
            return False
        parts = separate(stream, symbols.tensors, order)
        return all(torch.equal(bits_of(parts[name]), bits_of(tensor)) for name, tensor in symbols.tensors.items())

    return check


def bits_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, flat."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Program:
    """A compressor that is a program of the system: it works on files, on one thread.

    Attributes:
        name: name of the program and of its package.
        encode: arguments to turn the file "x" of the working folder into `archive`.
        decode: arguments to turn `archive` into the file `output`.
        archive: file whose size counts.
        output: file that must equal "x".
        version: arguments to print its version.
    """

    name: str
    encode: tuple[str, ...]
    decode: tuple[str, ...]
    archive: str
    output: str
    version: tuple[str, ...]

    def __call__(self, symbols: SymbolSet) -> Measured:
        """Measure the program on a set of tensors."""
        if shutil.which(self.name) is None:
            raise NotInstalledError(f"not installed: apt install {self.name}")
        return smallest([self._measure(symbols, order) for order in ORDERS])

    def _measure(self, symbols: SymbolSet, order: Order) -> Measured:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            (work / "x").write_bytes(join(symbols.tensors, order))
            encode_s, _ = run_command([self.name, *self.encode], work, TIMEOUT_S)
            (work / "x").rename(work / "original")
            decode_s, peak = run_command([self.name, *self.decode], work, TIMEOUT_S)
            exact = _restores(symbols, order)((work / self.output).read_bytes())
            size = (work / self.archive).stat().st_size
        return Measured(size, encode_s, decode_s, exact, self._version(), order, peak)

    def _version(self) -> str:
        process = subprocess.run([self.name, *self.version], capture_output=True, text=True, timeout=60, check=False)
        words = (process.stdout + process.stderr).split()
        return next((word.strip(",") for word in words if any(letter.isdigit() for letter in word)), "unknown")


# lrzip: -N 0 is normal priority (default: the lowest), -T does not skip data that LZ4 finds incompressible.
ZPAQ = Program("zpaq", ("a", "x.zpaq", "x", "-m5", "-t1"), ("x", "x.zpaq", "-t1"), "x.zpaq", "x", ())
LRZIP = Program(
    "lrzip",
    ("-z", "-L", "9", "-p", "1", "-N", "0", "-T", "-q", "x"),
    ("-d", "-p", "1", "-N", "0", "-q", "-o", "out", "x.lrz"),
    "x.lrz",
    "out",
    ("-V",),
)


def nncodec(symbols: SymbolSet) -> Measured:
    """Measure NNCodec in the rivals' environment, by `rival_worker`."""
    if not symbols.is_integer:
        raise NotApplicableError("codes integers only")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tensors.npz"
        np.savez(path, allow_pickle=False, **{name: tensor.numpy() for name, tensor in symbols.tensors.items()})
        output = run_in_environment([str(HERE / "rival_worker.py"), "lossless", str(path)], "NNCodec", Path(folder))
    return Measured(**json.loads(output.strip().splitlines()[-1]))


def run_in_environment(arguments: list[str], package: str, folder: Path | None = None) -> str:
    """Run the Python of the rivals' environment in `folder`, and return its output.

    Raises:
        NotInstalledError: the environment or the package is not installed.
        RuntimeError: the run failed.
    """
    if not RIVALS.is_file():
        raise NotInstalledError("not installed: make rivals")
    # Without PYTHONPATH and the like: they would add the packages of this environment to the other.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    process = subprocess.run(
        [str(RIVALS), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    if process.returncode:
        if "ModuleNotFoundError" in process.stderr or "PackageNotFoundError" in process.stderr:
            raise NotInstalledError("not installed: make rivals")
        raise RuntimeError(f"{package} failed: {process.stderr.strip()[-400:]}")
    return process.stdout


MEASURES: dict[str, tuple[str, Measure]] = {
    "save-zlib": ("torch.save + zlib -9", saved("zlib")),
    "save-zstd": ("torch.save + zstd -22", saved("zstd")),
    "zstd": ("zstd -22", streamed("zstd")),
    "xz": ("xz -9e", streamed("lzma")),
    "brotli": ("brotli -11", streamed("brotli")),
    "zpaq": ("zpaq -m5", ZPAQ),
    "lrzip": ("lrzip -z -L 9", LRZIP),
    "nncodec": ("NNCodec", nncodec),
}
