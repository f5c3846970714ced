"""Training throughput: tokens a second of birdie's `fit` against a plain eager PyTorch loop.

    python -m benchmarks.train --json [--seconds N] [--seed 0]

Both train the same model from the same weights on the same batches in the same dtype, in turns within one process. The
plain loop is what one would write by hand: `torch.optim.Muon` for the blocks' matrices and fused Adam for the rest, one
backward pass a micro-step, the loss read once a step. Rows: the best and the median over the turns, and birdie's over
the plain loop's.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import report
from birdie.device import choose_device, synchronize
from birdie.model.gpt import GPT, GPTConfig
from birdie.train.groups import OptimizerSettings
from birdie.train.loop import Fit, fit
from birdie.train.settings import TrainSettings

CONFIG = GPTConfig(vocab_size=1024, num_layers=4, model_dim=256, num_heads=4, num_kv_heads=2)
SETTINGS = TrainSettings(
    iterations=10**9,
    train_batch_tokens=8192,
    train_seq_len=512,
    accumulation=4,
    warmup_steps=0,
    warmdown_iters=0,
    max_wallclock_seconds=0,
    compute_dtype="float32",
)
OPTIMIZERS = OptimizerSettings()


class RandomBatches:
    """Uniform tokens made beforehand: the loader costs nothing, and what they say does not change the speed."""

    def __init__(self, seed: int) -> None:
        sequences = SETTINGS.train_batch_tokens // SETTINGS.accumulation // SETTINGS.train_seq_len
        shape = (64, sequences, SETTINGS.train_seq_len + 1)
        self.spans = torch.randint(CONFIG.vocab_size, shape, generator=torch.Generator().manual_seed(seed))
        self.position = 0

    def next(self) -> tuple[Tensor, Tensor]:
        rows = self.spans[self.position % len(self.spans)]
        self.position += 1
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class PlainLoop:
    """The loop written by hand."""

    def __init__(self, seed: int, device: torch.device) -> None:
        torch.manual_seed(seed)
        self.model, self.batches, self.device = GPT(CONFIG).to(device), RandomBatches(seed), device
        named = dict(self.model.named_parameters())
        matrices = [p for n, p in named.items() if n.startswith("blocks.") and n.endswith(".weight")]
        scalars = [p for n, p in named.items() if not n.endswith(".weight")]
        adam: list[dict[str, Any]] = [
            {"params": [named["tok_emb.weight"]], "lr": OPTIMIZERS.tied_embed_lr},
            {"params": scalars},
        ]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=OPTIMIZERS.matrix_lr, momentum=OPTIMIZERS.muon_momentum, weight_decay=0.0),
            torch.optim.Adam(adam, lr=OPTIMIZERS.scalar_lr, betas=(0.9, 0.95), eps=1e-8, fused=True),
        ]

    def step(self) -> float:
        total = torch.zeros((), device=self.device)
        for _ in range(SETTINGS.accumulation):
            ids, targets = self.batches.next()
            loss = self.model.loss(ids.to(self.device), targets.to(self.device)) / SETTINGS.accumulation
            torch.autograd.backward(loss)
            total += loss.detach()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return total.item()


def birdie_run(seed: int, device: torch.device) -> Fit:
    torch.manual_seed(seed)
    return fit(GPT(CONFIG), RandomBatches(seed), SETTINGS, OPTIMIZERS, device=device)


def measure(seconds: float, seed: int, device: torch.device) -> list[dict[str, Any]]:
    """Take turns of one step until `seconds` are over; a row for each loop."""
    plain, run = PlainLoop(seed, device), birdie_run(seed, device)
    steps = iter(run)
    turns: dict[str, Callable[[], float]] = {"plain": plain.step, "birdie": lambda: next(steps).loss}
    rates: dict[str, list[float]] = {name: [] for name in turns}
    for turn in turns.values():  # the first step allocates
        turn()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rates["birdie"]) < 3:
        for name, turn in turns.items():
            synchronize(device)
            start = time.perf_counter()
            turn()
            synchronize(device)
            rates[name].append(SETTINGS.train_batch_tokens / (time.perf_counter() - start))
    dtypes = {"plain": "bfloat16", "birdie": run.facts["newton_schulz_dtype"]}
    return [
        {
            "loop": name,
            "tokens_per_s": round(statistics.median(rates[name]), 1),
            "best_tokens_per_s": round(max(rates[name]), 1),
            "ratio": round(statistics.median(rates[name]) / statistics.median(rates["plain"]), 4),
            "steps": len(rates[name]),
            "newton_schulz_dtype": dtypes[name],
        }
        for name in turns
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Training throughput of birdie against a plain PyTorch loop.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--seconds", type=float, default=60.0, help="time to measure (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="decides weights and batches (default: 0)")
    parser.add_argument("--device", default="auto", help="auto, cuda, mps or cpu (default: auto)")
    arguments = parser.parse_args()
    rows = measure(arguments.seconds, arguments.seed, choose_device(arguments.device))
    report(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
