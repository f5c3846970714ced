"""Bytes and speeds of lossless coders on the same tensors: `python -m benchmarks.codec --weights FILE --json`.

    python -m benchmarks.codec --weights FILE [--set NAME] [--codecs max,zpaq] [--plot docs/codec.svg]
    python -m benchmarks.codec --set uniform           of the shared model (benchmarks.bench_model)
    python -m benchmarks.codec --suite --json          every set of every file in the shared data

birdie's rows count the whole file, names, shapes and checksums included; rivals get the tensors in the form that suits
them best (`benchmarks.rivals`), on one thread. docs/benchmarks.md says how to read the rows.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_model import bench_model
from benchmarks.birdie_rows import birdie
from benchmarks.plot import svg
from benchmarks.report import report
from benchmarks.rivals import MEASURES, Measure, Measured, NotInstalledError, NotMeantForError
from benchmarks.symbols import SETS, SymbolSet, make
from birdie.errors import BirdieError
from birdie.runtime.files import write_bytes

Row = dict[str, Any]
OURS = ("max", "fast")
CODECS = (*OURS, *MEASURES)
TABLE = ("set", "codec", "bytes", "bits", "encode_s", "decode_s", "exact", "version")  # the rest is in --json
BENCH_SETS = ("uniform", "sdclip6", "rowmax6", "bf16", "fp32")


def measures(threads: int, repeat: int) -> dict[str, tuple[str, Measure]]:
    """Every coder: its key for --codecs, its label in the rows, and how it is measured."""
    return {
        "max": ("birdie max", birdie("max", threads=threads, repeat=repeat)),
        "fast": ("birdie fast", birdie("fast", threads=threads, repeat=repeat)),
        **MEASURES,
    }


def rows(given: SymbolSet, codecs: Sequence[str] = CODECS, *, threads: int = 1, repeat: int = 1) -> Iterator[Row]:
    """One row a coder, in the order of `codecs`; what is not installed says so where its version would stand."""
    known = measures(threads, repeat)
    for key in codecs:
        label, measure = known[key]
        try:
            yield row(label, given, measure(given))
        except NotInstalledError as error:
            yield row(label, given, None, version=str(error))
        except NotMeantForError:
            continue


def row(codec: str, given: SymbolSet, found: Measured | None, version: str = "") -> Row:
    """One line of the table; None where there is nothing to say."""
    return {
        "codec": codec,
        "bytes": found and found.bytes,
        "symbol_bytes": given.bytes,
        "encode_s": found and found.encode_s,
        "decode_s": found and found.decode_s,
        "exact": None if found is None else bool(found.exact),
        "version": found.version if found else version,
        "form": found.form if found else "",
        "decode_mb": found and found.decode_mb,
        "symbols": given.symbols,
        "bits": found and round(8 * found.bytes / given.symbols, 4),
    }


def suite(data: Path, runs: Path) -> Iterator[tuple[str, Callable[[], SymbolSet]]]:
    """(label, maker) of every set of the shared data."""
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


def chosen(text: str) -> list[str]:
    """The keys in a comma-separated list.

    Raises:
        argparse.ArgumentTypeError: one is unknown.
    """
    keys = [key.strip() for key in text.split(",") if key.strip()]
    unknown = [key for key in keys if key not in CODECS]
    if unknown or not keys:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown) or 'nothing'} is no codec; choose from {', '.join(CODECS)}"
        )
    return keys


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", type=Path, help="a checkpoint (default: the shared benchmark model)")
    parser.add_argument(
        "--set", choices=SETS, default="auto", help="what is made of it (default: its integers, or bf16)"
    )
    parser.add_argument("--suite", action="store_true", help="every set of the shared data instead (BIRDIE_DATA)")
    parser.add_argument("--codecs", type=chosen, default=list(CODECS), help=f"of {','.join(CODECS)} (default: all)")
    parser.add_argument("--threads", type=int, default=1, help="of birdie's rows; rivals have one (default: 1)")
    parser.add_argument("--repeat", type=int, default=3, help="decodings of birdie's rows, best counts (default: 3)")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), help="where the shared model is kept (default: runs)"
    )
    parser.add_argument("--plot", type=Path, help="also draw bytes against decode speed into this .svg")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return parser.parse_args()


def measured(options: argparse.Namespace) -> list[Row]:
    """All rows the options ask for."""
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
    """Parse, measure, print."""
    options = parse()
    if options.suite and options.plot:
        raise SystemExit("--plot draws one set; name it with --weights and --set instead of --suite")
    try:
        found = measured(options)
    except BirdieError as error:
        raise SystemExit(str(error)) from error
    if options.plot:
        source = options.weights.name if options.weights else "the benchmark model"
        symbols = found[0]["symbols"]
        title = f"{source}, {options.set}: {symbols:,} symbols" if options.set != "gaussian" else f"{symbols:,} symbols"
        write_bytes(options.plot, svg(found, title).encode())
    shown = found if options.json else [{key: line[key] for key in line if key in TABLE} for line in found]
    report(shown, as_json=options.json)


if __name__ == "__main__":
    main()
