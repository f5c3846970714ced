"""Parallel Muon: each rank orthogonalizes its share of every bank, and communication overlaps with that work.

    backward ─► every bank, largest first:  gradients ──reduce-scatter──► this rank's matrices ┐   all asynchronous
                all other parameters:       gradients ──all-reduce──────────────────────────── ┘
    then, bank by bank:  wait ─► momentum ─► Newton–Schulz ─► start all-gather ─► next bank
                                                                  └─► wait, decay and apply the previous bank

Without a process group the same steps run with nothing to wait for; with Newton–Schulz in float32, one rank and many do
the same arithmetic. Of a bank of n matrices a rank owns ⌊n / size⌋ or one more, so that the ranks' work is equal over
all banks, and it keeps the momentum of these alone, in `optimizer.state`. What is sent is padded with zeros to ⌈n /
size⌉ matrices per rank. Gradients and updates are sent in the dtype of Newton–Schulz: in bfloat16, gradients are
rounded before the momentum update, on one rank after it. CPUs sum them in float32, NCCL in the dtype they are sent in.

Source: openai/parameter-golf #399 (optimizer 19.7 → 1.3 ms a step on 8 H100s; no DistributedDataParallel).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from birdie.gpt.train.banks import Bank
from birdie.gpt.train.muon import STATE, Muon, apply_, load_into
from birdie.system.distributed import PendingTensor, World
from birdie.system.ranges import named_range

_LARGE = 32_768  # elements beyond which a gradient is sent alone
_TINY = 1e-6  # keeps the clipping factor finite, as torch's does


@dataclass(frozen=True, slots=True)
class Sharding:
    """Distribution of the matrices of a bank over the ranks.

    Attributes:
        ranges: matrices of each rank, by rank.
        padded: matrices of the largest range: every rank sends and receives so many.
    """

    ranges: tuple[range, ...]
    padded: int


def shard_banks(banks: Sequence[torch.Size], ranks: int) -> list[Sharding]:
    """Distribute banks of these shapes over the ranks in contiguous ranges.

    The remainder of a bank goes to the ranks with the least work so far.
    """
    work, shardings = [0] * ranks, []
    for count, rows, columns in banks:
        least, remainder = divmod(count, ranks)
        idle = sorted(range(ranks), key=lambda rank: (work[rank], rank))[:remainder]
        counts = [least + (rank in idle) for rank in range(ranks)]
        ends = list(accumulate(counts))
        shardings.append(Sharding(tuple(range(end - n, end) for n, end in zip(counts, ends, strict=True)), max(counts)))
        flops = min(rows, columns) ** 2 * max(rows, columns)
        work = [total + n * flops for total, n in zip(work, counts, strict=True)]
    return shardings


class ParallelMuon(Muon):
    """Muon over banks that are sharded across the ranks.

    A step is `start`, then `square_sum` and `scale_` if the gradient is clipped, then `begin` and `finish`.

    Attributes:
        banks: the arguments.
    """

    def __init__(self, banks: Sequence[Bank], lr: float, *, world: World | None = None, **settings: Any) -> None:
        super().__init__([bank.parameter for bank in banks], lr, **settings)
        self.world = world or World()
        self.banks = tuple(banks)
        self.shardings = shard_banks([bank.shape for bank in banks], self.world.size)
        self._buffers = [self._allocate(bank, shards) for bank, shards in zip(self.banks, self.shardings, strict=True)]
        self._pending: list[PendingTensor] = []
        self._gradients: list[Tensor] = []
        self._sent: PendingTensor

    @property
    def settings(self) -> dict[str, Any]:
        """Learning rate, momentum and the other settings of the parameter group; they may be changed between steps."""
        group: dict[str, Any] = self.param_groups[0]
        return group

    @torch.no_grad()
    def start(self) -> None:
        """Start to reduce the gradients of all banks."""
        self._gradients, self._pending = [], []
        with self._reduce_range("banks"):
            for i, (bank, (send, receive, _)) in enumerate(zip(self.banks, self._buffers, strict=True)):
                for shard, slot in self._shards(i, send):
                    slot.copy_(bank.gradient[shard.start : shard.stop])
                gradient = send if self.world.size > 1 else bank.gradient
                self._pending.append(self.world.start_reduce_scatter(gradient, receive))

    def square_sum(self) -> Tensor:
        """Wait for the reduced gradients of this rank's matrices; return the sum of their squares, 0-d."""
        squares = [torch.linalg.vector_norm(self._gradient(i)).square() for i in range(len(self.banks))]
        return torch.stack(squares).sum()

    def scale_(self, factor: Tensor) -> None:
        """Multiply the reduced gradients by `factor`, in place, to clip them."""
        torch._foreach_mul_([self._gradient(i) for i in range(len(self.banks))], factor)

    @torch.no_grad()
    def begin(self) -> None:
        """Compute the updates of the first bank and start to send them; no weight of a bank changes."""
        self._sent = self._send(0)

    @torch.no_grad()
    def finish(self) -> None:
        """Update all banks, while the updates of the next one are computed and sent."""
        for i in range(1, len(self.banks)):
            sent, self._sent = self._sent, self._send(i)
            self._apply(i - 1, sent)
        self._apply(len(self.banks) - 1, self._sent)
        self._pending, self._gradients = [], []

    def full_state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (matrix name, key, tensor) of the state of all ranks. Every rank must call it."""
        for i, bank in enumerate(self.banks):
            for key in self._state_keys(bank):
                local = self.state[bank.parameter][key]
                send = local.new_zeros((self.shardings[i].padded, *local.shape[1:]))
                send[: len(local)] = local
                receive = send.new_empty((self.world.size * len(send), *local.shape[1:]))
                gathered = self.world.start_all_gather(send, receive).wait()
                for shard, slot in self._shards(i, gathered):
                    for name, part in zip(bank.names[shard.start : shard.stop], slot, strict=True):
                        yield name, key, part

    def load_state(self, saved: Callable[[str, str], Tensor | None]) -> None:
        """Replace all state by `saved(matrix name, key)`, from any number of ranks; zero is what is not saved."""
        for bank, sharding in zip(self.banks, self.shardings, strict=True):
            for key in STATE:
                tensors = [saved(name, key) for name in bank.names]
                example = next((tensor for tensor in tensors if tensor is not None), None)
                state = self.state[bank.parameter]
                if example is None and key in state:
                    state[key].zero_()
                if example is not None:
                    stacked = torch.stack([torch.zeros_like(example) if t is None else t for t in tensors])
                    shard = sharding.ranges[self.world.rank]
                    load_into(state, key, stacked[shard.start : shard.stop], bank.parameter.device)

    def _allocate(self, bank: Bank, sharding: Sharding) -> tuple[Tensor, Tensor, Tensor]:
        """Return buffers to send, to receive, and for this rank's updates; their padding stays zero."""
        shape, sent = bank.shape[1:], self.world.size * sharding.padded if self.world.size > 1 else 0
        dtype = self.settings["dtype"]
        sizes = (sent, sent, sharding.padded)
        send, receive, updates = (bank.parameter.detach().new_zeros((n, *shape), dtype=dtype) for n in sizes)
        return send, receive, updates

    def _state_keys(self, bank: Bank) -> list[str]:
        """Return the keys of the state that the ranks hold of a bank: all have it after a step, before it none."""
        return [key for key in STATE if key in self.state.get(bank.parameter, {})]

    def _shards(self, i: int, buffer: Tensor) -> Iterator[tuple[range, Tensor]]:
        """Yield (matrices, their slot in a buffer of all ranks) for each rank; nothing for an empty buffer."""
        padded = self.shardings[i].padded
        for rank, shard in enumerate(self.shardings[i].ranges):
            if len(buffer):
                yield shard, buffer[rank * padded : rank * padded + len(shard)]

    def _gradient(self, i: int) -> Tensor:
        """Wait for the reduced gradient of this rank's matrices of bank i, float32."""
        while len(self._gradients) <= i:
            with self._reduce_range("wait"):
                gradient = self._pending[len(self._gradients)].wait()
            shard = self.shardings[len(self._gradients)].ranges[self.world.rank]
            self._gradients.append(gradient[: len(shard)])
        return self._gradients[i]

    def _send(self, i: int) -> PendingTensor:
        """Compute this rank's updates of bank i and start to gather those of all ranks."""
        # the send buffer of the gradients receives the updates: its reduction has completed when `_gradient` returns
        gradient, (receive, _, updates) = self._gradient(i), self._buffers[i]
        self.update_(updates[: len(gradient)], self.banks[i].parameter, gradient)
        with named_range("optimizer/muon/exchange"):
            return self.world.start_all_gather(updates, receive)

    def _reduce_range(self, part: str) -> AbstractContextManager[Any]:
        return named_range(f"reduce/{part}") if self.world.size > 1 else nullcontext()

    def _apply(self, i: int, pending: PendingTensor) -> None:
        with named_range("optimizer/muon/exchange"):
            updates = pending.wait()
        with named_range("optimizer/muon/apply"):
            for shard, slot in self._shards(i, updates):
                apply_(self.banks[i].parameter[shard.start : shard.stop], slot, self.settings)


class Reduction:
    """Reduction of gradients and loss over all ranks.

    Large gradients are sent alone and in place, the small ones and the loss in one buffer.
    """

    def __init__(self, muon: ParallelMuon | None, others: Iterable[nn.Parameter], loss: Tensor, world: World) -> None:
        self._muon, self._world, self._loss = muon, world, loss
        if muon is not None:
            muon.start()
        self._others = [p.grad for p in others if p.grad is not None]
        self._small = [loss, *(g for g in self._others if g.numel() <= _LARGE)]
        self._buffer: Tensor | None = None
        self._pending: list[PendingTensor] = []
        if world.size > 1:
            with named_range("reduce/others"):
                self._buffer = torch.cat([tensor.reshape(-1) for tensor in self._small])
                sent = [*(g for g in self._others if g.numel() > _LARGE), self._buffer]
                self._pending = [world.start_sum_(tensor) for tensor in sent]

    def totals(self, limit: float) -> Tensor:
        """Wait for all gradients, clip them to norm `limit` (0: no limit); return [loss, norm before clipping]."""
        if self._buffer is not None:
            with named_range("reduce/wait"):
                for pending in self._pending:
                    pending.wait()
                parts = torch.split(self._buffer, [tensor.numel() for tensor in self._small])
                shaped = [part.view_as(tensor) for part, tensor in zip(parts, self._small, strict=True)]
                torch._foreach_copy_(self._small, shaped)
        square = torch.zeros((), device=self._loss.device)
        if self._muon is not None:
            square = self._muon.square_sum()
        with named_range("clip"):
            if self._muon is not None:
                self._world.sum_(square)
            if self._others:
                square = square + torch.stack(torch._foreach_norm(self._others)).square().sum()
            norm = square.sqrt()
            if limit:
                factor = (limit / (norm + _TINY)).clamp(max=1.0)
                if self._others:
                    torch._foreach_mul_(self._others, factor)
                if self._muon is not None:
                    self._muon.scale_(factor)
            return torch.stack((self._loss, norm))
