"""Step time with sequences of several lengths in one step, on ranks that wait for each other.

    python -m benchmarks.mixed_lengths --json [--seconds 120] [--ranks 2] [--length 2048] [--short 256] [--seed 0]

The model of `benchmarks.train` on `--ranks` processes with one thread each and gloo between them. A step has four
gradient-accumulation chunks with the same number of tokens, whatever the length of their sequences. Four mixtures take
turns of one step: all long; lengths by rank (even ranks long, odd ranks short); both lengths on every rank; all short.
`ms` is the step of the slowest rank by the run's clock, `busy_ms` the forward and backward passes of each rank. The
effect of a mixture on the loss is not measured.
"""

import dataclasses
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks.command import command_parser, report
from benchmarks.loaders import RepeatedTokens
from benchmarks.train import CONFIG, OPTIMIZERS
from birdie.model.gpt import GPT
from birdie.runtime.distributed import World
from birdie.train.loop import Step
from birdie.train.settings import TrainSettings
from birdie.train.training import Training

CHUNKS = 4  # of gradient accumulation
MIN_TURNS = 3


def mixtures(long: int, short: int, ranks: int) -> dict[str, tuple[int, ...]]:
    """Return the sequence lengths of the chunks of a step, in turn, by name of the mixture."""
    return {
        "long": (),
        "by rank": (long, short),
        "in every rank": (*[long] * ranks, *[short] * ranks),
        "short": (short,),
    }


class PassTimer:
    """Technique that measures the time from the begin of a step to the end of this rank's passes, before it waits."""

    def __init__(self) -> None:
        self.start = self.ms = 0.0

    def before_step(self, step: int, share: float, multiplier: float) -> None:
        del step, share, multiplier
        self.start = time.perf_counter()

    def penalty(self) -> None:
        self.ms = 1000 * (time.perf_counter() - self.start)


def take_turns(world: World, long: int, short: int, seconds: float, seed: int) -> dict[str, list[tuple[float, float]]]:
    """Return (ms of the step, ms of this rank's passes) of each turn, by mixture."""
    base = TrainSettings(
        iterations=10**9,
        warmdown_iters=0,
        warmup_steps=0,
        max_wallclock_seconds=0,
        train_batch_tokens=CHUNKS * long,
        train_seq_len=long,
        accumulation=CHUNKS,
        compile=False,
    )
    runs: dict[str, tuple[Training, Iterator[Step], PassTimer]] = {}
    for name, lengths in mixtures(long, short, world.size).items():
        settings, timer = dataclasses.replace(base, mixed_seq_lens=lengths), PassTimer()
        torch.manual_seed(seed)
        loader = RepeatedTokens(settings, CONFIG.vocab_size, seed)
        run = Training(GPT(CONFIG), loader, settings, OPTIMIZERS, world=world, hooks=[timer])
        runs[name] = run, iter(run), timer
    durations: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    while not world.any(time.perf_counter() > end, torch.device("cpu")) or len(durations["long"]) <= MIN_TURNS:
        for name, (run, steps, timer) in runs.items():
            start = run.clock.ms
            durations[name].append((next(steps).train_ms - start, timer.ms))
    return {name: turns[1:] for name, turns in durations.items()}  # the first turn allocates


def run_rank(rank: int, ranks: int, folder: str, length: int, short: int, seconds: float, seed: int) -> None:
    """Take turns as one of several ranks, and write the durations to `folder`."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(minutes=5)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks, timeout=timeout)
    durations = take_turns(World(rank, ranks, rank), length, short, seconds, seed)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(durations))
    dist.destroy_process_group()


def measure(ranks: int, length: int, short: int, seconds: float, seed: int) -> list[dict[str, Any]]:
    """Return a row for each mixture."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, folder, length, short, seconds, seed)
        multiprocessing.spawn(run_rank, arguments, nprocs=ranks)  # type: ignore[attr-defined, no-untyped-call]
        durations = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    return rows_of(durations)


def rows_of(durations: list[dict[str, list[tuple[float, float]]]]) -> list[dict[str, Any]]:
    """Return a row for each mixture from the durations of each rank."""
    rows: list[dict[str, Any]] = []
    for name in durations[0]:
        steps = [step for step, _ in durations[0][name]]
        rows.append(
            {
                "lengths": name,
                "ms": round(statistics.median(steps), 1),
                "best_ms": round(min(steps), 1),
                "steps": len(steps),
                "busy_ms": [round(statistics.median(busy for _, busy in rank[name]), 1) for rank in durations],
            }
        )
    for row in rows:
        row["ratio"] = round(rows[0]["ms"] / row["ms"], 4)
    return rows


def main() -> None:
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds to measure (default: 120)")
    parser.add_argument("--ranks", type=int, default=2, help="processes, a divisor of 4 (default: 2)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a long sequence (default: 2048)")
    parser.add_argument("--short", type=int, default=256, help="tokens of a short sequence (default: 256)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens (default: 0)")
    options = parser.parse_args()
    rows = measure(options.ranks, options.length, options.short, options.seconds, options.seed)
    report(rows if options.json else [{**row, "busy_ms": str(row["busy_ms"])} for row in rows], as_json=options.json)


if __name__ == "__main__":
    main()
