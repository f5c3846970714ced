"""What each scheme costs and what it spoils, on one model: `python -m benchmarks.schemes [--json] [--markdown]`.

Every row is a file that was written, loaded and measured. Matrices take the scheme and are what `bytes` counts; the
embedding, which would drown them, is lossless, and what is small is kept in 16 bits. `error` is
‖w − ŵ‖² / ‖w‖², averaged over the weights; `predicted` is ½ Σ G(i) · e H eᵀ, the loss in nats a token that the
calibration foretells; `kl` is the one measured on held-out tokens. A plain grid with steps of σ(row) · c is the measure
of all: `grid_error` and `grid_kl` are the bytes over those of that grid at the same error and at the same KL,
read off its curve.

`+ data` means that the scheme was told the sensitivity; rows without looked at the weights alone.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.curves import bytes_at
from benchmarks.quality import Subject, bench_subject
from benchmarks.report import report
from birdie.artifact.load import load
from birdie.artifact.save import save
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.calibration.sensitivity import calibrate
from birdie.compress.registry import parse_spec
from birdie.compress.scheme import Sensitivity
from birdie.compress.small_tensors import is_matrix
from birdie.errors import ConfigError

TOKENS, CALIBRATION_TOKENS = 8_192, 8_192
GRID = tuple(f"sigma:{c:g}" for c in (0.05, 0.15, 0.4, 0.7, 1.1, 1.6, 2.2, 3.0))
SPECS = (
    *("int8", "int6", "int6:clip=search", "int6:clip=search + data"),
    *("int4", "int4:clip=search", "int4:clip=search + data", "int4:group_size=64", "int3", "int3:clip=search"),
    *("sdclip:bits=6,clip_sigmas=12.85", "gptq:bits=6,clip_sigmas=12.85 + data"),
    *("trellis:states=1,sigma=0.4145 + data", "trellis:states=32,sigma=0.4145 + data"),
    *("ternary", "ternary + data", "ternary:group_size=32", "binary"),
    *(
        "codebook:k=4",
        "codebook:k=16",
        "codebook:k=16 + data",
        "codebook:k=16,per_row",
        "codebook:k=64,per_row,rate=0.008",
    ),
    *("rotation:bits=2", "rotation:bits=3", "rotation:bits=4", "rotation:bits=3,residual", "rotation:base=sigma:0.4"),
    *("lowrank:rank=4,base=int4", "lowrank:rank=4,base=int4 + data", "lowrank:rank=4,base=sigma:0.4 + data"),
    *("lowrank:rank=16,base=sigma:0.8", "lowrank:rank=16,base=sigma:0.8 + data", "lowrank:rank=8,base=ternary + data"),
    *("spectral:identity,sigma=0.4", "spectral:auto,sigma=0.4", "spectral:dct,edge=8,sigma=0.4"),
    *("spectral:wavelet53,sigma=0.4", "spectral:hadamard,sigma=0.4"),
)
Row = dict[str, Any]


def row(subject: Subject, spec: str, told: Mapping[str, Sensitivity]) -> Row:
    """Compress, decode from the file, measure."""
    text, _, data = spec.partition(" + ")
    scheme = parse_spec(text)
    names = [name for name, weight in subject.state.items() if is_matrix(weight) and "emb" not in name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.birdie"
        start = time.perf_counter()
        summary = save(
            subject.state,
            path,
            scheme=[*((name, scheme) for name in names), ("*emb*", "lossless")],
            calibration=CalibrationResult(dict(subject.state), dict(told)) if data else None,
        )
        encoded = time.perf_counter()
        state = load(path)
        decoded, size = time.perf_counter(), sum(each.bytes for each in summary.tensors if each.name in names)
    weights = sum(subject.state[name].numel() for name in names)
    error = predicted = 0.0
    for name in names:
        weight = subject.state[name].double()
        away = (state[name].double() - weight).flatten(1)
        error += float(away.square().sum() / weight.square().sum()) * weight.numel() / weights
        predicted += _nats(away, told[name]) if name in told else 0.0
    quality = subject.measure(state)
    times = {"encode_s": round(encoded - start, 2), "decode_s": round(decoded - encoded, 2)}
    found = {"error": error, "predicted": predicted, "kl": quality.kl, "bpb": quality.bpb}
    return {"scheme": spec, "bytes": size, "bits": 8 * size / weights, **found, **times}


def _nats(away: Tensor, told: Sensitivity) -> float:
    """½ Σ G(i) · e(i) H e(i)ᵀ."""
    if told.hessian is None or told.row_fisher is None:
        return 0.0
    spent = (away @ told.hessian.double() * away).sum(dim=1)
    return 0.5 * float((told.row_fisher.double() * spent).sum())


def rows(subject: Subject, specs: Sequence[str], say: Callable[[str], None]) -> list[Row]:
    """The grid's curve, then `specs`, each with its bytes over the grid's."""
    told = calibrate(subject.module, subject.calibration, subject.loss)
    found = []
    for spec in (*GRID, *specs):
        with torch.no_grad():
            found.append(row(subject, spec, told))
        say(f"{spec}: {found[-1]['bytes']:,} bytes, KL {found[-1]['kl']:.5f}")
    curve = found[: len(GRID)]
    for each in found:
        for against in ("error", "kl"):
            size = bytes_at(curve, each[against], against)
            each[f"grid_{against}"] = None if size is None else round(each["bytes"] / size, 4)
    return found


def markdown(found: Sequence[Row]) -> str:
    """The rows as the table of docs/schemes.md."""
    lines = [
        "| scheme | bytes | bits | error | KL | bytes / grid, same error | same KL |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for each in found:
        ratios = [f"{each[key]:.3f}" if each[key] else "–" for key in ("grid_error", "grid_kl")]
        figures = [f"{each['bytes']:,}", f"{each['bits']:.2f}", f"{each['error']:.2e}", f"{each['kl']:.4f}", *ratios]
        lines.append("| " + " | ".join([f"`{each['scheme']}`", *figures]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    parser.add_argument("--markdown", action="store_true", help="the table of docs/schemes.md")
    parser.add_argument("--schemes", default=";".join(SPECS), help="specs, separated by semicolons")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs (default: runs)")
    parser.add_argument("--data", type=Path, help="the shared data (default: the folder BIRDIE_DATA names)")
    options = parser.parse_args()
    data = options.data or Path(os.environ.get("BIRDIE_DATA", ""))
    if not data.is_dir() or not str(data).strip("."):
        raise ConfigError("the benchmark is measured on the shared data; set BIRDIE_DATA to its folder")
    torch.manual_seed(0)
    subject = bench_subject(options.runs, data, tokens=TOKENS, calibration_tokens=CALIBRATION_TOKENS)
    specs = [spec.strip() for spec in options.schemes.split(";") if spec.strip()]
    found = rows(subject, specs, lambda words: print(words, file=sys.stderr, flush=True))
    if options.markdown:
        sys.stdout.write(markdown(found))
    else:
        report(found, as_json=options.json)


if __name__ == "__main__":
    main()
