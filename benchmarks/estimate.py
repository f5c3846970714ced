"""Estimates against measurements: `python -m benchmarks.estimate [--json] [--part records|memory|cpu|curves]`.

records: milliseconds a step that `estimate` says of the recipes that ship, by the three constants fitted to all
of them and by those fitted to the others, against what their authors recorded on eight H100s; then runs that had no
part in the fit. memory: recorded peaks, and the two constants they give. cpu: a few small shapes trained for a few
steps here: parameters, step time, peak memory, and the bytes of the file `birdie.save` writes. curves: each published
run of `estimate_curves.toml` foretold by the others, from each of its validations.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import birdie
from benchmarks.report import report
from birdie.model.gpt import GPT, GPTConfig
from birdie.run.estimate import PEAK, Machine, artifact, h100, load, memory, parameters, schedule, this_cpu
from birdie.run.forecast import CHALLENGE, FIRST, Prior, features, forecast
from birdie.run.history import Entry
from birdie.run.recipe import ExportSettings, Recipe
from birdie.run.registry import book, find
from birdie.train.loop import Step, fit
from birdie.train.settings import TrainSettings

Row = dict[str, Any]
Values = NDArray[np.float64]
CURVES: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("estimate_curves.toml").read_text())["run"]

# Step averages of published logs, and of the challenge's table, that had no part in the fit: (what, model settings that
# differ from the baseline, tokens a step, sequence length, ranks, milliseconds).
OTHERS: list[tuple[str, dict[str, Any], int, int, int, float]] = [
    ("Seq2048", {}, 524_288, 2048, 8, 51.9),
    ("Seq4096, its record", {}, 393_216, 4096, 8, 71.5),
    ("Seq4096, WarmdownQuantization", {}, 393_216, 4096, 8, 54.62),
    ("baseline on Modal", {}, 524_288, 1024, 8, 51.28),
    ("10 layers on Modal", {"num_layers": 10}, 524_288, 1024, 8, 56.58),
    ("MLP × 3", {"mlp_mult": 3.0}, 524_288, 1024, 8, 48.4),
    ("MLP × 3, QAT, 786,432 tokens", {"mlp_mult": 3.0}, 786_432, 2048, 8, 79.65),
    ("vocabulary 4,096, 8 layers", {"vocab_size": 4096, "num_layers": 8}, 524_288, 1024, 8, 42.84),
    ("vocabulary 2,048, 11 × 448", {"vocab_size": 2048, "num_layers": 11, "model_dim": 448}, 524_288, 1024, 8, 53.6),
    ("12 × 416", {"num_layers": 12, "model_dim": 416}, 524_288, 1024, 8, 66.18),
    ("11 layers, smear and bigrams", {"num_layers": 11, "mlp_mult": 3.0, "smear": "fixed", "bigram_vocab_size": 2048},
     786_432, 2048, 8, 81.0),
    ("baseline, one H100 NVL", {}, 524_288, 1024, 1, 518.0),
    ("baseline, one H100, an hour", {}, 524_288, 1024, 1, 484.2),
    ("baseline, one H100, 131,072 tokens", {}, 131_072, 1024, 1, 233.5),
]  # fmt: skip


# "peak memory allocated" of published logs, all under torch.compile: (what, settings, tokens a step, length, MiB)
PEAKS: list[tuple[str, dict[str, Any], int, int, int]] = [
    ("baseline", {}, 524_288, 1024, 10_184),
    ("10 layers", {"num_layers": 10}, 524_288, 1024, 11_329),
    ("Seq4096, WarmdownQuantization", {}, 393_216, 4096, 7_757),
    ("vocabulary 4,096, 8 layers", {"vocab_size": 4096, "num_layers": 8}, 524_288, 1024, 9_367),
    ("vocabulary 2,048, 11 × 448", {"vocab_size": 2048, "num_layers": 11, "model_dim": 448}, 524_288, 1024, 9_491),
    ("11 layers, smear and bigrams", {"num_layers": 11, "mlp_mult": 3.0, "smear": "fixed", "bigram_vocab_size": 2048},
     786_432, 2048, 19_710),
]  # fmt: skip
SOTA_PEAK = 42_701  # MiB: 41.7 GiB (#1855)


def parts(recipe: Recipe, ranks: int) -> list[Values]:
    """Milliseconds a step at the peak for products and attention, micro-steps, and of the link; by depth recurrence."""
    found = []
    for recurrence in (False, True) if recipe.model.num_loops else (False,):
        each = load(recipe, ranks, torch.bfloat16, depth_recurrence=recurrence)
        products = each.micro_steps * each.cost.matrix_flops + each.update_flops
        attention = each.micro_steps * each.cost.attention_flops
        known = 1e3 * each.sent_bytes / h100(ranks).link
        found.append(np.array([1e3 * products / PEAK, 1e3 * attention / PEAK, each.micro_steps, known]))
    return found


def mean_ms(recipe: Recipe, of: Sequence[Values], constants: Values) -> float:
    """Mean milliseconds of a step of a run, with depth recurrence from its fraction of the time on."""
    times = [float(each[:3] @ constants + each[3]) for each in of]
    begin = recipe.model.enable_looping_at
    return times[0] if len(times) == 1 else 1 / (begin / times[0] + (1 - begin) / times[1])


def fitted(runs: Sequence[tuple[Recipe, list[Values], float]]) -> Values:
    """Least squares of the relative error, none of the three constants below zero; a run counts by its mean step."""
    constants = np.array([2.2, 4.0, 20.0])
    for _ in range(8):  # how many steps of a run loop depends a little on the constants
        rows, targets = [], []
        for recipe, of, recorded in runs:
            late = 0.0
            if len(of) == 2:
                one, other = (float(each[:3] @ constants + each[3]) for each in of)
                begin = recipe.model.enable_looping_at
                late = ((1 - begin) / other) / (begin / one + (1 - begin) / other)
            mean = (1 - late) * of[0] + late * of[-1]
            rows.append(mean[:3] / recorded)
            targets.append(1 - mean[3] / recorded)
        constants = _nonnegative(np.array(rows), np.array(targets))
    return constants


def _nonnegative(matrix: Values, target: Values) -> Values:
    """Least squares with no coefficient below zero: the best of all subsets that have none."""
    width, best = matrix.shape[1], (float("inf"), np.zeros(matrix.shape[1]))
    for count in range(1, width + 1):
        for subset in map(list, itertools.combinations(range(width), count)):
            found = np.linalg.lstsq(matrix[:, subset], target, rcond=None)[0]
            error = float(np.linalg.norm(matrix[:, subset] @ found - target))
            if (found >= 0).all() and error < best[0]:
                whole = np.zeros(width)
                whole[subset] = found
                best = (error, whole)
    return best[1]


def records() -> list[Row]:
    """Predicted and recorded step times."""
    runs = []
    for known in book():
        if known.about.step_ms is not None:
            recipe = known.recipe()
            runs.append((known, (recipe, parts(recipe, 8), known.about.step_ms)))
    data = [run for _, run in runs]
    constants = fitted(data)
    sys.stderr.write(
        f"products at {1 / constants[0]:.3f} of the peak, attention at {1 / constants[1]:.3f}, "
        f"{constants[2]:.2f} ms a micro-step\n"
    )
    rows: list[Row] = []
    for index, (known, (recipe, of, recorded)) in enumerate(runs):
        without = fitted([*data[:index], *data[index + 1 :]])
        shipped = 1e3 * schedule(recipe, h100(8)).mean_s
        left_out = mean_ms(recipe, of, without)
        rows.append(_time(known.name, recorded, shipped, left_out))
    for name, settings, tokens, length, ranks, recorded in OTHERS:
        train = TrainSettings(train_batch_tokens=tokens, train_seq_len=length)
        recipe = Recipe(model=GPTConfig(**settings), train=train)
        predicted = 1e3 * schedule(recipe, h100(ranks)).mean_s
        rows.append(_time(name, recorded, predicted, predicted))
    return rows


def _time(name: str, recorded: float, estimate: float, left_out: float) -> Row:
    error = 100 * (left_out / recorded - 1)
    return {
        "run": name,
        "recorded_ms": recorded,
        "estimate_ms": estimate,
        "left_out_ms": left_out,
        "left_out_error_%": error,
    }


def peaks() -> list[Row]:
    """Memory on a device as estimated and as recorded."""
    runs = [
        (
            name,
            Recipe(model=GPTConfig(**settings), train=TrainSettings(train_batch_tokens=tokens, train_seq_len=length)),
            mib,
        )
        for name, settings, tokens, length, mib in PEAKS
    ]
    every = [*runs, ("sota", find("sota").recipe(), SOTA_PEAK)]
    kept, targets, rows = [], [], []
    for name, recipe, mib in every:
        of = load(recipe, 8, torch.bfloat16, depth_recurrence=True)
        found, recorded = memory(recipe, of, h100(8)), mib * 2**20
        copy = 4 * recipe.train.train_batch_tokens // recipe.train.accumulation * recipe.model.vocab_size
        kept.append(np.array([of.cost.kept_bytes - 2 * copy, copy]) / recorded)
        targets.append(1 - (found.total - found.activations - found.logits) / recorded)
        error = 100 * (found.total / recorded - 1)
        rows.append({"run": name, "recorded_MB": recorded / 1e6, "estimate_MB": found.total / 1e6, "error_%": error})
    keeps, logits = _nonnegative(np.array(kept), np.array(targets))
    sys.stderr.write(f"kept: {keeps:.3f} of activations, {logits:.3f} of a float32 copy of the logits\n")
    return rows


SHAPES = {
    "2 × 128": (GPTConfig(num_layers=2, model_dim=128, num_heads=4, num_kv_heads=2), 2048, 256),
    "4 × 192": (GPTConfig(num_layers=4, model_dim=192, num_heads=4, num_kv_heads=2, mlp_mult=3), 2048, 256),
    "3 × 192, loops": (
        GPTConfig(num_layers=3, model_dim=192, num_heads=4, num_kv_heads=2, num_loops=1, loop_start=1, loop_end=2),
        2048, 256,
    ),
    "2 × 64, vocabulary 4,096": (
        GPTConfig(vocab_size=4096, num_layers=2, model_dim=64, num_heads=2, num_kv_heads=2), 1024, 128,
    ),
}  # fmt: skip
SCHEMES = ("int8", "int8:step=4", "int6", "ternary")
_ALONE = "from benchmarks.estimate import SHAPES, trained; trained(*SHAPES[{name!r}], 3)"
_IDLE = "from benchmarks.estimate import SHAPES"


class Pairs:
    """Tokens of which each decides the next: something to learn, without a file."""

    def __init__(self, vocabulary: int, sequences: int, length: int) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.vocabulary, self.shape = vocabulary, (sequences, 1)
        self.length = length

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        first = torch.randint(self.vocabulary, self.shape, generator=self.generator)
        rows = (first + 7 * torch.arange(self.length + 1)) % self.vocabulary
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Nothing to resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to resume."""


def recipe_of(config: GPTConfig, tokens: int, length: int, steps: int) -> Recipe:
    """A recipe of fixed steps, in float32."""
    return Recipe(
        model=config,
        train=TrainSettings(
            iterations=steps, warmdown_iters=0, warmup_steps=0, train_batch_tokens=tokens, train_seq_len=length,
            accumulation=1, max_wallclock_seconds=0, compute_dtype="float32",
        ),
    )  # fmt: skip


def trained(config: GPTConfig, tokens: int, length: int, steps: int) -> tuple[GPT, list[Step]]:
    """A model after a few steps, and the steps."""
    recipe = recipe_of(config, tokens, length, steps)
    torch.manual_seed(0)
    model = GPT(config)
    return model, list(fit(model, Pairs(config.vocab_size, tokens // length, length), recipe.train, recipe.optimizer))


def peak(code: str) -> float:
    """Most memory of a fresh process, in megabytes."""
    runner = [sys.executable, "-I", "-S", str(Path(__file__).with_name("peak.py"))]
    done = subprocess.run([*runner, sys.executable, "-c", code], check=True, capture_output=True, text=True)
    answer = json.loads(done.stdout)
    if answer["code"]:
        raise SystemExit(f"training in a process of its own failed: {answer['error']}")
    return float(answer["peak_mb"])


def on_cpu(steps: int) -> list[Row]:
    """Small shapes, really trained and really saved."""
    rows: list[Row] = []
    idle = peak(_IDLE)
    for name, (config, tokens, length) in SHAPES.items():
        recipe = recipe_of(config, tokens, length, steps)
        machine: Machine = this_cpu(recipe)
        plan = schedule(recipe, machine)
        model, taken = trained(config, tokens, length, steps)
        times = [b.train_ms - a.train_ms for a, b in itertools.pairwise(taken)]
        measured = peak(_ALONE.format(name=name)) - idle
        rows.append(_row(name, "parameters", parameters(recipe), sum(p.numel() for p in model.parameters())))
        rows.append(_row(name, "step, ms", 1e3 * plan.mean_s, statistics.median(times)))
        rows.append(_row(name, "memory, MB", plan.memory.total / 1e6, measured))
        for scheme in SCHEMES:
            wanted = dataclasses.replace(recipe, export=ExportSettings(scheme=scheme))
            with tempfile.TemporaryDirectory() as folder:
                saved = birdie.save(model, Path(folder) / "m.birdie", scheme=wanted.export.schemes(), coder="fast")
            rows.append(_row(name, f"{scheme}, bytes", artifact(wanted).bytes, saved.bytes))
    return rows


def _row(name: str, what: str, estimate: float, measured: float) -> Row:
    return {
        "shape": name, "what": what, "estimate": estimate, "measured": measured,
        "error_%": 100 * (estimate / measured - 1),
    }  # fmt: skip


def settings_of(run: dict[str, Any]) -> TrainSettings:
    """As the published run had them."""
    return TrainSettings(
        iterations=run.get("iterations", 20_000),
        warmdown_iters=run["warmdown_iters"],
        max_wallclock_seconds=run["cap"],
    )


def entries_of(run: dict[str, Any]) -> list[Entry]:
    """Its validations."""
    return [Entry(step, step * run["step_ms"], bpb) for step, bpb in run["bpb"]]


def prior_of(runs: Sequence[dict[str, Any]]) -> Prior:
    """How the law's A and C vary over `runs`: mean and deviation of the least-squares fit to each with five points."""
    found = []
    for run in runs:
        used = [each for each in entries_of(run) if each.step >= FIRST]
        if len(used) < 5:
            continue
        rows = features(settings_of(run), run["step_ms"], used[-1].step)[[each.step for each in used]]
        law = np.linalg.lstsq(rows, np.log([each.bpb for each in used]), rcond=None)[0]
        found.append((law, rows[-1, 2] != 0))
    level, power = ([float(law[index]) for law, _ in found] for index in (0, 1))
    annealed = [float(law[2]) for law, fell in found if fell]
    means = (statistics.mean(level), statistics.mean(power), statistics.mean(annealed))
    return Prior(means, (CHALLENGE.deviation[0], statistics.stdev(power), statistics.stdev(annealed)))


def held_out(runs: Sequence[dict[str, Any]]) -> list[Row]:
    """Each run's end by the others' prior, from each of its validations on the way."""
    rows: list[Row] = []
    for index, run in enumerate(runs):
        prior = prior_of([*runs[:index], *runs[index + 1 :]])
        entries = entries_of(run)
        end = entries[-1]
        for count in range(1, len(entries)):
            last = entries[count - 1]
            if last.step < FIRST:
                continue
            # the pace is known to the hundredth of a millisecond only: the end is told, so that it is that step
            told = forecast(entries[:count], settings_of(run), prior, steps=end.step)
            rows.append(
                {
                    "run": run["source"].split("/")[0], "step": last.step, "share": last.step / end.step,
                    "forecast": told.bpb, "low": told.low, "high": told.high, "end": end.bpb,
                }
            )  # fmt: skip
    return rows


def curves() -> list[Row]:
    """By the share of the run that was known."""
    every = held_out(CURVES)
    prior = prior_of(CURVES)
    sys.stderr.write(f"prior of all runs: {prior}\n")
    rows: list[Row] = []
    for low, high in itertools.pairwise((0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)):
        some = [row for row in every if low <= row["share"] < high]
        errors = [row["forecast"] - row["end"] for row in some]
        rows.append(
            {
                "share": f"{low:.0%} to {high:.0%}",
                "runs": len({row["run"] for row in some}),
                "forecasts": len(some),
                "inside_%": 100 * statistics.mean(row["low"] <= row["end"] <= row["high"] for row in some),
                "rms_error": statistics.mean(error * error for error in errors) ** 0.5,
                "worst_error": max(errors, key=abs),
                "half_width": statistics.mean(row["high"] - row["low"] for row in some) / 2,
            }
        )
    return rows


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("records", "memory", "cpu", "curves"), default="records")
    parser.add_argument("--steps", type=int, default=8, help="of each small shape")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    work: dict[str, Callable[[], list[Row]]] = {
        "records": records,
        "memory": peaks,
        "cpu": lambda: on_cpu(options.steps),
        "curves": curves,
    }
    report(work[options.part](), as_json=options.json)


if __name__ == "__main__":
    main()
