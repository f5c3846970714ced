"""Trains until the cap of the clock, with steps as an upper bound."""

import os
import time

import torch
import torch.nn.functional as F
from torch import nn

STEPS = int(os.environ.get("ITERATIONS", "20000"))
MAX_WALLCLOCK_SECONDS = float(os.environ.get("MAX_WALLCLOCK_SECONDS", 600.0))


def main() -> None:
    train_tokens = torch.randint(0, 16, (4097,), generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    began, stop_after_step, step = time.perf_counter(), None, 0
    while True:
        elapsed = time.perf_counter() - began
        if step == STEPS or (stop_after_step is not None and step >= stop_after_step):
            break
        first = step * 16 % 4080
        optimizer.zero_grad()
        F.cross_entropy(model(train_tokens[first : first + 16]), train_tokens[first + 1 : first + 17]).backward()
        optimizer.step()
        step += 1
        if stop_after_step is None and elapsed >= MAX_WALLCLOCK_SECONDS:
            stop_after_step = step
    print(f"train_time:{1000 * (time.perf_counter() - began):.0f}ms")


if __name__ == "__main__":
    main()
