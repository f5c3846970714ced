"""Momentum SGD on targets that were scored, shared out over all ranks; what TTT by SGD and its phases have in common.

    positions ─► sequences of T ─► batch_seqs a step ─► ledger.learn ─► this rank's part ─► mean gradient of all ranks
                                                                                                └─► clip ─► momentum

Each step declares its targets to the ledger before anything is computed, and the ledger refuses what was not scored.
The order of chunks and steps is fixed and nothing is random: two runs on one machine agree to the bit (on CUDA as far
as its kernels do; embedding gradients are summed there in no fixed order).

Weights are float32 masters, products run in the model's `compute_dtype` as in training and scoring. Gradients are
summed over all ranks before they are clipped, so ranks change results by rounding alone, and their weights stay equal.

Freezing parameters by name froze nothing in the records' models whose blocks were slices of banks, which is why the
diagnostics count changed weights.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from birdie.errors import ConfigError
from birdie.gpt.model.gpt import GPT
from birdie.gpt.score.ledger import Ledger, Range
from birdie.gpt.score.window_losses import Windows
from birdie.system.distributed import World

if TYPE_CHECKING:
    from birdie.gpt.score.modes.ttt_sgd import SGDSettings

_MAX_TOKENS = {"cpu": 4096}  # of a forward and backward pass: beyond, a CPU gains nothing and needs memory
_MAX_TOKENS_GPU = 32_768


def split_windows(windows: Windows, tokens: int) -> Iterator[tuple[Range, Windows]]:
    """Yield the positions of each chunk of `tokens`, up to the last that is scored, and the chunk's windows."""
    if not len(windows):
        return
    ordered = windows.by_position()
    end = int(windows.stops.max())
    tokens = min(tokens, end)
    edges = np.searchsorted(ordered.firsts, np.arange(0, end + tokens, tokens))
    for number, first in enumerate(range(0, end, tokens)):
        yield (first, min(first + tokens, end)), ordered.select(int(edges[number]), int(edges[number + 1]))


def cosine(number: int, count: int) -> float:
    """Return the factor on the learning rate of chunk `number` of `count`: 1 for the first, 0 for the last."""
    return (1 + math.cos(math.pi * number / (count - 1))) / 2 if count > 1 else 1.0


class SGDTrainer:
    """Momentum SGD of one model during one evaluation.

    Args:
        model: in evaluation mode, and in it again after each call; all ranks hold the same weights.
        world: ranks that share every step.

    Attributes:
        steps: number of steps taken.
        tokens: targets in all steps, counted once for each step they are in.
    """

    def __init__(self, model: GPT, settings: "SGDSettings", world: World | None = None) -> None:
        self.model, self.settings, self.world = model, settings, world or World()
        self.steps = self.tokens = 0
        frozen = frozen_names(model, settings.freeze_blocks)
        self._named = dict(model.named_parameters())
        for name, p in self._named.items():
            if p.dtype != torch.float32:
                raise ConfigError(f"{name} is {p.dtype}, in which small steps are lost; train a model in float32")
        self._trained = {name: p for name, p in self._named.items() if name not in frozen}
        self._initial = {name: p.detach().clone() for name, p in self._named.items()}
        self._momenta: dict[str, Tensor] = {}
        self._device = next(iter(self._named.values())).device

    def train(
        self, tokens: NDArray[np.uint16], ranges: Sequence[Range], ledger: Ledger, *, length: int, factor: float = 1.0
    ) -> None:
        """Take `epochs` passes over the targets of `ranges`, concatenated in order. Every rank must call it.

        Args:
            tokens: (N + 1,) of the stream; position i has input i and target i + 1.
            ranges: of positions, all scored; a sequence continues across their borders, as in training.
            ledger: of the N targets, which knows what other ranks scored.
            length: positions of a sequence; the remainder is a shorter one.
            factor: on the learning rate.
        """
        positions = (
            np.concatenate([np.arange(*span, dtype=np.int64) for span in ranges]) if ranges else np.empty(0, int)
        )
        size = self.settings.batch_seqs * length
        with self._training(), self.model.rotary.base_for_length(length):
            for _ in range(self.settings.epochs):
                for begin in range(0, len(positions), size):
                    batch = positions[begin : begin + size]
                    ledger.learn(*contiguous_ranges(batch))
                    self._step(tokens, batch, length, self.settings.lr * factor)

    def diagnostics(self) -> str:
        """Return one line for the log that counts changed and unchanged weights."""
        changed = unchanged = 0
        square = norm = 0.0
        for name, p in self._named.items():
            count = int((p.detach() != self._initial[name]).sum())
            changed, unchanged = changed + count, unchanged + p.numel() - count
            square += float(torch.linalg.vector_norm(p.detach() - self._initial[name])) ** 2
            norm += float(torch.linalg.vector_norm(self._initial[name])) ** 2
        frozen = sum(p.numel() for name, p in self._named.items() if name not in self._trained)
        relative = math.sqrt(square / norm) if norm else 0.0
        held = f" ({frozen:,} of them frozen in the first {self.settings.freeze_blocks} blocks)" if frozen else ""
        return (
            f"TTT by SGD: {self.steps:,} steps, {self.tokens:,} tokens trained on after they were scored; "
            f"{changed:,} weights changed, by {relative:.3%} of the norm, {unchanged:,} unchanged{held}"
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Give the model the weights it had when the trainer was constructed."""
        for name, p in self._named.items():
            p.copy_(self._initial[name])

    def _step(self, tokens: NDArray[np.uint16], positions: NDArray[np.int64], length: int, lr: float) -> None:
        """Take one step on the mean loss of `positions`."""
        self._drop_gradients()
        for part in self._local_parts(positions, length):
            ids, targets = (
                torch.from_numpy(np.asarray(tokens)[part + shift].astype(np.int64)).to(self._device) for shift in (0, 1)
            )
            loss = self.model.loss(ids, targets) * (part.size / len(positions))
            torch.autograd.backward(loss)
        self._reduce_gradients()
        if self.settings.grad_clip:
            norm = float(nn.utils.clip_grad_norm_(self._trained.values(), self.settings.grad_clip))
            if not math.isfinite(norm):
                raise ConfigError(f"the gradient of TTT step {self.steps + 1} has norm {norm}; lower the learning rate")
        self._update(lr)
        self.steps += 1
        self.tokens += len(positions)

    @torch.no_grad()
    def _update(self, lr: float) -> None:
        """v ← momentum · v + g;  w ← w − lr · v, as in `torch.optim.SGD`."""
        with_gradient = {name: p for name, p in self._trained.items() if p.grad is not None}
        for name in with_gradient.keys() - self._momenta.keys():
            self._momenta[name] = torch.zeros_like(with_gradient[name])
        momenta = [self._momenta[name] for name in with_gradient]
        torch._foreach_mul_(momenta, self.settings.momentum)
        torch._foreach_add_(momenta, [p.grad for p in with_gradient.values() if p.grad is not None])
        torch._foreach_add_(list(with_gradient.values()), momenta, alpha=-lr)

    def _drop_gradients(self) -> None:
        for p in self._named.values():
            p.grad = None

    def _local_parts(self, positions: NDArray[np.int64], length: int) -> Iterator[NDArray[np.int64]]:
        """Yield this rank's sequences, (sequences, length) at a time, and the shorter one if it is this rank's."""
        count = -(-len(positions) // length)
        rank, size = self.world.rank, self.world.size
        local = positions[count * rank // size * length : count * (rank + 1) // size * length]
        full = local[: len(local) // length * length].reshape(-1, length)
        rows = max(1, _MAX_TOKENS.get(self._device.type, _MAX_TOKENS_GPU) // length)
        for begin in range(0, len(full), rows):
            yield full[begin : begin + rows]
        if full.size < len(local):
            yield local[None, full.size :]

    def _reduce_gradients(self) -> None:
        """Sum the gradients over all ranks, in one message."""
        if self.world.size == 1:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._trained.values()]
        packed = self.world.sum_(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        parts = torch.split(packed, [gradient.numel() for gradient in gradients])
        for p, part in zip(self._trained.values(), parts, strict=True):
            p.grad = part.view_as(p)

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Inside, the model computes as in training and frozen weights get no gradients; afterwards all is restored."""
        model, way = self.model, self.model.loss_backend
        required = {name: p.requires_grad for name, p in self._named.items()}
        was_training = model.training
        for name, p in self._named.items():
            p.requires_grad_(name in self._trained)
        model.train()
        model.fuse_loss()
        try:
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            self._drop_gradients()
            model.loss_backend = way
            model.train(was_training)
            for name, p in self._named.items():
                p.requires_grad_(required[name])


def train_on_ranges(
    model: GPT,
    tokens: NDArray[np.uint16],
    ranges: Sequence[Range],
    settings: "SGDSettings",
    ledger: Ledger,
    *,
    length: int,
    world: World | None = None,
) -> SGDTrainer:
    """Train once on all targets of `ranges`, in chunks, while the learning rate falls as a cosine.

    Momentum starts at zero. The last of several chunks has learning rate 0 and is left out. Every rank must call it.

    Args:
        model: in evaluation mode; all ranks hold the same weights.
        tokens, ranges, ledger, length: as in `SGDTrainer.train`.
        world: ranks that share every step.

    Returns:
        The trainer, which has the diagnostics and can restore the weights.

    Raises:
        RuleError: a target was not scored yet; steps before it have been taken.
        ConfigError: the settings do not fit the model, or the gradient is not finite.
    """
    trainer = SGDTrainer(model, settings, world)
    chunks = list(split_ranges(ranges, settings.chunk_tokens))
    for number, chunk in enumerate(chunks):
        if number == 0 or number + 1 < len(chunks):
            trainer.train(tokens, chunk, ledger, length=length, factor=cosine(number, len(chunks)))
    return trainer


def frozen_names(model: nn.Module, blocks: int) -> set[str]:
    """Return the names of the parameters of the first `blocks` blocks."""
    frozen: set[str] = set()
    for block in range(blocks):
        names = {name for name, _ in model.named_parameters() if name.startswith(f"blocks.{block}.")}
        if not names:
            raise ConfigError(
                f"freeze_blocks is {blocks}, but the model has no parameter of block {block}; freeze fewer blocks"
            )
        frozen |= names
    return frozen


def split_ranges(ranges: Sequence[Range], tokens: int) -> Iterator[list[Range]]:
    """Yield `ranges` in chunks of `tokens` positions; the last may have fewer."""
    chunk: list[Range] = []
    room = tokens
    for first, stop in ranges:
        while first < stop:
            end = min(stop, first + room)
            chunk.append((first, end))
            room -= end - first
            first = end
            if not room:
                yield chunk
                chunk, room = [], tokens
    if chunk:
        yield chunk


def contiguous_ranges(positions: NDArray[np.int64]) -> list[Range]:
    """Return positions as ranges of neighbors, in their order."""
    if not len(positions):
        return []
    edges = np.flatnonzero(np.diff(positions) != 1) + 1
    firsts, lasts = positions[np.append(0, edges)], positions[np.append(edges - 1, len(positions) - 1)]
    return [(int(first), int(last) + 1) for first, last in zip(firsts, lasts, strict=True)]
