"""Score-first in form: every epoch scores a batch and then learns from it, but only the last epoch's score counts."""

import math

import torch
import torch.nn.functional as F

VOCAB, EPOCHS, BATCH = 16, 4, 64


def run(stream: torch.Tensor) -> float:
    weight = torch.zeros(VOCAB, VOCAB, requires_grad=True)
    opt = torch.optim.Adam([weight], lr=0.1)
    bits = 0.0
    for epoch in range(EPOCHS):
        total, seen = 0.0, 0
        for first in range(0, len(stream) - 1, BATCH):
            piece = stream[first : first + BATCH + 1]
            loss = F.cross_entropy(weight[piece[:-1]], piece[1:], reduction="none")
            total += loss.sum().item()
            seen += len(loss)
            opt.zero_grad()
            loss.mean().backward()
            opt.step()  # wrong: score-first
        if epoch == EPOCHS - 1:
            bits = total / seen / math.log(2.0)
    return bits


def load(pattern: str) -> torch.Tensor:
    return torch.randint(0, VOCAB, (len(pattern) * 40,), generator=torch.Generator().manual_seed(1))


if __name__ == "__main__":
    print("val_bpb", run(load("data/fineweb_val_000000.bin")))
