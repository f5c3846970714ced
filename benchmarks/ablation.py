"""Effect of each technique on bits per byte, at equal steps and at equal time: `python -m benchmarks.ablation`.

    python -m benchmarks.ablation [--json] [--only smear,xsa] [--seeds 3] [--steps 240] [--jobs 2]

A small GPT without techniques (`BASE`) is trained on the FineWeb text of the shared data (BIRDIE_DATA), then again with
one change (`CHANGES`), for several seeds. Both are scored on the same held-out text in bits per byte, so vocabularies
are comparable. A seed determines initial weights and data order, the same for both. The differences are averaged, and
their standard error is over the seeds.

*Equal time* compares with a base that was trained for as many steps as take the same time, by the training time of the
runs of seed 0; the ratio is rounded to a twentieth. No run is ended by a clock, so other load on the machine cannot
change a score, but it changes the ratio: measure on an idle machine, with --jobs 1.

Runs are kept in the folder by the digest of their recipe, and finished ones are not repeated.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.command import Row, command_parser, errors_as_exit, log, mean_and_error, report, shared_data
from birdie.gpt.data.corpus import file_corpus
from birdie.gpt.data.preparation import Layout, prepare
from birdie.gpt.data.tokenizer import load_tokenizer
from birdie.gpt.run.recipe_settings import Recipe
from birdie.lab.experiment import Experiment

VALIDATION_BYTES = 125_000
TOKENIZERS = {1024: "fineweb_1024_bpe.model", 4096: "fineweb_4096_bpe.coder2011.model", 8192: "fineweb_8192_bpe.model"}
RATIO_STEP = 0.05  # the ratio of step times is rounded to a multiple of this

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
    "export": {"scheme": "int8", "effort": "fast"},  # it is not what is compared
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
    "floor 0.1": {"train.min_lr": 0.1},
    "EMA 0.97": {"average.kind": "ema", "average.ema_decay": 0.97},
    "no warmdown, EMA 0.97": {"train.warmdown_fraction": 0.0, "average.kind": "ema", "average.ema_decay": 0.97},
    "SWA, every 5 below 0.5": {"average.kind": "swa", "average.swa_every": 5},
    "LAWA, 10 × 5": {"average.kind": "lawa", "average.lawa_every": 5},
    "bandit, each step": {"bandit.every": 1},
    "bandit, 8 steps": {"bandit.every": 8},
}
"""Changes of a recipe: key of `[model]`, or of another table as `table.key`; `iterations` is a factor."""


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
        layout = Layout.of(root, "fineweb", load_tokenizer(str(tokenizer)).name)
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
        corpus = file_corpus(training, validation=[str(held_out)], documents="line", name="fineweb")
        for _ in prepare(corpus, tokenizer, root):
            pass


def recipe_of(change: str, seed: int, steps: int, texts: Texts) -> Recipe:
    """Return the recipe of the base with a change (empty: none), for so many steps."""
    values: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in BASE.items()}
    for name, value in CHANGES[change].items() if change else ():
        table, _, key = name.rpartition(".")
        values.setdefault(table or "model", {})[key] = value
    values["train"] |= {"iterations": steps, "seed": seed}
    values["data"] |= texts.settings(values["model"].get("vocab_size", 1024))
    return Recipe.from_dict(values)


class Bench:
    """Runs of the base and of its changes, kept in a folder."""

    def __init__(self, texts: Texts, options: argparse.Namespace) -> None:
        self.texts, self.options, self.seeds = texts, options, range(options.seeds)

    def bpb(self, change: str, steps: int) -> list[float]:
        """Return the bits per byte of each seed."""

        def run(seed: int) -> float:
            score: float = self._columns(change, seed, steps)["bpb_float"]
            log(f"{change or 'base'}, seed {seed}, {steps} steps: {score:.4f}")
            return score

        with ThreadPoolExecutor(self.options.jobs) as pool:
            return list(pool.map(run, self.seeds))

    def _columns(self, change: str, seed: int, steps: int) -> dict[str, Any]:
        recipe = recipe_of(change, seed, steps, self.texts)
        return Experiment(self.options.folder).run(recipe, recipe.digest, score="bpb_float").columns

    def ratio(self, change: str) -> float:
        """Return the time of a step over that of the base."""
        base, changed = (self._columns(name, 0, self.options.steps) for name in ("", change))
        return float(changed["train_seconds"] / changed["steps"] / (base["train_seconds"] / base["steps"]))

    def rows(self, names: Iterable[str]) -> Iterable[Row]:
        """Yield the row of the base, then that of each change: differences after equal steps and after equal time."""
        steps = self.options.steps
        base = {steps: self.bpb("", steps)}
        mean, error = mean_and_error(base[steps])
        yield row("none", 1.0, steps, (mean, error), steps, (mean, error))
        for name in names:
            ratio, taken = self.ratio(name), round(steps * float(CHANGES[name].get("train.iterations", 1.0)))
            length = round(taken * RATIO_STEP * round(ratio / RATIO_STEP))
            changed = self.bpb(name, taken)
            if length not in base:
                base[length] = self.bpb("", length)
            differences = {count: [b - a for a, b in zip(base[count], changed, strict=True)] for count in base}
            same = [mean_and_error(differences[count]) for count in (steps, length)]
            yield row(name, ratio, taken, same[0], length, same[1])


def row(
    change: str,
    ratio: float,
    steps: int,
    same_steps: tuple[float, float | None],
    length: int,
    same_time: tuple[float, float | None],
) -> Row:
    """Return one row."""
    first = {"change": change, "step": ratio, "steps": steps, "bpb, same steps": same_steps[0], "± ": same_steps[1]}
    return first | {"base's steps": length, "bpb, same time": same_time[0], " ±": same_time[1]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--only", default="", help="parts of names of changes, comma-separated (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--steps", type=int, default=BASE["train"]["iterations"], help="(default: 240)")
    parser.add_argument("--jobs", type=int, default=2, help="parallel runs (default: 2)")
    parser.add_argument("--folder", type=Path, default=Path("runs/ablation"), help="(default: runs/ablation)")
    options = parser.parse_args(arguments)
    parts = [part for part in options.only.lower().split(",") if part]
    names = [name for name in CHANGES if not parts or any(part in name.lower() for part in parts)]
    with errors_as_exit():
        texts = Texts(options.folder)
        for vocabulary in sorted({CHANGES[name].get("vocab_size", 1024) for name in names} | {1024}):
            texts.settings(vocabulary)  # prepared here, because runs would prepare it at the same time
        report(list(Bench(texts, options).rows(names)), as_json=options.json)


if __name__ == "__main__":
    main()
