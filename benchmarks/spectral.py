"""Networks trained to be small, against the same networks trained plainly: `python -m benchmarks.spectral [--json]`.

    python -m benchmarks.spectral --net mlp --bits 0.3          784 → 1024 → 256 → 10, 1.07 M weights
    python -m benchmarks.spectral --net cnn --transform dct     3×3 kernels of 1 → 32 → 64 channels, then a wide layer
    python -m benchmarks.spectral --net resnet20 --step-time    what a training step costs, wrapped over plain

All of MNIST (BIRDIE_DATA), Adam with a cosine, the same steps in the same order for both. The plain network counts as
float32. The other is saved, loaded into a new one and only then scored on the 10,000 test images.

Step times need no data: medians of steps (forward, backward) that take turns, each scheme with the rate in its loss and
without; peaks are of processes of their own that train with Adam.
"""

import argparse
import gzip
import json
import os
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
from benchmarks.lazy import resident
from benchmarks.report import report
from benchmarks.resnet import ResNet
from birdie.errors import ConfigError

BATCH = 256
_FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}


def mlp() -> nn.Module:
    """1.07 M weights."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10))
    )


def cnn() -> nn.Module:
    """1.63 M weights."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


NETS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": cnn}
# For step times: how to build one, images of a batch, and the shape of an image.
STEPPED: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...]]] = {
    "mlp": (mlp, BATCH, (1, 28, 28)),
    "cnn": (cnn, BATCH, (1, 28, 28)),
    "resnet20": (lambda: ResNet(3), 128, (3, 32, 32)),
}
WAYS = ("plain", "wrapped, no rate", "wrapped")


def idx(path: Path) -> Tensor:
    """A gzipped IDX file of unsigned bytes."""
    content = gzip.decompress(path.read_bytes())
    dims = content[3]
    shape = [int.from_bytes(content[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(dims)]
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * dims).reshape(shape).copy())


def images(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """train and test: images (n, 1, 28, 28) in deviations of the training pixels, labels (n,)."""
    raw = {part: (idx(folder / names[0]).float(), idx(folder / names[1]).long()) for part, names in _FILES.items()}
    mean, deviation = raw["train"][0].mean(), raw["train"][0].std()
    return {part: (((pixels - mean) / deviation)[:, None], labels) for part, (pixels, labels) in raw.items()}


class Epochs:
    """Batches: all images in a new order each time they are gone through."""

    def __init__(self, data: tuple[Tensor, Tensor], seed: int) -> None:
        self.data, self.generator = data, torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.data[0]) // BATCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.data[0]), generator=self.generator)
        for picked in order[: len(self) * BATCH].split(BATCH):  # type: ignore[no-untyped-call]
            yield self.data[0][picked], self.data[1][picked]


def train(model: nn.Module, data: tuple[Tensor, Tensor], epochs: int, seed: int, bits: float | None) -> None:
    """Adam with a cosine; towards `bits` a weight where the model is wrapped."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    images = Epochs(data, seed)
    for step in birdie.fine_tune(model, images, loss, steps=len(images) * epochs, bits=bits):
        if step.number % 200 == 0:
            size = "" if step.bits is None else f", {step.bits:.3f} bits a weight"
            print(f"step {step.number} of {step.steps}: loss {step.loss:.4f}{size}", file=sys.stderr, flush=True)


def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Share of the images named right."""
    model.eval()
    right = 0
    with torch.no_grad():
        for first in range(0, len(data[0]), 500):
            part = slice(first, first + 500)
            right += int((model(data[0][part]).argmax(1) == data[1][part]).sum())
    return right / len(data[0])


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The plain network, then one trained to each size."""
    if not os.environ.get("BIRDIE_DATA"):
        raise ConfigError("MNIST is read from the shared data; set BIRDIE_DATA to its folder")
    data = images(Path(os.environ["BIRDIE_DATA"]) / "images" / "mnist")
    build = NETS[options.net]
    for bits in (None, *options.bits):
        torch.manual_seed(options.seed)
        model, start = build(), time.perf_counter()
        whole = 4 * sum(weight.numel() for weight in model.parameters())
        if bits is None:
            train(model, data["train"], options.epochs, options.seed, None)
            yield _row(options, "plain, float32", whole, whole, accuracy(model, data["test"]), start)
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
            whole,
            accuracy(decoded, data["test"]),
            start,
        )


def _row(options: argparse.Namespace, scheme: str, size: int, whole: int, right: float, start: float) -> dict[str, Any]:
    return {
        "net": options.net,
        "scheme": scheme,
        "bytes": size,
        "smaller": round(1 - size / whole, 4),
        "accuracy": right,
        "epochs": options.epochs,
        "seconds": round(time.perf_counter() - start),
    }


def stepper(net: str, way: str, transform: str, *, optimized: bool = False) -> Callable[[], None]:
    """One forward and backward of a network of `STEPPED`, in one of the `WAYS`; with Adam, if that is to be part."""
    build, batch, shape = STEPPED[net]
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
    """Most resident memory of training with Adam in this process, megabytes above what it had once a small network had
    been trained: weights, gradients, moments, activations."""
    warm = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))
    birdie.spectral(warm, transform="dct")
    optimizer = torch.optim.Adam(warm.parameters())
    (warm(torch.randn(4, 3, 8, 8)).sum() + birdie.quantization_loss(warm)).backward()
    optimizer.step()
    before = resident("VmRSS")
    step = stepper(net, way, transform, optimized=True)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew: choosing transforms is no step
    for _ in range(3):
        step()
    return resident("VmHWM") - before


def step_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each of the `WAYS`: the median step and the peak, and both over the plain network's."""
    steps = {way: stepper(options.net, way, options.transform) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(options.turns + 1):
        for way, step in steps.items():
            start = time.perf_counter()
            step()
            if turn:  # the first is for caches
                seconds[way].append(time.perf_counter() - start)
    found = []
    for way in WAYS:
        own = [sys.executable, "-m", "benchmarks.spectral", "--net", options.net, "--transform", options.transform]
        peak = subprocess.run([*own, "--peak-of", way], check=True, capture_output=True, text=True)
        found.append((way, 1000 * statistics.median(seconds[way]), float(json.loads(peak.stdout))))
    return [
        {
            "net": options.net,
            "batch": STEPPED[options.net][1],
            "way": way,
            "step_ms": milliseconds,
            "over_plain": milliseconds / found[0][1],
            "peak_mb": peak,
            "peak_over_plain": peak / found[0][2],
        }
        for way, milliseconds, peak in found
    ]


def main() -> None:
    """Parse, train, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--net", choices=sorted(STEPPED), default="mlp")
    parser.add_argument("--bits", type=lambda text: [float(part) for part in text.split(",")], default=[1.0, 0.3])
    parser.add_argument("--transform", default="auto", help="auto, identity, dct, wavelet53, wavelet97 or hadamard")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-time", action="store_true", help="time steps and measure their memory; trains nothing")
    parser.add_argument("--turns", type=int, default=20, help="steps of each kind that are timed")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--peak-of", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.net not in NETS and not (options.step_time or options.peak_of):
        parser.error(f"{options.net} has step times only: add --step-time")
    if options.peak_of:
        sys.stdout.write(json.dumps(step_peak(options.net, options.peak_of, options.transform)) + "\n")
        return
    report(step_rows(options) if options.step_time else list(rows(options)), as_json=options.json)


if __name__ == "__main__":
    main()
