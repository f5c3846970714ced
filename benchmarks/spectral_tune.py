"""Networks fine-tuned to a byte budget compared with quantization alone: `python -m benchmarks.spectral_tune [--json]`.

    python -m benchmarks.spectral_tune                            the shared GPT (benchmarks.bench_model)
    python -m benchmarks.spectral_tune --smaller 17,30.5 --rows plain,trellis --seeds 3
    python -m benchmarks.spectral_tune --subject resnet32 --smaller 10,20,28
    python -m benchmarks.spectral_tune --recipe resnet_spectral --rows spectral

The GPT continues its training on its training text. A ResNet is trained on the 2,000 lossless training images of the
shared data (BIRDIE_DATA), varied in many ways (`Images`), to have the outputs of the float network, its own and those
of its blocks; the JPEG test images are used for testing only. The sizes are reached one after the other, each starting
from the previous.

Other rows: the float network; the float network fine-tuned without a size, for as many steps as the smallest size,
times `--longer` (a ResNet by labels, because it already predicts its own outputs), and of the GPT its files; and files
of the float network without training. Every row is decoded from its file.
"""

import argparse
import copy
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie
from benchmarks.bench_model import Sources
from benchmarks.command import (
    comma_separated,
    command_parser,
    errors_as_exit,
    log,
    mean_and_error,
    one_of,
    report,
    shared_data,
)
from benchmarks.networks import Block, augmented
from benchmarks.rate_distortion import Row, birdie_rows, row
from benchmarks.subjects import CHOICES, Amounts, Batch, Subject, load_subject, windows
from birdie.artifact.loading import load
from birdie.errors import ConfigError
from birdie.gpt.data.shards import read_shard
from birdie.gpt.run.recipe_registry import find
from birdie.system.device import choose_device
from birdie.system.provenance import __version__

PROGRAM = "python -m benchmarks.spectral_tune"
SETTINGS = ("subject", "smaller", "transform", "steps", "batch", "rate", "settled", "start", "seed")  # keys of a recipe
ROWS = ("plain", "spectral", "trellis", "untrained")  # that can be chosen; the float network is always measured
TABLE = ("seed", "scheme", "bytes", "smaller", "bpb", "accuracy", "agreement", "kl", "encode_s")
Loss = Callable[[nn.Module, Batch], Tensor]


class Images:
    """Training images in a new order in each epoch: flipped, shifted by up to 4 pixels, and mixed in pairs (mixup).

    Of the batches, 30 % get a patch of another image (CutMix), and 30 % other colors.
    """

    def __init__(self, subject: Subject, batch: int, seed: int) -> None:
        self.inputs, self.labels = (torch.cat(parts).cpu() for parts in zip(*subject.calibration, strict=True))
        self.batch, self.seed = batch, seed

    def __iter__(self) -> Iterator[Batch]:
        """Yield (inputs, class probabilities): shares of the area, where images are mixed."""
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        parts = torch.randperm(len(self.inputs), generator=generator).split(self.batch)  # type: ignore[no-untyped-call]
        batches = augmented([(self.inputs[part], self.labels[part]) for part in parts], times=1, seed=self.seed)
        for inputs, labels in batches:
            share = torch.rand((), generator=generator)
            other = torch.randperm(len(inputs), generator=generator)
            classes = F.one_hot(labels, 10).float()
            mixed = share * inputs + (1 - share) * inputs[other]
            yield _varied(mixed, share * classes + (1 - share) * classes[other], generator)


def _varied(images: Tensor, classes: Tensor, generator: torch.Generator) -> Batch:
    """Return normalized images and their classes, with patches of others, with other colors, or as they are."""
    kind = float(torch.rand((), generator=generator))
    if kind < 0.3:
        side = images.shape[-1]
        height, width = torch.randint(side // 4, side * 3 // 4 + 1, (2,), generator=generator).tolist()
        top, left = (int(torch.randint(side - size + 1, (), generator=generator)) for size in (height, width))
        order, patch = torch.randperm(len(images), generator=generator), height * width / side**2
        other, images, classes = images[order], images.clone(), (1 - patch) * classes + patch * classes[order]
        images[:, :, top : top + height, left : left + width] = other[:, :, top : top + height, left : left + width]
    elif kind < 0.6:
        contrast = 0.7 + 0.6 * torch.rand(len(images), 3, 1, 1, generator=generator)
        images = images * contrast + 0.3 * torch.randn(len(images), 1, 1, 1, generator=generator)
    return images, classes


class Text:
    """Windows of the training tokens, in a new order in each epoch."""

    def __init__(self, subject: Subject, batch: int, seed: int) -> None:
        if subject.name == "tiny":
            pairs = list(subject.calibration)
        else:
            tokens = read_shard(Sources.under(shared_data()).train)
            pairs = windows(tokens[: (len(tokens) - 1) // 512 * 512 + 1])
        self.ids, self.targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        self.batch, self.generator = batch, torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[Batch]:
        """Yield (ids, targets)."""
        order = torch.randperm(len(self.ids), generator=self.generator)
        for part in order.split(self.batch):  # type: ignore[no-untyped-call]
            yield self.ids[part], self.targets[part]


class Moved:
    """Batches on a device, as often as they are read."""

    def __init__(self, batches: Iterable[Batch], device: torch.device) -> None:
        self.batches, self.device = batches, device

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches."""
        return ((inputs.to(self.device), targets.to(self.device)) for inputs, targets in self.batches)


def target_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of target tokens, or of class probabilities."""
    logits = model(batch[0])
    targets = batch[1] if batch[1].is_floating_point() else batch[1].flatten()
    return F.cross_entropy(logits.flatten(0, -2), targets)


def distillation_loss(teacher: nn.Module) -> Loss:
    """Return the loss KL(teacher ‖ model), plus the mean relative squared error of the outputs of the blocks."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            target, wanted = _with_blocks(teacher, batch[0])
        logits, outputs = _with_blocks(model, batch[0])
        kl = F.kl_div(logits.log_softmax(-1), target.log_softmax(-1), reduction="batchmean", log_target=True)
        errors = [(a - b).square().mean() / b.square().mean() for a, b in zip(outputs, wanted, strict=True)]
        return kl + torch.stack(errors).mean()

    return loss


def _with_blocks(model: nn.Module, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the logits, and the outputs of all blocks."""
    outputs: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Tensor) -> None:
        outputs.append(output)

    hooks = [block.register_forward_hook(keep) for block in model.modules() if isinstance(block, Block)]
    try:
        return model(inputs), outputs
    finally:
        for hook in hooks:
            hook.remove()


class Bench:
    """One network and its fine-tuning."""

    def __init__(self, subject: Subject, options: argparse.Namespace) -> None:
        self.subject, self.options = subject, options
        self.text = subject.bits is not None
        self.float_bytes = 4 * sum(weight.numel() for weight in subject.state.values())
        self.budgets = [int(self.float_bytes / factor) for factor in sorted(options.smaller)]

    def tune(self, model: nn.Module, data: Iterable[Batch], loss: Loss, steps: int, budget: int | None) -> None:
        """Fine-tune in place. Batch-norm statistics are not updated, because those of mixed images differ."""
        model.eval()
        settings = {"rate": self.options.rate, "settled": self.options.settled, "measured": self.text}
        for step in birdie.fine_tune(model, data, loss, steps=steps, budget=budget, **settings):
            if step.number % 50 == 0 or step.number == step.steps:
                size = "" if step.bits is None else f", {step.bits:.3f} bits per weight"
                log(f"step {step.number} of {step.steps}: loss {step.loss:.4f}{size}")

    def data(self) -> Iterable[Batch]:
        """Return the training batches, the same in each call."""
        batch, seed = self.options.batch, self.options.seed
        return Moved(
            Text(self.subject, batch, seed) if self.text else Images(self.subject, batch, seed), self.options.device
        )

    def start(self) -> nn.Module:
        """Return a copy of the float network."""
        return copy.deepcopy(self.subject.module)

    def without_size(self) -> Iterator[Row]:
        """Yield the row of the float network fine-tuned without a size, and of a GPT the rows of its files."""
        model, start, subject = self.start(), time.perf_counter(), self.subject
        steps = round(self.options.longer * self.options.steps * len(self.budgets))
        self.tune(model, self.data(), target_loss, steps, None)
        seconds, quality = time.perf_counter() - start, subject.measure(model.state_dict())
        yield row("float", "float32, fine-tuned", self.float_bytes, quality, seconds, torch.__version__)
        if self.text:
            other = dataclasses.replace(subject, module=model, state=model.state_dict(), logits=dict(subject.logits))
            for line in self.files(other, "fine-tuned, then a file"):
                yield {**line, "encode_s": line["encode_s"] + seconds}

    def rows(self) -> Iterator[Row]:
        """Yield all rows of the table."""
        subject = self.subject
        yield row("float", "float32", self.float_bytes, subject.measure(subject.state), 0.0, torch.__version__)
        rows = self.options.rows
        if "plain" in rows:
            yield from self.without_size()
        if "spectral" in rows:
            yield from self.spectral()
        if "trellis" in rows:
            yield from self.trellis()
        if "untrained" in rows:
            yield from self.files(subject, "without training")

    def spectral(self) -> Iterator[Row]:
        """Yield the rows of the network trained to each size in turn."""
        torch.manual_seed(self.options.seed)
        model, start, data = self.start(), time.perf_counter(), self.data()
        birdie.spectral(model, transform=self.options.transform, init_bits=self.options.start)
        loss = target_loss if self.text else distillation_loss(self.subject.module)
        for budget in self.budgets:
            self.tune(model, data, loss, self.options.steps, budget)
            yield self.trained(model, "spectral", f"spectral, {self.options.transform}", start)

    def trellis(self) -> Iterator[Row]:
        """Yield the rows of the network trained on what the trellis stores, from the float network for each size.

        Each takes the steps that `without_size` takes.
        """
        loss = target_loss if self.text else distillation_loss(self.subject.module)
        for budget in self.budgets:
            torch.manual_seed(self.options.seed)
            model, start = self.start(), time.perf_counter()
            self.tune(model, self.data(), loss, self.options.steps * len(self.budgets), budget)
            yield self.trained(model, "trained", "trained on the trellis", start)

    def trained(self, model: nn.Module, curve: str, scheme: str, start: float) -> Row:
        """Return the row of a trained model, decoded from its file."""
        with tempfile.TemporaryDirectory() as folder:
            size = birdie.save(model, Path(folder) / "x.birdie").bytes
            quality = self.subject.measure(load(Path(folder) / "x.birdie"))
        return row(curve, scheme, size, quality, time.perf_counter() - start, __version__)

    def files(self, subject: Subject, name: str) -> Iterator[Row]:
        """Yield the rows of birdie's calibrated files of a network at each size."""
        return birdie_rows(subject, [(name, name, {"budget": size}) for size in self.budgets])


def over_seeds(rows: Sequence[Row], seeds: int, quality: str) -> list[Row]:
    """Return mean and standard error of the quality of each row; `rows` has those of one seed after the other."""
    count = len(rows) // seeds
    means = []
    for index in range(count):
        same = rows[index::count]
        mean, error = mean_and_error([line[quality] for line in same])
        largest = max(line["bytes"] for line in same)
        means.append({"scheme": same[0]["scheme"], "bytes, at most": largest, quality: mean, "±": error})
    return means


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed command line: flags, then the settings of a recipe, then the defaults.

    Raises:
        ConfigError: the recipe belongs to another program, has an unknown setting, or there is no such device.
    """
    parser = command_parser(__doc__)
    parser.add_argument("--recipe", help="a recipe of this program (birdie recipe list), or its file")
    parser.add_argument("--subject", choices=CHOICES, default="bench", help="network (default: the shared GPT)")
    parser.add_argument("--smaller", type=comma_separated(float), default=[10, 14, 20], help="factors to float32")
    parser.add_argument("--transform", default="auto", help="auto, identity, dct, wavelet53, wavelet97 or hadamard")
    parser.add_argument("--steps", type=int, default=800, help="steps for each size (default: 800)")
    parser.add_argument("--longer", type=float, default=1.0, help="factor on the steps without a size, for equal time")
    parser.add_argument("--batch", type=int, help="images (default: 50), or windows of 512 tokens (default: 8)")
    parser.add_argument("--rate", type=float, help="learning rate (default: 2e-4 for a ResNet, 5e-4 for the GPT)")
    parser.add_argument("--settled", type=float, default=0.4, help="share of the steps after which the size is reached")
    parser.add_argument("--start", type=float, default=4.0, help="bits per weight before the first step (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of batches and transforms (default: 0)")
    parser.add_argument("--seeds", type=int, default=1, help="how many, from --seed on (default: 1)")
    parser.add_argument(
        "--rows", type=comma_separated(one_of(ROWS, "kind of row")), default=ROWS, help=f"of {', '.join(ROWS)}"
    )
    parser.add_argument("--device", default="cpu", help="auto, cuda, mps or cpu (default: cpu)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of models, pixels and cached rows")
    options = parser.parse_args(arguments)
    if options.recipe is not None:
        options = parser.parse_args([*from_recipe(options.recipe), *arguments])
    image = options.subject.startswith("resnet")
    options.device = choose_device(options.device)
    options.batch = options.batch or (50 if image else 8)
    options.rate = options.rate or (2e-4 if image else 5e-4)
    return options


def from_recipe(name: str) -> list[str]:
    """Return the settings of a recipe as flags.

    Raises:
        ConfigError: there is no such recipe, it belongs to another program, or it has an unknown setting.
    """
    known = find(name)
    if known.about.runs != PROGRAM:
        raise ConfigError(f"{name} is a recipe of {known.about.runs or 'birdie train'}, not of {PROGRAM}")
    flags = []
    for setting, value in known.settings()["program"].items():
        if setting not in SETTINGS:
            raise ConfigError(f"{name}: [program] has no {setting!r}; it has {', '.join(SETTINGS)}")
        flags.append(f"--{setting}={','.join(map(str, value)) if isinstance(value, list) else value}")
    return flags


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure, and print the tables."""
    rows = []
    with errors_as_exit():
        options = parse(sys.argv[1:] if arguments is None else arguments)
        if options.seeds < 1:
            raise ConfigError(f"there is nothing to measure with {options.seeds} seeds; give at least 1")
        torch.set_num_threads(1)
        subject = load_subject(options.subject, options.runs, Amounts()).on(options.device)
        for seed in range(options.seed, options.seed + options.seeds):
            bench = Bench(subject, argparse.Namespace(**{**vars(options), "seed": seed}))
            for line in bench.rows():
                smaller = bench.float_bytes / line["bytes"] if line["bytes"] else None
                rows.append({"seed": seed, **line, "smaller": smaller})
                log(json.dumps(rows[-1]))
    quality = "bpb" if subject.bits is not None else "accuracy"
    means = over_seeds(rows, options.seeds, quality) if options.seeds > 1 else []
    if options.json:
        report([*rows, *({"mean": True, **line} for line in means)], as_json=True)
        return
    columns = [key for key in TABLE if any(line[key] is not None for line in rows)]
    report([{key: line[key] for key in columns} for line in rows], as_json=False)
    if means:
        report(means, as_json=False)


if __name__ == "__main__":
    main()
