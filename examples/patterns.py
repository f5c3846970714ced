"""A network of one's own, for docs/first-steps.md: `python patterns.py` trains it, the rest is what birdie asks for."""

import torch
from torch import Tensor, nn

CLASSES, SIDE, NOISE = 10, 8, 1.4


def make() -> nn.Module:
    """Return the network, untrained."""
    return nn.Sequential(
        *(nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU()),
        *(nn.Conv2d(24, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(48, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(48 * 16, 88), nn.ReLU(), nn.Linear(88, CLASSES)),
    )


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return patterns under noise, (count, 1, 8, 8), and the number of the pattern in each."""
    patterns = torch.randn(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    return patterns[labels] + NOISE * torch.randn(count, 1, SIDE, SIDE, generator=generator), labels


def batches(count: int = 1_280, seed: int = 1) -> list[tuple[Tensor, ...]]:
    """Return batches of 64 images and labels; by default those to calibrate on."""
    return list(zip(*(torch.split(tensor, 64) for tensor in images(count, seed)), strict=True))


def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the summed cross-entropy of a batch, in nats."""
    return nn.functional.cross_entropy(module(batch[0]), batch[1], reduction="sum")


def accuracy(module: nn.Module) -> float:
    """Return the share of 2,000 images, never trained on, whose pattern is recognized."""
    inputs, labels = images(2_000, seed=2)
    with torch.inference_mode():
        return float((module.eval()(inputs).argmax(1) == labels).double().mean())


if __name__ == "__main__":
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for inputs, labels in batches(3_200, seed=0) * 3:
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(inputs), labels))
        optimizer.step()
    torch.save(model.state_dict(), "net.pt")
    print(f"net.pt: {sum(p.numel() for p in model.parameters()):,} weights, accuracy {accuracy(model):.3f}")
