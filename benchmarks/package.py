"""Scoring by an ahead-of-time package against torch.compile and eager: what the start takes, and the speed after it.

    python -m benchmarks.package --json [--seconds 30] [--length 1024] [--dtype auto] [--device auto] [--seed 0]

The model of `benchmarks.train`, windows end to end. Starts: each in a process of its own, from the import's end to the
first window's nats, once with empty caches (`start_s`) and once with what that left (`again_s`): Inductor's folder for
torch.compile, the package for the package; `cpu` is what processors spent on it. Speed: in one process, all in turns of
one batch; median and best over the turns, and the ratio of medians to eager. `difference`: the largest from eager's
nats. Without a C++ compiler all but the row of eager says so.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import report
from benchmarks.train import CONFIG
from birdie.device import choose_device, choose_dtype, synchronize
from birdie.model.gpt import GPT
from birdie.score.package import Shape, packaged

WAYS = ("eager", "torch.compile", "package")
LEAST = 3  # turns

Nats = Callable[[Tensor, Tensor], Tensor]


def model_of(options: argparse.Namespace, device: torch.device) -> GPT:
    """With weights that say something."""
    torch.manual_seed(options.seed)
    model = GPT(CONFIG).eval().to(device)
    model.compute_dtype = choose_dtype(options.dtype, device)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    return model


def nats_by(way: str, model: GPT, shape: Shape, folder: Path) -> Nats:
    """How `way` scores; a package is made if it is not there."""
    if way == "package":
        through = packaged(model, folder / "scoring.pt2", shape)
        return lambda ids, targets: through.loss(ids, targets, "none")
    if way == "torch.compile":
        compiled = torch.compile(lambda ids, targets: model.loss(ids, targets, "none"), dynamic=False)
        return lambda ids, targets: compiled(ids, targets)
    return lambda ids, targets: model.loss(ids, targets, "none")


def tokens(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(CONFIG.vocab_size, (shape.rows, shape.length + 1), generator=draw).to(device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@torch.inference_mode()
def start(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first nats, and of them those of processors, children's included."""
    began, spent = time.perf_counter(), _processor_seconds()
    device = choose_device(options.device)
    model, shape = model_of(options, device), Shape.of(options.length, options.length)
    ids, targets = tokens(shape, device)
    nats_by(options.way, model, shape, options.folder)(ids, targets)
    synchronize(device)
    return {"s": round(time.perf_counter() - began, 2), "cpu_s": round(_processor_seconds() - spent, 2)}


def _processor_seconds() -> float:
    return sum(os.times()[:4])


@torch.inference_mode()
def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of each way, by turns."""
    device = choose_device(options.device)
    model, shape = model_of(options, device), Shape.of(options.length, options.length)
    ids, targets = tokens(shape, device)
    ways = {way: nats_by(way, model, shape, options.folder) for way in options.ways}
    first = {way: nats(ids, targets) for way, nats in ways.items()}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    end = time.perf_counter() + options.seconds
    while time.perf_counter() < end or len(rates["eager"]) < LEAST:
        for way, nats in ways.items():
            began = time.perf_counter()
            nats(ids, targets)
            synchronize(device)
            rates[way].append(ids.numel() / (time.perf_counter() - began))
    return {
        way: {
            "tokens_per_s": round(statistics.median(each)),
            "best_tokens_per_s": round(max(each)),
            "turns": len(each),
            "difference": float((first[way] - first["eager"]).abs().max()),
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
    for name in ("length", "seconds", "dtype", "device", "seed"):
        command += [f"--{name}", str(getattr(options, name))]
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "XDG_CACHE_HOME": f"{folder}/cache"}
    done = subprocess.run(command, env=os.environ | caches, stdout=subprocess.PIPE, check=True, text=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--seconds", type=float, default=30.0, help="time to take turns in (default: 30)")
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
