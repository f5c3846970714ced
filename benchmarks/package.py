"""Scoring by an ahead-of-time package against torch.compile and eager: what the start takes, and the speed after it.

    python -m benchmarks.package --json [--seconds 30] [--tokens 16384] [--length 1024] [--dtype auto] [--device auto]
        [--seed 0]

The model of `benchmarks.train`, windows end to end. Starts: each in a process of its own, from the import's end to the
first window's nats, once with empty caches (`start_s`) and once with what that left (`again_s`): Inductor's folder for
torch.compile, the package for the package; `cpu` is what processors spent on it. Speed: in one process, all in turns of
`--tokens` targets, scored as `birdie evaluate` does it; median and best over the turns, and the ratio of medians to
eager. `difference`: the largest from eager's nats. Without a C++ compiler all but the row of eager says so.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.report import report
from benchmarks.train import CONFIG
from birdie.model.gpt import GPT
from birdie.runtime.device import choose_device, choose_dtype
from birdie.score.accumulator import Accumulator
from birdie.score.mode import Scoring
from birdie.score.package import Shape, load_or_compile
from birdie.score.windows import LanguageModel, max_inputs, non_overlapping, score_windows

WAYS = ("eager", "torch.compile", "package")
LEAST = 3  # turns


class Compiled:
    """`GPT.loss` by torch.compile."""

    def __init__(self, model: GPT) -> None:
        self._loss = torch.compile(lambda ids, targets: model.loss(ids, targets, "none"), dynamic=False)

    def loss(self, ids: Tensor, targets: Tensor, reduction: Literal["mean", "none"]) -> Tensor:
        """Nats."""
        assert reduction == "none"
        found: Tensor = self._loss(ids, targets)
        return found


def model_of(options: argparse.Namespace, device: torch.device) -> GPT:
    """With weights that say something."""
    torch.manual_seed(options.seed)
    model = GPT(CONFIG).eval().to(device)
    model.compute_dtype = choose_dtype(options.dtype, device)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    return model


def scoring_by(way: str, model: GPT, shape: Shape, folder: Path) -> LanguageModel:
    """What `way` scores with; a package is made if it is not there."""
    if way == "package":
        return load_or_compile(model, folder / "scoring.pt2", shape)
    return Compiled(model) if way == "torch.compile" else model


def shape_of(length: int, device: torch.device) -> Shape:
    """Of what passes together."""
    return Shape(max(1, max_inputs(device) // length), length, length)


def nats_of(model: LanguageModel, tokens: NDArray[np.uint16], length: int, device: torch.device) -> NDArray[np.float64]:
    """Of all whole windows end to end."""
    windows = non_overlapping(len(tokens) - 1, length)
    accumulator = Accumulator(tokens, np.ones(len(tokens), np.uint16), 0, keep_losses=True)
    gpt = cast(GPT, model)  # of which windows need the losses alone
    score_windows(Scoring(gpt, tokens, accumulator, length, 0, device, batch_tokens=len(tokens)), windows)
    assert accumulator.losses is not None
    return accumulator.losses[: windows.scored]


def text(targets: int) -> NDArray[np.uint16]:
    return np.random.default_rng(0).integers(0, CONFIG.vocab_size, targets + 1, dtype=np.uint16)


@torch.inference_mode()
def start(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first nats, and of them those of processors, children's included."""
    began, spent = time.perf_counter(), _processor_seconds()
    device = choose_device(options.device)
    model, shape = model_of(options, device), shape_of(options.length, device)
    by = scoring_by(options.way, model, shape, options.folder)
    nats_of(by, text(shape.rows * shape.length), shape.length, device)
    return {"s": round(time.perf_counter() - began, 2), "cpu_s": round(_processor_seconds() - spent, 2)}


def _processor_seconds() -> float:
    return sum(os.times()[:4])


@torch.inference_mode()
def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of each way, by turns."""
    device = choose_device(options.device)
    model, shape = model_of(options, device), shape_of(options.length, device)
    # whole batches: torch.compile would begin anew for a smaller one
    tokens = text(max(1, options.tokens // (shape.rows * shape.length)) * shape.rows * shape.length)
    ways = {way: scoring_by(way, model, shape, options.folder) for way in options.ways}
    first = {way: nats_of(by, tokens, shape.length, device) for way, by in ways.items()}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    end = time.perf_counter() + options.seconds
    while time.perf_counter() < end or len(rates["eager"]) < LEAST:
        for way, by in ways.items():
            began = time.perf_counter()
            nats_of(by, tokens, shape.length, device)
            rates[way].append((len(tokens) - 1) / (time.perf_counter() - began))
    return {
        way: {
            "tokens_per_s": round(statistics.median(each)),
            "best_tokens_per_s": round(max(each)),
            "turns": len(each),
            "difference": float(np.abs(first[way] - first["eager"]).max()),
        }
        for way, each in rates.items()
    }


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way."""
    ways = WAYS if shutil.which("g++") or shutil.which("clang++") else WAYS[:1]
    with tempfile.TemporaryDirectory() as folder:
        starts = {way: [_asked(options, folder, "start", way) for _ in range(2)] for way in ways}
        speeds = _asked(options, folder, "speed", *ways)
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        if way not in ways:
            rows.append({"way": way, "skipped": "no C++ compiler"})
            continue
        ratio = speeds[way]["tokens_per_s"] / speeds["eager"]["tokens_per_s"]
        cold, warm = starts[way]
        times = {"start_s": cold["s"], "start_cpu_s": cold["cpu_s"], "again_s": warm["s"], "again_cpu_s": warm["cpu_s"]}
        rows.append({"way": way, **times, **speeds[way], "ratio": round(ratio, 4)})
    return rows


def _asked(options: argparse.Namespace, folder: str, what: str, *ways: str) -> dict[str, Any]:
    """What a process of its own finds, with its caches below `folder`."""
    command = [sys.executable, "-m", "benchmarks.package", "--worker", what, "--folder", folder, "--ways", *ways]
    for name in ("length", "seconds", "tokens", "dtype", "device", "seed"):
        command += [f"--{name}", str(getattr(options, name))]
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "XDG_CACHE_HOME": f"{folder}/cache"}
    done = subprocess.run(command, env=os.environ | caches, stdout=subprocess.PIPE, check=True, text=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--seconds", type=float, default=30.0, help="time to take turns in (default: 30)")
    parser.add_argument("--tokens", type=int, default=16_384, help="targets of a turn (default: 16384)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window (default: 1024)")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default: auto)")
    parser.add_argument("--device", default="auto", help="auto, cuda, mps or cpu (default: auto)")
    parser.add_argument("--seed", type=int, default=0, help="decides the weights (default: 0)")
    for name in ("--worker", "--ways", "--folder"):
        kind: dict[str, Any] = {"nargs": "+"} if name == "--ways" else {"type": Path} if name == "--folder" else {}
        parser.add_argument(name, help=argparse.SUPPRESS, **kind)
    options = parser.parse_args()
    if options.worker:
        options.way = options.ways[0]
        found = start(options) if options.worker == "start" else speed(options)
        sys.stdout.write(json.dumps(found) + "\n")
        return
    report(measure(options), as_json=options.json)


if __name__ == "__main__":
    main()
