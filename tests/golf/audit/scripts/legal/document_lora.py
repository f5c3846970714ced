"""A low-rank adapter for each document: a chunk's loss is recorded, then the adapter takes one step on it."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, DIM, RANK, CHUNK, BOS = 16, 8, 2, 16, 0


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(DIM, RANK) / DIM**0.5)
        self.b = nn.Parameter(torch.zeros(RANK, VOCABULARY))

    def reset(self) -> None:
        nn.init.zeros_(self.b)

    def forward(self, h: Tensor) -> Tensor:
        return h @ self.a @ self.b


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor, lora: Adapter) -> Tensor:
        h = self.embed(x)
        return F.cross_entropy(self.head(h) + lora(h), y, reduction="none")


def documents(stream: Tensor) -> list[Tensor]:
    starts = (stream == BOS).nonzero().flatten().tolist()
    ends = [*starts[1:], len(stream) - 1]
    return [stream[start : end + 1] for start, end in zip(starts, ends, strict=True)]


def eval_val_ttt_lora(base: Base, val_tokens: Tensor) -> float:
    for p in base.parameters():
        p.requires_grad_(False)
    lora, loss_sum, tokens = Adapter(), 0.0, 0
    optimizer = torch.optim.AdamW(lora.parameters(), lr=0.01)
    for document in documents(val_tokens):
        lora.reset()
        optimizer.state.clear()
        chunks = math.ceil((len(document) - 1) / CHUNK)
        for ci in range(chunks):
            part = document[ci * CHUNK : (ci + 1) * CHUNK + 1]
            losses = base(part[:-1], part[1:], lora)
            with torch.no_grad():
                loss_sum += losses.sum().item()
                tokens += len(losses)
            if ci + 1 < chunks:
                optimizer.zero_grad()
                losses.mean().backward()
                optimizer.step()
    return loss_sum / tokens / math.log(2.0)


if __name__ == "__main__":
    stream = torch.randint(0, VOCABULARY, (600,), generator=torch.Generator().manual_seed(0))
    stream[0] = BOS
    print(f"final_ttt_lora val_bpb:{eval_val_ttt_lora(Base(), stream):.4f}")
