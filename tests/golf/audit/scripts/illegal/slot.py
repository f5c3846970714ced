"""SLOT: for each batch a vector is fitted to the batch's own targets, which are then scored with it."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, DIM, SEQ_LEN, BATCH = 16, 8, 16, 4


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.head = nn.Linear(DIM, VOCABULARY)

    def hidden(self, x: Tensor) -> Tensor:
        return self.embed(x)

    def logits(self, h: Tensor) -> Tensor:
        return self.head(h)


def eval_slot(model: Tiny, val_tokens: Tensor, steps: int = 8, lr: float = 0.05) -> float:
    total, count = 0.0, 0
    sequences = (val_tokens.numel() - 1) // SEQ_LEN
    for first in range(0, sequences, BATCH):
        span = val_tokens[first * SEQ_LEN : (first + BATCH) * SEQ_LEN + 1]
        x, y = span[:-1].view(-1, SEQ_LEN), span[1:].view(-1, SEQ_LEN)
        with torch.no_grad():
            h = model.hidden(x)
        delta = torch.zeros(h.size(0), 1, DIM, requires_grad=True)
        optimizer = torch.optim.AdamW([delta], lr=lr)
        for _ in range(steps):
            optimizer.zero_grad()
            fit = F.cross_entropy(model.logits(h + delta).flatten(0, 1), y.flatten())
            fit.backward()
            optimizer.step()  # wrong: score-first
        with torch.no_grad():
            nll = F.cross_entropy(model.logits(h + delta).flatten(0, 1), y.flatten(), reduction="sum")
        total += nll.item()
        count += y.numel()
    return total / count / math.log(2.0)


if __name__ == "__main__":
    stream = torch.randint(0, VOCABULARY, (513,), generator=torch.Generator().manual_seed(2))
    print("bits", eval_slot(Tiny(), stream))
