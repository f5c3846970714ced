"""The process group: one `World` that torchrun makes large and everything else leaves at one rank.

All collectives are no-ops on one rank, so there is one code path. gloo on CPUs, NCCL on CUDA. Those that return an
`Arriving` are under way meanwhile; all ranks must start them in one order.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from birdie.errors import ConfigError


class Arriving:
    """The result of a collective that is under way."""

    def __init__(self, work: dist.Work | None, result: Callable[[], Tensor]) -> None:
        self._work, self._result = work, result

    def wait(self) -> Tensor:
        """The result, once it is here; on CUDA the current stream waits, not the caller."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._result()


def _summed(parts: Tensor) -> Tensor:
    """(ranks, n, …) → (n, …) in float32, one of n at a time: a CPU then needs no more room than that."""
    total = torch.empty(parts.shape[1:], dtype=torch.float32)
    for i in range(len(total)):
        torch.sum(parts[:, i], 0, dtype=torch.float32, out=total[i])
    return total


# torch 2.13 gave these new names
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class World:
    """This process among its peers.

    Attributes:
        rank: from 0.
        size: number of ranks.
        local_rank: rank on this machine.
        restarts: how often torchrun has started all ranks anew because one had died; nodes may count differently.
        job: what stays the same from one such start to the next, on this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    restarts: int = 0
    job: str = ""

    @property
    def is_main(self) -> bool:
        """Rank 0: the one that prints and writes."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """All-reduce `tensor` in place by summing; returns it."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        return tensor

    def start_sum_(self, tensor: Tensor) -> Arriving:
        """As `sum_`, under way."""
        work = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, async_op=True) if self.size > 1 else None
        return Arriving(work, lambda: tensor)

    def start_reduce_scatter(self, tensor: Tensor, room: Tensor) -> Arriving:
        """Sum `tensor`, (size · n, …), over the ranks; arriving is this rank's part of the sum, (n, …), in float32.

        gloo reduces the whole and throws most of it away, so there the parts are exchanged and summed here.

        Args:
            tensor: must stay as it is until the result has arrived; on one rank it is the result.
            room: like `tensor`, to be written over.
        """
        if self.size == 1:
            return Arriving(None, tensor.float)
        part = (tensor.shape[0] // self.size, *tensor.shape[1:])
        if tensor.is_cuda:
            own = room[: part[0]]
            work = _reduce_scatter(own, tensor, op=dist.ReduceOp.SUM, async_op=True)
            return Arriving(work, own.float)
        work = dist.all_to_all_single(room, tensor, async_op=True)
        return Arriving(work, lambda: _summed(room.view(self.size, *part)))

    def start_all_gather(self, own: Tensor, room: Tensor) -> Arriving:
        """Every rank's `own`, (n, …), one after the other: arriving is `room`, (size · n, …); on one rank `own`."""
        if self.size == 1:
            return Arriving(None, lambda: own)
        return Arriving(_all_gather(room, own, async_op=True), lambda: room)

    def max_int(self, value: int, device: torch.device) -> int:
        """The largest `value` any rank holds."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.int64, device=device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor.item())

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether `flag` is true on any rank."""
        return bool(self.max_int(int(flag), device))

    def share(self, value: str) -> str:
        """Rank 0's `value`, on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def gather(self, value: str) -> list[str]:
        """Every rank's `value`, in the order of ranks, on every rank."""
        if self.size == 1:
            return [value]
        values = [""] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast_(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Copy `tensor` of rank `source` into every rank's, in place; returns it."""
        if self.size > 1:
            dist.broadcast(tensor, src=source)
        return tensor

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier()


class Claims:
    """Numbers 0, 1, 2, … each of which goes to one rank: whoever asks first. Every rank must make one.

    The count is kept by the store the ranks met at, so that nobody waits for anybody.
    """

    def __init__(self, world: World) -> None:
        self._store: PrefixStore | None = None
        self._next = 0
        if world.size > 1:
            self._store = PrefixStore(world.share(uuid4().hex), dist.distributed_c10d._get_default_store())

    def next(self) -> int:
        """A number that no other rank has."""
        if self._store is not None:
            return int(self._store.add("claimed", 1)) - 1
        self._next += 1
        return self._next - 1


def launched_by_torchrun() -> bool:
    """Whether torchrun's environment variables are set.

    Raises:
        ConfigError: only one of them is.
    """
    found = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if len(found) == 1:
        raise ConfigError(f"of RANK and WORLD_SIZE only {found[0]} is set; start with torchrun, or unset it")
    return bool(found)


def world_from_environment() -> World:
    """The `World` torchrun describes, or one rank; joins no process group yet.

    Raises:
        ConfigError: the environment describes no world.
    """
    if not launched_by_torchrun():
        return World()
    restarts = _integer("TORCHELASTIC_RESTART_COUNT", "0")
    job = f"{socket.gethostname()}/{os.getppid()}"  # torchrun is the parent of all its ranks
    world = World(_integer("RANK"), _integer("WORLD_SIZE"), _integer("LOCAL_RANK", "0"), restarts, job)
    if not 0 <= world.rank < world.size or world.local_rank < 0:
        raise ConfigError(
            f"RANK {world.rank} of WORLD_SIZE {world.size} with LOCAL_RANK {world.local_rank} cannot be; "
            "start with torchrun"
        )
    return world


def _integer(name: str, default: str = "") -> int:
    text = os.environ.get(name, default)
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}, not a whole number; start with torchrun") from error


@contextmanager
def process_group(device: torch.device, timeout_minutes: float = 30) -> Iterator[World]:
    """Join the process group torchrun describes, leave it at the end; without torchrun, a world of one.

    After a restart torchrun's own store still holds the addresses of the ranks that died (pytorch/pytorch #135712), so
    each attempt keeps to names of its own there.

    Raises:
        ConfigError: the environment describes no process group, or the other ranks cannot be reached.
    """
    world = world_from_environment()
    if world.size == 1:
        yield world
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    on_cuda, timeout = device.type == "cuda", timedelta(minutes=timeout_minutes)
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
    finally:
        dist.destroy_process_group()


def on_main(world: World, device: torch.device, work: Callable[[], None]) -> None:
    """Do `work` on rank 0 while the others wait; when it fails there they end too, without a word of their own."""
    failure: Exception | None = None
    if world.is_main:
        try:
            work()
        except Exception as error:
            failure = error
    if world.any(failure is not None, device):
        raise failure or SystemExit(1)
