"""Searches for the smallest file that holds a metric, beside all sizes: `python -m benchmarks.size_search [--json]`.

Three networks are trained at run time on data made at run time: convolutions on glyphs, a GRU on sequences of tokens,
and a U-Net that segments shapes. `birdie.curve(at_least=…)` searches, with a calibration on inputs alone, and then the
sizes below the one it search are measured, a percent apart. A measure of few samples is not monotone, so that smaller
files may hold it by chance: `exhaustive` is the smallest that does, and `holding` how many of the sizes do.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie
from benchmarks.command import Row, comma_separated, command_parser, errors_as_exit, log, one_of, report
from birdie.errors import BudgetError
from birdie.system.provenance import __version__

SAMPLES, STEPS, BATCH = 2048, 400, 64
LOSS = 0.01  # of accuracy that the smallest file may have


class Glyphs(nn.Sequential):
    """Convolutions with batch norms for 8 × 8 glyphs."""

    def __init__(self) -> None:
        norms = [nn.Sequential(nn.BatchNorm2d(width), nn.ReLU()) for width in (16, 32, 32)]
        super().__init__(
            *(nn.Conv2d(1, 16, 3, padding=1), norms[0], nn.Conv2d(16, 32, 3, padding=1), norms[1], nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 32, 3, padding=1), norms[2], nn.Flatten(), nn.Linear(512, 10)),
        )


class Motifs(nn.Module):
    """GRU that tells which motif is in a sequence of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 24), nn.Linear(64, 8)
        self.recurrent = nn.GRU(24, 64, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, 8) of tokens (batch, length)."""
        logits: Tensor = self.head(self.recurrent(self.embedding(tokens))[0].amax(1))
        return logits


class Shapes(nn.Module):
    """U-Net of one scale that segments background, squares and discs in 16 × 16 images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.middle, self.up = nn.Conv2d(32, 32, 3, padding=1), nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.last = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, 3, height, width)."""
        fine = self.first(images).relu()
        coarse = self.middle(self.down(fine).relu()).relu()
        logits: Tensor = self.last(torch.cat([fine, self.up(coarse).relu()], 1))
        return logits


def glyphs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy images of ten random glyphs, moved by up to a pixel, and which they are."""
    shapes = (torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(0)) > 0).float()
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=random)
    moves = torch.randint(-1, 2, (count, 2), generator=random).tolist()
    images = torch.stack([shapes[label].roll(move, (1, 2)) for label, move in zip(labels, moves, strict=True)])
    return images + 0.6 * torch.randn(images.shape, generator=random), labels


def motifs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return sequences of random tokens, with one of eight motifs of four tokens at any position, and which it is."""
    known = torch.randint(16, (8, 4), generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(high, size, generator=random) for high, size in ((16, (count, 24)), (8, (count,))))
    positions = torch.randint(21, (count, 1), generator=random) + torch.arange(4)
    return tokens.scatter(1, positions, known[labels]), labels


def shapes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy images of a square and a disc, and the class of each pixel."""
    random = torch.Generator().manual_seed(seed)
    centers = torch.randint(3, 13, (count, 2, 2, 1, 1), generator=random)
    distances = (torch.stack(torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")) - centers).abs()
    square, disc = distances[:, 0].amax(1) < 3, distances[:, 1].square().sum(1) < 12
    labels = torch.where(disc, 2, square.long())
    images = (labels > 0)[:, None] + 0.5 * torch.randn(count, 1, 16, 16, generator=random)
    return images, labels


@dataclass(frozen=True, slots=True)
class Task:
    """A network, and its data: (count, seed) → inputs and labels."""

    build: Callable[[], nn.Module]
    data: Callable[[int, int], tuple[Tensor, Tensor]]


TASKS = {"cnn": Task(Glyphs, glyphs), "gru": Task(Motifs, motifs), "unet": Task(Shapes, shapes)}


def trained(task: Task, steps: int) -> nn.Module:
    """Return the network after so many steps of Adam."""
    torch.manual_seed(0)
    model = task.build()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(steps):
        inputs, labels = task.data(BATCH, 1000 + step)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.eval()


def row(name: str, steps: int, samples: int, below: float, ratio: float) -> Row:
    """Return what the search finds for a network, beside the sizes down to a share of that."""
    task = TASKS[name]
    model = trained(task, steps)
    inputs, labels = task.data(samples, 1)

    @torch.no_grad()
    def accuracy(module: nn.Module) -> float:
        return float((module(inputs).argmax(1) == labels).double().mean())

    known = birdie.calibrate(model, example_inputs=task.data(512, 2)[0])
    at_least = accuracy(model) - LOSS
    start = time.perf_counter()
    search = birdie.curve(model, accuracy, at_least=at_least, calibration=known, progress=lambda p: log(f"{name}: {p}"))
    seconds = time.perf_counter() - start
    assert search.smallest is not None
    ceiling = search.smallest.bytes
    sizes = [round(ceiling / ratio**index) for index in range(1, 1 + math.ceil(-math.log(below) / math.log(ratio)))]
    log(f"{name}: {len(sizes)} sizes below {ceiling:,} bytes")
    try:
        points = birdie.curve(model, accuracy, sizes=sizes, calibration=known).points
    except BudgetError:  # it is the smallest file of all
        points = ()
    best = min((point.bytes for point in points if point.value >= at_least), default=ceiling)
    return {
        "network": name,
        "weights": sum(weight.numel() for weight in model.parameters()),
        "float": search.float_value,
        "files": len(search.points),
        "bytes": ceiling,
        "bits": search.smallest.bits,
        "of files": len(points),
        "exhaustive": best,
        "larger_%": 100 * (ceiling / best - 1),
        "holding": sum(point.value >= at_least for point in points),
        "seconds": seconds,
    }


def main(arguments: list[str] | None = None) -> None:
    """Print the sizes that a search finds, and those that all sizes tell."""
    parser = command_parser(__doc__)
    parser.add_argument("--networks", type=comma_separated(one_of([*TASKS], "network")), default=[*TASKS])
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of training")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="samples that the metric is measured on")
    parser.add_argument("--below", type=float, default=0.75, help="least size that is measured, of the one search")
    parser.add_argument("--ratio", type=float, default=1.01, help="of the sizes that are measured, one after the other")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with errors_as_exit():
        log(f"birdie {__version__}, torch {torch.__version__}")
        lines = [row(name, options.steps, options.samples, options.below, options.ratio) for name in options.networks]
        report(lines, as_json=options.json)


if __name__ == "__main__":
    main()
