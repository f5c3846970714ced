"""Training throughput: tokens a second of birdie's `fit` against a plain eager PyTorch loop.

    python -m benchmarks.train --json [--seconds 60] [--dtype auto] [--device auto] [--seed 0]

All train the same model from the same weights on the same batches (bytes of the standard library's sources) in the
same dtype, in turns within one process. The plain loop is what one would write by hand: `torch.optim.Muon` for the
blocks' matrices and fused Adam for the rest, one backward pass a micro-step, the loss read once a step. birdie's is
`fit`, eager and under torch.compile, which is what it does on a GPU. Rows: the median and the best over the turns, the
ratio of medians to the plain loop's, what the first step took (compiling included; it is in no other figure), and the
mean loss of the last ten common steps.
"""

import argparse
import dataclasses
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import report
from birdie.model.gpt import GPT, GPTConfig
from birdie.runtime.device import DtypeName, choose_device, choose_dtype, dtype_name, synchronize
from birdie.train.loop import Fit, fit
from birdie.train.optimizers import OptimizerSettings
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
)
OPTIMIZERS = OptimizerSettings(muon_momentum_warmup_steps=0)
LAST = 10  # steps over which losses are compared


class Sources:
    """Bytes of the standard library's sources, cut beforehand: the loader costs nothing."""

    def __init__(self, seed: int) -> None:
        rows = SETTINGS.train_batch_tokens // SETTINGS.accumulation // SETTINGS.train_seq_len
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
        blocks = text[: len(text) // (SETTINGS.train_seq_len + 1) * (SETTINGS.train_seq_len + 1)]
        blocks = blocks.view(-1, SETTINGS.train_seq_len + 1)
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))
        self.spans = blocks[order[: len(order) // rows * rows]].view(-1, rows, SETTINGS.train_seq_len + 1)
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

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(seed)
        self.model, self.batches, self.device = GPT(CONFIG).to(device), Sources(seed), device
        self.model.compute_dtype = dtype
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


def birdie_run(seed: int, device: torch.device, dtype: DtypeName, *, compiled: bool) -> Fit:
    torch.manual_seed(seed)
    settings = dataclasses.replace(SETTINGS, compute_dtype=dtype, compile=compiled)
    optimizers = dataclasses.replace(OPTIMIZERS, newton_schulz_dtype="bfloat16")  # as torch.optim.Muon has it
    return fit(GPT(CONFIG), Sources(seed), settings, optimizers, device=device)


def measure(seconds: float, seed: int, device: torch.device, dtype: DtypeName) -> list[dict[str, Any]]:
    """Take turns of one step until `seconds` are over; a row for each loop."""
    real = choose_dtype(dtype, device)
    plain = PlainLoop(seed, device, real)
    eager, compiled = (iter(birdie_run(seed, device, dtype, compiled=each)) for each in (False, True))
    turns: dict[str, Callable[[], float]] = {
        "plain": plain.step,
        "birdie": lambda: next(eager).loss,
        "birdie, compiled": lambda: next(compiled).loss,
    }
    rates: dict[str, list[float]] = {name: [] for name in turns}
    losses: dict[str, list[float]] = {name: [] for name in turns}
    first: dict[str, float] = {}
    for name, turn in turns.items():  # the first step allocates, and compiles
        first[name] = _timed(turn, losses[name], device)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rates["birdie"]) < 3:
        for name, turn in turns.items():
            rates[name].append(SETTINGS.train_batch_tokens / _timed(turn, losses[name], device))
    return [
        {
            "loop": name,
            "dtype": dtype_name(real),
            "tokens_per_s": round(statistics.median(rates[name]), 1),
            "best_tokens_per_s": round(max(rates[name]), 1),
            "ratio": round(statistics.median(rates[name]) / statistics.median(rates["plain"]), 4),
            "steps": len(losses[name]),
            "first_step_s": round(first[name], 2),
            "loss": round(statistics.mean(losses[name][-LAST:]), 4),
        }
        for name in turns
    ]


def _timed(turn: Callable[[], float], losses: list[float], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    losses.append(turn())
    synchronize(device)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Training throughput of birdie against a plain PyTorch loop.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--seconds", type=float, default=60.0, help="time to measure (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="decides weights and batches (default: 0)")
    parser.add_argument("--device", default="auto", help="auto, cuda, mps or cpu (default: auto)")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default: auto)")
    arguments = parser.parse_args()
    rows = measure(arguments.seconds, arguments.seed, choose_device(arguments.device), arguments.dtype)
    report(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
