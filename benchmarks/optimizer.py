"""Step time of the Muon optimizer alone, on 66 matrices: eleven layers of width 512 with an MLP of 1536, as the
records.

    python -m benchmarks.optimizer --json [--seconds 60] [--ranks 2] [--device auto] [--seed 0] [--layers 11]

In one process, with the same gradients, by turns, iterating in bfloat16 as `torch.optim.Muon` does: the loop over
matrices that ships with torch; birdie's Muon on the same matrices, on four banks (stacks of matrices of equal shape),
and on banks one Newton–Schulz step at a time, which shows what two steps on one Gram matrix save; and the matrix
products of the classic iteration alone (314 GFLOP), one call per bank.

On `--ranks` processes with one thread each and gloo or NCCL between them, from the end of backward to updated weights:
replicated (gradients all-reduced in bfloat16, every rank updates all matrices) compared with Parallel Muon;
Newton–Schulz without communication; the collectives of a step alone; and how long Parallel Muon waits for them. The
slowest rank counts.

Rows: median and best over the turns. `ratio` is the median of torch.optim.Muon, or of replicated, over the row's own.
`difference` is the distance of the weights from torch's after three steps, over the distance that torch's weights moved
(bfloat16 rounds in another order).
"""

import datetime
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn

from benchmarks.command import command_parser, report
from benchmarks.processes import duration, take_turns
from birdie.runtime.device import choose_device, synchronize
from birdie.runtime.distributed import World
from birdie.train import muon as muon_module
from birdie.train.banks import make_banks
from birdie.train.muon import Muon, newton_schulz
from birdie.train.parallel_muon import ParallelMuon
from birdie.train.profile import named_ranges

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


def single_steps(turn: Turn) -> Turn:
    """Return `turn` without the fusion of two Newton–Schulz steps."""

    def without() -> None:
        wide, muon_module.WIDE = muon_module.WIDE, 10**9
        try:
            turn()
        finally:
            muon_module.WIDE = wide

    return without


def products(device: torch.device, layers: int, dim: int) -> Turn:
    """Return the products X·Xᵀ, A·A and B·X alone, five times for each bank."""
    stacks = []
    for rows, columns in ((dim, dim), (dim // KV_PART, dim), (dim, HIDDEN_FACTOR * dim)):
        count = 2 * layers
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


class RangeTimer:
    """Adds up the seconds of each named range in its blocks, by torch's profiler."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Add the ranges of the block."""
        activity = torch.profiler.ProfilerActivity
        activities = [activity.CPU, *([activity.CUDA] if self._device.type == "cuda" else [])]
        with torch.profiler.profile(activities=activities) as recorded:
            yield
            synchronize(self._device)
        for name, begin, end in named_ranges(recorded, self._device):
            self.seconds[name] = self.seconds.get(name, 0.0) + (end - begin) / 1000


def rows_of(durations: Mapping[str, Sequence[float]], baseline: str, ranks: int) -> list[dict[str, Any]]:
    """Return a row for each name, whose ratio is to `baseline`."""
    base = statistics.median(durations[baseline])
    rows = []
    for name, turns in durations.items():
        median = statistics.median(turns)
        row = bare_row(name, ranks, round(1e3 * median, 2))
        rows.append(
            row | {"best_ms": round(1e3 * min(turns), 2), "ratio": round(base / median, 3), "turns": len(turns)}
        )
    return rows


def bare_row(step: str, ranks: int = 1, median_ms: float | None = None) -> dict[str, Any]:
    """Return a row without a comparison."""
    keys = ("best_ms", "ratio", "turns", "difference")
    return {"step": step, "ranks": ranks, "median_ms": median_ms, **dict.fromkeys(keys)}


def one_process(
    seconds: float, seed: int, device: torch.device, layers: int = LAYERS, dim: int = DIM
) -> list[dict[str, Any]]:
    """Return the rows of one process."""
    members = {name: matrices(seed, device, layers, dim) for name in ("torch", "matrices", "banks", "single")}
    banks = bank_muon(members["banks"])
    turns: dict[str, Turn] = {
        # torch's momentum is a running mean, birdie's a sum: of equal direction, and Newton–Schulz normalizes
        "torch.optim.Muon": torch.optim.Muon(members["torch"].values(), RATE, momentum=MOMENTUM, weight_decay=0.0).step,
        "birdie.Muon, matrices": Muon(members["matrices"].values(), RATE, momentum=MOMENTUM, dtype=DTYPE).step,
        "birdie, banks": banks,
        "birdie, banks, one step at a time": single_steps(bank_muon(members["single"])),
    }
    initial = matrices(seed, device, layers, dim)
    for turn in turns.values():
        for _ in range(CHECKED_STEPS):
            turn()
    differences = {name: distance(members["torch"], moved, initial) for name, moved in members.items()}
    with RangeTimer(device).recording():  # the first profile takes longer
        banks()
    durations = take_turns({**turns, "products alone": products(device, layers, dim)}, seconds=seconds, device=device)
    rows = rows_of(durations, "torch.optim.Muon", ranks=1)
    for row, key in zip(rows[1:], ("matrices", "banks", "single"), strict=False):
        row["difference"] = round(differences[key], 5)
    timer = RangeTimer(device)
    with timer.recording():
        for _ in range(CHECKED_STEPS):
            banks()
    parts = {name.rpartition("/")[2]: 1e3 * total / CHECKED_STEPS for name, total in timer.seconds.items()}
    return [*rows, *(bare_row(f"of banks: {name}", median_ms=round(ms, 2)) for name, ms in parts.items())]


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


def orthogonalization(shares: list[Tensor]) -> Turn:
    """Return the Newton–Schulz iteration alone."""

    def turn() -> None:
        for share in shares:
            newton_schulz(share, 5, DTYPE)

    return turn


def communication(parallel: ParallelMuon, world: World) -> Turn:
    """Return the collectives of a step and the copies that they need, without any work to overlap with."""

    def turn() -> None:
        parallel.start()
        parallel.square_sum()  # waits for all ranks
        gathered = [world.start_all_gather(part, buffer) for buffer, _, part in parallel._buffers]
        for weights in gathered:
            weights.wait()

    return turn


def run_rank(
    rank: int, size: int, folder: str, seconds: float, seed: int, kind: str, layers: int, dim: int, results: Any
) -> None:
    """Measure as one of several ranks; rank 0 puts (durations by name, seconds of waiting) into `results`."""
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
    update = update_of(parallel)
    shards = [share.ranges[rank] for share in parallel.shardings]
    turns = {
        "replicated": replicated(Muon(full, RATE, momentum=MOMENTUM, dtype=DTYPE), full, world),
        "parallel": update,
        "Newton–Schulz, replicated": orthogonalization([p.detach() for p in full]),
        "Newton–Schulz, shared": orthogonalization(
            [p.detach()[shard.start : shard.stop] for p, shard in zip(full, shards, strict=True)]
        ),
        "communication alone": communication(parallel, world),
    }
    durations: dict[str, list[float]] = {name: [] for name in turns}
    for turn in turns.values():
        turn()
    end = time.perf_counter() + seconds
    while not world.any(time.perf_counter() > end and len(durations["parallel"]) >= 3, device):
        for name, turn in turns.items():
            dist.barrier()
            durations[name].append(world.max_int(round(1e6 * duration(turn, device)), device) / 1e6)
    timer = RangeTimer(device)
    for _ in range(len(durations["parallel"])):
        dist.barrier()
        with timer.recording():
            update()
    waits = sum(total for name, total in timer.seconds.items() if name in ("reduce/wait", "optimizer/muon/exchange"))
    if rank == 0:
        results.put((durations, waits / len(durations["parallel"])))
    dist.destroy_process_group()


def several_processes(
    seconds: float, seed: int, device: torch.device, size: int, layers: int, dim: int
) -> list[dict[str, Any]]:
    """Return the rows of `size` processes."""
    if device.type == "cuda" and torch.cuda.device_count() < size:
        return [bare_row(f"skipped: {torch.cuda.device_count()} GPU(s), not {size}", size)]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(  # type: ignore[attr-defined, no-untyped-call]
            run_rank, (size, folder, seconds, seed, device.type, layers, dim, results), nprocs=size, join=True
        )
        durations, waits = results.get()
    steps = {name: durations[name] for name in ("replicated", "parallel", "communication alone")}
    iterations = {name: turns for name, turns in durations.items() if "Newton" in name}
    return [
        *rows_of(steps, "replicated", size),
        *rows_of(iterations, "Newton–Schulz, replicated", size),
        bare_row("of parallel: waiting for it", size, round(1e3 * waits, 2)),
    ]


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
