"""birdie itself on a set of tensors: the whole file as `birdie.save(lossless=True)` writes and `birdie.load` reads it.

Names, shapes, dtypes and checksums are counted. Memory is measured in a process of its own:

    python -m benchmarks.birdie_rows FILE.birdie    →    the rise of its memory while it decodes, 10^6 bytes
"""

import re
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.rivals import Measure, Measured
from benchmarks.symbols import SymbolSet
from birdie.artifact.load import decode_tensor, inspect, load
from birdie.artifact.save import save
from birdie.entropy.hints import Effort

ROOT = Path(__file__).resolve().parents[1]
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def birdie(effort: Effort, *, threads: int = 1, repeat: int = 1) -> Measure:
    """`effort` on `threads` threads; decoding is timed `repeat` times and the best counts, kernels warm."""

    def measure(given: SymbolSet) -> Measured:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "set.birdie"
            _warm(given, path, effort)
            start = time.perf_counter()
            save(given.tensors, path, lossless=True, coder=effort, workers=threads)
            encode_s = time.perf_counter() - start
            decoded = load(path, workers=threads)
            decode_s = min(_load_seconds(path, threads) for _ in range(repeat))
            exact = decoded.keys() == given.tensors.keys() and all(
                decoded[name].dtype == tensor.dtype and torch.equal(_bits(decoded[name]), _bits(tensor))
                for name, tensor in given.tensors.items()
            )
            size, peak = path.stat().st_size, _decode_peak(path)
        form = "whole file" if threads == 1 else f"whole file, {threads} threads"
        return Measured(size, encode_s, decode_s, exact, metadata.version("birdie"), form, peak)

    return measure


def _warm(given: SymbolSet, path: Path, effort: Effort) -> None:
    """Compile or load every kernel the tensors of `given` need, on a few rows of each."""
    part = {name: tensor[:64].clone() for name, tensor in given.tensors.items()}
    save(part, path, lossless=True, coder=effort)
    load(path)


def _load_seconds(path: Path, threads: int) -> float:
    start = time.perf_counter()
    load(path, workers=threads)
    return time.perf_counter() - start


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _decode_peak(path: Path) -> float | None:
    """What decoding `path` takes at most beyond an idle process, decoded tensors included; None beside Linux."""
    if not _CLEAR.exists():
        return None
    command = [sys.executable, "-m", "benchmarks.birdie_rows", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=True)
    return float(done.stdout)


def _kilobytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+)", _STATUS.read_text())
    return int(found[1]) if found else 0


def main() -> None:
    """Decode one tensor, which loads the kernels, then all of them with the peak reset before."""
    torch.set_num_threads(1)
    path = sys.argv[1]
    smallest = min(inspect(path).tensors, key=lambda tensor: (tensor.scheme == "alias", tensor.bytes))
    decode_tensor(path, smallest.name)
    _CLEAR.write_text(_RESET_PEAK)
    before = _kilobytes("VmRSS")
    load(path, workers=1)
    print(round((_kilobytes("VmHWM") - before) * 1024 / 1e6, 1))


if __name__ == "__main__":
    main()
