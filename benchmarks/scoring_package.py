"""Scoring with an ahead-of-time package compared with torch.compile and eager mode: start-up time and speed.

    python -m benchmarks.scoring_package --json [--seconds 30] [--tokens 16384] [--length 1024] [--dtype auto]
                                         [--device auto] [--seed 0]

The model of `benchmarks.train` scores non-overlapping windows. Start-up: a new process each, from the end of its
imports to the losses of the first window, once with empty caches (`start_s`) and once with the caches that the first
process left (`again_s`; Inductor's folder for torch.compile, the package file for the package). `cpu` is the CPU time
of both.
Speed: in one process, by turns of `--tokens` targets, scored as in `birdie evaluate`; median and best over the turns,
and the ratio of the median to that of eager mode. `difference` is the largest difference from eager mode, in nats.
Without a C++ compiler, all rows but that of eager mode say so.
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
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.command import command_parser, report
from benchmarks.timing import take_turns
from benchmarks.train import CONFIG
from birdie.model.gpt import GPT
from birdie.runtime.device import choose_device, choose_dtype
from birdie.score.accumulator import Text
from birdie.score.evaluator import score
from birdie.score.package import Shape, load_or_compile
from birdie.score.windows import LanguageModel, max_inputs

WAYS = ("eager", "torch.compile", "package")


class Compiled:
    """Language model whose loss is `GPT.loss` under torch.compile."""

    def __init__(self, model: GPT) -> None:
        self._loss = torch.compile(lambda ids, targets: model.loss(ids, targets, "none"), dynamic=False)

    def loss(self, ids: Tensor, targets: Tensor, reduction: Literal["mean", "none"]) -> Tensor:
        """Return the nats of each target."""
        assert reduction == "none"
        nats: Tensor = self._loss(ids, targets)
        return nats


def model_of(options: argparse.Namespace, device: torch.device) -> GPT:
    """Return the model, with all weights randomized: some are zero initially."""
    torch.manual_seed(options.seed)
    model = GPT(CONFIG).eval().to(device)
    model.compute_dtype = choose_dtype(options.dtype, device)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    return model


def scoring_by(way: str, model: GPT, shape: Shape, folder: Path) -> LanguageModel:
    """Return the language model of `way`; a package is compiled if its file does not exist."""
    if way == "package":
        return load_or_compile(model, folder / "scoring.pt2", shape)
    return Compiled(model) if way == "torch.compile" else model


def shape_of(length: int, device: torch.device) -> Shape:
    """Return the shape of the windows that are scored in one forward pass."""
    return Shape(max(1, max_inputs(device) // length), length, length)


def nats_of(model: LanguageModel, tokens: NDArray[np.uint16], length: int, device: torch.device) -> NDArray[np.float64]:
    """Return the nats of all complete non-overlapping windows."""
    text = Text(tokens, np.ones(len(tokens), np.uint16), 0)
    scored = score(model, text, train_seq_len=length, device=device, batch_tokens=len(tokens), keep_losses=True)
    assert scored.losses is not None
    return scored.losses


def random_tokens(targets: int) -> NDArray[np.uint16]:
    """Return `targets` + 1 random tokens."""
    return np.random.default_rng(0).integers(0, CONFIG.vocab_size, targets + 1, dtype=np.uint16)


@torch.inference_mode()
def start(options: argparse.Namespace) -> dict[str, Any]:
    """Return seconds and CPU seconds (with child processes) until the first losses."""
    start_time, start_cpu = time.perf_counter(), _cpu_seconds()
    device = choose_device(options.device)
    model, shape = model_of(options, device), shape_of(options.length, device)
    scorer = scoring_by(options.way, model, shape, options.folder)
    nats_of(scorer, random_tokens(shape.rows * shape.length), shape.length, device)
    return {"s": round(time.perf_counter() - start_time, 2), "cpu_s": round(_cpu_seconds() - start_cpu, 2)}


def _cpu_seconds() -> float:
    return sum(os.times()[:4])


@torch.inference_mode()
def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Return the speed of each way, measured by turns, and its difference from eager mode."""
    device = choose_device(options.device)
    model, shape = model_of(options, device), shape_of(options.length, device)
    # Complete batches only: torch.compile would compile again for a smaller one.
    tokens = random_tokens(max(1, options.tokens // (shape.rows * shape.length)) * shape.rows * shape.length)
    scorers = {way: scoring_by(way, model, shape, options.folder) for way in options.ways}
    works = {way: partial(nats_of, scorer, tokens, shape.length, device) for way, scorer in scorers.items()}
    nats = {way: work() for way, work in works.items()}  # also compiles
    durations = take_turns(works, seconds=options.seconds, warm_up=False, device=device)
    rates = {way: [(len(tokens) - 1) / seconds for seconds in turns] for way, turns in durations.items()}
    return {
        way: {
            "tokens_per_s": round(statistics.median(rates[way])),
            "best_tokens_per_s": round(max(rates[way])),
            "turns": len(rates[way]),
            "difference": float(np.abs(nats[way] - nats["eager"]).max()),
        }
        for way in works
    }


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each way."""
    ways = WAYS if shutil.which("g++") or shutil.which("clang++") else WAYS[:1]
    with tempfile.TemporaryDirectory() as folder:
        starts = {way: [_worker(options, folder, "start", way) for _ in range(2)] for way in ways}
        speeds = _worker(options, folder, "speed", *ways)
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


def _worker(options: argparse.Namespace, folder: str, what: str, *ways: str) -> dict[str, Any]:
    """Return the result of `start` or `speed` in a new process, whose caches are in `folder`."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.scoring_package",
        "--worker",
        what,
        "--folder",
        folder,
        "--ways",
        *ways,
    ]
    for name in ("length", "seconds", "tokens", "dtype", "device", "seed"):
        command += [f"--{name}", str(getattr(options, name))]
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "XDG_CACHE_HOME": f"{folder}/cache"}
    process = subprocess.run(command, env=os.environ | caches, stdout=subprocess.PIPE, check=True, text=True)
    answer: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return answer


def main() -> None:
    """Measure and print the table; with --worker, print the result of one process."""
    parser = command_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of the turns (default: 30)")
    parser.add_argument("--tokens", type=int, default=16_384, help="targets of a turn (default: 16384)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window (default: 1024)")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default: auto)")
    parser.add_argument("--device", default="auto", help="auto, cuda, mps or cpu (default: auto)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: 0)")
    parser.add_argument("--worker", choices=("start", "speed"), help=argparse.SUPPRESS)
    parser.add_argument("--ways", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        options.way = options.ways[0]
        result = start(options) if options.worker == "start" else speed(options)
        sys.stdout.write(json.dumps(result) + "\n")
        return
    report(measure(options), as_json=options.json)


if __name__ == "__main__":
    main()
