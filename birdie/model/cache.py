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
from birdie.model.gpt import GPT


class Stepwise(TorchFunctionMode):
    """`model` on `sequences` sequences of up to `length` tokens, a position a call.

    Attributes:
        position: tokens of each sequence that were seen.
    """

    def __init__(self, model: GPT, sequences: int, length: int) -> None:
        super().__init__()
        config = model.config
        self.model, self.length, self.position = model, length, 0
        shape = (config.num_layers, 2, sequences, config.num_kv_heads, length, config.model_dim // config.num_heads)
        self._stored = torch.zeros(shape, dtype=model.compute_dtype, device=model.tok_emb.weight.device)
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
        with self, self._at_position():
            logits: Tensor = self.model(ids[:, None])
        self.position += 1
        return logits[:, 0]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args  # (sequences, heads, 1, d) and (sequences, kv heads, 1, d)
        stored, self._layer = self._stored[self._layer], self._layer + 1
        stored[0, :, :, self.position], stored[1, :, :, self.position] = k[:, :, 0], v[:, :, 0]
        keys, values = stored[:, :, :, : self.position + 1]
        grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])  # heads that share keys, as so many queries
        return func(grouped, keys, values).reshape(q.shape)

    @contextmanager
    def _at_position(self) -> Iterator[None]:
        def up_to(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (self.position + 1, *args[1:])

        def last(_: nn.Module, _args: Any, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return tables[0][-1:], tables[1][-1:]

        rotary = self.model.rotary
        hooks = rotary.register_forward_pre_hook(up_to), rotary.register_forward_hook(last)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
