"""Step time of the Muon optimizer alone, on 66 matrices: eleven layers of width 512 with an MLP of 1536, as the
records.

    python -m benchmarks.optimizer --json [--seconds 60] [--ranks 2] [--device auto] [--seed 0] [--layers 11]

In one process, with the same gradients, by turns, iterating in bfloat16 as `torch.optim.Muon` does: the loop over
matrices that ships with torch; birdie's Muon on the same matrices; and on four banks (stacks of matrices of equal
shape). On `--ranks` processes with one thread each and gloo or NCCL between them, from the end of backward to updated
weights: replicated (gradients all-reduced in bfloat16, every rank updates all matrices) compared with Parallel Muon.
The slowest rank counts.

Rows: median and best over the turns. `ratio` is the median of torch.optim.Muon, or of replicated, over the row's own.
`difference` is the distance of the weights from torch's after three steps, over the distance that torch's weights moved
(bfloat16 rounds in another order).
"""

import datetime
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

from benchmarks.command import command_parser, report
from benchmarks.processes import duration, take_turns
from birdie.gpt.train.banks import make_banks
from birdie.gpt.train.muon import Muon
from birdie.gpt.train.parallel_muon import ParallelMuon
from birdie.system.device import choose_device
from birdie.system.distributed import World

LAYERS, DIM, KV_PART, HIDDEN_FACTOR = 11, 512, 2, 3
RATE, MOMENTUM, DTYPE = 0.02, 0.95, torch.bfloat16
CHECKED_STEPS = 3  # after which weights are compared

Turn = Callable[[], object]


def matrices(seed: int, device: torch.device, layers: int = LAYERS, dim: int = DIM) -> dict[str, nn.Parameter]:
    """Return the matrices of the blocks by name, each with a random gradient."""
    torch.manual_seed(seed)
    kv_dim, hidden = dim // KV_PART, HIDDEN_FACTOR * dim
    shapes = {"q": (dim, dim), "k": (kv_dim, dim), "v": (kv_dim, dim), "o": (dim, dim), "up": (hidden, dim)}
    shapes["down"] = (dim, hidden)
    members = {}
    for layer in range(layers):
        for name, shape in shapes.items():
            p = nn.Parameter(torch.randn(shape, device=device) / dim**0.5)
            p.grad = torch.randn(shape, device=device)
            members[f"blocks.{layer}.{name}"] = p
    return members


def bank_muon(members: dict[str, nn.Parameter]) -> Turn:
    """Return a step of Parallel Muon on banks of the matrices, on one rank."""
    gradients = {name: p.grad for name, p in members.items()}
    banks = make_banks(members)
    for bank in banks:
        for name, slot in bank.split(bank.gradient):
            gradient = gradients[name]
            assert gradient is not None
            slot.copy_(gradient)
    return update_of(ParallelMuon(banks, RATE, momentum=MOMENTUM, dtype=DTYPE))


def update_of(optimizer: ParallelMuon) -> Turn:
    """Return a step of Parallel Muon: communication and update."""

    def turn() -> None:
        optimizer.start()
        optimizer.begin()
        optimizer.finish()

    return turn


def rows_of(durations: Mapping[str, Sequence[float]], baseline: str, ranks: int) -> list[dict[str, Any]]:
    """Return a row for each name, whose ratio is to `baseline`."""
    base = statistics.median(durations[baseline])
    rows = []
    for name, turns in durations.items():
        median = statistics.median(turns)
        best, ratio = round(1e3 * min(turns), 2), round(base / median, 3)
        row = {"step": name, "ranks": ranks, "median_ms": round(1e3 * median, 2), "best_ms": best, "ratio": ratio}
        rows.append(row | {"turns": len(turns), "difference": None})
    return rows


def one_process(
    seconds: float, seed: int, device: torch.device, layers: int = LAYERS, dim: int = DIM
) -> list[dict[str, Any]]:
    """Return the rows of one process."""
    members = {name: matrices(seed, device, layers, dim) for name in ("torch", "matrices", "banks")}
    turns: dict[str, Turn] = {
        # torch's momentum is a running mean, birdie's a sum: of equal direction, and Newton–Schulz normalizes
        "torch.optim.Muon": torch.optim.Muon(members["torch"].values(), RATE, momentum=MOMENTUM, weight_decay=0.0).step,
        "birdie.Muon, matrices": Muon(members["matrices"].values(), RATE, momentum=MOMENTUM, dtype=DTYPE).step,
        "birdie, banks": bank_muon(members["banks"]),
    }
    initial = matrices(seed, device, layers, dim)
    for turn in turns.values():
        for _ in range(CHECKED_STEPS):
            turn()
    differences = {name: distance(members["torch"], moved, initial) for name, moved in members.items()}
    rows = rows_of(take_turns(turns, seconds=seconds, device=device), "torch.optim.Muon", ranks=1)
    for row, key in zip(rows[1:], ("matrices", "banks"), strict=True):
        row["difference"] = round(differences[key], 5)
    return rows


def distance(
    reference: dict[str, nn.Parameter], other: dict[str, nn.Parameter], initial: dict[str, nn.Parameter]
) -> float:
    """Return the distance of `other` from `reference`, over the distance of `reference` from `initial`."""
    error = sum((reference[name] - other[name]).square().sum().item() for name in reference)
    moved = sum((reference[name] - initial[name]).square().sum().item() for name in reference)
    return float((error / moved) ** 0.5)


def replicated(optimizer: Muon, members: list[nn.Parameter], world: World) -> Turn:
    """Return a step in which every rank sums all gradients and updates all matrices."""

    def turn() -> None:
        pending = []
        for p in members:
            assert p.grad is not None
            pending.append((p.grad, world.start_sum_(p.grad.to(DTYPE))))
        for gradient, total in pending:
            gradient.copy_(total.wait())
        optimizer.step()

    return turn


def run_rank(
    rank: int, size: int, folder: str, seconds: float, seed: int, kind: str, layers: int, dim: int, results: Any
) -> None:
    """Measure as one of several ranks; rank 0 puts the durations by name into `results`."""
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    timeout = datetime.timedelta(minutes=5)
    backend, rendezvous = "nccl" if kind == "cuda" else "gloo", f"file://{folder}/rendezvous"
    on_gpu = device if kind == "cuda" else None
    if on_gpu is not None:
        torch.cuda.set_device(on_gpu)
    dist.init_process_group(
        backend, init_method=rendezvous, rank=rank, world_size=size, timeout=timeout, device_id=on_gpu
    )
    world = World(rank, size, rank)
    shared = make_banks(matrices(seed, device, layers, dim))
    full = [bank.parameter for bank in make_banks(matrices(seed, device, layers, dim))]
    for p, bank in zip(full, shared, strict=True):
        assert p.grad is not None
        p.grad.copy_(torch.randn_like(p, generator=None))
        bank.gradient.copy_(p.grad)
    parallel = ParallelMuon(shared, RATE, world=world, momentum=MOMENTUM, dtype=DTYPE)
    turns = {
        "replicated": replicated(Muon(full, RATE, momentum=MOMENTUM, dtype=DTYPE), full, world),
        "parallel": update_of(parallel),
    }
    durations: dict[str, list[float]] = {name: [] for name in turns}
    for turn in turns.values():
        turn()
    end = time.perf_counter() + seconds
    while not world.any(time.perf_counter() > end and len(durations["parallel"]) >= 3, device):
        for name, turn in turns.items():
            dist.barrier()
            durations[name].append(world.max_int(round(1e6 * duration(turn, device)), device) / 1e6)
    if rank == 0:
        results.put(durations)
    dist.destroy_process_group()


def several_processes(
    seconds: float, seed: int, device: torch.device, size: int, layers: int, dim: int
) -> list[dict[str, Any]]:
    """Return the rows of `size` processes."""
    if device.type == "cuda" and torch.cuda.device_count() < size:
        return [{"step": f"skipped: {torch.cuda.device_count()} GPU(s), not {size}", "ranks": size}]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(  # type: ignore[attr-defined, no-untyped-call]
            run_rank, (size, folder, seconds, seed, device.type, layers, dim, results), nprocs=size, join=True
        )
        return rows_of(results.get(), "replicated", size)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds for each half (default: 60)")
    parser.add_argument("--ranks", type=int, default=2, help="processes of the second half; 1: none (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and gradients (default: 0)")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu (default: auto)")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"(default: {LAYERS})")
    parser.add_argument("--dim", type=int, default=DIM, help=f"width (default: {DIM})")
    options = parser.parse_args(arguments)
    device = choose_device(options.device)
    rows = one_process(options.seconds, options.seed, device, options.layers, options.dim)
    if options.ranks > 1:
        rows += several_processes(options.seconds, options.seed, device, options.ranks, options.layers, options.dim)
    report(rows, as_json=options.json)


if __name__ == "__main__":
    main()
