"""`micro_batch_tokens = "auto"`: the fewest micro-steps that memory allows.

On CUDA this is measured before the clock starts: the eager model, which keeps more than the compiled one, runs forward
and backward on more and more tokens, as long as that leaves a tenth of the free memory and room for the optimizer's two
moments of each weight. Elsewhere it is a rule: at most 8,192 tokens.

A resumed run keeps the size it began with: sums in another order would change bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from birdie.gpt.train.plan import differ_within_a_rank, micro_steps
from birdie.gpt.train.settings import TrainSettings
from birdie.system.context import Context

MOST = 8192  # tokens at once where memory is not measured; a CPU gains nothing from more
MEMORY_FRACTION = 0.9  # of the free memory


def candidate_sizes(settings: TrainSettings, ranks: int, *, uncut: bool = False) -> list[int]:
    """Return sizes in tokens, ascending, that cut a chunk, or a rank's chunks of a step, into equal parts.

    Chunks of different sequence lengths are not put side by side; `uncut` chunks are packed rows that must stay whole.
    """
    length = settings.train_seq_len
    rows = settings.chunk_tokens // length
    chunks = 1 if differ_within_a_rank(settings, ranks) else settings.accumulation // ranks
    parts = [part for part in range(1, rows) if rows % part == 0]
    groups = [rows * group for group in range(1, chunks + 1) if chunks % group == 0]
    return [length * size for size in (*([] if uncut else parts), *groups)]


def largest_that_fits(sizes: Sequence[int], needs: Callable[[int], int], free: int) -> int:
    """Return the largest of `sizes`, ascending tokens, before the first that does not fit; the smallest if none fits.

    Args:
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


def measured_size(
    model: nn.Module, settings: TrainSettings, context: Context, *, saved: object, uncut: bool = False
) -> int:
    """Return the tokens of a micro-batch that "auto" stands for, the same on every rank.

    Args:
        model: on its device.
        context: device, ranks, of which the one with the least memory decides, and log.
        saved: size in the checkpoint that this run resumes, or None.
        uncut: whether chunks are rows that must not be cut, as packed ones are.
    """
    world, device = context.world, context.device
    sizes = candidate_sizes(settings, world.size, uncut=uncut)
    if isinstance(saved, int) and saved in sizes:
        tokens, reason = saved, "as in the checkpoint"
    else:
        tokens = -world.max_int(-_size_of_this_rank(model, settings, sizes, device), device)
        reason = "measured" if device.type == "cuda" else f"at most {MOST:,} on {device.type}"
    steps = micro_steps(settings, world.size, tokens)
    context.notify(f"micro-batches of {tokens:,} tokens, {steps} to a step on each rank ({reason})")
    return tokens


def _size_of_this_rank(model: nn.Module, settings: TrainSettings, sizes: Sequence[int], device: torch.device) -> int:
    if device.type != "cuda":
        return largest_that_fits(sizes, lambda tokens: tokens, MOST)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    torch.cuda.empty_cache()
    free = int(MEMORY_FRACTION * torch.cuda.mem_get_info(device)[0]) - 2 * weights
    try:
        return largest_that_fits(sizes, lambda tokens: _peak_bytes(model, tokens, settings.train_seq_len, device), free)
    finally:
        model.zero_grad()
        torch.cuda.empty_cache()


def _peak_bytes(model: Any, tokens: int, length: int, device: torch.device) -> int:
    """Return the peak memory of one forward and backward pass, gradients included, without the weights."""
    model.zero_grad()  # gradients of a smaller size, or this pass would not allocate its own
    ids = torch.zeros((tokens // length, length), dtype=torch.int64, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device)
    torch.autograd.backward(model.loss(ids, ids))
    return torch.cuda.max_memory_allocated(device) - allocated
