"""Micro-batches: how many tokens go through the model at once. It changes memory and speed, not the gradient.

Spans decide which tokens a step has (`accumulation` of them, over all ranks); a micro-batch is some spans side by side,
or some rows of one. "auto" takes the fewest micro-steps that memory allows. On CUDA this is measured before the clock:
the eager model, which keeps more than the compiled one, goes forward and back on more and more tokens while what it
needs leaves a tenth of the free memory and the optimizer's two moments of each weight. Elsewhere it is a rule: at most
8,192 tokens.

A run that goes on keeps the size it began with, because sums in another order are other bits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from birdie.errors import ConfigError
from birdie.runtime.distributed import World
from birdie.runtime.nvtx import nvtx_range
from birdie.train.growth import Stage
from birdie.train.lengths import Lengths, differ_in_a_rank
from birdie.train.protocols import Batches, Documents, Trainable
from birdie.train.settings import TrainSettings

MOST = 8192  # tokens at once where memory is not measured: beyond, a CPU gains nothing
SHARE = 0.9  # of the free memory


def candidates(settings: TrainSettings, ranks: int, *, whole: bool = False) -> list[int]:
    """Sizes in tokens, ascending, that cut a span, or a rank's spans of a step, into equal parts; `whole`: no span.

    Spans of unlike length are not put side by side.
    """
    length = settings.train_seq_len
    rows = settings.train_batch_tokens // settings.accumulation // length
    spans = 1 if differ_in_a_rank(settings, ranks) else settings.accumulation // ranks
    parts = [each for each in range(1, rows) if rows % each == 0]
    groups = [rows * each for each in range(1, spans + 1) if spans % each == 0]
    return [length * each for each in (*([] if whole else parts), *groups)]


def largest(sizes: Sequence[int], needs: Callable[[int], int], free: int) -> int:
    """The largest of `sizes`, ascending, before the first that does not fit; the smallest is taken in any case.

    Args:
        sizes: tokens.
        needs: bytes that so many tokens need; may run out of memory.
        free: bytes there are.
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


def settled(
    model: Trainable,
    settings: TrainSettings,
    world: World,
    device: torch.device,
    *,
    before: object,
    whole: bool = False,
    notify: Callable[[str], None],
) -> int:
    """Tokens at once, the same on every rank; 0: a span.

    Args:
        model: on its device.
        settings: of the run.
        world: this rank among its peers; the one with the least memory decides.
        device: where the model is.
        before: what it was when the run began, if this one goes on.
        whole: whether spans are rows that cannot be cut, as packed ones are.
        notify: gets the line that says what "auto" came to.

    Raises:
        ConfigError: the size cuts what is whole, or joins what is of unlike length.
    """
    sizes = candidates(settings, world.size, whole=whole)
    if not isinstance(settings.micro_batch_tokens, str):
        if whole and 0 < settings.micro_batch_tokens < min(sizes):
            raise ConfigError(
                f"micro_batch_tokens {settings.micro_batch_tokens} would cut a packed span of {min(sizes)} tokens; "
                "choose a multiple of it, or a larger accumulation"
            )
        span = settings.train_batch_tokens // settings.accumulation
        if settings.micro_batch_tokens > span and differ_in_a_rank(settings, world.size):
            raise ConfigError(
                f"micro_batch_tokens {settings.micro_batch_tokens} would join spans of {span} tokens that are cut to "
                f"unlike mixed_seq_lens; choose at most {span}, or an order of lengths that gives each rank one"
            )
        return settings.micro_batch_tokens
    if isinstance(before, int) and before in sizes:
        tokens, why = before, "as the run began"
    else:
        tokens = -world.max_int(-chosen(model, settings, sizes, device), device)
        why = "measured" if device.type == "cuda" else f"at most {MOST:,} on {device.type}"
    steps = micro_steps(settings, world.size, tokens)
    notify(f"micro-batches of {tokens:,} tokens, {steps} to a step on each rank ({why})")
    return tokens


def micro_steps(settings: TrainSettings, ranks: int, tokens: int) -> int:
    """Micro-steps of a whole step on each rank."""
    span, spans = settings.train_batch_tokens // settings.accumulation, settings.accumulation // ranks
    return spans * span // tokens if 0 < tokens < span else -(-spans // max(1, tokens // span))


def chosen(model: Trainable, settings: TrainSettings, sizes: Sequence[int], device: torch.device) -> int:
    """What "auto" comes to on this rank, in tokens, of `sizes`."""
    if device.type != "cuda":
        return largest(sizes, lambda tokens: tokens, MOST)
    weights = sum(p.numel() * p.element_size() for _, p in model.named_parameters())
    torch.cuda.empty_cache()
    free = int(SHARE * torch.cuda.mem_get_info(device)[0]) - 2 * weights
    try:
        return largest(sizes, lambda tokens: _peak(model, tokens, settings.train_seq_len, device), free)
    finally:
        for _, parameter in model.named_parameters():
            parameter.grad = None
        torch.cuda.empty_cache()


def _peak(model: Trainable, tokens: int, length: int, device: torch.device) -> int:
    """Bytes that one forward and backward pass takes beside the weights."""
    ids = torch.zeros((tokens // length, length), dtype=torch.int64, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    torch.autograd.backward(model.loss(ids, ids))
    return torch.cuda.max_memory_allocated(device) - before


class Feed:
    """What a rank takes of each step, cut into micro-batches.

    Attributes:
        tokens: at once; 0: a span.

    Raises:
        ConfigError: micro-batches would cut what is whole.
    """

    def __init__(
        self,
        model: Trainable,
        batches: Batches,
        settings: TrainSettings,
        world: World,
        device: torch.device,
        *,
        documents: Documents | None,
        before: object,
        notify: Callable[[str], None],
    ) -> None:
        self._batches, self._settings, self._ranks, self._device = batches, settings, world.size, device
        self._documents, self._packed = documents, documents is not None and documents.packed
        self._cuts = self._packed or bool(settings.seq_len_start or settings.mixed_seq_lens)
        self._lengths = Lengths(settings, world.rank, world.size)
        self.tokens = settled(model, settings, world, device, before=before, whole=self._packed, notify=notify)
        if (line := self._lengths.told(world)) is not None:
            notify(line)

    @property
    def micro_steps(self) -> int:
        """Of a whole step."""
        return micro_steps(self._settings, self._ranks, self.tokens)

    def step(self, stage: Stage, *, counts: bool = True) -> Iterator["Micro"]:
        """The micro-batches of a step; `counts`: whether it is one of the run."""
        lengths = self._lengths.of(stage)
        if counts:
            self._lengths.took(lengths)
        cut = lengths if self._cuts else [0] * len(lengths)
        return micro_batches(self._batches, cut, self.tokens, self._device, self._documents)

    def evidence(self, world: World) -> str | None:
        """What the lengths of sequences were, if there were several. Every rank must call it."""
        return self._lengths.evidence(world)


@dataclass(frozen=True, slots=True)
class Micro:
    """A micro-batch on the device.

    Attributes:
        ids, targets: (rows, length).
        parts: into how many of that size this rank's step is cut.
        more: what else the loss takes, by name.
    """

    ids: Tensor
    targets: Tensor
    parts: float
    more: dict[str, Any]


def micro_batches(
    batches: Batches, lengths: Sequence[int], tokens: int, device: torch.device, documents: Documents | None = None
) -> Iterator[Micro]:
    """A step of one rank, all of its tokens once.

    Args:
        batches: gives the spans.
        lengths: of the sequences into which rows are cut, for each span of this rank in the step; 0: leave them.
        tokens: at once, of spans of one length; 0: a span.
        device: where to.
        documents: finds the bounds that the loss is to keep to; with packed rows these cut at `length`.
    """
    spans, done = len(lengths), 0
    while done < spans:
        length = lengths[done]
        alike = next((n for n, each in enumerate(lengths[done:]) if each != length), spans - done)
        with nvtx_range("data"):
            pairs = [batches.next()]
            group = max(1, tokens // pairs[0][0].numel()) if tokens else 1
            pairs += [batches.next() for _ in range(min(group, alike) - 1)]
        done += len(pairs)
        rows = max(1, tokens // pairs[0][0].shape[1]) if tokens else sum(len(ids) for ids, _ in pairs)
        found = [] if documents is None else _bounds([ids for ids, _ in pairs], rows, length, documents)
        with nvtx_range("transfer"):
            x, y = (_on(device, [pair[side] for pair in pairs]) for side in (0, 1))
        for number, (ids, targets) in enumerate(zip(torch.split(x, rows), torch.split(y, rows), strict=True)):
            parts = spans * pairs[0][0].numel() / ids.numel()
            if length and not (documents is not None and documents.packed):
                ids, targets = ids.reshape(-1, length), targets.reshape(-1, length)
            yield Micro(ids, targets, parts, {"bounds": found[number]} if found else {})


def _bounds(spans: list[Tensor], rows: int, length: int, documents: Documents) -> list[Any]:
    whole = spans[0] if len(spans) == 1 else torch.cat(spans)
    if documents.packed:
        return [documents(part, length) for part in torch.split(whole, rows)]
    longest = length or whole.shape[1]
    return [documents(part.reshape(-1, longest), longest) for part in torch.split(whole, rows)]


def _on(device: torch.device, parts: list[Tensor]) -> Tensor:
    moved = [part.to(device, non_blocking=True) for part in parts]
    return moved[0] if len(moved) == 1 else torch.cat(moved)
