"""What sequences of several lengths in a step do to its time, on ranks that wait for each other.

    python -m benchmarks.lengths --json [--seconds 120] [--ranks 2] [--length 2048] [--short 256] [--seed 0]

The model of `benchmarks.train` on `--ranks` processes with one thread each, gloo between them, four spans a step, as
many tokens in each whatever the length. In turns of one step within one run: all long; lengths by rank (the ranks of
even number long, the others short); both lengths in every rank; all short. `ms` is the slowest rank's step, as the
run's clock has it, `busy_ms` what each rank took for its forward and backward passes. What training on such a mixture
is worth in quality is not asked here.
"""

import argparse
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
from torch import Tensor, multiprocessing

from benchmarks.report import report
from benchmarks.train import CONFIG, OPTIMIZERS
from birdie.model.gpt import GPT
from birdie.runtime.distributed import World
from birdie.train.loop import Fit, Step, fit
from birdie.train.settings import TrainSettings

SPANS = 4
LEAST = 3  # turns


def mixtures(long: int, short: int, ranks: int) -> dict[str, tuple[int, ...]]:
    """By name, the lengths that a step's spans have in turn."""
    return {
        "long": (),
        "by rank": (long, short),
        "in every rank": (*[long] * ranks, *[short] * ranks),
        "short": (short,),
    }


class Random:
    """Random tokens, made beforehand: what they are does not change the speed."""

    def __init__(self, settings: TrainSettings, seed: int) -> None:
        rows = settings.train_batch_tokens // settings.accumulation // settings.train_seq_len
        draw = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(CONFIG.vocab_size, (rows, settings.train_seq_len + 1), generator=draw)

    def next(self) -> tuple[Tensor, Tensor]:
        return self.tokens[:, :-1], self.tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


class Busy:
    """Hears when this rank's passes of a step begin, and when they are over and it comes to waiting."""

    def __init__(self) -> None:
        self.began = self.ms = 0.0

    def before_step(self, step: int, share: float, multiplier: float) -> None:
        del step, share, multiplier
        self.began = time.perf_counter()

    def penalty(self) -> None:
        self.ms = 1000 * (time.perf_counter() - self.began)


def turns(world: World, long: int, short: int, seconds: float, seed: int) -> dict[str, list[tuple[float, float]]]:
    """(ms of the step, ms that this rank's passes took) of each turn, by mixture."""
    whole = TrainSettings(
        iterations=10**9,
        warmdown_iters=0,
        warmup_steps=0,
        max_wallclock_seconds=0,
        train_batch_tokens=SPANS * long,
        train_seq_len=long,
        accumulation=SPANS,
        compile=False,
    )
    runs: dict[str, tuple[Fit, Iterator[Step], Busy]] = {}
    for name, lengths in mixtures(long, short, world.size).items():
        settings, busy = dataclasses.replace(whole, mixed_seq_lens=lengths), Busy()
        torch.manual_seed(seed)
        going = fit(GPT(CONFIG), Random(settings, seed), settings, OPTIMIZERS, world=world, hooks=[busy])
        runs[name] = going, iter(going), busy
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    while not world.any(time.perf_counter() > end, torch.device("cpu")) or len(taken["long"]) <= LEAST:
        for name, (going, steps, busy) in runs.items():
            before = going.train_ms
            taken[name].append((next(steps).train_ms - before, busy.ms))
    return {name: each[1:] for name, each in taken.items()}  # the first one allocates


def as_rank(rank: int, ranks: int, folder: str, length: int, short: int, seconds: float, seed: int) -> None:
    torch.set_num_threads(1)
    wait = datetime.timedelta(minutes=5)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=wait)
    taken = turns(World(rank, ranks, rank), length, short, seconds, seed)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(taken))
    dist.destroy_process_group()


def measure(ranks: int, length: int, short: int, seconds: float, seed: int) -> list[dict[str, Any]]:
    """A row for each mixture."""
    with tempfile.TemporaryDirectory() as folder:
        args = (ranks, folder, length, short, seconds, seed)
        multiprocessing.spawn(as_rank, args, nprocs=ranks)  # type: ignore[attr-defined, no-untyped-call]
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    rows = []
    for name in found[0]:
        steps = [step for step, _ in found[0][name]]
        rows.append(
            {
                "lengths": name,
                "ms": round(statistics.median(steps), 1),
                "best_ms": round(min(steps), 1),
                "steps": len(steps),
                "busy_ms": [round(statistics.median(busy for _, busy in of[name]), 1) for of in found],
            }
        )
    for row in rows:
        row["ratio"] = round(rows[0]["ms"] / row["ms"], 4)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--seconds", type=float, default=120.0, help="time to measure (default: 120)")
    parser.add_argument("--ranks", type=int, default=2, help="processes, a divisor of 4 (default: 2)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a long sequence (default: 2048)")
    parser.add_argument("--short", type=int, default=256, help="tokens of a short one (default: 256)")
    parser.add_argument("--seed", type=int, default=0, help="decides weights and tokens (default: 0)")
    options = parser.parse_args()
    rows = measure(options.ranks, options.length, options.short, options.seconds, options.seed)
    report(rows if options.json else [{**row, "busy_ms": str(row["busy_ms"])} for row in rows], as_json=options.json)


if __name__ == "__main__":
    main()
