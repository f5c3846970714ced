"""The coders birdie is compared with, each in its best form, behind one function: a set of tensors → `Measured`.

General compressors get the tensors as one stream of bytes (`streams`), by rows and by columns, and the smaller counts;
"torch.save + …" is what the Parameter Golf challenge ships. Whatever is not installed raises `NotInstalledError`, whose
text says what to do. Every rival's output is decoded again and compared.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import row_class_ans, streams
from benchmarks.symbols import SymbolSet
from birdie.entropy.general_purpose import COMPRESSORS

HERE = Path(__file__).resolve().parent
RIVALS = HERE.parent / ".venv-rivals" / "bin" / "python"
TIMEOUT_S = 3600


class NotInstalledError(Exception):
    """A rival that is not there; the text says how to get it."""


class NotMeantForError(Exception):
    """A rival that such tensors are not for; the text says why."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One coder on one set.

    Attributes:
        bytes: all a decoder needs beyond names and shapes (which "torch.save + …" and birdie count too).
        encode_s: seconds to encode, of the form that came out smallest.
        decode_s: seconds to decode.
        exact: whether everything came back bit for bit.
        version: of the coder.
        form: which of its forms was smallest.
        decode_mb: most memory of the decoding process, in 10^6 bytes, where the coder is a process of its own.
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


def smallest(tries: list[Measured]) -> Measured:
    """The try of fewest bytes; it is exact only if all of them are."""
    best = min(tries, key=lambda each: each.bytes)
    if all(each.exact for each in tries):
        return best
    return next(each for each in tries if not each.exact)


def saved(name: str) -> Measure:
    """torch.save of the dict of tensors under the general compressor `name`."""

    def measure(given: SymbolSet) -> Measured:
        _require(name)
        buffer = io.BytesIO()
        torch.save(dict(given.tensors), buffer)
        return _general(name, buffer.getvalue(), "torch.save", lambda data: data == buffer.getvalue())

    return measure


def streamed(name: str) -> Measure:
    """The stream of bytes under the general compressor `name` of birdie.entropy.general_purpose."""

    def measure(given: SymbolSet) -> Measured:
        _require(name)
        return smallest(
            [
                _general(name, streams.join(given.tensors, order), order, _returns(given, order))
                for order in streams.ORDERS
            ]
        )

    return measure


def _require(name: str) -> None:
    if not COMPRESSORS[name].installed:
        raise NotInstalledError(f"not installed: pip install {COMPRESSORS[name].package}")


def _general(name: str, data: bytes, form: str, returned: Callable[[bytes], bool]) -> Measured:
    compressor = COMPRESSORS[name]
    start = time.perf_counter()
    packed = compressor.compress(data)
    middle = time.perf_counter()
    unpacked = compressor.decompress(packed, len(data))
    end = time.perf_counter()
    return Measured(len(packed), middle - start, end - middle, returned(unpacked), compressor.version, form)


def _returns(given: SymbolSet, order: streams.Order) -> Callable[[bytes], bool]:
    """Whether a stream holds exactly the tensors of `given`."""

    def check(stream: bytes) -> bool:
        if stream != streams.join(given.tensors, order):
            return False
        parted = streams.part(stream, given.tensors, order)
        return all(torch.equal(_bits(parted[name]), _bits(tensor)) for name, tensor in given.tensors.items())

    return check


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Program:
    """A compressor that is a program of the system and works on files, on one thread.

    Attributes:
        name: of the program and of the package to install.
        encode: arguments that turn the file "x" of the working folder into `archive`.
        decode: arguments that turn `archive` into the file `output`.
        archive: what is counted.
        output: what must equal "x".
        version: arguments that make it say its version.
    """

    name: str
    encode: tuple[str, ...]
    decode: tuple[str, ...]
    archive: str
    output: str
    version: tuple[str, ...]

    def __call__(self, given: SymbolSet) -> Measured:
        """Measure it on `given`."""
        if shutil.which(self.name) is None:
            raise NotInstalledError(f"not installed: apt install {self.name}")
        return smallest([self._on(given, order) for order in streams.ORDERS])

    def _on(self, given: SymbolSet, order: streams.Order) -> Measured:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            (work / "x").write_bytes(streams.join(given.tensors, order))
            encode_s, _ = run([self.name, *self.encode], work)
            (work / "x").rename(work / "original")
            decode_s, peak = run([self.name, *self.decode], work)
            exact = _returns(given, order)((work / self.output).read_bytes())
            size = (work / self.archive).stat().st_size
        return Measured(size, encode_s, decode_s, exact, self._version(), order, peak)

    def _version(self) -> str:
        said = subprocess.run([self.name, *self.version], capture_output=True, text=True, timeout=60, check=False)
        words = (said.stdout + said.stderr).split()
        return next((word.strip(",") for word in words if any(letter.isdigit() for letter in word)), "unknown")


# lrzip is told not to be nice (its default is the lowest priority) and not to skip what LZ4 finds incompressible.
ZPAQ = Program("zpaq", ("a", "x.zpaq", "x", "-m5", "-t1"), ("x", "x.zpaq", "-t1"), "x.zpaq", "x", ())
LRZIP = Program(
    "lrzip",
    ("-z", "-L", "9", "-p", "1", "-N", "0", "-T", "-q", "x"),
    ("-d", "-p", "1", "-N", "0", "-q", "-o", "out", "x.lrz"),
    "x.lrz",
    "out",
    ("-V",),
)


def run(command: list[str], folder: Path) -> tuple[float, float]:
    """(seconds, peak in 10^6 bytes) of a command in `folder`.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    launcher = [sys.executable, "-I", "-S", str(HERE / "peak.py"), *command]
    done = subprocess.run(launcher, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    told = json.loads(done.stdout)
    if told["code"]:
        raise RuntimeError(f"{' '.join(command)} failed with code {told['code']}: {told['error'].strip()}")
    return float(told["seconds"]), float(told["peak_mb"])


def row_class(given: SymbolSet) -> Measured:
    """The row-class ANS format on all tensors as one stream, rows as classes and columns as classes."""
    if not given.is_integer:
        raise NotMeantForError("codes symbols only")
    grids = [array.reshape(array.shape[0] if array.ndim > 1 else 1, -1) for array in given.arrays.values()]
    warm = [np.arange(64, dtype=np.int16).reshape(8, 8)]
    row_class_ans.decode(row_class_ans.encode(warm), [(8, 8)])
    tries = []
    for order in streams.ORDERS:
        turned = grids if order == "rows" else [np.ascontiguousarray(grid.T) for grid in grids]
        start = time.perf_counter()
        coded = row_class_ans.encode(turned)
        middle = time.perf_counter()
        decoded = row_class_ans.decode(coded, [grid.shape for grid in turned])
        end = time.perf_counter()
        exact = all(np.array_equal(found, grid) for found, grid in zip(decoded, turned, strict=True))
        tries.append(Measured(coded.size, middle - start, end - middle, exact, "of this repository", order))
    return smallest(tries)


def in_environment(package: str) -> Measure:
    """A package of the rivals' own environment, through `rival_worker`."""

    def measure(given: SymbolSet) -> Measured:
        if package == "nncodec" and not given.is_integer:
            raise NotMeantForError("codes symbols only")
        if not RIVALS.is_file():
            raise NotInstalledError("not installed: make rivals")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tensors.npz"
            arrays = _worker_arrays(given, as_bytes=package == "zipnn" and given.is_integer)
            np.savez(path, allow_pickle=False, **arrays)
            command = [str(RIVALS), str(HERE / "rival_worker.py"), package, str(path)]
            # Without a PYTHONPATH, which would show one environment the packages of the other.
            done = subprocess.run(
                command,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
                env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
                | {"OMP_NUM_THREADS": "1"},
            )
        if done.returncode:
            if "ModuleNotFoundError" in done.stderr or "PackageNotFoundError" in done.stderr:
                raise NotInstalledError("not installed: make rivals")
            raise RuntimeError(f"{package} failed: {done.stderr.strip()[-400:]}")
        told = json.loads(done.stdout.strip().splitlines()[-1])
        return Measured(**told)

    return measure


def _worker_arrays(given: SymbolSet, *, as_bytes: bool) -> dict[str, Words]:
    """What the worker reads: numpy has no bfloat16, so those go as their bits under a marked name."""
    if as_bytes:
        return {"stream": np.frombuffer(streams.join(given.tensors, "rows"), np.int8)}
    out: dict[str, Words] = {}
    for name, tensor in given.tensors.items():
        if tensor.dtype == torch.bfloat16:
            out[f"{name}|bf16"] = tensor.view(torch.int16).numpy()
        else:
            out[name] = tensor.numpy()
    return out


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
