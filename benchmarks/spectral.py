"""Networks trained with the spectral rate compared with plain training: `python -m benchmarks.spectral [--json]`.

    python -m benchmarks.spectral --net mlp --bits 0.3          784 → 1024 → 256 → 10, 1.07 M weights
    python -m benchmarks.spectral --net cnn --transform dct     3×3 kernels of 1 → 32 → 64 channels, then a wide layer
    python -m benchmarks.spectral --net resnet20 --step-time    cost of a training step, wrapped over plain

Data: all of MNIST (BIRDIE_DATA). Both train with Adam and a cosine schedule, with the same steps in the same order. The
plain network counts as float32. The other is saved, loaded into a new network, and then scored on the 10,000 test
images.

Step times need no data: medians of steps (forward and backward) that take turns, with and without the rate in the loss;
peak memory is that of new processes that train with Adam.
"""

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie
from benchmarks.command import comma_separated, command_parser, errors_as_exit, log, report
from benchmarks.memory import reset_peak, resident
from benchmarks.resnet import ResNet
from benchmarks.shared_data import shared_data
from benchmarks.timing import take_turns

BATCH = 256
_FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}


def mlp() -> nn.Module:
    """Return a multilayer perceptron of 1.07 M weights."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10))
    )


def cnn() -> nn.Module:
    """Return a convolutional network of 1.63 M weights."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


NETS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": cnn}
# Networks for step times: function that builds one, images per batch, shape of an image.
TIMED_NETS: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...]]] = {
    "mlp": (mlp, BATCH, (1, 28, 28)),
    "cnn": (cnn, BATCH, (1, 28, 28)),
    "resnet20": (lambda: ResNet(3), 128, (3, 32, 32)),
}
WAYS = ("plain", "wrapped, no rate", "wrapped")


def idx(path: Path) -> Tensor:
    """Return the array of a gzipped IDX file of unsigned bytes."""
    content = gzip.decompress(path.read_bytes())
    dims = content[3]
    shape = [int.from_bytes(content[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(dims)]
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * dims).reshape(shape).copy())


def images(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return "train" and "test": images (n, 1, 28, 28), normalized by the training pixels, and labels (n,)."""
    raw = {part: (idx(folder / names[0]).float(), idx(folder / names[1]).long()) for part, names in _FILES.items()}
    mean, deviation = raw["train"][0].mean(), raw["train"][0].std()
    return {part: (((pixels - mean) / deviation)[:, None], labels) for part, (pixels, labels) in raw.items()}


class Epochs:
    """Batches of all images, in a new order in each epoch."""

    def __init__(self, data: tuple[Tensor, Tensor], seed: int) -> None:
        self.data, self.generator = data, torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.data[0]) // BATCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.data[0]), generator=self.generator)
        for indices in order[: len(self) * BATCH].split(BATCH):  # type: ignore[no-untyped-call]
            yield self.data[0][indices], self.data[1][indices]


def train(model: nn.Module, data: tuple[Tensor, Tensor], epochs: int, seed: int, bits: float | None) -> None:
    """Train with Adam and a cosine schedule; a wrapped model is trained to `bits` per weight."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    images = Epochs(data, seed)
    for step in birdie.fine_tune(model, images, loss, steps=len(images) * epochs, bits=bits):
        if step.number % 200 == 0:
            size = "" if step.bits is None else f", {step.bits:.3f} bits per weight"
            log(f"step {step.number} of {step.steps}: loss {step.loss:.4f}{size}")


def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Return the share of correctly classified images."""
    model.eval()
    right = 0
    with torch.no_grad():
        for first in range(0, len(data[0]), 500):
            part = slice(first, first + 500)
            right += int((model(data[0][part]).argmax(1) == data[1][part]).sum())
    return right / len(data[0])


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the row of the plain network, then one row for each size."""
    data = images(shared_data() / "images" / "mnist")
    build = NETS[options.net]
    for bits in (None, *options.bits):
        torch.manual_seed(options.seed)
        model, start = build(), time.perf_counter()
        float_bytes = 4 * sum(weight.numel() for weight in model.parameters())
        if bits is None:
            train(model, data["train"], options.epochs, options.seed, None)
            yield _row(options, "plain, float32", float_bytes, float_bytes, accuracy(model, data["test"]), start)
            continue
        birdie.spectral(model, transform=options.transform)
        train(model, data["train"], options.epochs, options.seed, bits)
        with tempfile.TemporaryDirectory() as folder:
            size = birdie.save(model, Path(folder) / "x.birdie").bytes
            decoded = birdie.load(Path(folder) / "x.birdie", into=build())
        yield _row(
            options,
            f"spectral, {options.transform}, towards {bits:g} bits",
            size,
            float_bytes,
            accuracy(decoded, data["test"]),
            start,
        )


def _row(
    options: argparse.Namespace, scheme: str, size: int, float_bytes: int, accuracy: float, start: float
) -> dict[str, Any]:
    return {
        "net": options.net,
        "scheme": scheme,
        "bytes": size,
        "smaller": round(1 - size / float_bytes, 4),
        "accuracy": accuracy,
        "epochs": options.epochs,
        "seconds": round(time.perf_counter() - start),
    }


def stepper(net: str, way: str, transform: str, *, optimized: bool = False) -> Callable[[], None]:
    """Return a training step of a network of `TIMED_NETS`, in one of the `WAYS`; with Adam if `optimized`."""
    build, batch, shape = TIMED_NETS[net]
    torch.manual_seed(0)
    model, x, y = build(), torch.randn(batch, *shape), torch.randint(0, 10, (batch,))
    if way != "plain":
        birdie.spectral(model, transform=transform)
    optimizer = torch.optim.Adam(model.parameters()) if optimized else None

    def step() -> None:
        for weight in model.parameters():
            weight.grad = None
        loss = F.cross_entropy(model(x), y)
        if way == "wrapped":
            loss = loss + 0.01 * birdie.quantization_loss(model)
        loss.backward()  # type: ignore[no-untyped-call]
        if optimizer is not None:
            optimizer.step()

    return step


def step_peak(net: str, way: str, transform: str) -> float:
    """Return the peak memory of training with Adam in this process, in 10^6 bytes: weights, gradients, moments,
    activations.

    The memory of imports and kernels is subtracted: a small network is trained first.
    """
    warm = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))
    birdie.spectral(warm, transform="dct")
    optimizer = torch.optim.Adam(warm.parameters())
    (warm(torch.randn(4, 3, 8, 8)).sum() + birdie.quantization_loss(warm)).backward()
    optimizer.step()
    idle = resident("VmRSS")
    step = stepper(net, way, transform, optimized=True)
    reset_peak()  # the choice of transforms does not count
    for _ in range(3):
        step()
    return resident("VmHWM") - idle


def step_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each of the `WAYS`: median step, peak memory, and both over those of the plain network."""
    steps = {way: stepper(options.net, way, options.transform) for way in WAYS}
    seconds = take_turns(steps, turns=options.turns)
    results = []
    for way in WAYS:
        command = [sys.executable, "-m", "benchmarks.spectral", "--net", options.net, "--transform", options.transform]
        process = subprocess.run([*command, "--peak-of", way], check=True, capture_output=True, text=True)
        results.append((way, 1000 * statistics.median(seconds[way]), float(json.loads(process.stdout))))
    return [
        {
            "net": options.net,
            "batch": TIMED_NETS[options.net][1],
            "way": way,
            "step_ms": milliseconds,
            "over_plain": milliseconds / results[0][1],
            "peak_mb": peak,
            "peak_over_plain": peak / results[0][2],
        }
        for way, milliseconds, peak in results
    ]


def main() -> None:
    """Train or time, and print the table; with --peak-of, print the peak of one process."""
    parser = command_parser(__doc__)
    parser.add_argument("--net", choices=sorted(TIMED_NETS), default="mlp", help="(default: mlp)")
    parser.add_argument("--bits", type=comma_separated(float), default=[1.0, 0.3], help="per weight (default: 1,0.3)")
    parser.add_argument("--transform", default="auto", help="auto, identity, dct, wavelet53, wavelet97 or hadamard")
    parser.add_argument("--epochs", type=int, default=10, help="(default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    parser.add_argument(
        "--step-time", action="store_true", help="time steps and measure their memory, without training"
    )
    parser.add_argument("--turns", type=int, default=20, help="timed steps of each way (default: 20)")
    parser.add_argument("--peak-of", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.net not in NETS and not (options.step_time or options.peak_of):
        parser.error(f"{options.net} has step times only: add --step-time")
    if options.peak_of:
        sys.stdout.write(json.dumps(step_peak(options.net, options.peak_of, options.transform)) + "\n")
        return
    with errors_as_exit():
        lines = step_rows(options) if options.step_time else list(rows(options))
    report(lines, as_json=options.json)


if __name__ == "__main__":
    main()
