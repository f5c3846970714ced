"""Profile of a training step by torch's profiler: its time by named range, torch's table of operations, and a trace.

    run ─► steps that are undone ─► 3 unobserved ─► 3 recorded by torch.profiler ─► table.txt, trace.json.gz

Steps are rehearsed after warm-up, so a profile changes neither weights nor clock. Ranges are those of
`birdie.system.ranges`. For Nsight, `nsys profile --pytorch=autograd-nvtx` shows the same ranges.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from birdie.gpt.train.training import Training
from birdie.system.device import synchronize
from birdie.system.files import write_bytes

UNOBSERVED, RECORDED = 3, 3
FRACTION = 0.5  # of the run that profiled steps pretend: techniques that are on for at least half of it are included
_ROWS = 60  # of the table


def profile(run: Training, device: torch.device, folder: Path | None) -> dict[str, float] | None:
    """Profile `run` without changing it. Every rank must call it.

    Args:
        run: after warm-up.
        device: where it trains.
        folder: for `table.txt` and `trace.json.gz`; None: nothing is written.

    Returns:
        Milliseconds of a mean step by range, "step" first, with the ranges inside it; None if a stop was requested.
    """

    def step() -> None:
        if not run.stopped:
            run.timed(run.plan.rehearsal(FRACTION, run.number, run.clock.ms))

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with run.undone():
        for _ in range(UNOBSERVED):
            step()
        with torch.profiler.profile(activities=activities) as recorded:
            for _ in range(RECORDED):
                step()
            synchronize(device)
    if run.stopped:
        return None
    kind, ranges = ("CUDA" if device.type == "cuda" else "CPU"), dict[str, float]()
    events: Sequence[Any] = recorded.events() or ()
    for event in events:  # torch names its own ranges with a #, such as Optimizer.step#AdamW.step
        if event.is_user_annotation and event.device_type.name == kind and "#" not in event.name:
            ranges[event.name] = ranges.get(event.name, 0.0) + event.time_range.elapsed_us() / 1000 / RECORDED
    if folder is not None:
        averages: Any = recorded.key_averages()
        table = averages.table(sort_by=f"self_{kind.lower()}_time_total", row_limit=_ROWS)
        write_bytes(folder / "table.txt", table.encode())
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "trace.json.gz"
            recorded.export_chrome_trace(str(path))
            write_bytes(folder / path.name, path.read_bytes())
    return dict(sorted(ranges.items(), key=lambda item: -item[1]))
