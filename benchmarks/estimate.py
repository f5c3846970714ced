"""Estimates compared with recorded runs: `python -m benchmarks.estimate [--json] [--part records|memory]`.

- records: milliseconds per step that `birdie estimate` predicts for the shipped recipes, with the three constants
  fitted to all of them and with those fitted to all others (leave-one-out), compared with the times that their authors
  recorded on eight H100s; then runs that are not in the fit.
- memory: recorded peaks, and the two constants fitted to them.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.command import command_parser, log, report
from birdie.gpt.model.gpt import GPTConfig
from birdie.gpt.run.recipe_registry import find, shipped_recipes
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.run.run_estimate import LINK, PEAK, load, memory, schedule
from birdie.gpt.train.settings import TrainSettings

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
        link_ms = 1e3 * step.sent_bytes / LINK
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
        shipped = 1e3 * schedule(recipe, 8).step_s
        rows.append(_time(entry.name, recorded, shipped, mean_ms(recipe, entries, without)))
    for name, settings, tokens, length, ranks, recorded in OTHERS:
        train = TrainSettings(train_batch_tokens=tokens, train_seq_len=length)
        recipe = Recipe(model=GPTConfig(**settings), train=train)
        predicted = 1e3 * schedule(recipe, ranks).step_s
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
        estimated, recorded = memory(recipe, step, 8, torch.bfloat16, compiled=True), mib * 2**20
        copy = 4 * recipe.train.train_batch_tokens // recipe.train.accumulation * recipe.model.vocab_size
        matrix.append(np.array([step.cost.kept_bytes - 2 * copy, copy]) / recorded)
        targets.append(1 - estimated.fixed / recorded)
        error = 100 * (estimated.total / recorded - 1)
        rows.append(
            {"run": name, "recorded_MB": recorded / 1e6, "estimate_MB": estimated.total / 1e6, "error_%": error}
        )
    activations, logits = _nonnegative(np.array(matrix), np.array(targets))
    log(f"stored: {activations:.3f} of the activations, {logits:.3f} of a float32 copy of the logits")
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--part", choices=("records", "memory"), default="records")
    options = parser.parse_args(arguments)
    report(records() if options.part == "records" else peaks(), as_json=options.json)


if __name__ == "__main__":
    main()
