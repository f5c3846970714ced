"""Lossless coders that birdie is compared with, each in its best form, as functions from a set of tensors to
`Measured`.

General compressors get the tensors as one byte string (`streams`), by rows and by columns, and the smaller result
counts; "torch.save + …" is the form that the Parameter Golf challenge ships. A coder that is not installed raises
`NotInstalledError`, whose text says how to install it. The output of every coder is decoded and compared.
"""

import io
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import row_class_ans, streams
from benchmarks.compressors import COMPRESSORS
from benchmarks.memory import run_command
from benchmarks.symbols import SymbolSet

HERE = Path(__file__).resolve().parent
RIVALS = HERE.parent / ".venv-rivals" / "bin" / "python"
TIMEOUT_S = 3600


class NotInstalledError(Exception):
    """A coder is not installed; the text says how to install it."""


class NotApplicableError(Exception):
    """A coder cannot code such tensors; the text says why."""


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


Words = NDArray[np.generic]
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
    """Return the measurement of the byte string under the general compressor `name` of benchmarks.compressors."""

    def measure(symbols: SymbolSet) -> Measured:
        _require(name)
        return smallest(
            [
                _general(name, streams.join(symbols.tensors, order), order, _restores(symbols, order))
                for order in streams.ORDERS
            ]
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


def _restores(symbols: SymbolSet, order: streams.Order) -> Callable[[bytes], bool]:
    """Return the check that a byte string has exactly these tensors."""

    def check(stream: bytes) -> bool:
        if stream != streams.join(symbols.tensors, order):
            return False
        parts = streams.part(stream, symbols.tensors, order)
        return all(torch.equal(_bits(parts[name]), _bits(tensor)) for name, tensor in symbols.tensors.items())

    return check


def _bits(tensor: torch.Tensor) -> torch.Tensor:
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
        return smallest([self._measure(symbols, order) for order in streams.ORDERS])

    def _measure(self, symbols: SymbolSet, order: streams.Order) -> Measured:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            (work / "x").write_bytes(streams.join(symbols.tensors, order))
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


def row_class(symbols: SymbolSet) -> Measured:
    """Measure the row-class ANS format on all tensors together, with classes of rows and with classes of columns."""
    if not symbols.is_integer:
        raise NotApplicableError("codes integers only")
    grids = [array.reshape(array.shape[0] if array.ndim > 1 else 1, -1) for array in symbols.arrays.values()]
    small = [np.arange(64, dtype=np.int16).reshape(8, 8)]
    row_class_ans.decode(row_class_ans.encode(small), [(8, 8)])  # compiles the kernels
    forms = []
    for order in streams.ORDERS:
        turned = grids if order == "rows" else [np.ascontiguousarray(grid.T) for grid in grids]
        start = time.perf_counter()
        coded = row_class_ans.encode(turned)
        middle = time.perf_counter()
        decoded = row_class_ans.decode(coded, [grid.shape for grid in turned])
        end = time.perf_counter()
        exact = all(np.array_equal(restored, grid) for restored, grid in zip(decoded, turned, strict=True))
        forms.append(Measured(coded.size, middle - start, end - middle, exact, "of this repository", order))
    return smallest(forms)


def in_environment(package: str) -> Measure:
    """Return the measurement of a package of the rivals' environment, by `rival_worker`."""

    def measure(symbols: SymbolSet) -> Measured:
        if package == "nncodec" and not symbols.is_integer:
            raise NotApplicableError("codes integers only")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tensors.npz"
            arrays = _worker_arrays(symbols, as_bytes=package == "zipnn" and symbols.is_integer)
            np.savez(path, allow_pickle=False, **arrays)
            output = run_in_environment([str(HERE / "rival_worker.py"), package, str(path)], package, Path(folder))
        return Measured(**json.loads(output.strip().splitlines()[-1]))

    return measure


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


def _worker_arrays(symbols: SymbolSet, *, as_bytes: bool) -> dict[str, Words]:
    """Return the arrays for the worker; bfloat16, which numpy lacks, as int16 words under a marked name."""
    if as_bytes:
        return {"stream": np.frombuffer(streams.join(symbols.tensors, "rows"), np.int8)}
    arrays: dict[str, Words] = {}
    for name, tensor in symbols.tensors.items():
        if tensor.dtype == torch.bfloat16:
            arrays[f"{name}|bf16"] = tensor.view(torch.int16).numpy()
        else:
            arrays[name] = tensor.numpy()
    return arrays


MEASURES: dict[str, tuple[str, Measure]] = {
    "save-zlib": ("torch.save + zlib -9", saved("zlib")),
    "save-zstd": ("torch.save + zstd -22", saved("zstd")),
    "zstd": ("zstd -22", streamed("zstd")),
    "xz": ("xz -9e", streamed("lzma")),
    "brotli": ("brotli -11", streamed("brotli")),
    "zpaq": ("zpaq -m5", ZPAQ),
    "lrzip": ("lrzip -z -L 9", LRZIP),
    "row-class": ("row-class ANS", row_class),
    "nncodec": ("NNCodec", in_environment("nncodec")),
    "zipnn": ("ZipNN", in_environment("zipnn")),
}
