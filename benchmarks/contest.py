"""Comparison of recipes at equal training time, equal bytes and the same text: `python -m benchmarks.contest`.

    python -m benchmarks.contest --seeds 3 --sizes own,450kB            the claims of recipes/cpu_best.toml
    python -m benchmarks.contest sota:cpu cpu_best --seconds 300

A recipe is a name of the recipe registry, with `:PRESET` for a smaller preset. All recipes train on the FineWeb text of
the shared data (BIRDIE_DATA; the validation text that is not scored is training text), with the tokenizer of their
vocabulary, in one process and by turns: the next step is always that of the run whose clock is behind, and a clock
stops while other runs have their turn. So other load on the machine slows all of them alike; runs one after the other
would not be comparable.

At each size the first recipe is exported by its own schemes (own) or into that many bytes, and the others get its bytes
as their budget. The decoded files are compared. Compilation and warm-up are before the clock, as in the challenge;
calibration counts. A seed determines initial weights and the order of the data.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ablation import Texts
from benchmarks.command import comma_separated, command_parser, errors_as_exit, log, mean_and_error, report
from birdie.compress.rate.target import parse_size
from birdie.errors import ConfigError
from birdie.gpt.run.evaluation import evaluate
from birdie.gpt.run.events import Started, Validated
from birdie.gpt.run.pipeline import Run
from birdie.gpt.run.recipe_registry import find
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.score.request import EvaluationRequest
from birdie.gpt.train.loop import Step
from birdie.system.context import Context
from birdie.system.device import choose_device

VALIDATION_BYTES = 400_000
OWN = "own"  # size of a file by the schemes of its recipe


class Contestant:
    """A run that trains one step at a time.

    Attributes:
        clock_ms: training time so far.
        finished: the training has ended.
    """

    def __init__(self, name: str, recipe: Recipe, folder: Path) -> None:
        context = Context(choose_device(recipe.device), notify=lambda line: log(f"{name}: {line}"))
        self.name, self.run = name, Run(recipe, folder, context)
        self.clock_ms, self.steps, self.finished, self.float_bpb = 0.0, 0, False, float("nan")
        self._events: Iterator[Any] = self.run.train()
        start = time.perf_counter()
        while not isinstance(next(self._events), Started):
            pass
        self.advance()  # the first step includes warm-up and compilation
        self.startup_s = time.perf_counter() - start - self.clock_ms / 1000

    def advance(self) -> None:
        """Train one step, and do everything that follows it."""
        for event in self._events:
            if isinstance(event, Step):
                self.clock_ms, self.steps = event.train_ms, event.number
                if event.number % 50 == 0 or event.stopping:
                    log(f"{self.name}: step {event.number}, {event.train_ms / 1000:.0f} s, loss {event.loss:.3f}")
                if not event.stopping:
                    return
            elif isinstance(event, Validated):
                self.float_bpb = event.score.bpb
        self.finished = True

    def row(self, size: str, bytes_allowed: int | None) -> dict[str, Any]:
        """Export, decode, score, and return the row of a size."""
        summary = self.run.export(budget=bytes_allowed)
        scored = evaluate(summary.path, EvaluationRequest(device="cpu", max_tokens=0))
        model, train = self.run.model, self.run.recipe.train
        return {
            "recipe": self.name,
            "seed": train.seed,
            "size": size,
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps": self.steps,
            "tokens": self.steps * train.train_batch_tokens,
            "train_s": self.clock_ms / 1000 + (0.0 if self.run.calibration is None else self.run.calibration.seconds),
            "before_s": self.startup_s,
            "bytes": summary.bytes,
            "bpb_float": self.float_bpb,
            "bpb_artifact": scored.score.bpb,
            "ci95": scored.score.ci95,
            "text_bytes": scored.score.bytes,
        }


def recipe_of(name: str, texts: Texts, seconds: float, seed: int) -> Recipe:
    """Return the recipe on the shared text, for `seconds` of training."""
    registered, _, preset = name.partition(":")
    recipe = find(registered).recipe(preset or None)
    return dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, **texts.settings(recipe.model.vocab_size)),
        train=dataclasses.replace(recipe.train, max_wallclock_seconds=seconds, seed=seed),
        validation=dataclasses.replace(recipe.validation, every=0, max_tokens=0),
        run=dataclasses.replace(recipe.run, checkpoint_every=0),
        device="cpu",
    )


def rows_of(seed: int, options: argparse.Namespace, texts: Texts) -> list[dict[str, Any]]:
    """Train all recipes by turns, and return the rows of each size; `less` compares with the first recipe."""
    with tempfile.TemporaryDirectory() as folder:
        recipes = {name: recipe_of(name, texts, options.seconds, seed) for name in options.recipes}
        contestants = [
            Contestant(name, recipe, Path(folder) / str(index)) for index, (name, recipe) in enumerate(recipes.items())
        ]
        while running := [contestant for contestant in contestants if not contestant.finished]:
            min(running, key=lambda contestant: contestant.clock_ms).advance()
        rows = []
        for size in options.sizes:
            first = contestants[0].row(size, None if size == OWN else parse_size(size))
            others = [contestant.row(size, first["bytes"]) for contestant in contestants[1:]]
            rows += [{**row, "less": 1 - row["bpb_artifact"] / first["bpb_artifact"]} for row in (first, *others)]
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return mean and standard error over the seeds, of each recipe at each size."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["size"], row["recipe"]), []).append(row)
    return [
        {
            "size": size,
            "recipe": name,
            "seeds": len(group),
            "bytes, at most": max(row["bytes"] for row in group),
            **_mean("bpb_artifact", group),
            **_mean("less", group),
        }
        for (size, name), group in groups.items()
    ]


def _mean(key: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    mean, error = mean_and_error([row[key] for row in rows])
    return {key: mean, f"{key} ±": error}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train by turns for each seed, export at each size, and print the tables."""
    parser = command_parser(__doc__)
    parser.add_argument("recipes", nargs="*", default=["baseline:cpu", "cpu_best"])
    parser.add_argument("--seconds", type=float, default=600.0, help="training time of each (default: 600)")
    parser.add_argument("--seed", type=int, default=1337, help="the first (default: 1337)")
    parser.add_argument("--seeds", type=int, default=1, help="how many (default: 1)")
    parser.add_argument("--sizes", type=comma_separated(str), default=[OWN], help=f"{OWN}, 450kB, … (default: {OWN})")
    parser.add_argument("--folder", type=Path, default=Path("runs/contest"), help="folder of the prepared text")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with errors_as_exit():
        if options.seeds < 1:
            raise ConfigError(f"there is nothing to compare with {options.seeds} seeds; give at least 1")
        texts = Texts(options.folder, VALIDATION_BYTES, rest=True)
        for seed in range(options.seed, options.seed + options.seeds):
            rows += rows_of(seed, options, texts)
            for row in rows[-len(options.recipes) * len(options.sizes) :]:
                log(json.dumps(row))
    if options.json:
        report([*rows, *({"summary": True, **line} for line in summary(rows))], as_json=True)
        return
    report(rows, as_json=False)
    report(summary(rows), as_json=False)


if __name__ == "__main__":
    main()
