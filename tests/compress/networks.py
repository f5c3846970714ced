"""A small network with data and a loss, for the tests of calibrations."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie

Batch = tuple[Tensor, Tensor]
FEATURES, LABELS = 64, 10


class Declared(nn.Sequential):
    """A network that declares that its hidden units may be sorted."""

    def symmetries(self) -> Any:
        """Return the units of both hidden layers."""
        return [((f"{i}.weight", 0, 1), (f"{i}.bias", 0, 1), (f"{i + 2}.weight", 1, 1)) for i in (0, 2)]


def mlp(seed: int = 0) -> nn.Module:
    """Return an MLP whose predictions differ, as those of a trained one do."""
    torch.manual_seed(seed)
    net = Declared(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, LABELS))
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(2.5)
    return net


def batches(count: int = 10, size: int = 64, seed: int = 1) -> list[Batch]:
    """Return inputs that live in few dimensions, as activations do, and labels."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(-torch.arange(FEATURES) / 8.0)
    return [
        (
            torch.randn(size, FEATURES, generator=generator) * scale,
            torch.randint(0, LABELS, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def classify(module: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1], reduction="sum")


def divergence(model: nn.Module, path: Path, data: list[Batch]) -> float:
    """Return the KL of a file decoded into an MLP of its own, in nats per target, by plain arithmetic."""
    decoded, x = birdie.load(path, into=mlp(9)), torch.cat([x for x, _ in data])
    with torch.no_grad():
        p, q = (F.log_softmax(net(x).double(), -1) for net in (model, decoded))
    return float((p.exp() * (p - q)).sum()) / len(x)
