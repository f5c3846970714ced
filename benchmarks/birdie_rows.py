"""birdie itself on a set of tensors: the entire file that `birdie.save(lossless=True)` writes and `birdie.load` reads.

Names, shapes, dtypes and checksums count. Memory is measured in a new process:

    python -m benchmarks.birdie_rows FILE.birdie    →    growth of its memory while it decodes, in 10^6 bytes
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import memory
from benchmarks.rivals import Measure, Measured
from benchmarks.symbols import SymbolSet
from birdie.artifact.file import File
from birdie.artifact.inspect import inspect
from birdie.artifact.load import load
from birdie.artifact.save import save
from birdie.compress import registry
from birdie.entropy.hints import Effort
from birdie.runtime.provenance import VERSION

ROOT = Path(__file__).resolve().parents[1]


def birdie(effort: Effort, *, threads: int = 1, repeat: int = 1) -> Measure:
    """Return the measurement of `effort` on `threads` threads: warm kernels, best decoding time of `repeat`."""

    def measure(symbols: SymbolSet) -> Measured:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "set.birdie"
            _warm(symbols, path, effort)
            start = time.perf_counter()
            save(symbols.tensors, path, lossless=True, coder=effort, workers=threads)
            encode_s = time.perf_counter() - start
            decoded = load(path, workers=threads)
            decode_s = min(_load_seconds(path, threads) for _ in range(repeat))
            exact = decoded.keys() == symbols.tensors.keys() and all(
                decoded[name].dtype == tensor.dtype and torch.equal(_bits(decoded[name]), _bits(tensor))
                for name, tensor in symbols.tensors.items()
            )
            size, peak = path.stat().st_size, _decode_peak(path)
        form = "whole file" if threads == 1 else f"whole file, {threads} threads"
        return Measured(size, encode_s, decode_s, exact, VERSION, form, peak)

    return measure


def _warm(symbols: SymbolSet, path: Path, effort: Effort) -> None:
    """Compile or load the kernels that the tensors need, with a few rows of each."""
    part = {name: tensor[:64].clone() for name, tensor in symbols.tensors.items()}
    save(part, path, lossless=True, coder=effort)
    load(path)


def _load_seconds(path: Path, threads: int) -> float:
    start = time.perf_counter()
    load(path, workers=threads)
    return time.perf_counter() - start


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _decode_peak(path: Path) -> float | None:
    """Return the peak of decoding `path` above an idle process, decoded tensors included; None except on Linux."""
    if not memory.can_measure():
        return None
    command = [sys.executable, "-m", "benchmarks.birdie_rows", str(path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=True)
    return float(process.stdout)


def main() -> None:
    """Decode one tensor to load the kernels, then decode all tensors and print the growth of memory."""
    torch.set_num_threads(1)
    path = sys.argv[1]
    smallest = min(inspect(path).tensors, key=lambda tensor: (tensor.scheme == "alias", tensor.bytes))
    with File(path, registry.decoder) as file:
        file.require(names=[smallest.name])
        file.decode(smallest.name)
    memory.reset_peak()
    idle = memory.resident("VmRSS")
    load(path, workers=1)
    print(round(memory.resident("VmHWM") - idle, 1))


if __name__ == "__main__":
    main()
