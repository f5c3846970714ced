"""Bytes against quality of lossy coders of weights: `python -m benchmarks.rate_distortion [--json] [--plot FILE.svg]`.

    python -m benchmarks.rate_distortion                                every network of benchmarks.subjects
    python -m benchmarks.rate_distortion --subjects bench,resnet20      some of them
    python -m benchmarks.rate_distortion --rivals record,nncodec --targets 0.005,0.01,0.02
    python -m benchmarks.rate_distortion --rivals record --tune 4       tuned for four times as long as saving takes

Every row is a file that was written, decoded from its bytes and then measured; the entire file counts. Equal quality
means equal mean KL(float ‖ decoded) on held-out data, interpolated on birdie's curve at the rival's KL. Over several
networks, the worst and the median ratio to each rival are printed last, and the ratios of networks of other people on
which nothing was chosen beside them. The rows of rivals are cached in runs/rd-cache, keyed by everything they depend
on. docs/benchmarks.md explains the rows.
"""

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import lossy_rivals, record_stack
from benchmarks.command import comma_separated, command_parser, errors_as_exit, log, one_of, report
from benchmarks.curves import quality_chart, ratios
from benchmarks.lossy_rivals import LossyCoder
from benchmarks.networks import augmented
from benchmarks.record_stack import Tuner, measure_files
from benchmarks.rivals import HERE, NotInstalledError
from benchmarks.subjects import (
    CHOICES,
    HELD_OUT_TOKENS,
    KEPT_OUT,
    SUBJECTS,
    TEST_IMAGES,
    Amounts,
    Quality,
    Subject,
    load_subject,
)
from birdie.artifact.loading import load
from birdie.artifact.saving import save
from birdie.compress.calibration.result import CalibrationResult
from birdie.system.files import atomic_path, write_bytes
from birdie.system.provenance import __version__

Row = dict[str, Any]
TARGETS = (0.005, 0.01, 0.02)  # KL at which the record stack is tuned
RIVALS = ("record", "int6", "int8", "challenge", "nncodec")
QUALITIES = (0.00004, 0.0004, 0.002, 0.005, 0.01, 0.02, 0.045)  # KL that birdie is asked for
BITS = (2.3, 2.7, 3.2, 3.7, 4.3, 4.8, 5.2, 6.0)  # bits per weight that it is asked for, of image models
TABLE = ("scheme", "bytes", "bpb", "kl", "agreement", "accuracy", "encode_s")  # further keys are in --json


def birdie_settings(subject: Subject) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (curve, scheme, arguments of birdie.save without calibration) of each of birdie's rows.

    The KL on calibration images predicts that on held-out images poorly, so image models are saved at bits per weight.
    """
    if subject.has_images:
        return [("birdie", f"birdie {bits:g} bits a weight", {"bits": bits}) for bits in BITS]
    return [("birdie", f"birdie quality {quality:g}", {"quality": quality}) for quality in QUALITIES]


def birdie_rows(
    subject: Subject,
    settings: Sequence[tuple[str, str, Mapping[str, Any]]] | None = None,
    *,
    tune: float = 0.0,
    targets: Sequence[float] = TARGETS,
) -> Iterator[Row]:
    """Yield a row for each setting: the decoded file of birdie.save. Every row includes the time of the calibration.

    Args:
        subject: the network.
        settings: default: those of `birdie_settings`.
        tune: rows near `targets` once more at the same bytes, tuned for so many times as long as saving took.
        targets: KL; rows count whose own is up to a third below one, or up to four times as much.
    """
    start = time.perf_counter()
    calibration = augmented(subject.calibration) if subject.has_images else subject.calibration
    known = CalibrationResult.of(subject.state, (subject.module, calibration, subject.loss))
    calibration_s = time.perf_counter() - start
    log(f"calibrated in {calibration_s:.0f} s")
    for curve, scheme, arguments in birdie_settings(subject) if settings is None else settings:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.birdie"
            start = time.perf_counter()
            save(subject.state, path, **{"calibration": known, **arguments})
            seconds = calibration_s + time.perf_counter() - start
            size, quality = path.stat().st_size, subject.measure(load(path))
            yield row(curve, scheme, size, quality, seconds, __version__)
            log(f"{scheme}: {size:,} bytes, KL {quality.kl:.5f}, {seconds:.0f} s")
            if not tune or not any(0.67 * target <= quality.kl <= 4 * target for target in targets):
                continue
            start = time.perf_counter()
            save(subject.state, path, budget=size, calibration=known, tune=tune * seconds)
            total = calibration_s + time.perf_counter() - start
            tuned_size, tuned = path.stat().st_size, subject.measure(load(path))
        yield row(f"{curve}, tuned", f"{scheme}, tuned", tuned_size, tuned, total, __version__)
        log(f"… tuned: {tuned_size:,} bytes, KL {tuned.kl:.5f}, × {tuned.kl / quality.kl:.3f}, {total:.0f} s")


def row(curve: str, scheme: str, size: int, quality: Quality, encode_s: float, version: str) -> Row:
    """Return one row; `curve` names the coder whose settings belong together."""
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
    """Cached rows of rivals, one small file for each set of everything they depend on."""

    def __init__(self, folder: Path, subject: Subject) -> None:
        self.folder, self.subject = folder, subject

    def rows(self, name: str, version: str, sources: Sequence[str], make: Callable[[], Sequence[Row]]) -> list[Row]:
        """Return the rows of `make()`, or the cached rows of the same subject, name, version and source files."""
        texts = {source: hashlib.sha256((HERE / source).read_bytes()).hexdigest() for source in sources}
        key = json.dumps([self.subject.key, name, version, torch.__version__, texts], sort_keys=True)
        path = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        if path.is_file():
            cached: list[Row] = json.loads(path.read_text())["rows"]
            return cached
        rows = list(make())
        self.folder.mkdir(parents=True, exist_ok=True)
        write_bytes(path, json.dumps({"key": json.loads(key), "rows": rows}, indent=1).encode())
        return rows


def coder_rows(subject: Subject, cache: Cache, curve: str, coders: Sequence[LossyCoder]) -> list[Row]:
    """Return a row for each coder, decoded from its own bytes."""

    def make(coder: LossyCoder) -> list[Row]:
        start = time.perf_counter()
        data = coder.encode(subject.state)
        seconds = time.perf_counter() - start
        quality = subject.measure(coder.decode(data))
        log(f"{coder.scheme}: {len(data):,} bytes, KL {quality.kl:.5f}")
        return [row(curve, coder.scheme, len(data), quality, seconds, coder.version)]

    rows: list[Row] = []
    for coder in coders:
        sources = ("lossy_rivals.py", "rival_worker.py", "subjects.py")
        rows += cache.rows(coder.scheme, coder.version, sources, lambda coder=coder: make(coder))  # type: ignore[misc]
    return rows


def record_rows(subject: Subject, cache: Cache, targets: Sequence[float]) -> list[Row]:
    """Return the rows of the record stack tuned at each target KL, slightly finer and slightly coarser."""
    version = record_stack.version()
    tuner: list[Tuner] = []

    def make(target: float) -> list[Row]:
        if not tuner:
            tuner.append(Tuner(subject, record_hessians(subject, cache.folder), log))
        return [
            row("record stack", f"record stack {_factors(file)}", file.bytes, file.quality, file.encode_s, version)
            for file in measure_files(tuner[0], target)
        ]

    rows: list[Row] = []
    for target in targets:
        sources = ("record_stack.py", "subjects.py")
        rows += cache.rows(f"record {target}", version, sources, lambda target=target: make(target))  # type: ignore[misc]
    return rows


def _factors(file: record_stack.Measured) -> str:
    return f"{file.a:g} σ" + ("" if file.b is None else f", embedding {file.b:g} σ")


def record_hessians(subject: Subject, folder: Path) -> dict[str, torch.Tensor]:
    """Return the record stack's Hessians of a subject, cached in `folder`: they take a pass over the data."""
    source = hashlib.sha256((HERE / "record_stack.py").read_bytes()).hexdigest()[:8]
    path = folder / f"hessians-{subject.key}-{source}.pt"
    if not path.is_file():
        log("record stack: Hessians")
        hessians = record_stack.hessians(
            subject.module, subject.calibration, record_stack.quantized_names(subject.state)
        )
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            torch.save(hessians, temporary)
    cached: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return cached


def rival_rows(subject: Subject, cache: Cache, keys: Sequence[str], targets: Sequence[float]) -> Iterator[Row]:
    """Yield the rows of the rivals named by `keys`; a rival that is not installed says so in its `version`."""
    coders: dict[str, tuple[str, Callable[[], list[LossyCoder]]]] = {
        "int6": ("int6 + zstd", lambda: [lossy_rivals.row_maximum(6, "zstd")]),
        "int8": ("int8 + zlib", lambda: [lossy_rivals.row_maximum(8, "zlib")]),
        "challenge": ("int8 + zlib, the challenge's", lambda: [lossy_rivals.challenge_int8()]),
        "nncodec": ("NNCodec", lambda: [lossy_rivals.nncodec(qp) for qp in lossy_rivals.TRELLIS_QPS]),
    }
    for key in keys:
        try:
            if key == "record":
                yield from record_rows(subject, cache, targets)
            else:
                curve, make = coders[key]
                yield from coder_rows(subject, cache, curve, make())
        except NotInstalledError as error:
            yield dict.fromkeys(row("", "", 0, Quality(0, 0, 0), 0, "")) | {
                "curve": key,
                "scheme": key,
                "version": str(error),
            }


def comparison(rows: Sequence[Row], targets: Sequence[float]) -> list[Row]:
    """Return birdie's bytes over each rival's at equal KL, and for images at equal agreement as well."""
    curves = {
        name: [line for line in rows if line["curve"] == name] for name in dict.fromkeys(r["curve"] for r in rows)
    }
    ours = {name: lines for name, lines in curves.items() if name.startswith("birdie")}
    lines: list[Row] = []
    for name, birdie_lines in ours.items():
        for curve in (name for name in curves if name not in ours):
            rival_lines = [line for line in curves[curve] if line["bytes"]]
            compared = ratios(birdie_lines, rival_lines, targets if curve == "record stack" else ())
            if rival_lines and rival_lines[0]["accuracy"] is not None:
                compared += ratios(birdie_lines, rival_lines, against="disagreement")
            lines += [{"of": name, **line} for line in compared]
    return lines


def rival_keys(text: str) -> list[str]:
    """Return the rivals of a comma-separated list; "none" is ignored.

    Raises:
        argparse.ArgumentTypeError: a rival is unknown.
    """
    return [key for key in comma_separated(one_of((*RIVALS, "none"), "rival"))(text) if key != "none"]


def overview(compared: Mapping[str, Sequence[Row]]) -> list[Row]:
    """Return for each rival the worst and the median network by bytes at equal KL.

    Args:
        compared: network → lines of `comparison`; a network counts by the mean of its ratios to a rival. Those on which
            nothing was chosen have columns of their own.
    """
    by_rival: dict[tuple[str, str], dict[str, list[float]]] = {}
    for name, lines in compared.items():
        for line in lines:
            if line["equal"] == "kl" and line["ratio"] is not None:
                by_rival.setdefault((line["of"], line["rival"]), {}).setdefault(name, []).append(line["ratio"])
    rows: list[Row] = []
    for (ours, rival), networks in by_rival.items():
        every = {name: round(statistics.fmean(values), 4) for name, values in networks.items()}
        means = {name: mean for name, mean in every.items() if name not in KEPT_OUT}
        kept_out = {name: every.get(name) for name in KEPT_OUT}
        worst = max(means, key=means.__getitem__, default="")
        median = round(statistics.median(means.values()), 4) if means else None
        line = {"of": ours, "rival": rival, "networks": len(means), "worst": means.get(worst), "network": worst}
        rows.append({**line, "median": median, **kept_out})
    return rows


def _table_row(line: Row) -> Row:
    """Return a row of the table: without keys that this kind of model has no value for, the KL with more digits."""
    cells = {key: line[key] for key in TABLE if key not in ("bpb", "accuracy") or line[key] is not None}
    return {**cells, "kl": None if line["kl"] is None else f"{line['kl']:.6f}"}


def measured(name: str, options: argparse.Namespace) -> list[Row]:
    """Return the rows of one network."""
    known = load_subject(name, options.runs, Amounts(options.tokens, options.images))
    cache = Cache(options.runs / "rd-cache", known)
    rows = list(rival_rows(known, cache, options.rivals, options.targets))
    return rows if options.no_birdie else rows + list(birdie_rows(known, tune=options.tune, targets=options.targets))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the tables."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--subjects", type=comma_separated(one_of(CHOICES, "network")), default=[*SUBJECTS, *KEPT_OUT], help="networks"
    )
    parser.add_argument("--rivals", type=rival_keys, default=list(RIVALS), help=f"of {','.join(RIVALS)}; or none")
    parser.add_argument(
        "--targets", type=comma_separated(float), default=list(TARGETS), help="KL that the record stack is tuned for"
    )
    parser.add_argument("--tune", type=float, default=0.0, help="tune for so many times as long as saving takes")
    parser.add_argument("--tokens", type=int, default=HELD_OUT_TOKENS, help="held-out tokens (default: 65,536)")
    parser.add_argument("--images", type=int, default=TEST_IMAGES, help="held-out images (default: 10,000)")
    parser.add_argument("--no-birdie", action="store_true", help="rivals only")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of models and cached rows")
    parser.add_argument("--plot", type=Path, help="also draw bytes against KL of one network, .svg")
    options = parser.parse_args(arguments)
    if options.plot and len(options.subjects) > 1:
        raise SystemExit("--plot draws one network; name it by --subjects")
    torch.set_num_threads(1)
    rows: list[Row] = []
    compared: dict[str, list[Row]] = {}
    for name in options.subjects:
        with errors_as_exit(NotInstalledError):
            lines = measured(name, options)
        compared[name] = comparison(lines, options.targets)
        rows += [{"network": name, **line} for line in lines]
        if options.plot:
            write_bytes(options.plot, quality_chart(lines, f"{name}: bytes of the file"))
        if not options.json:
            for version in dict.fromkeys(f"{name}, {line['curve']}: {line['version']}" for line in lines):
                log(version)
            for table in ([_table_row(line) for line in lines], compared[name]):
                report(table, as_json=False)
    summary = overview(compared)
    if options.json:
        lines = [{"network": name, "comparison": True, **line} for name in compared for line in compared[name]]
        report([*rows, *lines, *({"overview": True, **line} for line in summary)], as_json=True)
    elif summary:
        report(summary, as_json=False)


if __name__ == "__main__":
    main()
