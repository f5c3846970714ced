"""Effect of each technique on bits per byte, at equal steps and at equal time: `python -m benchmarks.ablation`.

    python -m benchmarks.ablation [--json] [--only smear,xsa] [--seeds 3] [--steps 240] [--jobs 2]

A small GPT without techniques (`BASE`) is trained on the FineWeb text of the shared data (BIRDIE_DATA), then again with
one change (`CHANGES`), for several seeds. Both are scored on the same held-out text in bits per byte, so vocabularies
are comparable. A seed determines initial weights and data order, the same for both. The differences are averaged, and
their standard error is over the seeds.

*Equal time* compares with a base that was trained for as many steps as take the same time. The cost of a step is
measured by turns in one process with one thread: the median ratio, rounded to a twentieth. No run is ended by a clock,
so other load on the machine cannot change a score.

Results are kept in `runs/ablation/results.jsonl`, and finished runs are not repeated.
"""

import argparse
import dataclasses
import hashlib
import json
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import command_parser, errors_as_exit, log, report
from benchmarks.seeds import mean_and_error
from benchmarks.shared_data import shared_data
from birdie.data.batches import Batches
from birdie.data.corpus import file_corpus
from birdie.data.dataset import open_dataset
from birdie.data.prepare import Layout, prepare
from birdie.data.tokenizer import load_tokenizer
from birdie.model.gpt import GPT
from birdie.run.events import Validated
from birdie.run.pipeline import Run
from birdie.run.recipe import Recipe
from birdie.runtime.device import choose_device
from birdie.train.training import Training

VALIDATION_BYTES = 125_000
TOKENIZERS = {1024: "fineweb_1024_bpe.model", 4096: "fineweb_4096_bpe.coder2011.model", 8192: "fineweb_8192_bpe.model"}
RATIO_STEP = 0.05  # the ratio of step times is rounded to a multiple of this
TIMED_STEPS = 15

BASE: Mapping[str, Any] = {
    "model": {"num_layers": 4, "model_dim": 96, "num_heads": 4, "num_kv_heads": 2},
    "train": {
        "iterations": 240,
        "max_wallclock_seconds": 0.0,
        "warmdown_fraction": 0.5,
        "warmup_steps": 0,
        "train_batch_tokens": 1024,
        "train_seq_len": 256,
        "accumulation": 1,
    },
    "optimizer": {"muon_momentum_warmup_steps": 50},
    "data": {"order": "shuffled"},
    "validation": {"every": 0},
    "run": {"checkpoint_every": 0, "log_every": 0},
    "device": "cpu",
}

CHANGES: Mapping[str, Mapping[str, Any]] = {
    "bigram 2048 × 48": {"bigram_vocab_size": 2048, "bigram_dim": 48},
    "bigram and trigram": {"bigram_vocab_size": 2048, "bigram_dim": 48, "trigram": True},
    "smear, fixed": {"smear": "fixed"},
    "smear, gated": {"smear": "gated"},
    "embedding of 48": {"embed_dim": 48},
    "untied head": {"tie_embeddings": False},
    "rotary 8 of 24": {"rope_dims": 8},
    "XSA, last 1": {"xsa_last_n": 1},
    "XSA, all": {"xsa_last_n": 4},
    "value embedding, last 2": {"value_embed_dim": 48, "value_embed_layers": [2, 3]},
    "value residual": {"value_residual": True},
    "output gate": {"attn_gate": "output"},
    "sparse gate": {"attn_gate": "sparse"},
    "dense gate": {"attn_gate": "dense"},
    "leaky ReLU²": {"activation": "leaky_relu2"},
    "SwiGLU, as many weights": {"activation": "swiglu", "mlp_mult": 4 / 3},
    "MLP × 3": {"mlp_mult": 3.0},
    "LN scale": {"ln_scale": True},
    "skip gates": {"skip_gates": True},
    "QK gain 5": {"qk_gain_init": 5.0},
    "loop of 2, late": {"num_loops": 1, "loop_start": 1, "loop_end": 2, "enable_looping_at": 0.35},
    "parallel, last 2": {"parallel_start_layer": 2},
    "lanes, last 2": {"parallel_start_layer": 2, "parallel": "lanes"},
    "softcap, poly": {"softcap": "poly"},
    "softcap, asymmetric": {"softcap": "asymmetric"},
    "documents apart": {"isolate_documents": True},
    "orthogonal init": {"orthogonal_init": True},
    "overtone init": {"overtone_init": True},
    "phased init": {"phased_init": True},
    "vocabulary 4,096": {"vocab_size": 4096},
    "vocabulary 8,192": {"vocab_size": 8192},
    "sequences of 512": {"train.train_seq_len": 512},
    "twice the steps": {"train.iterations": 2.0},
    "no warmdown": {"train.warmdown_fraction": 0.0},
    "no warmdown, twice the steps": {"train.warmdown_fraction": 0.0, "train.iterations": 2.0},
}
"""Changes of a recipe: key of `[model]`, or of another table as `table.key`; `iterations` is a factor."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """One training run.

    Attributes:
        change: name in `CHANGES`; empty: the base.
        seed: of initial weights and data order.
        steps: training steps.
    """

    change: str
    seed: int
    steps: int


class Texts:
    """The FineWeb text of the shared data, prepared once per tokenizer in `folder`.

    Args:
        folder: of the prepared text.
        validation_bytes: about how many bytes of the validation text are held out.
        rest: train on the rest of the validation text as well.

    Raises:
        ConfigError: BIRDIE_DATA is unset.
    """

    def __init__(self, folder: Path, validation_bytes: int = VALIDATION_BYTES, *, rest: bool = False) -> None:
        self.shared, self.folder, self.rest = shared_data(), folder, rest
        self.validation_bytes = validation_bytes

    def settings(self, vocabulary: int) -> dict[str, Any]:
        """Return the recipe table [data] for a vocabulary size, preparing the data if necessary."""
        tokenizer = self.shared / "tokenizers" / TOKENIZERS[vocabulary]
        root = self.folder / f"{vocabulary}{'-rest' if self.rest else ''}"
        layout = Layout.of(root, load_tokenizer(str(tokenizer)).name)
        if not (layout.folder / "dataset.json").is_file():
            self._prepare(str(tokenizer), root)
        return {"path": str(layout.folder), "tokenizer": str(tokenizer)}

    def _prepare(self, tokenizer: str, root: Path) -> None:
        source = self.shared / "text" / "fineweb"
        held_out, rest = root / "held_out.txt", root / "rest.txt"
        root.mkdir(parents=True, exist_ok=True)
        text = (source / "val_head.txt").read_bytes()
        end = text.rindex(b"\n", 0, self.validation_bytes) + 1
        held_out.write_bytes(text[:end])
        rest.write_bytes(text[end:])
        training = [str(source / "train.txt"), *([str(rest)] if self.rest else [])]
        corpus = file_corpus(training, validation=[str(held_out)], documents="line")
        for _ in prepare(corpus, tokenizer, root):
            pass


def recipe_of(trial: Trial, texts: Texts) -> Recipe:
    """Return the recipe of the base with the change of `trial`."""
    values: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in BASE.items()}
    for name, value in CHANGES[trial.change].items() if trial.change else ():
        table, _, key = name.rpartition(".")
        values[table or "model"][key] = value
    values["train"] |= {"iterations": trial.steps, "seed": trial.seed}
    values["data"] |= texts.settings(values["model"].get("vocab_size", 1024))
    return Recipe.from_dict(values)


def run_trial(trial: Trial, folder: Path) -> dict[str, Any]:
    """Train and score, and return the row to keep."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as run_folder:
        run = Run(recipe_of(trial, Texts(folder)), Path(run_folder))
        score = [event.score for event in run.train() if isinstance(event, Validated)][-1]
    parameters = sum(p.numel() for p in run.model.parameters())
    return {**dataclasses.asdict(trial), "bpb": score.bpb, "parameters": parameters, "bytes": score.bytes}


def step_ratio(change: str, folder: Path) -> float:
    """Return the time of a step over that of the base, measured by turns.

    Depth recurrence that starts late counts with its share of the run.
    """
    torch.set_num_threads(1)
    texts = Texts(folder)
    iterations = 4 * TIMED_STEPS
    base, changed = (_fit(recipe_of(Trial(name, 0, iterations), texts)) for name in ("", change))
    ratios = []
    for base_ms, changed_ms in zip(_durations(base), _durations(changed), strict=False):
        ratios.append(changed_ms / base_ms)
        if len(ratios) == TIMED_STEPS + 3:
            break
    share = 1 - float(CHANGES[change].get("enable_looping_at", 0.0))  # the timed run loops from its first step on
    return 1 + (statistics.median(ratios[3:]) - 1) * share


def _fit(recipe: Recipe) -> Training:
    torch.manual_seed(recipe.train.seed)
    model, settings = GPT(recipe.model), recipe.train
    batches = Batches(
        open_dataset(recipe.data.path).train,
        batch_tokens=settings.train_batch_tokens,
        seq_len=settings.train_seq_len,
        accumulation=settings.accumulation,
        order=recipe.data.order,
        seed=settings.seed,
    )
    return Training(model, batches, settings, recipe.optimizer, device=choose_device("cpu"))


def _durations(run: Training) -> Iterator[float]:
    start = 0.0
    for step in run:
        yield step.train_ms - start
        start = step.train_ms


class Results:
    """Measured results, one JSON object per line; a different base or change has another key, so is measured again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.is_file() else []
        self.known = {row["key"]: row for row in map(json.loads, lines)}

    @staticmethod
    def key(kind: str, change: str, *numbers: int) -> str:
        """Return the key of a result ("run" or "time"), a hash of all settings it depends on."""
        settings = json.dumps([BASE, CHANGES.get(change), kind, change, numbers, VALIDATION_BYTES], sort_keys=True)
        return hashlib.sha256(settings.encode()).hexdigest()[:16]

    def add(self, key: str, row: Mapping[str, Any]) -> None:
        """Store a result."""
        self.known[key] = {"key": key, **row}
        with self.path.open("a") as file:
            file.write(json.dumps(self.known[key]) + "\n")


def run_trials(trials: Iterable[Trial], results: Results, folder: Path, jobs: int) -> None:
    """Run the trials that have no result yet, `jobs` at a time."""
    wanted = {results.key("run", t.change, t.seed, t.steps): t for t in trials}
    missing = {key: trial for key, trial in wanted.items() if key not in results.known}
    with ProcessPoolExecutor(jobs) as pool:
        keys = {pool.submit(run_trial, trial, folder): key for key, trial in missing.items()}
        for count, future in enumerate(as_completed(keys), 1):
            row = future.result()
            results.add(keys[future], row)
            trial = f"{row['change'] or 'base'}, seed {row['seed']}, {row['steps']} steps"
            log(f"{count} of {len(missing)}: {trial}: {row['bpb']:.4f}")


def main() -> None:
    """Run what is missing, and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--only", default="", help="parts of names of changes, comma-separated (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--steps", type=int, default=BASE["train"]["iterations"], help="(default: 240)")
    parser.add_argument("--jobs", type=int, default=2, help="parallel runs, one thread each (default: 2)")
    parser.add_argument("--folder", type=Path, default=Path("runs/ablation"), help="(default: runs/ablation)")
    options = parser.parse_args(arguments)
    parts = [part for part in options.only.lower().split(",") if part]
    names = [name for name in CHANGES if not parts or any(part in name.lower() for part in parts)]
    with errors_as_exit():
        report(_measure(names, options), as_json=options.json)


def _measure(names: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    texts, results = Texts(options.folder), Results(options.folder / "results.jsonl")
    for vocabulary in sorted({CHANGES[name].get("vocab_size", 1024) for name in names} | {1024}):
        texts.settings(vocabulary)  # prepared here, because several processes would prepare it at the same time

    def run_all(trials: Iterable[Trial]) -> None:
        run_trials(trials, results, options.folder, options.jobs)

    seeds = range(options.seeds)
    run_all(Trial("", seed, options.steps) for seed in seeds)
    run_all(Trial(name, seed, _steps(name, options.steps)) for seed in seeds for name in names)
    ratios = {name: _ratio(name, results, options.folder) for name in names}
    lengths = {name: _equal_time_steps(name, ratios[name], options.steps) for name in names}
    run_all(Trial("", seed, steps) for seed in seeds for steps in sorted(set(lengths.values())))
    rows = [_row(name, ratios[name], lengths[name], options, results) for name in names]
    return [_base_row(options, results), *rows]


def _steps(name: str, steps: int) -> int:
    return round(steps * float(CHANGES[name].get("train.iterations", 1.0)))


def _equal_time_steps(name: str, ratio: float, steps: int) -> int:
    """Return the steps of the base that take the same time as the change's."""
    return round(_steps(name, steps) * RATIO_STEP * round(ratio / RATIO_STEP))


def _ratio(name: str, results: Results, folder: Path) -> float:
    key = results.key("time", name)
    if key not in results.known:
        results.add(key, {"change": name, "ratio": step_ratio(name, folder)})
    return float(results.known[key]["ratio"])


def _bpb(results: Results, name: str, seeds: int, steps: int) -> list[float]:
    return [results.known[results.key("run", name, seed, steps)]["bpb"] for seed in range(seeds)]


def _base_row(options: argparse.Namespace, results: Results) -> dict[str, Any]:
    mean, error = mean_and_error(_bpb(results, "", options.seeds, options.steps))
    parameters = results.known[results.key("run", "", 0, options.steps)]["parameters"]
    row = {"change": "none", "parameters": parameters, "step": 1.0, "steps": options.steps}
    return row | {
        "bpb, same steps": mean,
        "± ": error,
        "base's steps": options.steps,
        "bpb, same time": mean,
        " ±": error,
    }


def _row(name: str, ratio: float, length: int, options: argparse.Namespace, results: Results) -> dict[str, Any]:
    """Return the differences to the base after equal steps and after equal time."""
    steps = _steps(name, options.steps)
    changed = _bpb(results, name, options.seeds, steps)
    same_steps, same_time = (
        mean_and_error([new - old for new, old in zip(changed, _bpb(results, "", options.seeds, count), strict=True)])
        for count in (options.steps, length)
    )
    parameters = results.known[results.key("run", name, 0, steps)]["parameters"]
    row = {"change": name, "parameters": parameters, "step": ratio, "steps": steps}
    row |= {"bpb, same steps": same_steps[0], "± ": same_steps[1]}
    return row | {"base's steps": length, "bpb, same time": same_time[0], " ±": same_time[1]}


if __name__ == "__main__":
    main()
