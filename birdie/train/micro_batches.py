"""Micro-batches: how many tokens go through the model at once. It changes memory and speed, not the gradient.

Chunks decide which tokens a step has (`accumulation` of them, over all ranks). A micro-batch is some chunks side by
side, or some rows of one. "auto" takes the fewest micro-steps that memory allows. On CUDA this is measured before the
clock starts: the eager model, which keeps more than the compiled one, runs forward and backward on more and more
tokens, as long as that leaves a tenth of the free memory and room for the optimizer's two moments of each weight.
Elsewhere it is a rule: at most 8,192 tokens.

A resumed run keeps the size it began with: sums in another order would change bits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from birdie.errors import ConfigError
from birdie.runtime.callbacks import Notify
from birdie.runtime.distributed import World
from birdie.runtime.nvtx import nvtx_range
from birdie.train.mixed_lengths import MixedLengths, differ_within_a_rank
from birdie.train.protocols import Batches, DocumentFinder, Trainable
from birdie.train.settings import TrainSettings
from birdie.train.size_schedule import StepSize

MOST = 8192  # tokens at once where memory is not measured; a CPU gains nothing from more
MEMORY_FRACTION = 0.9  # of the free memory


def candidate_sizes(settings: TrainSettings, ranks: int, *, uncut: bool = False) -> list[int]:
    """Return sizes in tokens, ascending, that cut a chunk, or a rank's chunks of a step, into equal parts.

    Chunks of different sequence lengths are not put side by side.

    Args:
        settings: of the run.
        ranks: number of processes.
        uncut: whether chunks must not be cut.
    """
    length = settings.train_seq_len
    rows = settings.chunk_tokens // length
    chunks = 1 if differ_within_a_rank(settings, ranks) else settings.accumulation // ranks
    parts = [part for part in range(1, rows) if rows % part == 0]
    groups = [rows * group for group in range(1, chunks + 1) if chunks % group == 0]
    return [length * size for size in (*([] if uncut else parts), *groups)]


def largest_that_fits(sizes: Sequence[int], needs: Callable[[int], int], free: int) -> int:
    """Return the largest of `sizes` before the first that does not fit; the smallest if none fits.

    Args:
        sizes: tokens, ascending.
        needs: (tokens) → bytes that they need; may run out of memory.
        free: bytes available.
    """
    best = sizes[0]
    for size in sizes:
        try:
            if needs(size) > free:
                break
        except torch.OutOfMemoryError:
            break
        best = size
    return best


def choose_size(
    model: Trainable,
    settings: TrainSettings,
    world: World,
    device: torch.device,
    *,
    saved: object,
    uncut: bool = False,
    notify: Notify,
) -> int:
    """Return the tokens of a micro-batch, the same on every rank; 0: a chunk.

    Args:
        model: on its device.
        settings: of the run.
        world: of this rank; the rank with the least memory decides.
        device: of the model.
        saved: size in the checkpoint that this run resumes, or None.
        uncut: whether chunks are rows that must not be cut, as packed ones are.
        notify: called with the line that says what "auto" has chosen.
    """
    sizes = candidate_sizes(settings, world.size, uncut=uncut)
    if not isinstance(settings.micro_batch_tokens, str):
        if uncut and 0 < settings.micro_batch_tokens < min(sizes):
            raise ConfigError(
                f"micro_batch_tokens {settings.micro_batch_tokens} would cut a packed chunk of {min(sizes)} tokens; "
                "choose a multiple of it, or a larger accumulation"
            )
        chunk = settings.chunk_tokens
        if settings.micro_batch_tokens > chunk and differ_within_a_rank(settings, world.size):
            raise ConfigError(
                f"micro_batch_tokens {settings.micro_batch_tokens} would join chunks of {chunk} tokens that have "
                f"different mixed_seq_lens; choose at most {chunk}, or an order of lengths that gives each rank one"
            )
        return settings.micro_batch_tokens
    if isinstance(saved, int) and saved in sizes:
        tokens, reason = saved, "as in the checkpoint"
    else:
        tokens = -world.max_int(-_automatic_size(model, settings, sizes, device), device)
        reason = "measured" if device.type == "cuda" else f"at most {MOST:,} on {device.type}"
    steps = micro_steps(settings, world.size, tokens)
    notify(f"micro-batches of {tokens:,} tokens, {steps} to a step on each rank ({reason})")
    return tokens


def micro_steps(settings: TrainSettings, ranks: int, tokens: int) -> int:
    """Return the number of micro-steps of a full step on each rank."""
    chunk, chunks = settings.chunk_tokens, settings.accumulation // ranks
    return chunks * chunk // tokens if 0 < tokens < chunk else -(-chunks // max(1, tokens // chunk))


def _automatic_size(model: Trainable, settings: TrainSettings, sizes: Sequence[int], device: torch.device) -> int:
    """Return the size of `sizes`, in tokens, that "auto" chooses on this rank."""
    if device.type != "cuda":
        return largest_that_fits(sizes, lambda tokens: tokens, MOST)
    weights = sum(p.numel() * p.element_size() for _, p in model.named_parameters())
    torch.cuda.empty_cache()
    free = int(MEMORY_FRACTION * torch.cuda.mem_get_info(device)[0]) - 2 * weights
    try:
        return largest_that_fits(sizes, lambda tokens: _peak_bytes(model, tokens, settings.train_seq_len, device), free)
    finally:
        for _, parameter in model.named_parameters():
            parameter.grad = None
        torch.cuda.empty_cache()


def _peak_bytes(model: Trainable, tokens: int, length: int, device: torch.device) -> int:
    """Return the peak memory of one forward and backward pass, gradients included, without the weights."""
    for _, parameter in model.named_parameters():
        parameter.grad = None  # of a smaller size, or this pass would not allocate its own
    ids = torch.zeros((tokens // length, length), dtype=torch.int64, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device)
    torch.autograd.backward(model.loss(ids, ids))
    return torch.cuda.max_memory_allocated(device) - allocated


class MicroBatches:
    """This rank's share of each step, cut into micro-batches.

    Attributes:
        tokens: of a micro-batch; 0: a chunk.
    """

    def __init__(
        self,
        model: Trainable,
        batches: Batches,
        settings: TrainSettings,
        world: World,
        device: torch.device,
        *,
        documents: DocumentFinder | None,
        saved: object,
        notify: Notify,
    ) -> None:
        self._batches, self._settings, self._ranks, self._device = batches, settings, world.size, device
        self._documents = documents
        packed = documents is not None and documents.packed
        self._cuts_rows = packed or bool(settings.seq_len_start or settings.mixed_seq_lens)
        self._lengths = MixedLengths(settings, world.rank, world.size)
        self.tokens = choose_size(model, settings, world, device, saved=saved, uncut=packed, notify=notify)
        if (line := self._lengths.plan(world)) is not None:
            notify(line)

    @property
    def micro_steps(self) -> int:
        """Micro-steps of a full step."""
        return micro_steps(self._settings, self._ranks, self.tokens)

    def of_step(self, size: StepSize, *, counted: bool = True) -> Iterator["MicroBatch"]:
        """Return the micro-batches of a step; `counted`: whether it is a step of the run, not of warm-up."""
        lengths = self._lengths.of_step(size)
        if counted:
            self._lengths.count(lengths)
        cut = lengths if self._cuts_rows else [0] * len(lengths)
        return micro_batches(self._batches, cut, self.tokens, self._device, self._documents)

    def diagnostics(self, world: World) -> str | None:
        """Return a line about mixed sequence lengths, if there are several. Every rank must call it."""
        return self._lengths.diagnostics(world)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch on the device.

    Attributes:
        ids, targets: (rows, length).
        parts: micro-batches of this size in this rank's step; the loss is divided by it.
        arguments: further arguments of the loss, by name.
    """

    ids: Tensor
    targets: Tensor
    parts: float
    arguments: dict[str, Any]


def micro_batches(
    batches: Batches,
    lengths: Sequence[int],
    tokens: int,
    device: torch.device,
    documents: DocumentFinder | None = None,
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a step of one rank, with all of its tokens once.

    Args:
        batches: yields the chunks.
        lengths: for each chunk of this rank in the step, the length of the sequences into which its rows are cut; 0:
            rows stay as they are.
        tokens: of a micro-batch, from chunks of one length; 0: a chunk.
        device: to move tensors to.
        documents: finds the bounds for the loss; packed rows are cut at `length` by these bounds alone.
    """
    chunks, done = len(lengths), 0
    while done < chunks:
        length = lengths[done]
        same_length = next((n for n, other in enumerate(lengths[done:]) if other != length), chunks - done)
        with nvtx_range("data"):
            pairs = [batches.next()]
            group = max(1, tokens // pairs[0][0].numel()) if tokens else 1
            pairs += [batches.next() for _ in range(min(group, same_length) - 1)]
        done += len(pairs)
        rows = max(1, tokens // pairs[0][0].shape[1]) if tokens else sum(len(ids) for ids, _ in pairs)
        bounds = [] if documents is None else _bounds([ids for ids, _ in pairs], rows, length, documents)
        with nvtx_range("transfer"):
            x, y = (_to_device(device, [pair[side] for pair in pairs]) for side in (0, 1))
        for number, (ids, targets) in enumerate(zip(torch.split(x, rows), torch.split(y, rows), strict=True)):
            parts = chunks * pairs[0][0].numel() / ids.numel()
            if length and not (documents is not None and documents.packed):
                ids, targets = ids.reshape(-1, length), targets.reshape(-1, length)
            yield MicroBatch(ids, targets, parts, {"bounds": bounds[number]} if bounds else {})


def _bounds(chunks: list[Tensor], rows: int, length: int, documents: DocumentFinder) -> list[Any]:
    """Return the bounds of each micro-batch of `rows` rows."""
    ids = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
    if documents.packed:
        return [documents(part, length) for part in torch.split(ids, rows)]
    longest = length or ids.shape[1]
    return [documents(part.reshape(-1, longest), longest) for part in torch.split(ids, rows)]


def _to_device(device: torch.device, parts: list[Tensor]) -> Tensor:
    moved = [part.to(device, non_blocking=True) for part in parts]
    return moved[0] if len(moved) == 1 else torch.cat(moved)
