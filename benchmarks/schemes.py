"""Bytes, error and KL of each quantization scheme on one model: `python -m benchmarks.schemes [--json] [--markdown]`.

Every row is a file that was written, loaded and measured. The scheme is applied to the matrices, and `bytes` counts
only those; the embedding, which has most of the bytes, is lossless, and small tensors stay in 16 bits. `error` is ‖w −
ŵ‖² / ‖w‖², averaged over the weights; `predicted` is ½ Σ G(i) · e H eᵀ, the loss in nats per token that the calibration
predicts; `kl` is measured on held-out tokens. The reference is a plain grid with steps σ(row) · c: `grid_error` and
`grid_kl` are the bytes over those of this grid at the same error and at the same KL, interpolated on its curve.

`+ data` in a scheme's name means that it used the sensitivity; the other rows used the weights alone.
"""

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import command_parser, errors_as_exit, log, report
from benchmarks.curves import bytes_at
from benchmarks.quality import Amounts, Folders, Subject, load_subject
from benchmarks.shared_data import shared_data
from birdie.artifact.load import load
from birdie.artifact.save import save
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.calibration.sensitivity import calibrate
from birdie.compress.registry import parse_spec
from birdie.compress.scheme import Sensitivity
from birdie.compress.small_tensors import is_matrix

TOKENS, CALIBRATION_TOKENS = 8_192, 8_192
GRID = tuple(f"sigma:{c:g}" for c in (0.05, 0.15, 0.4, 0.7, 1.1, 1.6, 2.2, 3.0))
SPECS = (
    *("int8", "int6", "int6:clip=search", "int6:clip=search + data"),
    *("int4", "int4:clip=search", "int4:clip=search + data", "int4:group_size=64", "int3", "int3:clip=search"),
    *("sdclip:bits=6,clip_sigmas=12.85", "gptq:bits=6,clip_sigmas=12.85 + data"),
    *("trellis:states=1,sigma=0.4145 + data", "trellis:states=32,sigma=0.4145 + data"),
    *("ternary", "ternary + data", "ternary:group_size=32", "binary"),
    *("codebook:k=4", "codebook:k=16", "codebook:k=16 + data", "codebook:k=16,per_row"),
    "codebook:k=64,per_row,rate=0.008",
    *("rotation:bits=2", "rotation:bits=3", "rotation:bits=4", "rotation:base=sigma:0.4"),
    *("lowrank:rank=4,base=int4", "lowrank:rank=4,base=int4 + data", "lowrank:rank=4,base=sigma:0.4 + data"),
    *("lowrank:rank=16,base=sigma:0.8", "lowrank:rank=16,base=sigma:0.8 + data", "lowrank:rank=8,base=ternary + data"),
    *("spectral:identity,sigma=0.4", "spectral:auto,sigma=0.4", "spectral:dct,edge=8,sigma=0.4"),
    *("spectral:wavelet53,sigma=0.4", "spectral:hadamard,sigma=0.4"),
)
Row = dict[str, Any]


def row(subject: Subject, spec: str, sensitivities: Mapping[str, Sensitivity]) -> Row:
    """Compress, decode from the file, and measure."""
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
            calibration=CalibrationResult(dict(subject.state), dict(sensitivities)) if data else None,
        )
        encoded = time.perf_counter()
        state = load(path)
        decoded, size = time.perf_counter(), sum(tensor.bytes for tensor in summary.tensors if tensor.name in names)
    weights = sum(subject.state[name].numel() for name in names)
    error = predicted = 0.0
    for name in names:
        weight = subject.state[name].double()
        difference = (state[name].double() - weight).flatten(1)
        error += float(difference.square().sum() / weight.square().sum()) * weight.numel() / weights
        predicted += _predicted_nats(difference, sensitivities[name]) if name in sensitivities else 0.0
    quality = subject.measure(state)
    times = {"encode_s": round(encoded - start, 2), "decode_s": round(decoded - encoded, 2)}
    losses = {"error": error, "predicted": predicted, "kl": quality.kl, "bpb": quality.bpb}
    return {"scheme": spec, "bytes": size, "bits": 8 * size / weights, **losses, **times}


def _predicted_nats(difference: Tensor, sensitivity: Sensitivity) -> float:
    """Return ½ Σ G(i) · e(i) H e(i)ᵀ."""
    if sensitivity.hessian is None or sensitivity.row_fisher is None:
        return 0.0
    per_row = (difference @ sensitivity.hessian.double() * difference).sum(dim=1)
    return 0.5 * float((sensitivity.row_fisher.double() * per_row).sum())


def rows(subject: Subject, specs: Sequence[str]) -> list[Row]:
    """Return the rows of the grid's curve, then of `specs`, each with its bytes over the grid's."""
    sensitivities = calibrate(subject.module, subject.calibration, subject.loss)
    lines = []
    for spec in (*GRID, *specs):
        with torch.no_grad():
            lines.append(row(subject, spec, sensitivities))
        log(f"{spec}: {lines[-1]['bytes']:,} bytes, KL {lines[-1]['kl']:.5f}")
    curve = lines[: len(GRID)]
    for line in lines:
        for against in ("error", "kl"):
            size = bytes_at(curve, line[against], against)
            line[f"grid_{against}"] = None if size is None else round(line["bytes"] / size, 4)
    return lines


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as the table of docs/schemes.md."""
    lines = [
        "| scheme | bytes | bits | error | KL | bytes / grid, same error | same KL |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        ratios = [f"{row[key]:.3f}" if row[key] else "–" for key in ("grid_error", "grid_kl")]
        values = [f"{row['bytes']:,}", f"{row['bits']:.2f}", f"{row['error']:.2e}", f"{row['kl']:.4f}", *ratios]
        lines.append("| " + " | ".join([f"`{row['scheme']}`", *values]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--markdown", action="store_true", help="the table of docs/schemes.md")
    parser.add_argument("--schemes", default=";".join(SPECS), help="specs, separated by semicolons")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs (default: runs)")
    parser.add_argument("--data", type=Path, help="folder of the shared data (default: BIRDIE_DATA)")
    options = parser.parse_args()
    torch.manual_seed(0)
    with errors_as_exit():
        data = options.data or shared_data()
        amounts = Amounts(TOKENS, calibration_tokens=CALIBRATION_TOKENS)
        model = load_subject("bench", Folders(options.runs, data), amounts)
        lines = rows(model, [spec.strip() for spec in options.schemes.split(";") if spec.strip()])
    if options.markdown:
        sys.stdout.write(markdown(lines))
    else:
        report(lines, as_json=options.json)


if __name__ == "__main__":
    main()
