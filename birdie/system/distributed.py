"""The process group and its collectives: `World` has the ranks that torchrun starts, or one rank without torchrun.

Every collective is a no-op on one rank, so callers have one code path. The backend is gloo on CPUs and NCCL on CUDA.
Collectives that return a `PendingTensor` are asynchronous; all ranks must start them in the same order.
"""

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from birdie.errors import ConfigError

T = TypeVar("T")
K = TypeVar("K", bound=Any)


class PendingTensor:
    """Result of an asynchronous collective."""

    def __init__(self, work: dist.Work | None, result: Callable[[], Tensor]) -> None:
        self._work, self._result = work, result

    def wait(self) -> Tensor:
        """Wait for the collective and return its result; on CUDA the current stream waits, not the caller."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._result()


def _sum_over_ranks(parts: Tensor) -> Tensor:
    """Sum (ranks, n, …) over the ranks to (n, …) in float32, one slice of n at a time to need little extra memory."""
    total = torch.empty(parts.shape[1:], dtype=torch.float32)
    for i in range(len(total)):
        torch.sum(parts[:, i], 0, dtype=torch.float32, out=total[i])
    return total


# torch 2.13 renamed these two functions.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class World:
    """Rank of this process, and the number of ranks."""

    rank: int = 0  # from 0
    size: int = 1  # number of ranks
    local_rank: int = 0  # rank on this machine
    restarts: int = 0  # how often torchrun has restarted all ranks because one died; nodes may count differently
    job: str = ""  # identifier of the torchrun job on this machine; a restart keeps it

    @property
    def is_main(self) -> bool:
        """True on rank 0, which prints and writes."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """All-reduce `tensor` by summing, in place, and return it."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        return tensor

    def reduce_(self, tensor: Tensor, owner: int) -> Tensor:
        """Sum `tensor` over the ranks, in place on rank `owner`, and return it; on other ranks it has no meaning."""
        if self.size > 1:
            dist.reduce(tensor, dst=owner, op=dist.ReduceOp.SUM)
        return tensor

    def start_sum_(self, tensor: Tensor) -> PendingTensor:
        """Start an asynchronous `sum_`."""
        work = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, async_op=True) if self.size > 1 else None
        return PendingTensor(work, lambda: tensor)

    def start_reduce_scatter(self, tensor: Tensor, buffer: Tensor) -> PendingTensor:
        """Start to sum `tensor`, (size · n, …), over the ranks; the result is this rank's part, (n, …), in float32.

        gloo's reduce-scatter reduces everything and discards most of it. So with gloo the ranks exchange the parts, and
        each rank sums its own.

        Args:
            tensor: must not change until the result is waited for; on one rank it is the result.
            buffer: scratch memory of the same shape and dtype as `tensor`.
        """
        if self.size == 1:
            return PendingTensor(None, tensor.float)
        part = (tensor.shape[0] // self.size, *tensor.shape[1:])
        if tensor.is_cuda:
            output = buffer[: part[0]]
            work = _reduce_scatter(output, tensor, op=dist.ReduceOp.SUM, async_op=True)
            return PendingTensor(work, output.float)
        work = dist.all_to_all_single(buffer, tensor, async_op=True)
        return PendingTensor(work, lambda: _sum_over_ranks(buffer.view(self.size, *part)))

    def start_all_gather(self, part: Tensor, buffer: Tensor) -> PendingTensor:
        """Start to concatenate every rank's `part`, (n, …), into `buffer`, (size · n, …); on one rank return `part`."""
        if self.size == 1:
            return PendingTensor(None, lambda: part)
        return PendingTensor(_all_gather(buffer, part, async_op=True), lambda: buffer)

    def max_int(self, value: int, device: torch.device) -> int:
        """Return the largest `value` of all ranks."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.int64, device=device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor.item())

    def any(self, flag: bool, device: torch.device) -> bool:
        """Return True on every rank if `flag` is true on any rank."""
        return bool(self.max_int(int(flag), device))

    def broadcast(self, value: T) -> T:
        """Return rank 0's `value` on every rank; it travels by pickle."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def all_gather_strings(self, value: str) -> list[str]:
        """Return every rank's `value`, ordered by rank, on every rank."""
        if self.size == 1:
            return [value]
        values = [""] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Copy the tensor of rank 0 to every rank, in place, and return it."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def barrier(self) -> None:
        """Wait until every rank has reached this call."""
        if self.size > 1:
            dist.barrier()


Work = Callable[[Sequence[K]], dict[K, T]]
"""Work on items, and its result for each."""


def owners(ranks: int, sizes: Mapping[K, int]) -> dict[K, int]:
    """Return the rank of each item, so that all have about the same amount of work (item → amount in `sizes`)."""
    loads, ranks_by_item = [0] * ranks, {}
    for item in sorted(sizes, key=lambda item: (-sizes[item], item)):
        ranks_by_item[item] = loads.index(min(loads))
        loads[ranks_by_item[item]] += sizes[item]
    return ranks_by_item


def share_out(world: World, sizes: Mapping[K, int], work: Work[K, T]) -> dict[K, T]:
    """Let every rank do `work` on some of the items, about as much each, and return all results on every rank.

    Every rank must call it with the same sizes. Results travel by pickle between ranks.

    Args:
        sizes: item → amount of work; items can be sorted.
    """
    if world.size == 1:
        return work(list(sizes))
    mine = [item for item, rank in owners(world.size, sizes).items() if rank == world.rank]
    result: dict[K, T] | Exception
    try:
        result = work(mine)
    except Exception as error:
        result = error
    results: list[Any] = [None] * world.size
    dist.all_gather_object(results, result)
    for one in results:
        if isinstance(one, Exception):
            raise one
    merged = {item: value for part in results for item, value in part.items()}
    return {item: merged[item] for item in sizes}


def send_to_main(world: World, source: int, pieces: Callable[[], Iterator[bytes]], length: int) -> Iterator[bytes]:
    """Yield on rank 0 the bytes that rank `source` has, piece by piece; ranks 0 and `source` iterate, others need not.

    Args:
        source: another rank than 0.
        pieces: called there alone: the bytes, in pieces of any sizes.
        length: bytes in all.
    """
    if world.rank == source:
        for piece in pieces():
            dist.send(torch.tensor(len(piece)), 0)
            dist.send(torch.frombuffer(bytearray(piece), dtype=torch.uint8), 0)
    while world.is_main and length:
        size = torch.tensor(0)
        dist.recv(size, source)
        received = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(received, source)
        length -= len(received)
        yield received.numpy().tobytes()


def launched_by_torchrun() -> bool:
    """Return whether torchrun's environment variables RANK and WORLD_SIZE are set."""
    names = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if len(names) == 1:
        raise ConfigError(f"of RANK and WORLD_SIZE only {names[0]} is set; start with torchrun, or unset it")
    return bool(names)


def world_from_environment() -> World:
    """Return the `World` that torchrun's variables describe, or one rank; does not join a process group."""
    if not launched_by_torchrun():
        return World()
    restarts = _integer("TORCHELASTIC_RESTART_COUNT", "0")
    job = f"{socket.gethostname()}/{os.getppid()}"  # torchrun is the parent of all its ranks
    world = World(_integer("RANK"), _integer("WORLD_SIZE"), _integer("LOCAL_RANK", "0"), restarts, job)
    if not 0 <= world.rank < world.size or world.local_rank < 0:
        raise ConfigError(
            f"RANK {world.rank} of WORLD_SIZE {world.size} with LOCAL_RANK {world.local_rank} is inconsistent; "
            "start with torchrun"
        )
    return world


def _integer(name: str, default: str = "") -> int:
    text = os.environ.get(name, default)
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}, not an integer; start with torchrun") from error


@contextmanager
def process_group(device: torch.device) -> Iterator[World]:
    """Join the process group that torchrun describes and leave it at the end; without torchrun, yield one rank.

    After an error on a GPU the group is not left: NCCL waits for all ranks to leave, and the others wait for this one's
    collectives. The end of the process, which torchrun sees, ends the group.

    After a restart torchrun's store still holds the addresses of the dead ranks (pytorch/pytorch#135712), so each
    attempt prefixes its keys.
    """
    world = world_from_environment()
    if world.size == 1:
        yield world
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    on_cuda, timeout = device.type == "cuda", timedelta(minutes=30)
    try:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = PrefixStore(f"attempt {world.restarts}", store)
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
            device_id=device if on_cuda else None,
        )
    except (ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"cannot join the other ranks ({reason}); start with torchrun") from error
    try:
        yield world
    except BaseException:
        if not on_cuda:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def run_on_main(world: World, device: torch.device, work: Callable[[], object]) -> None:
    """Run `work` on rank 0 while the other ranks wait; if it fails, they exit with code 1 and without a message."""
    failure: Exception | None = None
    if world.is_main:
        try:
            work()
        except Exception as error:
            failure = error
    if world.any(failure is not None, device):
        raise failure or SystemExit(1)


def together(world: World, work: Callable[[], T]) -> T:
    """Return the result of work that every rank does; if it fails on one, the others end without a message."""
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    failed = [rank for rank, text in enumerate(world.all_gather_strings("x" if failure else "")) if text]
    if failure is not None:
        raise failure
    if failed:
        raise SystemExit(1)
    return result
