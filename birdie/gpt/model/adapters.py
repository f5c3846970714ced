"""LoRA adapters for a GPT: one pair of matrices for each row of a batch and each time that a layer runs.

    q, k, v   x ─► c_q, c_k, c_v ─► + (α / r) · x · Aᵀ · Bᵀ      x: normalized input of attention
    o         x ─► attention     ─► + (α / r) · x · Aᵀ · Bᵀ      the same x, parallel to all of attention
    mlp       x ─► MLP           ─► + (α / r) · x · Aᵀ · Bᵀ      x: normalized input of the MLP
    head      x ─► logits        ─► + (α / r) · x · Aᵀ · Bᵀ      x: normalized output of the last layer; before the cap

A (rank, inputs) starts uniform in ±1/√inputs, B (outputs, rank) at zero, so new adapters leave every bit of the output
unchanged. A repeated layer has separate adapters for each time it runs. Adapters are hooks on the model's one forward
pass, so they work with every technique. Rows share nothing but the model's weights, which stay frozen.

Source: LoRA (Hu et al. 2021, arXiv 2106.09685). The adapted parts and one pair per document: openai/parameter-golf's
day-0 record of LoRA at test time and #1530. There each document draws its own A; here all rows start from one draw, so
that no score depends on which documents share a batch, or on their position in it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from birdie.errors import ConfigError
from birdie.gpt.model.config import ADAPTED_PARTS, AdaptedPart
from birdie.gpt.model.gpt import GPT
from birdie.gpt.model.techniques.depth_recurrence import layer_order

_LINEAR = {"q": "c_q", "k": "c_k", "v": "c_v"}


class Adapters:
    """New adapters for the rows of a batch.

    Attributes:
        rows: number of rows.
        rank: r.
        scale: α / r.
        down: A by (part, index in the order in which layers run): (rows, rank, inputs) float32.
        up: B by the same: (rows, outputs, rank) float32.
    """

    def __init__(
        self,
        model: GPT,
        rows: int,
        rank: int,
        *,
        alpha: float | None = None,
        parts: Sequence[AdaptedPart] = ADAPTED_PARTS,
        seed: int = 0,
    ) -> None:
        """Draw A and set B to zero.

        Args:
            model: decides shapes; it is not stored.
            rows: of a batch, at most.
            rank: r.
            alpha: α; None: r, for a factor of 1.
            parts: that get adapters.
            seed: of A, the same on every device.
        """
        if rank < 1 or rows < 1:
            raise ConfigError(f"adapters have rank {rank} and {rows} rows; both must be at least 1")
        for part in parts:
            if part not in ADAPTED_PARTS or parts.count(part) > 1:
                raise ConfigError(
                    f"adapter parts are {', '.join(parts)}; choose from {', '.join(ADAPTED_PARTS)}, each once"
                )
        config, device = model.config, model.tok_emb.weight.device
        dim = config.model_dim
        outputs = {"q": dim, "k": config.kv_dim, "v": config.kv_dim, "o": dim, "mlp": dim, "head": config.vocab_size}
        runs = sum(map(len, layer_order(config, model.depth_recurrence)))
        keys: list[tuple[AdaptedPart, int]] = [(part, 0) for part in parts if part == "head"]
        keys += [(part, run) for run in range(runs) for part in parts if part != "head"]
        generator = torch.Generator().manual_seed(seed)
        draws = (torch.rand(rank, dim, generator=generator, device="cpu") * 2 - 1 for _ in keys)
        self._initial = {key: (a * dim**-0.5).to(device) for key, a in zip(keys, draws, strict=True)}
        self.rows, self.rank = rows, rank
        self.scale = 1.0 if alpha is None else alpha / rank
        self.down = {key: a.expand(rows, -1, -1).clone() for key, a in self._initial.items()}
        self.up = {key: torch.zeros(rows, outputs[key[0]], rank, device=device) for key in keys}
        self._selected: dict[tuple[AdaptedPart, int], tuple[Tensor, Tensor]] = {}
        self._run = -1  # index of the layer that runs, in the order of running
        self.take(0, rows)

    def reset(self, *, warm: bool = False) -> None:
        """Return to new adapters; `warm` keeps A as it was trained."""
        for key, b in self.up.items():
            b.zero_()
            if not warm:
                self.down[key].copy_(self._initial[key])

    def tensors(self) -> list[Tensor]:
        """Return A and B of all rows, in the order of `take`."""
        return [tensor for key, b in self.up.items() for tensor in (self.down[key], b)]

    def take(self, first: int, stop: int) -> list[Tensor]:
        """Select rows first … stop − 1 for the next forward passes; return their A and B, leaves to differentiate by.

        They are views: what is done to them in place is done to the adapters.
        """
        if not 0 <= first < stop <= self.rows:
            raise IndexError(f"rows {first} to {stop} are not among {self.rows}")
        self._selected = {
            key: (self.down[key][first:stop].detach().requires_grad_(), b[first:stop].detach().requires_grad_())
            for key, b in self.up.items()
        }
        return [tensor for pair in self._selected.values() for tensor in pair]

    @contextmanager
    def attached(self, model: GPT) -> Iterator[None]:
        """Apply the adapters in `model` and freeze its parameters, until the end of the block."""
        if model.logits_hook is not None:
            raise ConfigError("the model has adapters already; detach those first")
        trainable = [p for p in model.parameters() if p.requires_grad]
        with ExitStack() as stack:
            for p in trainable:
                p.requires_grad_(False)
                stack.callback(p.requires_grad_, True)
            for handle in self._hook(model):
                stack.callback(handle.remove)
            model.logits_hook = self._add_to_logits
            stack.callback(setattr, model, "logits_hook", None)
            yield

    def _hook(self, model: GPT) -> Iterator[Any]:
        """Yield hook handles. The running layer is counted: the embedding begins a pass, attention a layer."""
        yield model.tok_emb.register_forward_pre_hook(self._begin)
        for block in model.blocks:
            attn: Any = block.attn
            yield attn.register_forward_pre_hook(self._advance)
            for part, name in _LINEAR.items():
                yield getattr(attn, name).register_forward_hook(self._add_to_linear(part))
            yield attn.register_forward_hook(self._add_to_attention)
            yield block.mlp.register_forward_hook(self._add_to_linear("mlp"))  # type: ignore[union-attr]

    def _begin(self, _module: nn.Module, _inputs: Any) -> None:
        self._run = -1

    def _advance(self, _module: nn.Module, _inputs: Any) -> None:
        self._run += 1

    def _add_to_linear(self, part: Any) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            return self._add(part, self._run, inputs[0], output)

        return hook

    def _add_to_attention(
        self, _module: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        y, values = output
        return self._add("o", self._run, inputs[0][:, -y.shape[1] :], y), values  # y may have the last positions only

    def _add_to_logits(self, x: Tensor, logits: Tensor) -> Tensor:
        return self._add("head", 0, x, logits)

    def _add(self, part: AdaptedPart, run: int, x: Tensor, y: Tensor) -> Tensor:
        """Add the product of each row of x (batch, length, inputs) with its pair to y (batch, length, outputs)."""
        pair = self._selected.get((part, run))
        if pair is None:
            return y
        a, b = (tensor.to(x.dtype).mT for tensor in pair)
        return torch.add(y, x @ a @ b, alpha=self.scale)
