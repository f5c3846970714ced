"""Bytes, error and KL of quantization schemes: `python -m benchmarks.schemes [--json] [--markdown]`.

    python -m benchmarks.schemes                        matrices of the shared GPT: the table of docs/schemes.md
    python -m benchmarks.schemes --subject layers       layers of two ResNets: transforms and Tucker (docs/schemes.md)
    python -m benchmarks.schemes --subject normal       normal numbers: how far above the rate–distortion bound?
    python -m benchmarks.schemes --schemes 'int4;ternary + data' --subject g128

Every row is a file that was written, loaded and measured. Of a network the scheme is applied to the matrices, and
`bytes` counts only those; embeddings are lossless, and small tensors stay in 16 bits. `error` is ‖w − ŵ‖² / ‖w‖²,
averaged over the weights; `predicted` is ½ Σ G(i) · e H eᵀ, the loss in nats per token that the calibration predicts;
`kl` is measured on held-out tokens. `+ data` means that a scheme used the sensitivity. The reference is a plain grid:
`grid_error` and `grid_kl` are the bytes over those of this grid at the same error and at the same KL, interpolated on
its curve. Of normal numbers `gap` is the bits of the entire file per number above the ½ log₂(1 / error) that any code
needs; a scalar grid with an ideal coder has 0.25 at high rates. Of layers, Tucker is cut at energies that cause a tenth
to four fifths of the grid's error at that scale, and the best is to be read.
"""

import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.command import Row, command_parser, errors_as_exit, log, report, shared_data
from benchmarks.curves import bytes_at
from benchmarks.subjects import CHOICES, Amounts, Subject, load_subject
from birdie.artifact.loading import load
from birdie.artifact.saving import save
from birdie.checkpoints.checkpoints import read_state_dict
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.calibration.sensitivity import measure
from birdie.compress.registry import parse_spec
from birdie.compress.scheme import Scheme, Sensitivity
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
NORMAL = ("sigma:0.1", "sigma:0.25", "sigma:0.5", "int8", "int6", "int4", "trellis:states=32,sigma=0.4145")
LAYERS = {
    "resnet20-12fca82f.th": ("layer1.1.conv1.weight", "layer2.1.conv2.weight", "layer3.1.conv1.weight"),
    "resnet32-d509ac18.th": ("layer1.2.conv2.weight", "layer3.2.conv2.weight"),
}
LAYER_GRID = tuple(f"spectral:identity,scan=none,sigma={c:g}" for c in (0.15, 0.3, 0.5, 0.7, 1, 1.4, 2, 2.8, 4))
SCALES, SHARES = (0.3, 1.0, 2.0), (0.1, 0.4, 0.8)


@dataclass(frozen=True)
class Case:
    """Tensors to compress, what is applied to them, and how they are measured.

    Attributes:
        name: of the row.
        state: tensors by name.
        names: of those that the scheme is applied to.
        grid: specs of the reference.
        subject: measures the KL; None: tensors alone.
        sensitivities: of the matrices.
    """

    name: str
    state: Mapping[str, Tensor]
    names: Sequence[str]
    grid: Sequence[str] = GRID
    subject: Subject | None = None
    sensitivities: Mapping[str, Sensitivity] = field(default_factory=dict)


def network(subject: Subject) -> Case:
    """Return the matrices of a network, calibrated."""
    names = [name for name, weight in subject.state.items() if is_matrix(weight) and "emb" not in name]
    known = measure(subject.module, subject.calibration, subject.loss)
    return Case(subject.name, subject.state, names, GRID, subject, known)


def normal(side: int, seed: int = 0) -> Case:
    """Return (side, side) independent normal numbers."""
    return Case("normal", {"x": torch.randn(side, side, generator=torch.Generator().manual_seed(seed))}, ["x"])


def layers(data: Path) -> Iterator[Case]:
    """Yield layers of the CIFAR ResNets of the shared data."""
    for file, ends in LAYERS.items():
        for name, weight in read_state_dict(data / "weights" / "resnet_cifar10" / file).items():
            if name.endswith(ends):
                yield Case(f"{file.partition('-')[0]} {name}", {name: weight.float()}, [name], LAYER_GRID)


def layer_specs(curve: Sequence[Row]) -> Iterator[str]:
    """Yield the transforms and Tucker factors of a layer, at each scale."""
    errors = {row["scheme"].rpartition("=")[2]: row["error"] for row in curve}
    for scale in SCALES:
        dct = f"spectral:dct,axes=kernel,scan=planes,sigma={scale:g}"
        yield dct
        for share in SHARES:
            energy = f"{1 - share * errors[f'{scale:g}']:.6g}"
            for base in (f"sigma:{scale:g},per_tensor", dct):
                yield f"tucker:energy={energy},base={base}"


def row(case: Case, spec: str) -> Row:
    """Compress, decode from the file, and measure."""
    text, _, data = spec.partition(" + ")
    scheme, names = parse_spec(text), case.names
    known = CalibrationResult(dict(case.state), dict(case.sensitivities)) if data else None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.birdie"
        start = time.perf_counter()
        rules: list[tuple[str, str | Scheme]] = [*((name, scheme) for name in names), ("*emb*", "lossless")]
        summary = save(case.state, path, scheme=rules[: len(names)] if not case.subject else rules, calibration=known)
        encoded = time.perf_counter()
        state = load(path)
        decoded, file_bytes = time.perf_counter(), path.stat().st_size
    size = sum(tensor.bytes for tensor in summary.tensors if tensor.name in names)
    weights = sum(case.state[name].numel() for name in names)
    error = predicted = 0.0
    for name in names:
        weight = case.state[name].double()
        difference = (state[name].double() - weight).flatten(1)
        error += float(difference.square().sum() / weight.square().sum()) * weight.numel() / weights
        if name in case.sensitivities:
            predicted += _predicted_nats(difference, case.sensitivities[name])
    line: Row = {"subject": case.name, "scheme": spec, "bytes": size, "bits": 8 * size / weights, "error": error}
    if case.subject is not None:
        quality = case.subject.measure(state)
        line |= {"predicted": predicted, "kl": quality.kl, "bpb": quality.bpb}
    elif case.name == "normal":
        line |= {"gap": 8 * file_bytes / weights - max(0.0, math.log2(1 / error) / 2)}
    return line | {"encode_s": round(encoded - start, 2), "decode_s": round(decoded - encoded, 2)}


def _predicted_nats(difference: Tensor, sensitivity: Sensitivity) -> float:
    """Return ½ Σ G(i) · e(i) H e(i)ᵀ."""
    if sensitivity.hessian is None or sensitivity.row_fisher is None:
        return 0.0
    per_row = (difference @ sensitivity.hessian.double() * difference).sum(dim=1)
    return 0.5 * float((sensitivity.row_fisher.double() * per_row).sum())


@torch.no_grad()
def rows(case: Case, specs: Sequence[str] | None) -> list[Row]:
    """Return the rows of the grid's curve, then of `specs` (None: of layers), each with its bytes over the grid's."""
    curve = [row(case, spec) for spec in case.grid]
    lines = [*curve]
    for spec in layer_specs(curve) if specs is None else specs:
        lines.append(row(case, spec))
        log(f"{case.name}, {spec}: {lines[-1]['bytes']:,} bytes, error {lines[-1]['error']:.3g}")
    for line in lines:
        for against in ("error", "kl") if case.subject is not None else ("error",):
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
        ratios = [f"{row[key]:.3f}" if row.get(key) else "–" for key in ("grid_error", "grid_kl")]
        kl = f"{row['kl']:.4f}" if "kl" in row else "–"
        values = [f"{row['bytes']:,}", f"{row['bits']:.2f}", f"{row['error']:.2e}", kl, *ratios]
        lines.append("| " + " | ".join([f"`{row['scheme']}`", *values]) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--subject", choices=(*CHOICES, "layers", "normal"), default="bench", help="(default: bench)")
    parser.add_argument("--markdown", action="store_true", help="the table of docs/schemes.md")
    parser.add_argument("--schemes", help="specs, separated by semicolons (default: those of the subject)")
    parser.add_argument("--side", type=int, default=1000, help="rows and columns of normal numbers (default: 1,000)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs (default: runs)")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    chosen = [spec.strip() for spec in options.schemes.split(";") if spec.strip()] if options.schemes else None
    with errors_as_exit():
        if options.subject == "layers":
            lines = [line for case in layers(shared_data()) for line in rows(case, chosen)]
        elif options.subject == "normal":
            lines = rows(normal(options.side), chosen or NORMAL)
        else:
            amounts = Amounts(TOKENS, calibration_tokens=CALIBRATION_TOKENS)
            lines = rows(network(load_subject(options.subject, options.runs, amounts)), chosen or SPECS)
    if options.markdown:
        sys.stdout.write(markdown(lines))
    else:
        report(lines, as_json=options.json)


if __name__ == "__main__":
    main()
