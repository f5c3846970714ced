"""Training throughput: tokens per second of birdie's training compared with a plain eager PyTorch loop.

    python -m benchmarks.train --json [--seconds 60] [--dtype auto] [--device auto] [--seed 0] [--small]

All train the same model from the same weights on the same tokens, random ones that take no time to load, in the same
dtype, and take turns in one process. The plain loop is hand-written: `torch.optim.Muon` for the matrices of the blocks
and fused Adam for the rest, one backward pass per micro-step, and the loss is read once per step. birdie's loop is
birdie, eager and under torch.compile (the default on a GPU). Rows: median and best over the turns; ratio of the median
to the plain loop's; duration of the first step, which compiles and is in no other figure; loss of the last step.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.command import Row, command_parser, report
from benchmarks.processes import duration, take_turns
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.train.settings import DtypeName, OptimizerSettings, TrainingTables, TrainSettings
from birdie.gpt.train.training import Training
from birdie.system.context import Context
from birdie.system.device import choose_device, choose_dtype, dtype_name

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
SMALL = (
    GPTConfig(vocab_size=256, num_layers=1, model_dim=32, num_heads=2, num_kv_heads=1),
    replace(SETTINGS, train_batch_tokens=128, train_seq_len=32, accumulation=2),
)
OPTIMIZERS = OptimizerSettings(muon_momentum_warmup_steps=0)
DOCUMENT = 1000  # tokens of a document, about as many as FineWeb's have


class RepeatedTokens:
    """Loader of one random chunk, the same in every micro-step: the values of tokens do not change the speed."""

    def __init__(self, settings: TrainSettings, vocab_size: int, seed: int = 0, bos_id: int | None = None) -> None:
        rows = settings.train_batch_tokens // settings.accumulation // settings.train_seq_len
        generator = torch.Generator().manual_seed(seed)
        self._rows = torch.randint(vocab_size, (rows, settings.train_seq_len + 1), generator=generator)
        if bos_id is not None:
            self._rows.view(-1)[::DOCUMENT] = bos_id

    def next(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets."""
        return self._rows[:, :-1], self._rows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the state."""


class PlainLoop:
    """Hand-written training loop with torch's optimizers."""

    def __init__(
        self, config: GPTConfig, settings: TrainSettings, seed: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        torch.manual_seed(seed)
        self.model, self.device, self.settings = GPT(config).to(device), device, settings
        self.batches = RepeatedTokens(settings, config.vocab_size, seed)
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
        total, parts = torch.zeros((), device=self.device), self.settings.accumulation
        for _ in range(parts):
            ids, targets = self.batches.next()
            loss = self.model.loss(ids.to(self.device), targets.to(self.device)) / parts
            torch.autograd.backward(loss)
            total += loss.detach()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return total.item()


def birdie_run(
    config: GPTConfig, settings: TrainSettings, seed: int, device: torch.device, dtype: DtypeName, *, compiled: bool
) -> Training:
    """Return a run with the same model, batches and optimizer arithmetic."""
    torch.manual_seed(seed)
    settings = replace(settings, compute_dtype=dtype, compile=compiled)
    optimizers = replace(OPTIMIZERS, newton_schulz_dtype="bfloat16")  # as torch.optim.Muon has it
    batches = RepeatedTokens(settings, config.vocab_size, seed)
    return Training(GPT(config), batches, TrainingTables(settings, optimizers), Context(device))


def measure(
    config: GPTConfig, settings: TrainSettings, seconds: float, seed: int, device: torch.device, dtype: DtypeName
) -> list[Row]:
    """Let the loops take turns of one step until `seconds` are over, and return a row for each loop."""
    real = choose_dtype(dtype, device)
    loops: dict[str, Callable[[], float]] = {"plain": PlainLoop(config, settings, seed, device, real).step}
    for name, compiled in (("birdie", False), ("birdie, compiled", True)):
        steps = iter(birdie_run(config, settings, seed, device, dtype, compiled=compiled))
        loops[name] = lambda steps=steps: next(steps).loss  # type: ignore[misc]
    losses: dict[str, list[float]] = {name: [] for name in loops}
    turns = {name: partial(_append_loss, loop, losses[name]) for name, loop in loops.items()}
    first = {name: duration(turn, device) for name, turn in turns.items()}  # the first step allocates and compiles
    durations = take_turns(turns, seconds=seconds, warm_up=False, device=device)
    rates = {name: [settings.train_batch_tokens / seconds for seconds in times] for name, times in durations.items()}
    plain = statistics.median(rates["plain"])
    return [
        {
            "loop": name,
            "dtype": dtype_name(real),
            "tokens_per_s": round(statistics.median(rates[name]), 1),
            "best_tokens_per_s": round(max(rates[name]), 1),
            "ratio": round(statistics.median(rates[name]) / plain, 4),
            "steps": len(losses[name]),
            "first_step_s": round(first[name], 2),
            "loss": round(losses[name][-1], 4),
        }
        for name in loops
    ]


def _append_loss(loop: Callable[[], float], losses: list[float]) -> None:
    losses.append(loop())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds to measure (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    parser.add_argument("--device", default="auto", help="auto, cuda, mps or cpu (default: auto)")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default: auto)")
    parser.add_argument("--small", action="store_true", help="a tiny model: does it run?")
    options = parser.parse_args(arguments)
    config, settings = SMALL if options.small else (CONFIG, SETTINGS)
    rows = measure(config, settings, options.seconds, options.seed, choose_device(options.device), options.dtype)
    report(rows, as_json=options.json)


if __name__ == "__main__":
    main()
