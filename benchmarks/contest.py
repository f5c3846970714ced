"""Recipes against each other: as much training time, as many bytes, the same text (`python -m benchmarks.contest`).

    python -m benchmarks.contest baseline:cpu cpu_best                 what recipes/cpu_best.toml claims
    python -m benchmarks.contest sota:cpu cpu_best --seconds 300

A recipe is a name of the book, with `:SCALE` shrunk. All train on the FineWeb text of the shared data (BIRDIE_DATA),
each under the tokenizer of its vocabulary, in one process and by turns: the next step is always of the run whose clock
is behind, and a clock stands still while others have their turn. So whatever else the machine does meanwhile slows all
of them alike, where runs one after the other would not be comparable.

The first is exported as its recipe says. All others get its bytes as their budget, and what is compared is decoded from
the files. Compiling and priming come before the clock, as in the challenge; calibration is inside it.
"""

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.ablation import Texts
from benchmarks.report import report
from birdie.cli.recipe import settings_of
from birdie.run.evaluation import evaluate
from birdie.run.events import Started, Validated
from birdie.run.pipeline import Run
from birdie.run.recipe import Recipe
from birdie.run.registry import find
from birdie.score.request import EvaluationRequest
from birdie.train.loop import Step

VALIDATION_BYTES = 400_000


class Contestant:
    """A run that is trained a step at a time.

    Attributes:
        clock_ms: training time so far.
        over: whether it has trained to its end.
    """

    def __init__(self, name: str, recipe: Recipe, folder: Path) -> None:
        self.name, self.run = name, Run(recipe, folder, notify=lambda line: _say(f"{name}: {line}"))
        self.clock_ms, self.steps, self.over, self.float_bpb = 0.0, 0, False, float("nan")
        self._events: Iterator[Any] = self.run.train()
        began = time.perf_counter()
        while not isinstance(next(self._events), Started):
            pass
        self.advance()  # priming and compiling come with the first step
        self.before_s = time.perf_counter() - began - self.clock_ms / 1000

    def advance(self) -> None:
        """One step, and whatever is to be done after it."""
        for event in self._events:
            if isinstance(event, Step):
                self.clock_ms, self.steps = event.train_ms, event.number
                if event.number % 50 == 0 or event.stopping:
                    _say(f"{self.name}: step {event.number}, {event.train_ms / 1000:.0f} s, loss {event.loss:.3f}")
                if not event.stopping:
                    return
            elif isinstance(event, Validated):
                self.float_bpb = event.score.bpb
        self.over = True

    def row(self, bytes_allowed: int | None) -> dict[str, Any]:
        """Export, decode, score."""
        summary = self.run.export(budget=bytes_allowed)
        scored = evaluate(summary.path, EvaluationRequest(device="cpu", max_tokens=0))
        model, train = self.run.model, self.run.recipe.train
        return {
            "recipe": self.name,
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps": self.steps,
            "tokens": self.steps * train.train_batch_tokens,
            "train_s": self.clock_ms / 1000 + (0.0 if self.run.calibration is None else self.run.calibration.seconds),
            "before_s": self.before_s,
            "bytes": summary.bytes,
            "bpb_float": self.float_bpb,
            "bpb_artifact": scored.score.bpb,
            "ci95": scored.score.ci95,
            "text_bytes": scored.score.bytes,
        }


def recipe_of(name: str, texts: Texts, seconds: float, seed: int) -> Recipe:
    """The recipe on the shared text, for so long."""
    book, _, scale = name.partition(":")
    recipe = settings_of(find(book), scale or None)
    return dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, **texts.settings(recipe.model.vocab_size)),
        train=dataclasses.replace(recipe.train, max_wallclock_seconds=seconds, seed=seed),
        validation=dataclasses.replace(recipe.validation, every=0, max_tokens=0),
        run=dataclasses.replace(recipe.run, checkpoint_every=0),
        device="cpu",
    )


def main() -> None:
    """Train by turns, export at the first one's size, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=["baseline:cpu", "cpu_best"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--folder", type=Path, default=Path("runs/contest"), help="where prepared text is kept")
    options = parser.parse_args()
    texts = Texts(options.folder, VALIDATION_BYTES)
    with tempfile.TemporaryDirectory() as place:
        recipes = {name: recipe_of(name, texts, options.seconds, options.seed) for name in options.recipes}
        all_of_them = [
            Contestant(name, recipe, Path(place) / str(number)) for number, (name, recipe) in enumerate(recipes.items())
        ]
        while going := [each for each in all_of_them if not each.over]:
            min(going, key=lambda each: each.clock_ms).advance()
        rows = [all_of_them[0].row(None)]
        rows += [each.row(rows[0]["bytes"]) for each in all_of_them[1:]]
    for row in rows:
        row["less"] = 1 - row["bpb_artifact"] / rows[0]["bpb_artifact"]
    report(rows, as_json=options.json)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
