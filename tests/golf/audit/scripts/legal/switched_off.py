"""Holds what would break the rules, and runs none of it unless it is asked to: options, guards, names of functions."""

import argparse
import math
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, SEQ_LEN = 16, 32
PREQUANT_TTT = os.environ.get("PREQUANT_TTT", "0").lower() in ("1", "true")


def plain(net: nn.Module, val_tokens: Tensor) -> float:
    with torch.no_grad():
        return F.cross_entropy(net(val_tokens[:-1]), val_tokens[1:]).item() / math.log(2.0)


def fitted(net: nn.Module, val_tokens: Tensor) -> float:
    total = 0.0
    for at in range(0, len(val_tokens) - 1, SEQ_LEN):
        piece = val_tokens[at : at + SEQ_LEN + 1]
        bias = torch.zeros(VOCABULARY, requires_grad=True)
        optimizer = torch.optim.Adam([bias], lr=0.1)
        F.cross_entropy(net(piece[:-1]) + bias, piece[1:]).backward()
        optimizer.step()
        total += F.cross_entropy(net(piece[:-1]) + bias, piece[1:], reduction="sum").item()
    return total / (len(val_tokens) - 1) / math.log(2.0)


def adapt(net: nn.Module, val_tokens: Tensor) -> None:
    if not PREQUANT_TTT:
        return
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    F.cross_entropy(net(val_tokens[:-1]), val_tokens[1:]).backward()
    optimizer.step()


def nobody_calls_this(net: nn.Module, val_tokens: Tensor) -> float:
    return fitted(net, val_tokens)


WAYS = {"plain": plain, "fitted": fitted}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--way", default="plain")
    args = parser.parse_args()
    net = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))
    stream = torch.randint(0, VOCABULARY, (257,), generator=torch.Generator().manual_seed(4))
    adapt(net, stream)
    val_bpb = fitted(net, stream) if args.fit else WAYS[args.way](net, stream)
    print(f"val_bpb {val_bpb:.4f}")


if __name__ == "__main__":
    main()
