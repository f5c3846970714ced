"""Bytes and speeds of lossless coders on the same tensors: `python -m benchmarks.codec --weights FILE --json`.

    python -m benchmarks.codec --weights FILE [--set NAME] [--codecs max,zpaq] [--plot docs/codec.svg]
    python -m benchmarks.codec --set uniform           of the shared model (benchmarks.bench_model)
    python -m benchmarks.codec --suite --json          every set of every file in the shared data

birdie's rows count the entire file with names, shapes and checksums; rivals get the tensors in their best form
(`benchmarks.rivals`), on one thread. docs/benchmarks.md explains the rows.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_model import bench_model
from benchmarks.birdie_rows import birdie
from benchmarks.command import comma_separated, command_parser, errors_as_exit, one_of, report
from benchmarks.plot import svg
from benchmarks.rivals import MEASURES, Measure, Measured, NotApplicableError, NotInstalledError
from benchmarks.symbols import SETS, SymbolSet, make
from birdie.runtime.files import write_bytes

Row = dict[str, Any]
CODECS = ("max", "fast", *MEASURES)
TABLE = ("set", "codec", "bytes", "bits", "encode_s", "decode_s", "exact", "version")  # further keys are in --json
BENCH_SETS = ("uniform", "sdclip6", "rowmax6", "bf16", "fp32")


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
    for path in (weights / "silero_vad" / "silero_vad_16k.safetensors", weights / "llama2c" / "stories260K.bin"):
        yield f"{path.stem} bf16", maker("bf16", path)
        yield f"{path.stem} fp32", maker("fp32", path)
    model = bench_model(runs, data, train=False)
    for name in BENCH_SETS:
        yield f"bench {name}", maker(name, model)


def parse() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = command_parser(__doc__)
    parser.add_argument("--weights", type=Path, help="a checkpoint (default: the shared benchmark model)")
    parser.add_argument(
        "--set", choices=SETS, default="auto", help="symbols to code (default: stored integers, or bf16)"
    )
    parser.add_argument("--suite", action="store_true", help="every set of the shared data instead (BIRDIE_DATA)")
    codecs = comma_separated(one_of(CODECS, "codec"))
    parser.add_argument("--codecs", type=codecs, default=list(CODECS), help=f"of {','.join(CODECS)} (default: all)")
    parser.add_argument("--threads", type=int, default=1, help="threads of birdie; rivals have one (default: 1)")
    parser.add_argument(
        "--repeat", type=int, default=3, help="decodings by birdie, of which the best counts (default: 3)"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs (default: runs)")
    parser.add_argument("--plot", type=Path, help="also draw bytes against decoding speed into this .svg")
    return parser.parse_args()


def measure_all(options: argparse.Namespace) -> list[Row]:
    """Return all rows that the flags name."""
    torch.set_num_threads(1)
    settings = {"threads": options.threads, "repeat": options.repeat}
    if options.suite:
        data = Path(os.environ.get("BIRDIE_DATA") or "data")
        return [
            {"set": label, **line}
            for label, maker in suite(data, options.runs)
            for line in rows(maker(), options.codecs, **settings)
        ]
    path = options.weights
    if path is None and options.set != "gaussian":
        path = bench_model(options.runs)
    return list(rows(make(options.set, path), options.codecs, **settings))


def main() -> None:
    """Measure and print the table."""
    options = parse()
    if options.suite and options.plot:
        raise SystemExit("--plot draws one set; name it with --weights and --set instead of --suite")
    with errors_as_exit():
        lines = measure_all(options)
    if options.plot:
        source = options.weights.name if options.weights else "the benchmark model"
        symbols = lines[0]["symbols"]
        title = f"{source}, {options.set}: {symbols:,} symbols" if options.set != "gaussian" else f"{symbols:,} symbols"
        write_bytes(options.plot, svg(lines, title).encode())
    table = lines if options.json else [{key: line[key] for key in line if key in TABLE} for line in lines]
    report(table, as_json=options.json)


if __name__ == "__main__":
    main()
