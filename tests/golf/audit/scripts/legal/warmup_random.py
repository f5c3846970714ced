"""Compiles and warms up on random tokens, undoes the steps, and scores."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, SEQ_LEN = 16, 32


def warm_up(model: nn.Module, like: Tensor, steps: int = 3) -> None:
    saved = {name: weight.clone() for name, weight in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        batch = torch.randint_like(like, VOCABULARY)
        loss = F.cross_entropy(model(batch[:-1]), batch[1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict(saved)


def main() -> None:
    val_tokens = torch.randint(0, VOCABULARY, (513,), generator=torch.Generator().manual_seed(4))
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))
    warm_up(torch.compile(model), val_tokens[: SEQ_LEN + 1])
    with torch.inference_mode():
        val_loss = F.cross_entropy(model(val_tokens[:-1]), val_tokens[1:]).item()
    print(f"val_bpb:{val_loss / math.log(2.0):.4f}")


if __name__ == "__main__":
    main()
