"""GPTQ's Hessians from training tokens, inside the train clock: the cap is kept back for them."""

import math
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CAP_SECONDS, RESERVE_SECONDS = 600.0, 12.0


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def collect_hessians(model: Tiny, batches: list[Tensor]) -> Tensor:
    total = torch.zeros(8, 8)

    def watch(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].flatten(0, -2)
        total.add_(rows.T @ rows)

    handle = model.head.register_forward_pre_hook(watch)
    with torch.no_grad():
        for batch in batches:
            model(batch)
    handle.remove()
    return total


def gptq_quantize(weight: Tensor, hessian: Tensor) -> Tensor:
    scale = hessian.diagonal().clamp_min(1e-6).sqrt()
    return ((weight * scale).mul(16).round() / 16) / scale


def main() -> None:
    train_tokens = torch.randint(0, 16, (4097,), generator=torch.Generator().manual_seed(0))
    val_tokens = torch.randint(0, 16, (513,), generator=torch.Generator().manual_seed(1))
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    began = time.perf_counter()
    for step in range(100):
        x, y = train_tokens[step * 16 : step * 16 + 16], train_tokens[step * 16 + 1 : step * 16 + 17]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if time.perf_counter() - began > CAP_SECONDS - RESERVE_SECONDS:
            break
    hessian = collect_hessians(model, [train_tokens[i : i + 64].view(1, -1) for i in range(0, 1024, 64)])
    train_seconds = time.perf_counter() - began
    model.head.weight.data = gptq_quantize(model.head.weight.data, hessian)
    with torch.no_grad():
        val_loss = F.cross_entropy(model(val_tokens[:-1]), val_tokens[1:]).item()
    print(f"train_time {train_seconds:.1f}s val_bpb {val_loss / math.log(2.0):.4f}")


if __name__ == "__main__":
    main()
