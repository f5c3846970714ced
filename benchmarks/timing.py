"""Durations of alternatives that take turns in one process, so that other load on the machine slows all alike."""

import time
from collections.abc import Callable, Mapping

import torch

from birdie.runtime.device import synchronize

Work = Callable[[], object]

_CPU = torch.device("cpu")


def duration(work: Work, device: torch.device = _CPU, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that `work` takes, until the device has finished."""
    synchronize(device)
    start = clock()
    work()
    synchronize(device)
    return clock() - start


def take_turns(
    works: Mapping[str, Work],
    *,
    seconds: float = 0.0,
    turns: int = 3,
    warm_up: bool = True,
    device: torch.device = _CPU,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Run the works in turns, and return the duration of each turn in seconds by name.

    Args:
        works: name → work.
        seconds: the turns go on for so long.
        turns: minimum number of turns.
        warm_up: run each work once before, untimed: it allocates, compiles or fills caches.
        device: device to synchronize before the clock is read.
        clock: `time.process_time` excludes other load on a CPU.
    """
    if warm_up:
        for work in works.values():
            work()
    durations: dict[str, list[float]] = {name: [] for name in works}
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or count < turns:
        for name, work in works.items():
            durations[name].append(duration(work, device, clock))
        count += 1
    return durations
