"""Networks fine-tuned to be small, beside what only quantizes them: `python -m benchmarks.spectral_tune [--json]`.

    python -m benchmarks.spectral_tune                            the shared GPT (benchmarks.bench_model)
    python -m benchmarks.spectral_tune --weights resnet32-….th --smaller 10,20,28
    python -m benchmarks.spectral_tune --recipe resnet_spectral --alone

The GPT is trained on, on text it knows, by its own loss. A ResNet is trained on the 2,000 lossless training images of
the shared data (BIRDIE_DATA), flipped, shifted and mixed in pairs (mixup), towards what the float network says of them;
the JPEG test images are only tested on. Sizes are reached in turn, each from the one before.

Beside them: the float network, and the same fine-tuned plainly for as many steps as the smallest has had (a ResNet by
labels, for towards its own predictions it would stay what it is); and without training: plain grids with one step a
matrix, birdie's trellis without data and with Fisher information, and NNCodec, all of the float network; of the GPT
also trellis and Fisher information on the one that was fine-tuned plainly. Every row is decoded from its file.
"""

import argparse
import copy
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie
from benchmarks.bench_model import Sources
from benchmarks.curves import bytes_at
from benchmarks.quality import Batch, Subject, windows
from benchmarks.rate_distortion import Cache, Row, birdie_rows, rival_rows, row, subject_of
from benchmarks.report import report
from benchmarks.resnet import augmented
from benchmarks.rivals import NotInstalledError
from birdie.artifact.load import load
from birdie.data.shards import read_shard
from birdie.errors import BirdieError, ConfigError
from birdie.run.registry import find

PROGRAM = "python -m benchmarks.spectral_tune"
SETTINGS = ("weights", "smaller", "transform", "steps", "batch", "rate", "settled", "start", "seed")  # of a recipe
GRIDS = (0.4, 0.6, 0.8, 1.1, 1.5, 2.0)  # steps of plain grids, in deviations of the matrix
TABLE = ("scheme", "bytes", "smaller", "bpb", "accuracy", "agreement", "kl", "encode_s")
Loss = Callable[[nn.Module, Batch], Tensor]


class Images:
    """Each epoch in a new order, flipped, shifted by up to 4 pixels, and mixed in pairs."""

    def __init__(self, subject: Subject, batch: int, seed: int) -> None:
        self.inputs, self.labels = (torch.cat(parts) for parts in zip(*subject.calibration, strict=True))
        self.batch, self.seed = batch, seed

    def __iter__(self) -> Iterator[Batch]:
        """(inputs, shares of the classes), both mixed."""
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        parts = torch.randperm(len(self.inputs), generator=generator).split(self.batch)  # type: ignore[no-untyped-call]
        moved = augmented([(self.inputs[part], self.labels[part]) for part in parts], times=1, seed=self.seed)
        for inputs, labels in moved:
            share = torch.rand((), generator=generator)
            other = torch.randperm(len(inputs), generator=generator)
            classes = F.one_hot(labels, 10).float()
            yield share * inputs + (1 - share) * inputs[other], share * classes + (1 - share) * classes[other]


class Text:
    """Windows of the training tokens, each epoch in a new order."""

    def __init__(self, batch: int, seed: int) -> None:
        tokens = read_shard(Sources.under(Path(os.environ["BIRDIE_DATA"])).train)
        pairs = windows(tokens[: (len(tokens) - 1) // 512 * 512 + 1])
        self.ids, self.targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        self.batch, self.generator = batch, torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(len(self.ids), generator=self.generator)
        for part in order.split(self.batch):  # type: ignore[no-untyped-call]
            yield self.ids[part], self.targets[part]


def from_targets(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy: of tokens, or of shares of classes."""
    logits = model(batch[0])
    targets = batch[1] if batch[1].is_floating_point() else batch[1].flatten()
    return F.cross_entropy(logits.flatten(0, -2), targets)


def from_float(teacher: nn.Module) -> Loss:
    """KL to what `teacher` says."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch[0]).log_softmax(-1)
        return F.kl_div(model(batch[0]).log_softmax(-1), wanted, reduction="batchmean", log_target=True)

    return loss


class Bench:
    """One network and how it is trained on."""

    def __init__(self, subject: Subject, options: argparse.Namespace) -> None:
        self.subject, self.options = subject, options
        self.text = subject.bits is not None
        self.whole = 4 * sum(weight.numel() for weight in subject.state.values())
        self.budgets = [int(self.whole / times) for times in sorted(options.smaller)]

    def tuned(self, model: nn.Module, data: Iterable[Batch], loss: Loss, steps: int, budget: int | None) -> None:
        """Fine-tune in place, and say how it goes. Statistics of norms stay: mixed images have others."""
        model.eval()
        settings = {"rate": self.options.rate, "settled": self.options.settled, "measured": self.text}
        for step in birdie.fine_tune(model, data, loss, steps=steps, budget=budget, **settings):
            if step.number % 50 == 0 or step.number == step.steps:
                size = "" if step.bits is None else f", {step.bits:.3f} bits a weight, λ {step.weight:.2g}"
                print(f"step {step.number} of {step.steps}: loss {step.loss:.4f}{size}", file=sys.stderr, flush=True)

    def data(self) -> Iterable[Batch]:
        """Batches to train on, the same each time."""
        batch, seed = self.options.batch, self.options.seed
        return Text(batch, seed) if self.text else Images(self.subject, batch, seed)

    def start(self) -> nn.Module:
        """The float network once more."""
        return copy.deepcopy(self.subject.module)

    def plainly(self) -> tuple[nn.Module, float]:
        """The float network trained on without a size in mind, and the seconds it took."""
        model, start = self.start(), time.perf_counter()
        self.tuned(model, self.data(), from_targets, self.options.steps * len(self.budgets), None)
        return model, time.perf_counter() - start

    def rows(self) -> Iterator[Row]:
        """Everything of the table."""
        subject, version = self.subject, torch.__version__
        yield row("float", "float32", self.whole, subject.measure(subject.state), 0.0, version)
        plain, seconds = self.plainly()
        yield row("float", "float32, fine-tuned", self.whole, subject.measure(plain.state_dict()), seconds, version)
        yield from self.spectral()
        if self.options.alone:
            return
        yield from self.untrained()
        if self.text:
            other = dataclasses.replace(subject, module=plain, state=plain.state_dict(), logits=dict(subject.logits))
            after = "fine-tuned, then Fisher steps"
            yield from birdie_rows(other, [(after, after, {"budget": size}) for size in self.finer()])
        else:
            yield from rival_rows(subject, Cache(self.options.runs / "rd-cache", subject), ["nncodec"], ())

    def spectral(self) -> Iterator[Row]:
        """The network trained to each size in turn."""
        torch.manual_seed(self.options.seed)
        model, start, data = self.start(), time.perf_counter(), self.data()
        birdie.spectral(model, transform=self.options.transform, init_bits=self.options.start)
        loss = from_targets if self.text else from_float(self.subject.module)
        for budget in self.budgets:
            self.tuned(model, data, loss, self.options.steps, budget)
            with tempfile.TemporaryDirectory() as folder:
                size = birdie.save(model, Path(folder) / "x.birdie").bytes
                quality = self.subject.measure(load(Path(folder) / "x.birdie"))
            seconds = time.perf_counter() - start
            scheme = f"spectral, {self.options.transform}"
            yield row("spectral", scheme, size, quality, seconds, metadata.version("birdie"))

    def untrained(self) -> Iterator[Row]:
        """birdie's files of the float network at the same sizes and finer, by what it is allowed to know."""
        nothing: dict[str, Any] = {"calibration": None}
        grids: list[tuple[str, str, dict[str, Any]]] = [
            ("plain grids", f"plain grid, {step:g} σ", nothing | {"scheme": f"sigma:{step},per_tensor"})
            for step in GRIDS
        ]
        trellis = [("trellis", "trellis, no data", nothing | {"budget": size}) for size in self.finer()]
        fisher = [("Fisher steps", "trellis, Fisher steps", {"budget": size}) for size in self.finer()]
        yield from birdie_rows(self.subject, [*grids, *trellis, *fisher])

    def finer(self) -> list[int]:
        """The sizes, and larger ones between which theirs are found that are as good."""
        return [*(int(self.budgets[0] * times) for times in (2.0, 1.6, 1.3)), *self.budgets]


def comparison(rows: Sequence[Row], against: str) -> list[Row]:
    """For each trained size and each other curve, what that takes to be as good; None where no size of it is."""
    lines = [{**line, "disagreement": 1 - line["agreement"]} for line in rows if line["bytes"]]
    curves = [name for name in dict.fromkeys(line["curve"] for line in lines) if name not in ("float", "spectral")]
    found = []
    for trained in (line for line in lines if line["curve"] == "spectral"):
        for name in curves:
            theirs = bytes_at([line for line in lines if line["curve"] == name], trained[against], against)
            found.append(
                {
                    "equal": against,
                    "value": trained[against],
                    "spectral_bytes": trained["bytes"],
                    "other": name,
                    "other_bytes": None if theirs is None else round(theirs),
                    "ratio": None if theirs is None else trained["bytes"] / theirs,
                }
            )
    return found


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line: flags, then what a recipe says, then the defaults.

    Raises:
        ConfigError: the recipe is another program's, or has a setting that this one has not.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", help="a recipe of this program (birdie recipe list), or its file")
    parser.add_argument("--weights", type=Path, help="a ResNet .th of the shared data (default: the shared GPT)")
    parser.add_argument("--smaller", type=lambda text: [float(part) for part in text.split(",")], default=[10, 14, 20])
    parser.add_argument("--transform", default="auto", help="auto, identity, dct, wavelet53, wavelet97 or hadamard")
    parser.add_argument("--steps", type=int, default=800, help="for each size")
    parser.add_argument("--batch", type=int, help="images (default: 50), or windows of 512 tokens (default: 8)")
    parser.add_argument("--rate", type=float, help="of learning (default: 2e-4 for a ResNet, 5e-4 for the GPT)")
    parser.add_argument("--settled", type=float, default=0.4, help="share of the steps after which the size is reached")
    parser.add_argument("--start", type=float, default=4.0, help="bits a weight before the first step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", action="store_true", help="only what is trained")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), help="where models, pixels and rivals' rows are kept"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(arguments)
    if options.recipe is not None:
        options = parser.parse_args([*from_recipe(options.recipe), *arguments])
    options.tokens, options.images = 65_536, 10_000
    options.batch = options.batch or (8 if options.weights is None else 50)
    options.rate = options.rate or (5e-4 if options.weights is None else 2e-4)
    return options


def from_recipe(name: str) -> list[str]:
    """The settings of a recipe as flags; its weights lie in the shared data.

    Raises:
        ConfigError: there is no such recipe, it is another program's, or has a setting that this one has not.
    """
    known = find(name)
    if known.about.runs != PROGRAM:
        raise ConfigError(f"{name} is a recipe of {known.about.runs or 'birdie train'}, not of {PROGRAM}")
    flags = []
    for setting, value in known.settings()["program"].items():
        if setting not in SETTINGS:
            raise ConfigError(f"{name}: [program] has no {setting!r}; it has {', '.join(SETTINGS)}")
        if setting == "weights":
            value = Path(os.environ.get("BIRDIE_DATA", "")) / value
        flags.append(f"--{setting}={','.join(map(str, value)) if isinstance(value, list) else value}")
    return flags


def main() -> None:
    """Parse, train, print."""
    found = []
    try:
        options = parse(sys.argv[1:])
        torch.set_num_threads(1)
        bench = Bench(subject_of(options), options)
        for line in bench.rows():
            found.append({**line, "smaller": bench.whole / line["bytes"] if line["bytes"] else None})
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    except (BirdieError, NotInstalledError) as error:
        raise SystemExit(str(error)) from error
    compared = comparison(found, "bpb" if bench.text else "disagreement")
    if options.json:
        report([*found, *({"comparison": True, **line} for line in compared)], as_json=True)
        return
    columns = [key for key in TABLE if any(line[key] is not None for line in found)]
    report([{key: line[key] for key in columns} for line in found], as_json=False)
    if compared:
        report(compared, as_json=False)


if __name__ == "__main__":
    main()
