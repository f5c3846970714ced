"""Low-rank adapters beside a GPT: a pair of its own for each row of a batch and each place where a layer runs.

    q, k, v   x ─► c_q, c_k, c_v ─► + (α / r) · x · Aᵀ · Bᵀ      x: the normed input of attention
    o         x ─► attention     ─► + (α / r) · x · Aᵀ · Bᵀ      the same x, around all of attention
    mlp       x ─► MLP           ─► + (α / r) · x · Aᵀ · Bᵀ      x: the normed input of the MLP
    head      x ─► logits        ─► + (α / r) · x · Aᵀ · Bᵀ      x: the normed output of the last layer; before the cap

A (rank, inputs) starts uniform in ±1/√inputs, B (outputs, rank) at zero: with new adapters the model is what it was, to
the bit. A layer that is looped has adapters for each time it runs. They are hooks on the model's one forward, so every
technique is in them; rows meet nowhere but in the model's weights, which stay as they are.

Source: LoRA (Hu et al. 2021, arXiv 2106.09685); parts, and one pair a document, openai/parameter-golf's day-0 record of
LoRA at test time and #1530. There each document draws an A of its own; here all start from one draw, so that no score
depends on which documents are scored together, or where.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from birdie.errors import ConfigError
from birdie.model.gpt import GPT

Part = Literal["q", "k", "v", "o", "mlp", "head"]
PARTS: tuple[Part, ...] = get_args(Part)

_LINEAR = {"q": "c_q", "k": "c_k", "v": "c_v"}


class Adapters:
    """Adapters of `rows` rows, all new.

    Attributes:
        rows: for which there is room.
        down: by (part, place in the order of running), A: (rows, rank, inputs) float32.
        up: by the same, B: (rows, outputs, rank) float32.
    """

    def __init__(
        self,
        model: GPT,
        rows: int,
        rank: int,
        *,
        alpha: float | None = None,
        parts: Sequence[Part] = PARTS,
        seed: int = 0,
    ) -> None:
        """Draw A.

        Args:
            model: what they fit; it is not kept.
            rows: of a batch, at most.
            rank: r.
            alpha: α, None: r, which is to say a factor of 1.
            parts: which there are.
            seed: of A, the same on every device.

        Raises:
            ConfigError: there is no such part, one is named twice, or rank or rows are below 1.
        """
        if rank < 1 or rows < 1:
            raise ConfigError(f"adapters of rank {rank} for {rows} rows are none; give at least 1 of both")
        for part in parts:
            if part not in PARTS or parts.count(part) > 1:
                raise ConfigError(f"adapters on {', '.join(parts)} cannot be; choose of {', '.join(PARTS)}, each once")
        config, device = model.config, model.tok_emb.weight.device
        dim = config.model_dim
        outputs = {"q": dim, "k": config.kv_dim, "v": config.kv_dim, "o": dim, "mlp": dim, "head": config.vocab_size}
        runs = sum(map(len, config.layers(model.looping)))
        keys: list[tuple[Part, int]] = [(part, 0) for part in parts if part == "head"]
        keys += [(part, place) for place in range(runs) for part in parts if part != "head"]
        generator = torch.Generator().manual_seed(seed)
        drawn = (torch.rand(rank, dim, generator=generator) * 2 - 1 for _ in keys)
        self._drawn = {key: (a * dim**-0.5).to(device) for key, a in zip(keys, drawn, strict=True)}
        self.rows, self.rank = rows, rank
        self.scale = 1.0 if alpha is None else alpha / rank
        self.down = {key: a.expand(rows, -1, -1).clone() for key, a in self._drawn.items()}
        self.up = {key: torch.zeros(rows, outputs[key[0]], rank, device=device) for key in keys}
        self._taken: dict[tuple[Part, int], tuple[Tensor, Tensor]] = {}
        self._place = -1
        self.take(0, rows)

    def reset(self, *, warm: bool = False) -> None:
        """As new; warm: A stays as it was learned."""
        for key, b in self.up.items():
            b.zero_()
            if not warm:
                self.down[key].copy_(self._drawn[key])

    def tensors(self) -> list[Tensor]:
        """As and Bs of all rows, in the order `take` has them."""
        return [tensor for key, b in self.up.items() for tensor in (self.down[key], b)]

    def take(self, first: int, stop: int) -> list[Tensor]:
        """Have the next passes use rows first … stop − 1; returns their As and Bs, leaves to differentiate by.

        They are views: what is done to them in place is done to the adapters.

        Raises:
            IndexError: there are no such rows.
        """
        if not 0 <= first < stop <= self.rows:
            raise IndexError(f"rows {first} to {stop} are not among {self.rows}")
        self._taken = {
            key: (self.down[key][first:stop].detach().requires_grad_(), b[first:stop].detach().requires_grad_())
            for key, b in self.up.items()
        }
        return [tensor for pair in self._taken.values() for tensor in pair]

    @contextmanager
    def attached(self, model: GPT) -> Iterator[None]:
        """Have `model` use them meanwhile, its own parameters frozen.

        Raises:
            ConfigError: it has adapters already.
        """
        if model.beside_head is not None:
            raise ConfigError("the model has adapters already; detach those first")
        frozen = [p for p in model.parameters() if p.requires_grad]
        with ExitStack() as stack:
            for p in frozen:
                p.requires_grad_(False)
                stack.callback(p.requires_grad_, True)
            for handle in self._hook(model):
                stack.callback(handle.remove)
            model.beside_head = self._head
            stack.callback(setattr, model, "beside_head", None)
            yield

    def _hook(self, model: GPT) -> Iterator[Any]:
        """Which layer runs is counted: the embedding begins a pass, attention a layer."""
        yield model.tok_emb.register_forward_pre_hook(self._begin)
        for block in model.blocks:
            attn: Any = block.attn
            yield attn.register_forward_pre_hook(self._advance)
            for part, name in _LINEAR.items():
                yield getattr(attn, name).register_forward_hook(self._linear(part))
            yield attn.register_forward_hook(self._around)
            yield block.mlp.register_forward_hook(self._linear("mlp"))  # type: ignore[union-attr]

    def _begin(self, _module: nn.Module, _inputs: Any) -> None:
        self._place = -1

    def _advance(self, _module: nn.Module, _inputs: Any) -> None:
        self._place += 1

    def _linear(self, part: Any) -> Any:
        def added(_module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            return self._added(part, self._place, inputs[0], output)

        return added

    def _around(self, _module: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> Any:
        y, own = output
        return self._added("o", self._place, inputs[0][:, -y.shape[1] :], y), own  # of the last places, with a tail

    def _head(self, x: Tensor, logits: Tensor) -> Tensor:
        return self._added("head", 0, x, logits)

    def _added(self, part: Part, place: int, x: Tensor, y: Tensor) -> Tensor:
        """Rows of x (batch, length, inputs) through their own pairs, added to y (batch, length, outputs)."""
        pair = self._taken.get((part, place))
        if pair is None:
            return y
        a, b = (tensor.to(x.dtype).mT for tensor in pair)
        return torch.add(y, x @ a @ b, alpha=self.scale)
