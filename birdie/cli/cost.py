"""What training will take on a CPU, said before the first step: the challenge's defaults are made for eight H100s."""

import math
import time
from dataclasses import dataclass

import torch

from birdie.pipeline import Run


@dataclass(frozen=True, slots=True)
class Cost:
    """An estimate.

    Attributes:
        step_s: seconds a step.
        steps: steps the run will take, the wall-clock cap considered.
        minutes: all of it, priming included.
        gflops: measured speed of this CPU's float32 products, in GFLOP/s.
    """

    step_s: float
    steps: int
    minutes: float
    gflops: float


def estimate(run: Run) -> Cost:
    """Time a few matrix products and scale: 6 FLOPs a weight and token for forward and backward.

    Small models take longer than this says: their steps are not all products.
    """
    a, b = torch.randn(1024, 512), torch.randn(512, 1024)
    a @ b  # the first product sets up the library
    began = time.perf_counter()
    for _ in range(10):
        a @ b
    flops = 10 * 2 * 1024 * 512 * 1024 / (time.perf_counter() - began)
    train, weights = run.training, sum(p.numel() for p in run.model.parameters())
    # steps were measured at 2 to 3 times what their products take
    step_s = 2.5 * 6 * weights * train.train_batch_tokens / run.world.size / flops
    steps = train.iterations
    if train.max_wallclock_seconds:
        steps = min(steps, math.ceil(train.max_wallclock_seconds / step_s))
    return Cost(step_s, steps, (train.warmup_steps + steps) * step_s / 60, flops / 1e9)
