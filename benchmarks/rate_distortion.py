"""Bytes against quality of lossy coders of weights: `python -m benchmarks.rate_distortion [--json] [--plot FILE.svg]`.

    python -m benchmarks.rate_distortion                                the shared model (benchmarks.bench_model)
    python -m benchmarks.rate_distortion --weights resnet20-….th        a ResNet of the shared data (BIRDIE_DATA)
    python -m benchmarks.rate_distortion --rivals record,nncodec --targets 0.005,0.01,0.02

Every row is a file that was written, decoded from its bytes and only then measured; the files count whole. Equal
quality is equal mean KL(float ‖ decoded) on held-out data, read off birdie's curve at the rival's own KL. Rivals' rows
are kept in runs/rd-cache by everything they depend on. docs/rate-distortion.md says how to read the rows.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import lossy_rivals, record_stack
from benchmarks.curves import ratios, svg
from benchmarks.lossy_rivals import LossyCoder
from benchmarks.quality import HELD_OUT_TOKENS, Quality, Subject, bench_subject, gpt_subject, resnet_subject
from benchmarks.record_search import Tuner, measured
from benchmarks.report import report
from benchmarks.resnet import augmented
from benchmarks.rivals import HERE, NotInstalledError
from birdie.artifact.load import load
from birdie.artifact.save import save
from birdie.compress.calibration.result import CalibrationResult
from birdie.errors import BirdieError, ConfigError
from birdie.runtime.files import atomic_path, write_bytes

Row = dict[str, Any]
TARGETS = (0.005, 0.01, 0.02)  # KL at which the record stack is tuned
RIVALS = ("record", "int6", "int8", "challenge", "nncodec")
QUALITIES = (0.00004, 0.0004, 0.002, 0.005, 0.01, 0.02, 0.045)  # KL of birdie's files, as it judges itself
BITS = (2.3, 2.7, 3.2, 3.7, 4.3, 4.8, 5.2, 6.0)  # a weight, of birdie's files of image models
TABLE = ("scheme", "bytes", "bpb", "kl", "agreement", "accuracy", "encode_s")  # the rest is in --json


def birdie_settings(subject: Subject) -> list[tuple[str, str, dict[str, Any]]]:
    """(curve, scheme, arguments of birdie.save but for calibration) of each of birdie's rows.

    Images that are calibrated on tell little of the KL on others: there it is bits that are asked for.
    """
    if subject.bits is None:
        return [("birdie", f"birdie {bits:g} bits a weight", {"bits": bits}) for bits in BITS]
    return [("birdie", f"birdie quality {quality:g}", {"quality": quality}) for quality in QUALITIES]


def birdie_rows(
    subject: Subject, settings: Sequence[tuple[str, str, Mapping[str, Any]]] | None = None
) -> Iterator[Row]:
    """One row a setting: the file birdie.save writes, as birdie.load reads it. Calibration is shared, its time not."""
    version = metadata.version("birdie")
    start = time.perf_counter()
    calibration = subject.calibration if subject.bits is not None else augmented(subject.calibration)
    known = CalibrationResult.of(subject.state, (subject.module, calibration, subject.loss))
    calibration_s = time.perf_counter() - start
    _say(f"calibrated in {calibration_s:.0f} s")
    for curve, scheme, arguments in birdie_settings(subject) if settings is None else settings:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.birdie"
            start = time.perf_counter()
            save(subject.state, path, **{"calibration": known, **arguments})
            seconds = calibration_s + time.perf_counter() - start
            size, quality = path.stat().st_size, subject.measure(load(path))
        yield row(curve, scheme, size, quality, seconds, version)
        _say(f"{scheme}: {size:,} bytes, KL {quality.kl:.5f}")


def row(curve: str, scheme: str, size: int, quality: Quality, encode_s: float, version: str) -> Row:
    """One line of the table; `curve` names the coder whose settings belong together."""
    return {
        "curve": curve,
        "scheme": scheme,
        "bytes": size,
        "bpb": quality.bpb,
        "kl": quality.kl,
        "kl_stderr": quality.stderr,
        "agreement": quality.agreement,
        "accuracy": quality.accuracy,
        "encode_s": encode_s,
        "version": version,
    }


class Cache:
    """Rows of rivals by what they depend on, one small file each."""

    def __init__(self, folder: Path, subject: Subject) -> None:
        self.folder, self.subject = folder, subject

    def rows(self, name: str, version: str, sources: Sequence[str], make: Callable[[], Sequence[Row]]) -> list[Row]:
        """What `make` gives, or what it gave for the same subject, name, version and source files."""
        texts = {source: hashlib.sha256((HERE / source).read_bytes()).hexdigest() for source in sources}
        key = json.dumps([self.subject.key, name, version, torch.__version__, texts], sort_keys=True)
        path = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        if path.is_file():
            held: list[Row] = json.loads(path.read_text())["rows"]
            return held
        made = list(make())
        self.folder.mkdir(parents=True, exist_ok=True)
        write_bytes(path, json.dumps({"key": json.loads(key), "rows": made}, indent=1).encode())
        return made


def coder_rows(subject: Subject, cache: Cache, curve: str, coders: Sequence[LossyCoder]) -> list[Row]:
    """One row a coder, each decoded from its own bytes."""

    def make(coder: LossyCoder) -> list[Row]:
        start = time.perf_counter()
        data = coder.encode(subject.state)
        seconds = time.perf_counter() - start
        quality = subject.measure(coder.decode(data))
        _say(f"{coder.scheme}: {len(data):,} bytes, KL {quality.kl:.5f}")
        return [row(curve, coder.scheme, len(data), quality, seconds, coder.version)]

    found: list[Row] = []
    for coder in coders:
        sources = ("lossy_rivals.py", "lossy_worker.py", "quality.py")
        found += cache.rows(coder.scheme, coder.version, sources, lambda coder=coder: make(coder))  # type: ignore[misc]
    return found


def record_rows(subject: Subject, cache: Cache, targets: Sequence[float]) -> list[Row]:
    """The record stack tuned at each target, finer and coarser."""
    version = record_stack.version()
    tuner: list[Tuner] = []

    def make(target: float) -> list[Row]:
        if not tuner:
            tuner.append(Tuner(subject, record_hessians(subject, cache.folder), _say))
        return [
            row(
                "record stack",
                f"record stack {one.a:g} σ{_embedding(one.b)}",
                one.bytes,
                one.quality,
                one.encode_s,
                version,
            )
            for one in measured(tuner[0], target)
        ]

    found: list[Row] = []
    for target in targets:
        sources = ("record_stack.py", "record_search.py", "quality.py")
        found += cache.rows(f"record {target}", version, sources, lambda target=target: make(target))  # type: ignore[misc]
    return found


def _embedding(step: float | None) -> str:
    return "" if step is None else f", embedding {step:g} σ"


def record_hessians(subject: Subject, folder: Path) -> dict[str, torch.Tensor]:
    """The record stack's Hessians of a subject, kept in `folder`: they take a pass over the calibration data."""
    source = hashlib.sha256((HERE / "record_stack.py").read_bytes()).hexdigest()[:8]
    path = folder / f"hessians-{subject.key}-{source}.pt"
    if not path.is_file():
        _say("record stack: Hessians")
        found = record_stack.hessians(subject.module, subject.calibration, record_stack.quantized_names(subject.state))
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            torch.save(found, temporary)
    held: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return held


def rival_rows(subject: Subject, cache: Cache, keys: Sequence[str], targets: Sequence[float]) -> Iterator[Row]:
    """The rows of the rivals named by `keys`; what is not installed says so where its version would stand."""
    makers: dict[str, Callable[[], list[Row]]] = {
        "record": lambda: record_rows(subject, cache, targets),
        "int6": lambda: coder_rows(subject, cache, "int6 + zstd", [lossy_rivals.row_maximum(6, "zstd")]),
        "int8": lambda: coder_rows(subject, cache, "int8 + zlib", [lossy_rivals.row_maximum(8, "zlib")]),
        "challenge": lambda: coder_rows(
            subject, cache, "int8 + zlib, the challenge's", [lossy_rivals.challenge_int8()]
        ),
        "nncodec": lambda: coder_rows(
            subject, cache, "NNCodec", [lossy_rivals.nncodec(qp) for qp in lossy_rivals.TRELLIS_QPS]
        ),
    }
    for key in keys:
        try:
            yield from makers[key]()
        except NotInstalledError as error:
            yield dict.fromkeys(row("", "", 0, Quality(0, 0, 0), 0, "")) | {
                "curve": key,
                "scheme": key,
                "version": str(error),
            }


def comparison(rows: Sequence[Row], targets: Sequence[float]) -> list[Row]:
    """birdie's bytes over each rival's at equal KL, and for images at equal agreement as well."""
    ours = [line for line in rows if line["curve"].startswith("birdie")]
    found: list[Row] = []
    for curve in dict.fromkeys(line["curve"] for line in rows if not line["curve"].startswith("birdie")):
        theirs = [line for line in rows if line["curve"] == curve and line["bytes"]]
        found += ratios(ours, theirs, targets if curve == "record stack" else ())
        if theirs and theirs[0]["accuracy"] is not None:
            found += ratios(ours, theirs, against="disagreement")
    return found


def chosen(text: str) -> list[str]:
    """The rivals in a comma-separated list; "none" is none.

    Raises:
        argparse.ArgumentTypeError: one is unknown.
    """
    keys = [key.strip() for key in text.split(",") if key.strip() and key.strip() != "none"]
    if unknown := [key for key in keys if key not in RIVALS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is no rival; choose from {', '.join(RIVALS)} or none")
    return keys


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--weights", type=Path, help="a GPT of the challenge, or a ResNet .th (default: the shared model)"
    )
    parser.add_argument("--rivals", type=chosen, default=list(RIVALS), help=f"of {','.join(RIVALS)}; or none")
    parser.add_argument("--targets", type=_numbers, default=list(TARGETS), help="KL the record stack is tuned for")
    parser.add_argument("--tokens", type=int, default=HELD_OUT_TOKENS, help="held-out tokens (default: 65,536)")
    parser.add_argument("--images", type=int, default=10_000, help="held-out images (default: 10,000)")
    parser.add_argument("--no-birdie", action="store_true", help="rivals alone")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where models and rivals' rows are kept")
    parser.add_argument("--plot", type=Path, help="also draw bytes against KL into this .svg")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    return parser.parse_args()


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def subject_of(options: argparse.Namespace) -> Subject:
    """The model the options name.

    Raises:
        ConfigError: BIRDIE_DATA is unset.
    """
    if not os.environ.get("BIRDIE_DATA"):
        raise ConfigError("quality is measured on the shared data; set BIRDIE_DATA to its folder")
    data, cache = Path(os.environ["BIRDIE_DATA"]), options.runs / "rd-cache"
    if options.weights is None:
        return bench_subject(options.runs, data, tokens=options.tokens)
    if options.weights.suffix == ".th":
        return resnet_subject(options.weights, data, cache / "cifar10.npz", count=options.images)
    return gpt_subject(options.weights.stem, options.weights, data, tokens=options.tokens)


def _shown(line: Row) -> Row:
    """A row of the table: what this kind of model has no value for is left out, small KLs keep their digits."""
    kept = {key: line[key] for key in TABLE if key not in ("bpb", "accuracy") or line[key] is not None}
    return {**kept, "kl": None if line["kl"] is None else f"{line['kl']:.6f}"}


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def main() -> None:
    """Parse, measure, print."""
    options = parse()
    torch.set_num_threads(1)
    try:
        subject = subject_of(options)
        cache = Cache(options.runs / "rd-cache", subject)
        rows = list(rival_rows(subject, cache, options.rivals, options.targets))
        rows += [] if options.no_birdie else birdie_rows(subject)
    except (BirdieError, NotInstalledError) as error:
        raise SystemExit(str(error)) from error
    compared = comparison(rows, options.targets)
    if options.plot:
        write_bytes(options.plot, svg(rows, f"{subject.name}: bytes of the whole file").encode())
    if options.json:
        report([*rows, *({"comparison": True, **line} for line in compared)], as_json=True)
        return
    for version in dict.fromkeys(f"{line['curve']}: {line['version']}" for line in rows):
        _say(version)
    report([_shown(line) for line in rows], as_json=False)
    if compared and not options.no_birdie:
        report(compared, as_json=False)


if __name__ == "__main__":
    main()
