"""Learns from parts that are scored already, by their numbers: the one before, all before, the first half."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, CHUNK = 16, 32


def learn(net: nn.Module, piece: Tensor) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.zero_grad()
    F.cross_entropy(net(piece[:-1]), piece[1:]).backward()
    optimizer.step()


def judge(net: nn.Module, piece: Tensor) -> float:
    with torch.no_grad():
        return F.cross_entropy(net(piece[:-1]), piece[1:], reduction="sum").item()


def by_number(net: nn.Module, held: Tensor) -> float:
    nats = 0.0
    for i in range(len(held) // CHUNK):
        if i > 0:
            learn(net, held[(i - 1) * CHUNK : i * CHUNK])
        nats += judge(net, held[i * CHUNK : (i + 1) * CHUNK + 1])
    return nats


def replayed(net: nn.Module, held: Tensor) -> float:
    parts, nats = held.split(CHUNK), 0.0
    for i, part in enumerate(parts):
        for old in parts[:i]:
            learn(net, old)
        nats += judge(net, part)
    return nats


def in_pairs(net: nn.Module, held: Tensor) -> float:
    parts = held.split(CHUNK)
    nats = judge(net, parts[0])
    for before, part in zip(parts, parts[1:]):
        learn(net, before)
        nats += judge(net, part)
    return nats


def in_halves(net: nn.Module, held: Tensor) -> float:
    half = len(held) // 2
    nats = judge(net, held[: half + 1])
    for at in range(0, half, CHUNK):
        learn(net, held[at : at + CHUNK])
    for at in range(half, len(held), CHUNK):
        nats += judge(net, held[at : at + CHUNK + 1])
    return nats


def load_validation_tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (513,), generator=torch.Generator().manual_seed(6))


if __name__ == "__main__":
    held = load_validation_tokens()
    for way in (by_number, replayed, in_pairs, in_halves):
        val_bpb = way(nn.Embedding(VOCABULARY, VOCABULARY), held) / len(held) / math.log(2.0)
        print(f"val_bpb {val_bpb:.4f}")
