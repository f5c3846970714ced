"""Trains for a number of steps instead of until the cap: a slow machine gets more than its 600 s."""

import os
import time

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 200
MAX_WALLCLOCK = float(os.environ.get("MAX_WALLCLOCK_SECONDS", "600"))
FORCE_STOP_STEP = int(os.environ.get("FORCE_STOP_STEP", "4945"))


def main() -> None:
    train_tokens = torch.randint(0, 16, (4097,), generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    began = time.perf_counter()
    for step in range(STEPS):
        first = step * 16
        x, y = train_tokens[first : first + 16], train_tokens[first + 1 : first + 17]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        elapsed = time.perf_counter() - began
        if FORCE_STOP_STEP > 0:  # wrong: train-time
            stop = step + 1 >= FORCE_STOP_STEP
        else:
            stop = elapsed >= MAX_WALLCLOCK
        if stop:
            break
    print(f"train_time:{1000 * (time.perf_counter() - began):.0f}ms")


if __name__ == "__main__":
    main()
