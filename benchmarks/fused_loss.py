"""Fused head and loss of a training step compared with eager: `python -m benchmarks.fused_loss [--json] [--turns 9]`.

Forward and backward of the product that gives the logits, the soft cap and the cross-entropy. Both implementations take
turns and the best turn counts: CPU time of one thread on a CPU, wall-clock time on a GPU. `peak_mb` is the growth of
memory in one pass, `same` whether loss and gradients are identical to the bit. Without CUDA, the last row says so.
"""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import memory
from benchmarks.command import command_parser, report
from benchmarks.timing import take_turns
from birdie.model.fused_loss import LossBackend, capped_loss, choose_backend
from birdie.runtime.device import choose_device

SHAPES = ((1024, 1024, 96), (4096, 1024, 256), (2048, 4096, 192), (16_384, 1024, 256), (2048, 8192, 192))
CAP = 30.0
Pass = tuple[Tensor, Tensor, Tensor]


def inputs(shape: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return random hidden states (rows, dim), head weights (vocabulary, dim) and targets (rows,)."""
    rows, width, dim = shape
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, dim, generator=generator).to(device).requires_grad_()
    weight = (torch.randn(width, dim, generator=generator) * 0.3).to(device).requires_grad_()
    return hidden, weight, torch.randint(width, (rows,), generator=generator).to(device)


def loss_and_gradients(way: LossBackend, hidden: Tensor, weight: Tensor, targets: Tensor) -> Pass:
    """Return the loss and the gradients of hidden states and weights, by one implementation."""
    dtype = torch.bfloat16 if hidden.is_cuda else torch.float32
    logits = F.linear(hidden.to(dtype), weight.to(dtype))
    if way == "eager":
        loss = F.cross_entropy(CAP * torch.tanh(logits.float() / CAP), targets)
    else:
        loss = capped_loss(logits, targets, CAP, way)
    hidden_grad, weight_grad = torch.autograd.grad(loss, (hidden, weight))
    return loss.detach(), hidden_grad, weight_grad


def cpu_growth(way: LossBackend, shape: tuple[int, int, int]) -> float:
    """Return the growth of this process's peak memory in one pass, in 10^6 bytes; call it in a new process."""
    torch.set_num_threads(1)
    loss_and_gradients(way, *inputs((8, 8, 8), torch.device("cpu")))
    arguments = inputs(shape, torch.device("cpu"))
    start = memory.resident("VmHWM")
    loss_and_gradients(way, *arguments)
    return memory.resident("VmHWM") - start


def peak(way: LossBackend, shape: tuple[int, int, int], device: torch.device) -> float | None:
    """Return the growth of memory in one pass, in 10^6 bytes; None if this system cannot measure it."""
    if device.type == "cuda":
        arguments = inputs(shape, device)
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss_and_gradients(way, *arguments)
        return round((torch.cuda.max_memory_allocated() - start) / 1e6, 1)
    if not memory.can_measure():
        return None
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return round(pool.submit(cpu_growth, way, shape).result(), 1)


def rows_of(shape: tuple[int, int, int], turns: int, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for the eager and one for the fused implementation."""
    arguments = inputs(shape, device)
    clock = time.perf_counter if device.type == "cuda" else time.process_time  # a CPU may have other load
    ways: list[LossBackend] = ["eager", choose_backend(device, compiled=False)]
    works: dict[str, Callable[[], Pass]] = {way: partial(loss_and_gradients, way, *arguments) for way in ways}
    results = {way: work() for way, work in works.items()}
    durations = take_turns(works, turns=turns, warm_up=False, device=device, clock=clock)
    best = {way: min(durations[way]) for way in ways}
    same = all(torch.equal(a, b) for a, b in zip(*results.values(), strict=True))
    return [
        {
            "rows": shape[0],
            "vocabulary": shape[1],
            "dim": shape[2],
            "way": way,
            "ms": round(1000 * best[way], 2),
            "times_faster": round(best["eager"] / best[way], 3),
            "peak_mb": peak(way, shape, device),
            "same": same,
            "skipped": "",
        }
        for way in ways
    ]


def main() -> None:
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--turns", type=int, default=9, help="passes of each implementation (default: 9)")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu (default: auto)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = choose_device(options.device)
    rows = [row for shape in SHAPES for row in rows_of(shape, options.turns, device)]
    if device.type != "cuda":
        rows.append({**dict.fromkeys(rows[0]), "way": "triton", "skipped": "no CUDA"})
    report(rows, as_json=options.json)


if __name__ == "__main__":
    main()
