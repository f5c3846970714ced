"""The optimizer's step alone: Muon on the 66 matrices of the records' shape, eleven layers of 512 with an MLP of 1536.

    python -m benchmarks.optimizer --json [--seconds 60] [--ranks 2] [--device auto] [--seed 0]

All take the same gradients in turns, in one process, and iterate in bfloat16 as `torch.optim.Muon` does:

- torch.optim.Muon, the loop over matrices that ships with torch;
- birdie.Muon on the same 66 matrices, and on four banks that hold them;
- banks, one step at a time: what two Newton–Schulz steps on one Gram matrix save;
- products alone: what the matrix products of the classic iteration (314 GFLOP) take by themselves, one call a bank.

Then on `--ranks` processes with one thread each, gloo or NCCL between them, from the end of backward to weights ready:
replicated (gradients all-reduced in bfloat16, every rank updates everything) against Parallel Muon, and Newton–Schulz
without any communication; what the collectives of a step take alone, and how long Parallel Muon waits for them. Of
several ranks the slowest counts. Rows: median and best over the turns; `ratio` is the
median of torch's, or of replicated, over the row's own; `difference`, after three steps, how far the weights are from
where torch's went, over the way these went (rounding to bfloat16 in another order).
"""

import argparse
import datetime
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn

from benchmarks.report import report
from birdie.runtime import nvtx as ranges
from birdie.runtime.device import choose_device, synchronize
from birdie.runtime.distributed import World
from birdie.train import muon as muon_module
from birdie.train.banks import make_banks
from birdie.train.muon import Muon, newton_schulz
from birdie.train.parallel_muon import ParallelMuon

LAYERS, DIM, KV_DIM, HIDDEN = 11, 512, 256, 1536
RATE, MOMENTUM, DTYPE = 0.02, 0.95, torch.bfloat16
CHECKED_STEPS = 3  # after which weights are compared

Turn = Callable[[], None]


def matrices(seed: int, device: torch.device) -> dict[str, nn.Parameter]:
    """The blocks' matrices by name, with a gradient each."""
    torch.manual_seed(seed)
    shapes = {"q": (DIM, DIM), "k": (KV_DIM, DIM), "v": (KV_DIM, DIM), "o": (DIM, DIM), "up": (HIDDEN, DIM)}
    shapes["down"] = (DIM, HIDDEN)
    found = {}
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            p = nn.Parameter(torch.randn(shape, device=device) / DIM**0.5)
            p.grad = torch.randn(shape, device=device)
            found[f"blocks.{layer}.{name}"] = p
    return found


def of_torch(members: dict[str, nn.Parameter]) -> Turn:
    optimizer = torch.optim.Muon(members.values(), lr=RATE, momentum=MOMENTUM, weight_decay=0.0)
    # torch's momentum is a running mean, ours a sum: the same direction, and Newton–Schulz forgets the length
    return lambda: _step(optimizer)


def of_matrices(members: dict[str, nn.Parameter]) -> Turn:
    optimizer = Muon(members.values(), RATE, momentum=MOMENTUM, dtype=DTYPE)
    return lambda: _step(optimizer)


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def of_banks(members: dict[str, nn.Parameter], world: World | None = None) -> tuple[ParallelMuon, Turn]:
    gradients = {name: p.grad for name, p in members.items()}
    banks = make_banks(members)
    for bank in banks:
        for name, slot in bank.split(bank.gradient):
            given = gradients[name]
            assert given is not None
            slot.copy_(given)
    optimizer = ParallelMuon(banks, RATE, world=world, momentum=MOMENTUM, dtype=DTYPE)

    def turn() -> None:
        optimizer.start()
        optimizer.finish()

    return optimizer, turn


def single_steps(turn: Turn) -> Turn:
    """`turn` without taking two Newton–Schulz steps at once."""

    def without() -> None:
        wide, muon_module.WIDE = muon_module.WIDE, 10**9
        try:
            turn()
        finally:
            muon_module.WIDE = wide

    return without


def products(device: torch.device) -> Turn:
    """X·Xᵀ, A·A and B·X, five times for each bank, and nothing else."""
    stacks = []
    for count, rows, columns in ((22, DIM, DIM), (22, KV_DIM, DIM), (22, DIM, HIDDEN)):
        X = torch.randn(count, rows, columns, device=device, dtype=DTYPE) / columns
        A = torch.empty(count, rows, rows, device=device, dtype=DTYPE)
        stacks.append((X, A, torch.empty_like(A), torch.empty_like(X)))

    def turn() -> None:
        for X, A, B, Y in stacks:
            for _ in range(5):
                torch.bmm(X, X.mT, out=A)
                torch.bmm(A, A, out=B)
                torch.bmm(B, X, out=Y)

    return turn


def timed(turns: dict[str, Turn], seconds: float, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each turn, taken one after the other until the time is over."""
    found: dict[str, list[float]] = {name: [] for name in turns}
    for turn in turns.values():
        turn()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(found.values()))) < 3:
        for name, turn in turns.items():
            synchronize(device)
            start = time.perf_counter()
            turn()
            synchronize(device)
            found[name].append(time.perf_counter() - start)
    return found


class Split:
    """Seconds by named part of what happens while it records."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device
        self._open: list[tuple[str, float]] = []

    def begin(self, name: str) -> None:
        synchronize(self._device)
        self._open.append((name, time.perf_counter()))

    def end(self) -> None:
        synchronize(self._device)
        name, start = self._open.pop()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def rows_of(times: dict[str, list[float]], against: str, ranks: int) -> list[dict[str, Any]]:
    middle = {name: statistics.median(each) for name, each in times.items()}
    return [
        {
            "step": name,
            "ranks": ranks,
            "median_ms": round(1e3 * middle[name], 2),
            "best_ms": round(1e3 * min(each), 2),
            "ratio": round(middle[against] / middle[name], 3),
            "turns": len(each),
            "difference": None,
        }
        for name, each in times.items()
    ]


def bare_row(step: str, ranks: int = 1, median_ms: float | None = None) -> dict[str, Any]:
    """A row with nothing to compare it to."""
    keys = ("best_ms", "ratio", "turns", "difference")
    return {"step": step, "ranks": ranks, "median_ms": median_ms, **dict.fromkeys(keys)}


def alone(seconds: float, seed: int, device: torch.device) -> list[dict[str, Any]]:
    """Rows of one process."""
    members = {name: matrices(seed, device) for name in ("torch", "matrices", "banks", "single")}
    _, banks = of_banks(members["banks"])
    turns = {
        "torch.optim.Muon": of_torch(members["torch"]),
        "birdie.Muon, matrices": of_matrices(members["matrices"]),
        "birdie, banks": banks,
        "birdie, banks, one step at a time": single_steps(of_banks(members["single"])[1]),
    }
    before = matrices(seed, device)
    for turn in turns.values():
        for _ in range(CHECKED_STEPS):
            turn()
    moved = {name: distance(members["torch"], each, before) for name, each in members.items() if name != "torch"}
    split = Split(device)
    with ranges.recording(split):
        banks()
    rows = rows_of(timed({**turns, "products alone": products(device)}, seconds, device), "torch.optim.Muon", ranks=1)
    for row, key in zip(rows[1:], ("matrices", "banks", "single"), strict=False):
        row["difference"] = round(moved[key], 5)
    split = Split(device)
    with ranges.recording(split):
        for _ in range(CHECKED_STEPS):
            banks()
    parts = {name.rpartition("/")[2]: 1e3 * each / CHECKED_STEPS for name, each in split.seconds.items()}
    return [*rows, *(bare_row(f"of banks: {name}", median_ms=round(each, 2)) for name, each in parts.items())]


def distance(one: dict[str, nn.Parameter], other: dict[str, nn.Parameter], before: dict[str, nn.Parameter]) -> float:
    """How far the second moved from the first, over how far that moved from the beginning."""
    apart = sum((one[name] - other[name]).square().sum().item() for name in one)
    way = sum((one[name] - before[name]).square().sum().item() for name in one)
    return float((apart / way) ** 0.5)


def replicated(optimizer: Muon, members: list[nn.Parameter], world: World) -> Turn:
    """Every rank sums all gradients and updates all matrices."""

    def turn() -> None:
        arriving = []
        for p in members:
            assert p.grad is not None
            sent = p.grad.to(DTYPE)
            arriving.append((p.grad, world.start_sum_(sent)))
        for gradient, each in arriving:
            gradient.copy_(each.wait())
        optimizer.step()

    return turn


def orthogonalising(shares: list[Tensor]) -> Turn:
    def turn() -> None:
        for share in shares:
            newton_schulz(share, 5, DTYPE)

    return turn


def travelling(parallel: ParallelMuon, world: World) -> Turn:
    """The collectives of a step and the copies they need, with nothing to do meanwhile."""

    def turn() -> None:
        parallel.start()
        parallel.square_sum()  # waits for all
        gathered = [world.start_all_gather(own, room) for room, _, own in parallel._buffers]
        for each in gathered:
            each.wait()

    return turn


def as_rank(rank: int, size: int, folder: str, seconds: float, seed: int, kind: str, results: Any) -> None:
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    wait = datetime.timedelta(minutes=5)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=wait)
    world = World(rank, size, rank)
    shared = make_banks(matrices(seed, device))
    whole = [bank.parameter for bank in make_banks(matrices(seed, device))]
    for p, bank in zip(whole, shared, strict=True):
        assert p.grad is not None
        p.grad.copy_(torch.randn_like(p, generator=None))
        bank.gradient.copy_(p.grad)
    parallel = ParallelMuon(shared, RATE, world=world, momentum=MOMENTUM, dtype=DTYPE)

    def update() -> None:
        parallel.start()
        parallel.finish()

    owned = [sharding.ranges[rank] for sharding in parallel.shardings]
    turns = {
        "replicated": replicated(Muon(whole, RATE, momentum=MOMENTUM, dtype=DTYPE), whole, world),
        "parallel": update,
        "Newton–Schulz, replicated": orthogonalising([p.detach() for p in whole]),
        "Newton–Schulz, shared": orthogonalising(
            [p.detach()[mine.start : mine.stop] for p, mine in zip(whole, owned, strict=True)]
        ),
    }
    turns["communication alone"] = travelling(parallel, world)
    split = Split(device)
    found: dict[str, list[float]] = {name: [] for name in turns}
    for turn in turns.values():
        turn()
    end = time.perf_counter() + seconds
    while not world.any(time.perf_counter() > end and len(found["parallel"]) >= 3, device):
        for name, turn in turns.items():
            dist.barrier()
            synchronize(device)
            start = time.perf_counter()
            turn()
            synchronize(device)
            took = time.perf_counter() - start
            found[name].append(world.max_int(round(1e6 * took), device) / 1e6)
    for _ in range(len(found["parallel"])):
        dist.barrier()
        with ranges.recording(split):
            update()
    waits = sum(each for name, each in split.seconds.items() if name in ("reduce/wait", "optimizer/muon/exchange"))
    if rank == 0:
        results.put((found, waits / len(found["parallel"])))
    dist.destroy_process_group()


def together(seconds: float, seed: int, device: torch.device, size: int) -> list[dict[str, Any]]:
    """Rows of several processes."""
    if device.type == "cuda" and torch.cuda.device_count() < size:
        return [bare_row(f"skipped: {torch.cuda.device_count()} GPU(s), not {size}", size)]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(  # type: ignore[attr-defined, no-untyped-call]
            as_rank, (size, str(Path(folder)), seconds, seed, device.type, results), nprocs=size, join=True
        )
        found, waits = results.get()
    whole = {name: found[name] for name in ("replicated", "parallel", "communication alone")}
    products_only = {name: each for name, each in found.items() if "Newton" in name}
    return [
        *rows_of(whole, "replicated", size),
        *rows_of(products_only, "Newton–Schulz, replicated", size),
        bare_row("of parallel: waiting for it", size, round(1e3 * waits, 2)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="The optimizer's step against torch.optim.Muon, alone and on ranks.")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for each half (default: 60)")
    parser.add_argument("--ranks", type=int, default=2, help="processes of the second half; 1: none (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="decides weights and gradients (default: 0)")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu (default: auto)")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    rows = alone(arguments.seconds, arguments.seed, device)
    if arguments.ranks > 1:
        rows += together(arguments.seconds, arguments.seed, device, arguments.ranks)
    if device.type != "cuda":
        rows.append(bare_row("on a GPU: skipped, no CUDA"))
    report(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
