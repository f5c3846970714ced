"""Head and loss of a training step, fused and not: `python -m benchmarks.fused [--json] [--turns 9] [--device auto]`.

Forward and backward of the logits' product, the soft cap and the cross-entropy, both ways in turns; the best of the
turns: on a CPU the time of one thread, on a GPU that of the clock. `peak_mb` is by how much memory grows in one pass,
`same` whether loss and gradients are the same to the bit. The last row is what only a GPU can show, or says so.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.report import report
from birdie.model.fused_loss import LossBackend, capped_loss, choose_backend
from birdie.runtime.device import choose_device, synchronize

SHAPES = ((1024, 1024, 96), (4096, 1024, 256), (2048, 4096, 192), (16_384, 1024, 256), (2048, 8192, 192))
CAP = 30.0
STATUS = Path("/proc/self/status")
Pass = tuple[Tensor, Tensor, Tensor]


def inputs(shape: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    rows, width, dim = shape
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, dim, generator=generator).to(device).requires_grad_()
    weight = (torch.randn(width, dim, generator=generator) * 0.3).to(device).requires_grad_()
    return hidden, weight, torch.randint(width, (rows,), generator=generator).to(device)


def passed(way: LossBackend, hidden: Tensor, weight: Tensor, targets: Tensor) -> Pass:
    """Loss and both gradients."""
    dtype = torch.bfloat16 if hidden.is_cuda else torch.float32
    logits = F.linear(hidden.to(dtype), weight.to(dtype))
    if way == "eager":
        loss = F.cross_entropy(CAP * torch.tanh(logits.float() / CAP), targets)
    else:
        loss = capped_loss(logits, targets, CAP, way)
    one, other = torch.autograd.grad(loss, (hidden, weight))
    return loss.detach(), one, other


def grown(way: LossBackend, shape: tuple[int, int, int]) -> float:
    """By how many MB the peak of this process rose in one pass; for a new process of its own."""
    torch.set_num_threads(1)
    passed(way, *inputs((8, 8, 8), torch.device("cpu")))
    made = inputs(shape, torch.device("cpu"))
    before = _status("VmHWM")
    passed(way, *made)
    return (_status("VmHWM") - before) * 1024 / 1e6


def peak(way: LossBackend, shape: tuple[int, int, int], device: torch.device) -> float | None:
    """By how many MB memory grows in one pass; None where that is not known."""
    if device.type == "cuda":
        made = inputs(shape, device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        passed(way, *made)
        return round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)
    if not STATUS.is_file():
        return None
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return round(pool.submit(grown, way, shape).result(), 1)


def _status(name: str) -> int:
    """KiB."""
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(name))


def rows_of(shape: tuple[int, int, int], turns: int, device: torch.device) -> list[dict[str, Any]]:
    """Eager and fused."""
    made = inputs(shape, device)
    clock = time.perf_counter if device.type == "cuda" else time.process_time  # other processes may be using this CPU
    ways: list[LossBackend] = ["eager", choose_backend(device, compiled=False)]
    run: dict[LossBackend, Callable[[], Pass]] = {way: lambda way=way: passed(way, *made) for way in ways}  # type: ignore[misc]
    results = {way: work() for way, work in run.items()}
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(turns):
        for way, work in run.items():
            synchronize(device)
            start = clock()
            work()
            synchronize(device)
            best[way] = min(best[way], clock() - start)
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--turns", type=int, default=9, help="passes of each way (default: 9)")
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
