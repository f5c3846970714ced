"""Tiny models and texts, the evaluation of one, and the scorers that train, token by token, as references of the modes.

The references of modes that do not train are those of `birdie.gpt.score.reference`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.score.accumulator import Text
from birdie.gpt.score.evaluator import Scored, score
from birdie.gpt.score.ledger import Ledger
from birdie.gpt.score.mode import ScoringMode
from birdie.gpt.score.modes.ttt_lora import LoRAMode
from birdie.gpt.score.modes.ttt_sgd import SGDSettings
from birdie.gpt.score.settings import EvaluationSettings
from birdie.gpt.score.ttt_documents import RowAdamW, new_adapters
from birdie.gpt.score.window_losses import Windows
from tests.device import DEVICE
from tests.gpt.model.technique_table import randomized

BOS, VOCABULARY, LENGTH = 1, 24, 12
DOCUMENTS = (8, 1, 7, 9, 4, 14, 2, 1, 14)  # tokens of each, BOS included; two have nothing else


class TwoBytes:
    """Byte table: every token but BOS has two bytes."""

    def count(self, _previous: NDArray[np.integer], targets: NDArray[np.integer]) -> NDArray[np.int64]:
        return np.where(targets == BOS, 0, 2)


def tiny_gpt(**changes: Any) -> GPT:
    shape: dict[str, Any] = {"num_layers": 2, "model_dim": 16, "num_heads": 2, "num_kv_heads": 1, "bos_id": BOS}
    return randomized(GPTConfig(**{"vocab_size": VOCABULARY, "tied_embed_init_std": 0.5, **shape, **changes})).eval()


def documents(lengths: tuple[int, ...] = DOCUMENTS) -> NDArray[np.uint16]:
    """Return documents that count up in steps, so that there is something to learn from earlier ones."""
    count = sum(lengths) + 1
    tokens = (np.arange(count) * 3 + np.random.default_rng(0).integers(0, 2, count)) % (VOCABULARY - 2) + 2
    tokens[np.cumsum((0, *lengths))] = BOS
    return tokens.astype(np.uint16)


def scored(
    model: Any,
    tokens: NDArray[np.uint16],
    instance: ScoringMode | None = None,
    /,
    *,
    world: Any = None,
    **settings: Any,
) -> Scored:
    """Score tokens by a mode, with every loss kept."""
    progress, length = settings.pop("progress", None), settings.pop("train_seq_len", LENGTH)
    text, evaluation = Text(tokens, TwoBytes(), BOS), EvaluationSettings(**settings)
    more: dict[str, Any] = {"world": world, "progress": progress, "batch_tokens": 64, "keep_losses": True}
    return score(model, text, evaluation, instance, train_seq_len=length, device=DEVICE, **more)


def losses_of(*arguments: Any, **settings: Any) -> NDArray[np.float64]:
    losses = scored(*arguments, **settings).losses
    assert losses is not None
    return losses


def weights(model: GPT) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same_weights(model: GPT, initial: dict[str, Tensor]) -> bool:
    return all(torch.equal(p, initial[name]) for name, p in model.named_parameters())


class SGDScorer:
    """TTT by SGD, one token at a time, trained on chunks in plain PyTorch.

    Args:
        model: is trained; give a copy.
        windows: of the stream; their positions do not depend on its tokens.
        early: all tokens, to train on a chunk before it is scored: cheating.
    """

    def __init__(
        self,
        model: GPT,
        windows: Windows,
        settings: SGDSettings,
        ledger: Ledger,
        early: NDArray[np.uint16] | None = None,
    ) -> None:
        self.model, self.windows, self.settings, self.ledger = model, windows, settings, ledger
        self.early = early is not None
        self.history: list[int] = [] if early is None else early.tolist()
        self.position = -1
        self.chunks_trained = 0
        self.chunks = -(-int(windows.stops.max()) // settings.chunk_tokens)
        self.velocities = [torch.zeros_like(p) for p in model.parameters()]

    def reveal(self, token: int) -> None:
        self.position += 1
        if not self.early:
            self.history.append(token)

    def predict(self) -> Tensor:
        row = min(int(np.searchsorted(self.windows.stops, self.position, side="right")), len(self.windows) - 1)
        chunk = int(self.windows.firsts[row]) // self.settings.chunk_tokens
        while self.chunks_trained < min(chunk + self.early, self.chunks - 1):
            self.train(self.chunks_trained)
            self.chunks_trained += 1
        with torch.no_grad(), self.model.rotary.base_for_length(LENGTH):
            window = self.history[int(self.windows.begins[row]) : self.position + 1]
            logits: Tensor = self.model(torch.tensor([window]).long())[0, -1]
            return logits.log_softmax(0).cpu()

    def train(self, chunk: int) -> None:
        size, s = self.settings.chunk_tokens, self.settings
        lr = s.lr * 0.5 * (1 + math.cos(math.pi * chunk / (self.chunks - 1)))
        begins = list(range(chunk * size, (chunk + 1) * size, LENGTH))
        for _ in range(s.epochs):
            for i in range(0, len(begins), s.batch_seqs):
                batch = [(b, min(b + LENGTH, (chunk + 1) * size)) for b in begins[i : i + s.batch_seqs]]
                self.ledger.learn(*batch)
                self.model.zero_grad()
                total = torch.zeros(())
                with self.model.rotary.base_for_length(LENGTH):
                    for first, stop in batch:
                        tokens = torch.tensor([self.history[first : stop + 1]]).long()
                        total = total + self.model.loss(tokens[:, :-1], tokens[:, 1:], reduction="none").sum()
                (total / sum(stop - first for first, stop in batch)).backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.grad_clip)
                with torch.no_grad():
                    for p, v in zip(self.model.parameters(), self.velocities, strict=True):
                        if p.grad is not None:
                            v.copy_(s.momentum * v + p.grad)
                            p.sub_(lr * v)


class LoRAScorer:
    """TTT by LoRA, one document after the other, one token at a time."""

    def __init__(self, model: GPT, settings: LoRAMode, ledger: Ledger) -> None:
        self._model, self._settings, self._ledger = model, settings, ledger
        self._adapters = new_adapters(model, 1, settings)
        self._optimizer = RowAdamW(self._adapters.tensors(), settings)
        self._document: list[int] = []  # its tokens so far
        self._revealed = 0

    def predict(self) -> Tensor:
        position = len(self._document) - 1
        first = position // self._settings.chunk * self._settings.chunk
        with self._attached(), torch.no_grad():
            logits: Tensor = self._model(self._window(first), last_n=self._settings.chunk)[0, position - first]
        return logits.log_softmax(0).cpu()

    def reveal(self, token: int) -> None:
        """Take the next token; train on a complete chunk once its document continues."""
        chunk = self._settings.chunk
        if token == BOS:
            self._adapters.reset(warm=self._settings.warm_a)
            self._optimizer.reset()
            self._document.clear()
        elif self._document and len(self._document) % chunk == 0:
            self._ledger.learn((self._revealed - chunk, self._revealed))
            leaves = self._adapters.take(0, 1)
            targets = torch.tensor([[*self._document[1 - chunk :], token]] if chunk > 1 else [[token]])
            with self._attached(), torch.inference_mode(False), torch.enable_grad():
                ids = self._window(len(self._document) - chunk)
                loss = self._model.loss(ids, targets.to(ids.device))
                gradients = torch.autograd.grad(loss, leaves)
                self._optimizer.step(len(self._document) // chunk, slice(0, 1), leaves, gradients)
        self._document.append(token)
        self._revealed += 1

    @contextmanager
    def _attached(self) -> Iterator[None]:
        with self._adapters.attached(self._model), self._model.rotary.base_for_length(LENGTH):
            yield

    def _window(self, first: int) -> Tensor:
        """Return the window of the chunk that begins at `first`, as long as that of a full chunk: (1, length)."""
        begin, stop = max(0, first + self._settings.chunk - LENGTH), first + self._settings.chunk
        window = self._document[begin:stop]
        window += window[-1:] * (stop - begin - len(window))
        return torch.tensor([window], device=self._model.tok_emb.weight.device)
