"""Effect of weight averages, a learning-rate floor and the bandit at equal steps: `python -m benchmarks.averages`.

    python -m benchmarks.averages [--json] [--seeds 3] [--steps 240] [--only warmdown,bandit] [--rates 1] [--last]

The base of `benchmarks.ablation`, a small GPT on the FineWeb text of the shared data (BIRDIE_DATA), is trained with
each of `SCHEDULES`. Averages do not change the training, so all of `AVERAGES` are computed along one run and scored on
the same held-out text. Differences in bits per byte are to the last weights of the base, paired by seed (same initial
weights, same data order).
"""

import dataclasses
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.ablation import Texts, Trial, recipe_of
from benchmarks.command import command_parser, errors_as_exit, log, report
from benchmarks.seeds import mean_and_error
from birdie.run.pipeline import Run
from birdie.run.recipe import Recipe
from birdie.train.average import Average
from birdie.train.bandit import BanditSettings
from birdie.train.loop import Step
from birdie.train.settings import AverageSettings

BASE = "warmdown"
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    BASE: {},
    "constant": {"warmdown_fraction": 0.0},
    "floor 0.1": {"min_lr": 0.1},
    "bandit, each step": {"bandit": BanditSettings(every=1)},
    "bandit, 4 steps": {"bandit": BanditSettings(every=4)},
    "bandit, 8 steps": {"bandit": BanditSettings(every=8)},
}
"""Changes of `[train]`, and settings of the bandit."""
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
"""Schedules whose averages are scored; for the others only the last weights are."""


def recipe_with(schedule: str, seed: int, steps: int, rate: float, texts: Texts) -> Recipe:
    """Return the recipe of the base with `schedule`, all learning rates multiplied by `rate`."""
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
    """Return the bits per byte of each average along one run, and the bandit's log line (empty without one)."""
    messages: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        run = Run(recipe, Path(folder), notify=messages.append)
        averages = {name: Average(kind, dict(run.model.named_parameters())) for name, kind in kinds.items()}
        for event in run.train():
            if isinstance(event, Step):
                for average in averages.values():
                    average.update(event.number, event.lr_multiplier)
        bpb = {}
        for name, average in averages.items():
            with average.in_model():
                bpb[name] = run.score(run.model).bpb
    return bpb, next((line for line in messages if "bandit" in line), "")


def main() -> None:
    """Train, score, and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--only", default="", help="parts of names of schedules, comma-separated (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--steps", type=int, default=240, help="(default: 240)")
    parser.add_argument("--rates", type=float, default=1.0, help="factor of all learning rates (default: 1)")
    parser.add_argument("--last", action="store_true", help="score the last weights only")
    parser.add_argument("--folder", type=Path, default=Path("runs/ablation"), help="(default: runs/ablation)")
    options = parser.parse_args()
    parts = [part for part in options.only.lower().split(",") if part]
    names = [name for name in SCHEDULES if name == BASE or not parts or any(part in name for part in parts)]
    torch.set_num_threads(1)
    by_average: dict[tuple[str, str], list[float]] = {}
    with errors_as_exit():
        texts = Texts(options.folder)
        for seed in range(options.seeds):
            for schedule in names:
                kinds = AVERAGES if schedule in AVERAGED and not options.last else {"last weights": AverageSettings()}
                bpb, bandit = scores(recipe_with(schedule, seed, options.steps, options.rates, texts), kinds)
                for name, value in bpb.items():
                    by_average.setdefault((schedule, name), []).append(value)
                log(f"seed {seed}, {schedule}: {bpb['last weights']:.4f} {bandit}")
    base = by_average[BASE, "last weights"]
    report([row(*key, values, base) for key, values in by_average.items()], as_json=options.json)


def row(schedule: str, average: str, values: list[float], base: list[float]) -> dict[str, Any]:
    """Return the row of one average: mean, and mean difference to the base with its standard error over the seeds."""
    differences = [value - other for value, other in zip(values, base, strict=True)]
    difference, error = mean_and_error(differences)
    return {
        "schedule": schedule,
        "weights": average,
        "bpb": statistics.fmean(values),
        "to the base": difference,
        "±": error,
    }


if __name__ == "__main__":
    main()
