"""The challenge's GPT: RMS-normalized, rotary, grouped heads, squared ReLU, U-Net skips, soft-capped logits.

    ids ─► tok_emb ─► norm = x₀ ─► first half of the layers, each output pushed ─┐
                                                                       ▼
                                   second half, each first adds skip_weights ⊙ the output popped last
                                                                       ▼
                            logits = c · tanh(norm(x) · Eᵀ / c) ◄──── norm

Notable: norms have no weights; every block (`block`) mixes in the embedding x₀ again; the last layer of each branch
starts at zero, so a new model only adds skips; input and output share one embedding. 17,059,912 parameters by default.

Techniques of the records are in `techniques`, `attention`, `mlp`, `rotary` and `attention_context`, each off by
default; `technique` says how they declare their optimizer groups, symmetries and diagnostics. The factored embedding
(`embed_dim`, the ternary record: a narrower table with a projection up, and down again for tied logits) is below; it
measured +0.082 (docs/techniques.md).

Source: the baseline script of OpenAI's Parameter Golf, itself derived from modded-nanogpt.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.gpt.model import technique as declarations
from birdie.gpt.model.attention_context import ATTENTION_CONTEXT, AttentionContext, BoundAttention, PastKeyValues, bind
from birdie.gpt.model.attention_functions import attention_function
from birdie.gpt.model.attention_kernels import Kernels
from birdie.gpt.model.block import Block
from birdie.gpt.model.config import GPTConfig
from birdie.gpt.model.documents import Bounds
from birdie.gpt.model.fused_loss import FUSED_LOSS, LossBackend, capped_loss, choose_backend
from birdie.gpt.model.initialization import orthogonal_init_, overtone_init_
from birdie.gpt.model.layers import Linear, norm
from birdie.gpt.model.mlp import hidden_symmetry
from birdie.gpt.model.rotary import PARTIAL_ROPE, Rotary
from birdie.gpt.model.symmetries import HeadSymmetries, Symmetry
from birdie.gpt.model.technique import Group, Technique
from birdie.gpt.model.techniques.depth_recurrence import DEPTH_RECURRENCE, layer_order
from birdie.gpt.model.techniques.ngram_embedding import NGRAM_EMBEDDING, NgramEmbedding
from birdie.gpt.model.techniques.parallel_residual import (
    PARALLEL_RESIDUAL,
    Streams,
    first_of_two_streams,
    stream_weights,
    update_streams,
)
from birdie.gpt.model.techniques.skips import SKIPS, add_skip, skip_gates, skip_weights
from birdie.gpt.model.techniques.smear import SMEAR, smear_of
from birdie.gpt.model.techniques.softcap import SOFTCAP, learned_caps, softcap
from birdie.gpt.model.techniques.value_embedding import VALUE_EMBEDDING, ValueEmbedding
from birdie.system.callbacks import Notify, StepHook

__all__ = ["GPT", "PREFIX_TOKENS", "GPTConfig"]


def _embedding_diagnostics(model: "GPT") -> Iterator[str]:
    if model.embed_proj is not None:
        yield f"factored embedding: {model.config.embed_dim} of {model.config.model_dim} dimensions"


TOKEN_EMBEDDING = Technique(
    groups={"tok_emb.weight": "embedding", "embed_proj.weight": "matrices", "lm_head.weight": "head"},
    diagnostics=_embedding_diagnostics,
)
"""The baseline's embedding and head, and the factored embedding."""


class GPT(nn.Module):
    """The model. `torch.manual_seed` before the constructor decides the initial weights.

    All parameters are float32 masters; products run in `compute_dtype`, to which they are cast at each use. So is the
    embedding: in bfloat16 an Adam update below 2⁻⁹ of a weight would be lost.

    Attributes:
        compute_dtype: dtype of the activations; it can be set at any time.
        depth_recurrence: whether layers are repeated, if the settings say so; training switches it on on schedule.
        kernels: attention kernels; set the installed ones for training (`birdie.gpt.model.attention_kernels`).
        loss_backend: how training computes the loss; `fuse_loss` sets it.
        logits_hook: (normalized output of the last layer, logits before the cap) → logits; None: unchanged. Adapters
            use it.
    """

    techniques: ClassVar[tuple[Technique, ...]] = (
        TOKEN_EMBEDDING,
        NGRAM_EMBEDDING,
        SMEAR,
        VALUE_EMBEDDING,
        PARTIAL_ROPE,
        ATTENTION_CONTEXT,
        SKIPS,
        DEPTH_RECURRENCE,
        PARALLEL_RESIDUAL,
        SOFTCAP,
        FUSED_LOSS,
    )

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        # parameters are created in this order: it decides the random initial values, and the order in the state dict
        self.config = config
        self.compute_dtype = torch.float32
        self.kernels = Kernels()
        self.attention_function = attention_function(config.attention)
        self.depth_recurrence = config.num_loops > 0
        self.loss_backend: LossBackend = "eager"
        self.logits_hook: Callable[[Tensor, Tensor], Tensor] | None = None
        self.tok_emb = nn.Embedding(config.vocab_size, config.token_dim)
        if config.tie_embeddings:
            nn.init.normal_(self.tok_emb.weight, std=config.tied_embed_init_std)
        if config.overtone_init:
            overtone_init_(self.tok_emb.weight)
        self.embed_proj = Linear(config.token_dim, config.model_dim) if config.embed_dim else None
        self.bigram = NgramEmbedding.of(config)
        self.smear = smear_of(config)
        self.value_embed = ValueEmbedding.of(config)
        self.rotary = Rotary(config.rotary_dims, config.rope_base, config.rope_train_seq_len)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.skip_weights = skip_weights(config)
        self.skip_gates = skip_gates(config)
        self.lane_keeps, self.lane_writes = stream_weights(config)
        self.lm_head = None if config.tie_embeddings else Linear(config.model_dim, config.vocab_size)
        if self.lm_head is not None:
            nn.init.zeros_(self.lm_head.weight)
        self.softcaps = learned_caps(config)
        if config.orthogonal_init:
            orthogonal_init_(self)

    def forward(
        self,
        ids: Tensor,
        prefix: Tensor | None = None,
        bounds: Bounds | None = None,
        *,
        last_n: int | None = None,
        past: PastKeyValues | None = None,
    ) -> Tensor:
        """Return logits of the next token: ids (batch, length) int64 → (batch, length, vocab_size) float32.

        Args:
            ids: tokens of the positions to compute.
            prefix: (batch, up to PREFIX_TOKENS) tokens right before `ids`, for the embeddings that look back; attention
                does not use them.
            bounds: of segments that do not attend to one another; None: rows, and documents if they are isolated.
            last_n: compute the last n positions only, which saves most of the last layer; None: all.
            past: keys and values of earlier positions; None: there are none.
        """
        x = self._hidden(ids, prefix, bounds, last_n, past)
        return softcap(self._project(x).float(), self.config, self.softcaps)

    def loss(
        self,
        ids: Tensor,
        targets: Tensor,
        reduction: Literal["mean", "none"] = "mean",
        bounds: Bounds | None = None,
    ) -> Tensor:
        """Return the cross-entropy in nats, computed in float32: 0-d for "mean", (batch, length) for "none".

        Args:
            ids: (batch, length) int64 tokens.
            targets: (batch, n) int64, the tokens after the last n of ids.
            bounds: as in `forward`.
        """
        last_n = targets.shape[1] if targets.shape[1] < ids.shape[1] else None
        if self.loss_backend != "eager" and reduction == "mean" and self.training and torch.is_grad_enabled():
            logits = self._project(self._hidden(ids, None, bounds, last_n)).flatten(0, 1)
            return capped_loss(logits, targets.flatten(), self.config.logit_softcap, self.loss_backend)
        logits = self(ids, bounds=bounds, last_n=last_n)
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
        return nats if reduction == "mean" else nats.view_as(targets)

    def fuse_loss(self, fused: bool = True, *, compiled: bool = False) -> LossBackend:
        """Choose how training computes softcap and loss, fused where a backend exists, and return it (`fused_loss`).

        Args:
            fused: False: use eager operations.
            compiled: whether `loss` is going to be compiled.
        """
        fusable = fused and self.config.softcap == "tanh"
        device = self.tok_emb.weight.device
        self.loss_backend = choose_backend(device, compiled=compiled) if fusable else "eager"
        return self.loss_backend

    def fuse_mlps(self, fused: bool = True) -> bool:
        """Use the kernels of `mlp_kernels` in training where they can run; return whether they will."""
        available = self.tok_emb.weight.device.type == "cuda" and find_spec("triton") is not None
        available = available and self.compute_dtype != torch.float32  # its tiles do not fit every GPU in float32
        fused = fused and available and self.config.activation != "swiglu"
        for block in self.blocks:
            block.mlp.fused = fused  # type: ignore[union-attr]
        return fused

    def named_matrices(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weight) of each matrix of a product or look-up: (outputs, inputs), or (vocab_size, dim)."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                yield f"{name}.weight", module.weight

    def parameter_groups(self) -> dict[str, Group]:
        """Return the optimizer group of each parameter, by name."""
        return declarations.parameter_groups(self)

    def symmetries(self) -> tuple[Symmetry, ...]:
        """Return the permutations that keep the function, as `compress.calibration.symmetry` reads them."""
        heads = HeadSymmetries(
            self.config, declarations.techniques_of(self), (name for name, _ in self.named_parameters())
        )
        symmetries: list[Symmetry] = []
        for layer in range(self.config.num_layers):
            symmetries += [hidden_symmetry(self.config, layer), *heads.of_layer(layer)]
        return tuple(symmetries)

    def diagnostics(self) -> list[str]:
        """Return a line for each active technique that the baseline does not have: how far its parameters have moved.

        A technique that is configured may still have no effect; some records were trained with such ones.
        """
        return declarations.diagnostics(self)

    def step_hooks(self, notify: Notify) -> list[StepHook]:
        """Return what the active techniques do before each training step."""
        hooks = (technique.hook(self, notify) for technique in declarations.techniques_of(self))
        return [hook for hook in hooks if hook is not None]

    def _hidden(
        self,
        ids: Tensor,
        prefix: Tensor | None = None,
        bounds: Bounds | None = None,
        last_n: int | None = None,
        past: PastKeyValues | None = None,
    ) -> Tensor:
        """Return the normalized output of the last layer, (batch, length or last_n, dim) in `compute_dtype`."""
        x0 = x = self._embed(ids, prefix)
        extra_values = {} if self.value_embed is None else self.value_embed(ids, x.dtype)
        context = AttentionContext(*self._attention(ids, bounds, past, x.dtype), extra_values)
        encoder, decoder = layer_order(self.config, self.depth_recurrence)
        order = (*encoder, *decoder)
        divides_at = first_of_two_streams(self.config)
        first_values: Tensor | None = None
        outputs: list[Tensor] = []
        second: Tensor | None = None  # the second residual stream, from `divides_at` on
        for step, layer in enumerate(order):
            if step >= len(encoder) and outputs:
                skip = step - len(encoder)
                gate = None if self.skip_gates is None else self.skip_gates[skip]
                x = add_skip(x, outputs.pop(), self.skip_weights[skip], gate)
            if layer == divides_at:
                second = x
            shortened = step == len(order) - 1 and context.attention[self._windowed(layer)].takes_last_queries
            layer_last_n = last_n if shortened else None
            if second is None:
                x, values = self.blocks[layer](x, x0, context, first_values, layer_last_n)
            else:
                streams = x, second
                x, second, values = self._run_on_two_streams(layer, streams, x0, context, first_values, layer_last_n)
            first_values = values if first_values is None else first_values
            if step < len(encoder):
                outputs.append(x)
        x = x if second is None else (x + second) / 2
        return norm(x if last_n is None else x[:, -last_n:])

    def _embed(self, ids: Tensor, prefix: Tensor | None) -> Tensor:
        """Return x₀, (batch, length, dim)."""
        tokens = ids if prefix is None else torch.cat((prefix, ids), dim=1)
        x: Tensor = self.tok_emb(tokens).to(self.compute_dtype)
        if self.embed_proj is not None:
            x = self.embed_proj(x)
        if self.bigram is not None:
            x = x + self.bigram(tokens, x.dtype)
        if self.smear is not None and self.smear.before_norm:
            x = self.smear(x, tokens)
        x = norm(x)
        if self.smear is not None and not self.smear.before_norm:
            x = self.smear(x, tokens)
        return x if prefix is None else x[:, prefix.shape[1] :]

    def _attention(
        self, ids: Tensor, bounds: Bounds | None, past: PastKeyValues | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, tuple[BoundAttention, BoundAttention]]:
        """Return cos, sin and attention of layers without and with a window, for an `AttentionContext`."""
        if past is not None:
            return past.attend(ids, dtype)
        config, kernels = self.config, Kernels() if dtype == torch.float32 else self.kernels
        cos, sin = self.rotary(ids.shape[1], ids.device, dtype)
        bos_id = config.bos_id if config.isolate_documents else None
        full = bind(self.attention_function, kernels, ids, bounds, bos_id, 0)
        if not config.attn_window:
            return cos, sin, (full, full)
        return cos, sin, (full, bind(self.attention_function, kernels, ids, bounds, bos_id, config.attn_window))

    def _run_on_two_streams(
        self,
        layer: int,
        streams: Streams,
        x0: Tensor,
        context: AttentionContext,
        first_values: Tensor | None,
        last_n: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return both streams after `layer`, and its values."""
        assert self.lane_keeps is not None
        assert self.lane_writes is not None
        branches = self.blocks[layer].branches(streams, x0, context, first_values, last_n)  # type: ignore[operator]
        attended, transformed, values = branches
        if last_n is not None:
            streams = streams[0][:, -last_n:], streams[1][:, -last_n:]
        keeps, writes = self.lane_keeps[layer], self.lane_writes[layer]
        return *update_streams(streams, attended, transformed, keeps, writes), values

    def _windowed(self, layer: int) -> bool:
        windowed: bool = self.blocks[layer].attn.windowed  # type: ignore[union-attr, assignment]
        return windowed

    def _project(self, x: Tensor) -> Tensor:
        """Return the logits before the cap, in the dtype of x."""
        if self.lm_head is not None:
            logits = F.linear(x, self.lm_head.weight.to(x.dtype))
        else:
            y = x if self.embed_proj is None else x @ self.embed_proj.weight.to(x.dtype)
            logits = F.linear(y, self.tok_emb.weight.to(x.dtype))
        return logits if self.logits_hook is None else self.logits_hook(x, logits)


PREFIX_TOKENS = sum(technique.lookback for technique in GPT.techniques)
"""Tokens before a position on which its embedding depends, at most."""
