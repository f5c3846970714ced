"""Bytes at equal error of files made without data, birdie's and naive ones: `python -m benchmarks.without_data`.

    python -m benchmarks.without_data                          every network of the shared data (BIRDIE_DATA)
    python -m benchmarks.without_data --subjects silero        some of them
    python -m benchmarks.without_data --inputs synthetic       birdie gets the module as well, but no data

The error is the mean KL of the predictions on held-out data, and of Silero's the mean difference of probabilities.
Naive files have per-channel integers of 8 to 3 bits under zstd -22. birdie writes
files at budgets from int3's bytes to int8's. The column `rise` is the largest error over that at the next smaller
budget. Constants of the prior were chosen on resnet20, silero and g128.
"""

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import lossy_rivals
from benchmarks.command import comma_separated, command_parser, errors_as_exit, log, one_of, report, shared_data
from benchmarks.curves import bytes_at
from benchmarks.lossy_rivals import LossyCoder
from benchmarks.networks import load_silero
from benchmarks.subjects import SEQ_LEN, SUBJECTS, Amounts, load_subject
from birdie.artifact.loading import load
from birdie.artifact.saving import save
from birdie.errors import BudgetError
from birdie.system.provenance import __version__

BITS = (8, 6, 5, 4, 3)
STEP, STEPS = 1.15, 8  # further budgets below int3's bytes, until birdie's error is the largest of the naive files
IMAGES, TOKENS = 2000, 65_536
NETWORKS = (*SUBJECTS, "silero")
Row = dict[str, Any]
State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Network:
    """A network with a measure of its decoded forms.

    Attributes:
        name: for rows.
        module, state: as trained.
        measure: decoded tensors → (error, share of decisions that are equal).
    """

    name: str
    module: nn.Module
    state: State
    measure: Callable[[State], tuple[float, float]] = field(repr=False)


def network(name: str, runs: Path) -> Network:
    """Return one of `NETWORKS`, or the tiny subject."""
    if name == "silero":
        return _silero(shared_data())
    known = load_subject(name, runs, Amounts(TOKENS, IMAGES, calibration_tokens=SEQ_LEN))

    def measure(state: State) -> tuple[float, float]:
        quality = known.measure(state)
        return quality.kl, quality.agreement

    return Network(name, known.module, known.state, measure)


def _silero(data: Path) -> Network:
    module, state, clips = load_silero(data)
    with torch.no_grad():
        expected = module(clips)

    def measure(state: State) -> tuple[float, float]:
        with torch.no_grad():
            floats = {name: weight.float() for name, weight in state.items()}
            decoded: Tensor = torch.func.functional_call(module, floats, (clips,))
        equal = ((decoded > 0.5) == (expected > 0.5)).double().mean()
        return float((decoded - expected).abs().mean()), float(equal)

    return Network("silero", module, state, measure)


def rival_rows(network: Network, coders: list[LossyCoder]) -> list[Row]:
    """Return a row for each coder, decoded from its file."""
    rows = []
    for coder in coders:
        data = coder.encode(network.state)
        error, agreement = network.measure(coder.decode(data))
        rows.append(_row(network.name, coder.scheme, len(data), error, agreement))
        log(f"{network.name}, {coder.scheme}: {len(data):,} bytes, error {error:.4g}")
    return rows


def budgets(rows: list[Row], count: int) -> list[int]:
    """Return `count` budgets from the smallest to the largest of naive files, ascending."""
    low, high = min(row["bytes"] for row in rows), max(row["bytes"] for row in rows)
    ratio = (high / low) ** (1 / max(count - 1, 1))
    return [round(low * ratio**step) for step in range(count)]


def birdie_rows(network: Network, sizes: list[int], worst: float, inputs: str) -> list[Row]:
    """Return a row for each budget, ascending, and before them smaller ones until the error is `worst`."""
    rows = [birdie_row(network, size, inputs) for size in sizes]
    for step in range(1, STEPS + 1):
        if rows[0]["error"] >= worst:
            break
        try:
            rows.insert(0, birdie_row(network, round(sizes[0] / STEP**step), inputs))
        except BudgetError:  # there is no smaller file
            break
    return rows


def birdie_row(network: Network, budget: int, inputs: str) -> Row:
    """Return the row of one file, decoded from its bytes."""
    source: Any = network.module if inputs == "synthetic" else network.state
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.birdie"
        save(source, path, budget=budget, calibration="synthetic" if inputs == "synthetic" else None)
        decoded = load(path)
        error, agreement = network.measure({name: decoded[name] for name in network.state})
        row = _row(network.name, "birdie", path.stat().st_size, error, agreement)
    log(f"{network.name}, birdie: {budget:,} bytes, error {error:.4g}")
    return row


def _row(network: str, scheme: str, size: int, error: float, agreement: float) -> Row:
    return {"network": network, "scheme": scheme, "bytes": size, "error": error, "agreement": agreement}


def comparison(naive: list[Row], birdie: list[Row]) -> list[Row]:
    """Return the naive rows with birdie's bytes at their error, and the ratio; None beyond birdie's curve."""
    lines = []
    for row in naive:
        size = bytes_at(birdie, row["error"], "error")
        lines.append({**row, "birdie": None if size is None else round(size), "ratio": size and size / row["bytes"]})
    return lines


def summary(naive: list[Row], birdie: list[Row]) -> Row:
    """Return worst and median ratio, the largest rise of the error, and the most wrong decisions from int4 up."""
    compared = comparison(naive, birdie)
    ratios = [line["ratio"] for line in compared if line["ratio"] is not None]
    rises = [larger["error"] / smaller["error"] for smaller, larger in pairwise(birdie) if smaller["error"] > 0]
    four_bits = min(row["bytes"] for row in naive if row["scheme"].startswith("int4"))
    wrong = [1 - row["agreement"] for row in birdie if row["bytes"] >= 0.999 * four_bits]
    return {
        "network": naive[0]["network"],
        "worst": max(ratios, default=None),
        "median": statistics.median(ratios) if ratios else None,
        "compared": f"{len(ratios)} of {len(compared)}",
        "rise": max(rises, default=None),
        "wrong": max(wrong, default=None),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the tables."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--subjects", type=comma_separated(one_of((*NETWORKS, "tiny"), "network")), default=list(NETWORKS)
    )
    parser.add_argument("--budgets", type=int, default=20, help="from int3's bytes to int8's (default: 20)")
    parser.add_argument("--inputs", choices=("none", "synthetic"), default="none", help="what birdie gets besides")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of models and cached images")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    compared: list[Row] = []
    summaries: list[Row] = []
    coders = [lossy_rivals.naive(bits) for bits in BITS]
    with errors_as_exit():
        for name in options.subjects:
            measured = network(name, options.runs)
            naive = rival_rows(measured, coders)
            worst = max(row["error"] for row in naive)
            birdie = birdie_rows(measured, budgets(naive, options.budgets), worst, options.inputs)
            rows += [*naive, *birdie]
            compared += comparison(naive, birdie)
            summaries.append(summary(naive, birdie))
    if options.json:
        report([*rows, *({"comparison": True, **line} for line in compared), *summaries], as_json=True)
        return
    log(f"birdie {__version__}; {coders[0].version}")
    report(compared, as_json=False)
    report(summaries, as_json=False)


if __name__ == "__main__":
    main()
