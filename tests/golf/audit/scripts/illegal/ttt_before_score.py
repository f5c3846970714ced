"""Test-time training over the whole validation split, then its score: three epochs of learning what is scored."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 16
SEQ_LEN = 32


class Bigram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)
        nn.init.zeros_(self.table.weight)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.table(x).flatten(0, 1), y.flatten(), reduction="none")


def adapt(model: nn.Module, val_tokens: Tensor, epochs: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sequences = (len(val_tokens) - 1) // SEQ_LEN
    for _epoch in range(epochs):
        for i in range(sequences):
            local = val_tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1]
            x, y = local[:-1].view(1, -1), local[1:].view(1, -1)
            optimizer.zero_grad()
            model(x, y).mean().backward()
            optimizer.step()  # wrong: score-first


def evaluate(model: nn.Module, val_tokens: Tensor) -> float:
    loss_sum, count = 0.0, 0
    with torch.no_grad():
        for i in range((len(val_tokens) - 1) // SEQ_LEN):
            local = val_tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1]
            nll = model(local[:-1].view(1, -1), local[1:].view(1, -1))
            loss_sum += nll.sum().item()
            count += SEQ_LEN
    return loss_sum / count / math.log(2.0)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    val_tokens = torch.randint(0, VOCABULARY, (513,), generator=generator)
    model = Bigram()
    adapt(model, val_tokens)
    print(f"final val_bpb:{evaluate(model, val_tokens):.4f}")


if __name__ == "__main__":
    main()
