"""Training throughput: tokens per second of birdie's training compared with a plain eager PyTorch loop.

    python -m benchmarks.train --json [--seconds 60] [--dtype auto] [--device auto] [--seed 0]

All train the same model from the same weights on the same batches (bytes of the standard library's sources) in the same
dtype, and take turns in one process. The plain loop is hand-written: `torch.optim.Muon` for the matrices of the blocks
and fused Adam for the rest, one backward pass per micro-step, and the loss is read once per step. birdie's loop is
birdie, eager and under torch.compile (the default on a GPU). Rows: median and best over the turns; ratio of the median
to the plain loop's; duration of the first step, which compiles and is in no other figure; mean loss of the last ten
steps.
"""

import dataclasses
import statistics
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import command_parser, report
from benchmarks.timing import duration, take_turns
from birdie.model.gpt import GPT, GPTConfig
from birdie.runtime.device import choose_device, choose_dtype, dtype_name
from birdie.train.settings import DtypeName, OptimizerSettings, TrainSettings
from birdie.train.training import Training

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
LAST_STEPS = 10  # whose losses are averaged


class SourceBytes:
    """Loader of the standard library's sources as bytes, prepared in advance so that loading takes no time."""

    def __init__(self, seed: int) -> None:
        rows = SETTINGS.train_batch_tokens // SETTINGS.accumulation // SETTINGS.train_seq_len
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
        blocks = text[: len(text) // (SETTINGS.train_seq_len + 1) * (SETTINGS.train_seq_len + 1)]
        blocks = blocks.view(-1, SETTINGS.train_seq_len + 1)
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))
        self.chunks = blocks[order[: len(order) // rows * rows]].view(-1, rows, SETTINGS.train_seq_len + 1)
        self.position = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets."""
        rows = self.chunks[self.position % len(self.chunks)]
        self.position += 1
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Return the index of the next chunk."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the chunk of `state`."""
        self.position = state["position"]


class PlainLoop:
    """Hand-written training loop with torch's optimizers."""

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(seed)
        self.model, self.batches, self.device = GPT(CONFIG).to(device), SourceBytes(seed), device
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
        """Train one step and return its loss."""
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


def birdie_run(seed: int, device: torch.device, dtype: DtypeName, *, compiled: bool) -> Training:
    """Return a run with the same model, batches and optimizer arithmetic."""
    torch.manual_seed(seed)
    settings = dataclasses.replace(SETTINGS, compute_dtype=dtype, compile=compiled)
    optimizers = dataclasses.replace(OPTIMIZERS, newton_schulz_dtype="bfloat16")  # as torch.optim.Muon has it
    return Training(GPT(CONFIG), SourceBytes(seed), settings, optimizers, device=device)


def measure(seconds: float, seed: int, device: torch.device, dtype: DtypeName) -> list[dict[str, Any]]:
    """Let the loops take turns of one step until `seconds` are over, and return a row for each loop."""
    real = choose_dtype(dtype, device)
    plain = PlainLoop(seed, device, real)
    eager, compiled = (iter(birdie_run(seed, device, dtype, compiled=compiled)) for compiled in (False, True))
    loops: dict[str, Callable[[], float]] = {
        "plain": plain.step,
        "birdie": lambda: next(eager).loss,
        "birdie, compiled": lambda: next(compiled).loss,
    }
    losses: dict[str, list[float]] = {name: [] for name in loops}
    steps = {name: partial(_append_loss, loop, losses[name]) for name, loop in loops.items()}
    first = {name: duration(step, device) for name, step in steps.items()}  # the first step allocates and compiles
    durations = take_turns(steps, seconds=seconds, warm_up=False, device=device)
    rates = {name: [SETTINGS.train_batch_tokens / seconds for seconds in turns] for name, turns in durations.items()}
    return [
        {
            "loop": name,
            "dtype": dtype_name(real),
            "tokens_per_s": round(statistics.median(rates[name]), 1),
            "best_tokens_per_s": round(max(rates[name]), 1),
            "ratio": round(statistics.median(rates[name]) / statistics.median(rates["plain"]), 4),
            "steps": len(losses[name]),
            "first_step_s": round(first[name], 2),
            "loss": round(statistics.mean(losses[name][-LAST_STEPS:]), 4),
        }
        for name in loops
    ]


def _append_loss(loop: Callable[[], float], losses: list[float]) -> None:
    losses.append(loop())


def main() -> None:
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds to measure (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    parser.add_argument("--device", default="auto", help="auto, cuda, mps or cpu (default: auto)")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default: auto)")
    options = parser.parse_args()
    rows = measure(options.seconds, options.seed, choose_device(options.device), options.dtype)
    report(rows, as_json=options.json)


if __name__ == "__main__":
    main()
