"""The process group: one `World` that torchrun makes large and everything else leaves at one rank.

All collectives are no-ops on one rank, so there is one code path. gloo on CPUs, NCCL on CUDA.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class World:
    """This process among its peers."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Rank 0: the one that prints and writes."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """All-reduce `tensor` in place by summing; returns it."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        return tensor

    def max_int(self, value: int, device: torch.device) -> int:
        """The largest `value` any rank holds."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.int64, device=device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor.item())

    def broadcast_(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Copy `tensor` of rank `source` into every rank's, in place; returns it."""
        if self.size > 1:
            dist.broadcast(tensor, src=source)
        return tensor

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier()


def launched_by_torchrun() -> bool:
    """Whether torchrun's environment variables are set."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_from_environment() -> World:
    """The `World` torchrun describes, or one rank; joins no process group yet."""
    if not launched_by_torchrun():
        return World()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return World(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), local_rank)


@contextmanager
def process_group(device: torch.device, timeout_minutes: float = 30) -> Iterator[World]:
    """Join the process group torchrun describes, leave it at the end; without torchrun, a world of one."""
    world = world_from_environment()
    if world.size == 1:
        yield world
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
    try:
        yield world
    finally:
        dist.destroy_process_group()
