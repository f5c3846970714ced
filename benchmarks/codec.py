"""Bytes and speeds of lossless coders on the same tensors: `python -m benchmarks.codec --weights FILE --json`.

    python -m benchmarks.codec --weights FILE [--set NAME] [--codecs max,zpaq] [--plot docs/codec.svg]
    python -m benchmarks.codec --set uniform           of the shared model (benchmarks.bench_model)
    python -m benchmarks.codec --suite --json          every set of every file in the shared data

birdie's rows count the entire file with names, shapes and checksums; rivals get the tensors in their best form
(`benchmarks.rivals`), on one thread. docs/benchmarks.md explains the rows.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_model import bench_model
from benchmarks.command import comma_separated, command_parser, errors_as_exit, one_of, report, shared_data
from benchmarks.curves import speed_chart
from benchmarks.processes import apart, can_measure, reset_peak, resident
from benchmarks.rivals import MEASURES, Measure, Measured, NotApplicableError, NotInstalledError, bits_of
from benchmarks.symbols import SETS, SymbolSet, make
from birdie.artifact.file import File
from birdie.artifact.inspection import inspect
from birdie.artifact.loading import load
from birdie.artifact.saving import save
from birdie.compress import registry
from birdie.entropy.hints import Effort
from birdie.system.files import write_bytes
from birdie.system.provenance import __version__

Row = dict[str, Any]
CODECS = ("max", "fast", *MEASURES)
TABLE = ("set", "codec", "bytes", "bits", "encode_s", "decode_s", "exact", "version")  # further keys are in --json
BENCH_SETS = ("uniform", "sdclip6", "rowmax6", "bf16", "fp32")


def birdie(effort: Effort, *, threads: int = 1, repeat: int = 1) -> Measure:
    """Return the measurement of whole lossless files: kernels are warm, the best decoding of `repeat` counts."""

    def measure(symbols: SymbolSet) -> Measured:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "set.birdie"
            _warm(symbols, path, effort)
            start = time.perf_counter()
            save(symbols.tensors, path, lossless=True, effort=effort, workers=threads)
            encode_s = time.perf_counter() - start
            decoded = load(path, workers=threads)
            decode_s = min(_load_seconds(path, threads) for _ in range(repeat))
            exact = decoded.keys() == symbols.tensors.keys() and all(
                decoded[name].dtype == tensor.dtype and torch.equal(bits_of(decoded[name]), bits_of(tensor))
                for name, tensor in symbols.tensors.items()
            )
            size, peak = path.stat().st_size, apart(decode_growth, str(path)) if can_measure() else None
        form = "whole file" if threads == 1 else f"whole file, {threads} threads"
        return Measured(size, encode_s, decode_s, exact, __version__, form, peak)

    return measure


def _warm(symbols: SymbolSet, path: Path, effort: Effort) -> None:
    """Compile or load the kernels that the tensors need, with a few rows of each."""
    part = {name: tensor[:64].clone() for name, tensor in symbols.tensors.items()}
    save(part, path, lossless=True, effort=effort)
    load(path)


def _load_seconds(path: Path, threads: int) -> float:
    start = time.perf_counter()
    load(path, workers=threads)
    return time.perf_counter() - start


def decode_growth(path: str) -> float:
    """Return the growth of this process's memory while it decodes a file, decoded tensors included, in 10^6 bytes."""
    smallest = min(inspect(path).tensors, key=lambda tensor: (tensor.scheme == "alias", tensor.bytes))
    with File(path, registry.decoder) as file:
        file.require(names=[smallest.name])
        file.decode(smallest.name)  # loads the kernels
    reset_peak()
    idle = resident("VmRSS")
    load(path, workers=1)
    return round(resident("VmHWM") - idle, 1)


def measures(threads: int, repeat: int) -> dict[str, tuple[str, Measure]]:
    """Return key → (label in the rows, measurement) of every coder."""
    return {
        "max": ("birdie max", birdie("max", threads=threads, repeat=repeat)),
        "fast": ("birdie fast", birdie("fast", threads=threads, repeat=repeat)),
        **MEASURES,
    }


def rows(symbols: SymbolSet, codecs: Sequence[str] = CODECS, *, threads: int = 1, repeat: int = 1) -> Iterator[Row]:
    """Yield a row for each of `codecs`; a coder that is not installed says so in its `version`."""
    by_key = measures(threads, repeat)
    for key in codecs:
        label, measure = by_key[key]
        try:
            yield row(label, symbols, measure(symbols))
        except NotInstalledError as error:
            yield row(label, symbols, None, version=str(error))
        except NotApplicableError:
            continue


def row(codec: str, symbols: SymbolSet, measured: Measured | None, version: str = "") -> Row:
    """Return one row; values are None for a coder that was not measured."""
    return {
        "codec": codec,
        "bytes": measured and measured.bytes,
        "symbol_bytes": symbols.bytes,
        "encode_s": measured and measured.encode_s,
        "decode_s": measured and measured.decode_s,
        "exact": None if measured is None else bool(measured.exact),
        "version": measured.version if measured else version,
        "form": measured.form if measured else "",
        "decode_mb": measured and measured.decode_mb,
        "symbols": symbols.symbols,
        "bits": measured and round(8 * measured.bytes / symbols.symbols, 4),
    }


def suite(data: Path, runs: Path) -> Iterator[tuple[str, Callable[[], SymbolSet]]]:
    """Yield (label, function that makes the set) of every set of the shared data."""
    weights = data / "weights"

    def maker(name: str, path: Path) -> Callable[[], SymbolSet]:
        return lambda: make(name, path)

    for path in sorted((weights / "parameter_golf").glob("*.int8.ptz")):
        yield path.name.partition("_valbpb")[0].removesuffix(".int8.ptz"), maker("stored", path)
    for path in sorted((weights / "resnet_cifar10").glob("*.th")):
        yield f"{path.name.partition('-')[0]} resnet", maker("resnet", path)
        yield f"{path.name.partition('-')[0]} bf16", maker("bf16", path)
        yield f"{path.name.partition('-')[0]} fp32", maker("fp32", path)
    silero = weights / "silero_vad" / "silero_vad_16k.safetensors"
    for name in ("bf16", "fp32"):
        yield f"{silero.stem} {name}", maker(name, silero)
    model = bench_model(runs, data, train=False)
    for name in BENCH_SETS:
        yield f"bench {name}", maker(name, model)


def measure_all(options: argparse.Namespace) -> list[Row]:
    """Return all rows that the flags name."""
    settings = {"threads": options.threads, "repeat": options.repeat}
    if options.suite:
        return [
            {"set": label, **line}
            for label, maker in suite(shared_data(), options.runs)
            for line in rows(maker(), options.codecs, **settings)
        ]
    path = options.weights
    if path is None and options.set != "gaussian":
        path = bench_model(options.runs)
    return list(rows(make(options.set, path), options.codecs, **settings))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--weights", type=Path, help="a checkpoint (default: the shared benchmark model)")
    parser.add_argument("--set", choices=SETS, default="auto", help="symbols (default: stored integers, or bf16)")
    parser.add_argument("--suite", action="store_true", help="every set of the shared data instead (BIRDIE_DATA)")
    codecs = comma_separated(one_of(CODECS, "codec"))
    parser.add_argument("--codecs", type=codecs, default=list(CODECS), help=f"of {','.join(CODECS)} (default: all)")
    parser.add_argument("--threads", type=int, default=1, help="threads of birdie; rivals have one (default: 1)")
    parser.add_argument("--repeat", type=int, default=3, help="decodings by birdie; the best counts (default: 3)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs (default: runs)")
    parser.add_argument("--plot", type=Path, help="also draw bytes against decoding speed into this .svg")
    options = parser.parse_args(arguments)
    if options.suite and options.plot:
        raise SystemExit("--plot draws one set; name it with --weights and --set instead of --suite")
    torch.set_num_threads(1)
    with errors_as_exit():
        lines = measure_all(options)
    if options.plot:
        source = options.weights.name if options.weights else "the benchmark model"
        title = "" if options.set == "gaussian" else f"{source}, {options.set}: "
        write_bytes(options.plot, speed_chart(lines, f"{title}{lines[0]['symbols']:,} symbols"))
    table = lines if options.json else [{key: line[key] for key in line if key in TABLE} for line in lines]
    report(table, as_json=options.json)


if __name__ == "__main__":
    main()
