"""Keys and values kept between tokens: the model's own forward, one position at a time, for many sequences at once.

    ids of one position ─► GPT.forward ─► rotary tables ── hooked: those of this position
                                │
                                └──────► attention ─────── intercepted: k, v stored; q against all stored so far

The forward stays the one that trains and scores; only what it asks of its surroundings is answered differently.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from birdie.errors import ConfigError
from birdie.model.attention import Attention
from birdie.model.embedding import BEFORE
from birdie.model.gpt import GPT


class Stepwise(TorchFunctionMode):
    """`model` on `sequences` sequences of up to `length` tokens, a position a call.

    Attributes:
        position: tokens of each sequence that were seen.
    """

    def __init__(self, model: GPT, sequences: int, length: int) -> None:
        """Make room.

        Raises:
            ConfigError: the model attends in a way of its own, which is not known to go token by token.
        """
        super().__init__()
        config = model.config
        if config.attention != "softmax":
            raise ConfigError(f"attention {config.attention!r} is not known to go one token at a time; score it whole")
        self.model, self.length, self.position = model, length, 0
        windowed = [part.windowed for part in model.modules() if isinstance(part, Attention)]
        # a looped layer has keys and values of each time
        self._windowed = [windowed[layer] for part in config.layers(model.looping) for layer in part]
        shape = (len(self._windowed), 2, sequences, config.num_kv_heads, length, config.head_dim)
        device = model.tok_emb.weight.device
        self._stored = torch.zeros(shape, dtype=model.compute_dtype, device=device)
        self._ids = torch.zeros((sequences, length), dtype=torch.int64, device=device)
        self._layer = 0

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """Logits of the next token: ids (sequences,) int64 → (sequences, vocab_size) float32.

        Raises:
            ConfigError: all `length` positions were seen.
        """
        if self.position >= self.length:
            raise ConfigError(f"all {self.length} positions that were made room for are taken; start with more")
        self._layer = 0
        self._ids[:, self.position] = ids
        before = self._ids[:, max(0, self.position - BEFORE) : self.position]
        with self, self._at_position():
            logits: Tensor = self.model(ids[:, None], before)
        self.position += 1
        return logits[:, 0]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args  # (sequences, heads, 1, d) and (sequences, kv heads, 1, d)
        windowed = self._windowed[self._layer]
        stored, self._layer = self._stored[self._layer], self._layer + 1
        stored[0, :, :, self.position], stored[1, :, :, self.position] = k[:, :, 0], v[:, :, 0]
        first = max(0, self.position + 1 - self.model.config.attn_window) if windowed else 0
        keys, values = stored[:, :, :, first : self.position + 1]
        grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])  # heads that share keys, as so many queries
        return func(grouped, keys, values, attn_mask=self._seen(first)).reshape(q.shape)

    def _seen(self, first: int) -> Tensor | None:
        """Positions from `first` on of the document that the last token is in, (sequences, 1, 1, positions)."""
        config = self.model.config
        if not config.isolate_documents:
            return None
        document = (self._ids[:, : self.position + 1] == config.bos_id).cumsum(1)
        return (document == document[:, -1:])[:, None, None, first:]

    @contextmanager
    def _at_position(self) -> Iterator[None]:
        def up_to(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (self.length, *args[1:])  # of all that will come: a base that grows with the length stays

        def last(_: nn.Module, _args: Any, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return tables[0][self.position, None], tables[1][self.position, None]

        rotary = self.model.rotary
        hooks = rotary.register_forward_pre_hook(up_to), rotary.register_forward_hook(last)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
