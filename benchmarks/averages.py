"""What an average of weights, a floor and the bandit bring at as many steps: `python -m benchmarks.averages`.

    python -m benchmarks.averages [--json] [--seeds 3] [--steps 240] [--only warmdown,bandit] [--rates 1] [--last]

The base of `benchmarks.ablation`, a small GPT on the FineWeb text of the shared data (BIRDIE_DATA), is trained with
each of `SCHEDULES`. Averages do not touch training, so that all of `AVERAGES` are taken along one run and scored on the
same held-out text. Differences in bits per byte are to the last weights of the base, paired by seed: weights at first
and order of data are the same.
"""

import argparse
import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.ablation import Texts, Trial, recipe_of
from benchmarks.report import report
from birdie.run.pipeline import Run
from birdie.run.recipe import Recipe
from birdie.train.average import Average, AverageSettings
from birdie.train.bandit import BanditSettings
from birdie.train.loop import Step

BASE = "warmdown"
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    BASE: {},
    "constant": {"warmdown_fraction": 0.0},
    "floor 0.1": {"min_lr": 0.1},
    "bandit, each step": {"bandit": BanditSettings(every=1)},
    "bandit, 4 steps": {"bandit": BanditSettings(every=4)},
    "bandit, 8 steps": {"bandit": BanditSettings(every=8)},
}
"""Changes of `[train]`, and what else a run gets."""
AVERAGES: Mapping[str, AverageSettings] = {
    "last weights": AverageSettings(),
    "EMA 0.9": AverageSettings("ema", ema_decay=0.9),
    "EMA 0.97": AverageSettings("ema", ema_decay=0.97),
    "EMA 0.99": AverageSettings("ema", ema_decay=0.99),
    "SWA, every 5 below 0.5": AverageSettings("swa", swa_every=5),
    "SWA, every 5 below 0.2": AverageSettings("swa", swa_every=5, swa_below=0.2),
    "LAWA, 10 × 5": AverageSettings("lawa", lawa_k=10, lawa_every=5),
}
AVERAGED = (BASE, "constant")
"""Schedules whose averages are scored; of the others the last weights are."""


def recipe_with(schedule: str, seed: int, steps: int, rate: float, texts: Texts) -> Recipe:
    """The base's recipe under `schedule`, its learning rates times `rate`."""
    recipe = recipe_of(Trial("", seed, steps), texts)
    changes = dict(SCHEDULES[schedule])
    bandit = changes.pop("bandit", BanditSettings())
    names = ("matrix_lr", "tied_embed_lr", "scalar_lr")
    rates = {name: rate * getattr(recipe.optimizer, name) for name in names}
    return dataclasses.replace(
        recipe,
        train=dataclasses.replace(recipe.train, **changes),
        optimizer=dataclasses.replace(recipe.optimizer, **rates),
        bandit=bandit,
    )


def scores(recipe: Recipe, kinds: Mapping[str, AverageSettings]) -> tuple[dict[str, float], str]:
    """Bits per byte of each average along one run, and what its bandit has to say."""
    told: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        run = Run(recipe, Path(place), notify=told.append)
        averages = {name: Average(kind, dict(run.model.named_parameters())) for name, kind in kinds.items()}
        for event in run.train():
            if isinstance(event, Step):
                for average in averages.values():
                    average.update(event.number, event.lr_multiplier)
        found = {}
        for name, average in averages.items():
            with average.in_model():
                found[name] = run.score(run.model).bpb
    return found, next((line for line in told if "bandit" in line), "")


def main() -> None:
    """Train, score, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="parts of names of schedules, by commas (default: all)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--rates", type=float, default=1.0, help="factor on all learning rates")
    parser.add_argument("--last", action="store_true", help="score the last weights alone")
    parser.add_argument("--folder", type=Path, default=Path("runs/ablation"))
    options = parser.parse_args()
    parts = [part for part in options.only.lower().split(",") if part]
    names = [name for name in SCHEDULES if name == BASE or not parts or any(part in name for part in parts)]
    torch.set_num_threads(1)
    texts = Texts(options.folder)
    found: dict[tuple[str, str], list[float]] = {}
    for seed in range(options.seeds):
        for schedule in names:
            kinds = AVERAGES if schedule in AVERAGED and not options.last else {"last weights": AverageSettings()}
            recipe = recipe_with(schedule, seed, options.steps, options.rates, texts)
            for name, bpb in (answer := scores(recipe, kinds))[0].items():
                found.setdefault((schedule, name), []).append(bpb)
            print(f"seed {seed}, {schedule}: {answer[0]['last weights']:.4f} {answer[1]}", file=sys.stderr, flush=True)
    base = found[BASE, "last weights"]
    report([row(*key, values, base) for key, values in found.items()], as_json=options.json)


def row(schedule: str, average: str, values: list[float], base: list[float]) -> dict[str, Any]:
    """Mean, and mean difference to the base with its standard error over the seeds."""
    apart = [value - other for value, other in zip(values, base, strict=True)]
    error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else None
    mean = statistics.fmean(values)
    return {"schedule": schedule, "weights": average, "bpb": mean, "to the base": statistics.fmean(apart), "±": error}


if __name__ == "__main__":
    main()
