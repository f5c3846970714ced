"""Estimates compared with measurements: `python -m benchmarks.estimate [--json] [--part records|memory|cpu]`.

- records: milliseconds per step that `birdie estimate` predicts for the shipped recipes, with the three constants
  fitted to all of them and with those fitted to all others (leave-one-out), compared with the times that their authors
  recorded on eight H100s; then runs that are not in the fit.
- memory: recorded peaks, and the two constants fitted to them.
- cpu: small shapes trained for a few steps on this machine: parameters, step time, peak memory, and the bytes of the
  file that `birdie.save` writes.
"""

import dataclasses
import itertools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import birdie
from benchmarks.command import command_parser, log, report
from benchmarks.loaders import StatelessLoader
from benchmarks.memory import python_peak
from birdie.model.gpt import GPT, GPTConfig
from birdie.run.estimate import PEAK, Machine, artifact, h100, load, memory, parameters, schedule, this_cpu
from birdie.run.recipe import ExportSettings, Recipe
from birdie.run.registry import find, shipped_recipes
from birdie.train.loop import Step
from birdie.train.settings import TrainSettings
from birdie.train.training import Training

Row = dict[str, Any]
Values = NDArray[np.float64]

# Average step times of published logs and of the challenge's table that are not in the fit: (name, model settings that
# differ from the baseline, tokens per step, sequence length, ranks, milliseconds).
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


# "peak memory allocated" of published logs, all under torch.compile: (name, settings, tokens per step, length, MiB)
PEAKS: list[tuple[str, dict[str, Any], int, int, int]] = [
    ("baseline", {}, 524_288, 1024, 10_184),
    ("10 layers", {"num_layers": 10}, 524_288, 1024, 11_329),
    ("Seq4096, WarmdownQuantization", {}, 393_216, 4096, 7_757),
    ("vocabulary 4,096, 8 layers", {"vocab_size": 4096, "num_layers": 8}, 524_288, 1024, 9_367),
    ("vocabulary 2,048, 11 × 448", {"vocab_size": 2048, "num_layers": 11, "model_dim": 448}, 524_288, 1024, 9_491),
    ("11 layers, smear and bigrams", {"num_layers": 11, "mlp_mult": 3.0, "smear": "fixed", "bigram_vocab_size": 2048},
     786_432, 2048, 19_710),
]  # fmt: skip
SOTA_PEAK = 42_701  # MiB: 41.7 GiB (parameter-golf#1855)


def parts(recipe: Recipe, ranks: int) -> list[Values]:
    """Return the parts of a step: ms at peak FLOP/s of products and of attention, micro-steps, and ms of communication.

    A recipe with depth recurrence has two entries: without and with loops.
    """
    entries = []
    for with_loops in (False, True) if recipe.model.num_loops else (False,):
        step = load(recipe, ranks, torch.bfloat16, depth_recurrence=with_loops)
        products = step.micro_steps * step.cost.matrix_flops + step.update_flops
        attention = step.micro_steps * step.cost.attention_flops
        link_ms = 1e3 * step.sent_bytes / h100(ranks).link
        entries.append(np.array([1e3 * products / PEAK, 1e3 * attention / PEAK, step.micro_steps, link_ms]))
    return entries


def mean_ms(recipe: Recipe, entries: Sequence[Values], constants: Values) -> float:
    """Return the mean step time of a run whose loops start at their share of the training time."""
    times = [float(entry[:3] @ constants + entry[3]) for entry in entries]
    begin = recipe.model.enable_looping_at
    return times[0] if len(times) == 1 else 1 / (begin / times[0] + (1 - begin) / times[1])


def fitted(runs: Sequence[tuple[Recipe, list[Values], float]]) -> Values:
    """Return the three constants: non-negative least squares of the relative error of the mean step."""
    constants = np.array([2.2, 4.0, 20.0])
    for _ in range(8):  # the share of steps with depth recurrence depends slightly on the constants, so iterate
        rows, targets = [], []
        for recipe, entries, recorded in runs:
            late = 0.0
            if len(entries) == 2:
                plain_ms, looping_ms = (float(entry[:3] @ constants + entry[3]) for entry in entries)
                begin = recipe.model.enable_looping_at
                late = ((1 - begin) / looping_ms) / (begin / plain_ms + (1 - begin) / looping_ms)
            mean = (1 - late) * entries[0] + late * entries[-1]
            rows.append(mean[:3] / recorded)
            targets.append(1 - mean[3] / recorded)
        constants = _nonnegative(np.array(rows), np.array(targets))
    return constants


def _nonnegative(matrix: Values, target: Values) -> Values:
    """Return the non-negative least-squares solution: the best over all subsets of columns with a valid solution."""
    width, best = matrix.shape[1], (float("inf"), np.zeros(matrix.shape[1]))
    for count in range(1, width + 1):
        for subset in map(list, itertools.combinations(range(width), count)):
            solution = np.linalg.lstsq(matrix[:, subset], target, rcond=None)[0]
            error = float(np.linalg.norm(matrix[:, subset] @ solution - target))
            if (solution >= 0).all() and error < best[0]:
                full = np.zeros(width)
                full[subset] = solution
                best = (error, full)
    return best[1]


def records() -> list[Row]:
    """Return predicted and recorded step times."""
    runs = []
    for entry in shipped_recipes():
        if entry.about.step_ms is not None:
            recipe = entry.recipe()
            runs.append((entry, (recipe, parts(recipe, 8), entry.about.step_ms)))
    data = [run for _, run in runs]
    constants = fitted(data)
    log(
        f"products at {1 / constants[0]:.3f} of the peak, attention at {1 / constants[1]:.3f}, "
        f"{constants[2]:.2f} ms per micro-step"
    )
    rows: list[Row] = []
    for index, (entry, (recipe, entries, recorded)) in enumerate(runs):
        without = fitted([*data[:index], *data[index + 1 :]])
        shipped = 1e3 * schedule(recipe, h100(8)).mean_s
        rows.append(_time(entry.name, recorded, shipped, mean_ms(recipe, entries, without)))
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
    """Return the estimated and the recorded memory of each run."""
    runs = [
        (
            name,
            Recipe(model=GPTConfig(**settings), train=TrainSettings(train_batch_tokens=tokens, train_seq_len=length)),
            mib,
        )
        for name, settings, tokens, length, mib in PEAKS
    ]
    runs.append(("sota", find("sota").recipe(), SOTA_PEAK))
    matrix, targets, rows = [], [], []
    for name, recipe, mib in runs:
        step = load(recipe, 8, torch.bfloat16, depth_recurrence=True)
        estimated, recorded = memory(recipe, step, h100(8)), mib * 2**20
        copy = 4 * recipe.train.train_batch_tokens // recipe.train.accumulation * recipe.model.vocab_size
        matrix.append(np.array([step.cost.kept_bytes - 2 * copy, copy]) / recorded)
        targets.append(1 - (estimated.total - estimated.activations - estimated.logits) / recorded)
        error = 100 * (estimated.total / recorded - 1)
        rows.append(
            {"run": name, "recorded_MB": recorded / 1e6, "estimate_MB": estimated.total / 1e6, "error_%": error}
        )
    activations, logits = _nonnegative(np.array(matrix), np.array(targets))
    log(f"stored: {activations:.3f} of the activations, {logits:.3f} of a float32 copy of the logits")
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
SCHEMES = ("int8", "int8:level_stride=4", "int6", "ternary")
_TRAIN = "from benchmarks.estimate import SHAPES, train_steps; train_steps(*SHAPES[{name!r}], 3)"
_IMPORT = "from benchmarks.estimate import SHAPES"


class SuccessorTokens(StatelessLoader):
    """Loader of sequences in which each token determines the next: data to learn from, without a file."""

    def __init__(self, vocabulary: int, sequences: int, length: int) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.vocabulary, self.shape = vocabulary, (sequences, 1)
        self.length = length

    def next(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets."""
        first = torch.randint(self.vocabulary, self.shape, generator=self.generator)
        rows = (first + 7 * torch.arange(self.length + 1)) % self.vocabulary
        return rows[:, :-1], rows[:, 1:]


def recipe_of(config: GPTConfig, tokens: int, length: int, steps: int) -> Recipe:
    """Return a recipe of `steps` steps in float32."""
    return Recipe(
        model=config,
        train=TrainSettings(
            iterations=steps, warmdown_iters=0, warmup_steps=0, train_batch_tokens=tokens, train_seq_len=length,
            accumulation=1, max_wallclock_seconds=0, compute_dtype="float32",
        ),
    )  # fmt: skip


def train_steps(config: GPTConfig, tokens: int, length: int, steps: int) -> tuple[GPT, list[Step]]:
    """Return a model after a few steps, and the steps."""
    recipe = recipe_of(config, tokens, length, steps)
    torch.manual_seed(0)
    model = GPT(config)
    return model, list(
        Training(model, SuccessorTokens(config.vocab_size, tokens // length, length), recipe.train, recipe.optimizer)
    )


def on_cpu(steps: int) -> list[Row]:
    """Return estimates and measurements of small shapes that are trained and saved on this machine."""
    rows: list[Row] = []
    idle = python_peak(_IMPORT)
    for name, (config, tokens, length) in SHAPES.items():
        recipe = recipe_of(config, tokens, length, steps)
        machine: Machine = this_cpu(recipe)
        plan = schedule(recipe, machine)
        model, trained = train_steps(config, tokens, length, steps)
        times = [b.train_ms - a.train_ms for a, b in itertools.pairwise(trained)]
        peak = python_peak(_TRAIN.format(name=name)) - idle
        rows.append(_row(name, "parameters", parameters(recipe), sum(p.numel() for p in model.parameters())))
        rows.append(_row(name, "step, ms", 1e3 * plan.mean_s, statistics.median(times)))
        rows.append(_row(name, "memory, MB", plan.memory.total / 1e6, peak))
        for scheme in SCHEMES:
            export = dataclasses.replace(recipe, export=ExportSettings(scheme=scheme))
            with tempfile.TemporaryDirectory() as folder:
                saved = birdie.save(model, Path(folder) / "m.birdie", scheme=export.export.schemes(), coder="fast")
            rows.append(_row(name, f"{scheme}, bytes", artifact(export).bytes, saved.bytes))
    return rows


def _row(name: str, what: str, estimate: float, measured: float) -> Row:
    return {
        "shape": name, "what": what, "estimate": estimate, "measured": measured,
        "error_%": 100 * (estimate / measured - 1),
    }  # fmt: skip


def main() -> None:
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--part", choices=("records", "memory", "cpu"), default="records")
    parser.add_argument("--steps", type=int, default=8, help="training steps of each small shape (default: 8)")
    options = parser.parse_args(arguments)
    work: dict[str, Callable[[], list[Row]]] = {
        "records": records,
        "memory": peaks,
        "cpu": lambda: on_cpu(options.steps),
    }
    report(work[options.part](), as_json=options.json)


if __name__ == "__main__":
    main()
