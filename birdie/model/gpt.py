"""The challenge's GPT: RMS-normalised, rotary, grouped heads, squared ReLU, U-Net skips, soft-capped logits.

    ids ─► tok_emb ─► norm = x₀ ─► first half of the layers, each output pushed ─┐
                                                                       ▼
                                   second half, each first adds skip_weights ⊙ the output popped last
                                                                       ▼
                            logits = c · tanh(norm(x) · Eᵀ / c) ◄──── norm

    block:  x ← mix₀ ⊙ x + mix₁ ⊙ x₀
            x ← x + attn_scale ⊙ attention(norm(x))
            x ← x + mlp_scale ⊙ down(relu(up(norm(x)))²)

Notable: norms have no weights; every block sees the embedding x₀ again; the last layer of each branch starts at zero,
so that a new model does nothing but add skips; input and output share one embedding. 17,059,912 parameters by default.

Techniques of the records, each off by default (`config`); those of the embedding, of attention and of the MLP are in
`embedding`, `attention` and `mlp`. Here is what concerns the stream between layers:

- ln_scale (#315): normed inputs of layer i over √(i + 1); no parameters.
- skip_gates (#1218): x ← σ(g) ⊙ x + (1 − σ(g)) ⊙ skip; dim parameters a skip.
- loops (#1204, #1394): layers run again with the same weights; time, no parameters. The list of layers as they are run
  is what is cut in half, and skips follow it. Until `looping` is set the plain list runs with the first skip weights.
- parallel (#1412): from a layer on, attention and MLP read the same input and both are added. As lanes (#1529) each
  has its own stream, lane ← keep · lane + writes · outputs, and their mean is read: 6 parameters a layer.
- softcap: the polynomial of the ternary record, which needs no exponential; two learned caps, above and below zero.

Source: the baseline script of OpenAI's Parameter Golf, itself a child of modded-nanogpt; numbers are its pull requests.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.model.attention import Attending, Attention, Linear, Past, Rotary, Surroundings, attend_named, attending
from birdie.model.config import GPTConfig
from birdie.model.documents import Bounds
from birdie.model.embedding import Bigram, FixedSmear, GatedSmear, ValueEmbedding
from birdie.model.fused import Way, capped_loss, way_for
from birdie.model.initial import orthogonal, overtones, phase
from birdie.model.kernels import Kernels
from birdie.model.mlp import MLP
from birdie.model.symmetries import Symmetry, symmetries

__all__ = ["GPT", "Block", "GPTConfig", "norm"]


class Block(nn.Module):
    """One layer: mix in the embedding, attend, transform."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        dim = config.model_dim
        self.attn = Attention(config, layer)
        self.mlp = MLP(dim, config.mlp_hidden, config.activation, config.leaky_slope)
        self.attn_scale = nn.Parameter(torch.ones(dim))
        self.mlp_scale = nn.Parameter(torch.ones(dim))
        share = phase(layer, config.num_layers) if config.phased_init else 1.0
        self.resid_mix = nn.Parameter(torch.stack((torch.full((dim,), share), torch.full((dim,), 1 - share))))
        self.input_scale = (layer + 1) ** -0.5 if config.ln_scale else 1.0
        start = config.parallel_start_layer
        self.joint = config.parallel == "joint" and start is not None and layer >= start

    def forward(
        self, x: Tensor, x0: Tensor, around: Surroundings, first: Tensor | None, tail: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """x, x0: (batch, length, dim) → the same shape, and the values of this layer, as `Attention` gives them.

        With a tail the answer is that of the last so many places.
        """
        x = self._mixed(x, x0)
        attended, own = self.attn(self._normed(x), around, first, tail)
        x = read = x if tail is None else x[:, -tail:]
        x = torch.addcmul(x, self.attn_scale.to(x.dtype), attended)
        return torch.addcmul(x, self.mlp_scale.to(x.dtype), self.mlp(self._normed(read if self.joint else x))), own

    def branches(
        self,
        lanes: tuple[Tensor, Tensor],
        x0: Tensor,
        around: Surroundings,
        first: Tensor | None,
        tail: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What attention, of the first lane, and the MLP, of the second, have to say; and the values."""
        attended, own = self.attn(self._normed(self._mixed(lanes[0], x0)), around, first, tail)
        transformed = self.mlp(self._normed(lanes[1] if tail is None else lanes[1][:, -tail:]))
        dtype = attended.dtype
        return self.attn_scale.to(dtype) * attended, self.mlp_scale.to(dtype) * transformed, own

    def _mixed(self, x: Tensor, x0: Tensor) -> Tensor:
        mix = self.resid_mix.to(x.dtype)
        return torch.addcmul(mix[0] * x, mix[1], x0)

    def _normed(self, x: Tensor) -> Tensor:
        return norm(x) if self.input_scale == 1.0 else norm(x) * self.input_scale


class GPT(nn.Module):
    """The model. `torch.manual_seed` before the constructor decides the initial weights.

    All parameters are fp32 masters; products run in `compute_dtype`, to which they are cast at each use. The embedding
    is a master too: in bfloat16 an Adam update below 2⁻⁹ of a weight would vanish.

    Attributes:
        compute_dtype: dtype of the activations; set it at any time.
        looping: whether layers loop, if the config has loops; training turns it on when it is time.
        kernels: what attends; whoever trains sets what is installed (`birdie.model.kernels`).
        way: how the loss is computed in training; `fuse` sets it.
        beside_head: (normed output of the last layer, logits before the cap) → logits; None: as they are (`adapters`).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32
        self.kernels = Kernels()
        self.attend = attend_named(config.attention)
        self.looping = config.num_loops > 0
        self.way: Way = "eager"
        self.beside_head: Callable[[Tensor, Tensor], Tensor] | None = None
        dim, bos_id = config.model_dim, config.bos_id
        self.tok_emb = nn.Embedding(config.vocab_size, config.token_dim)
        if config.tie_embeddings:
            nn.init.normal_(self.tok_emb.weight, std=config.tied_embed_init_std)
        if config.overtone_init:
            overtones(self.tok_emb.weight)
        self.embed_proj = Linear(config.token_dim, dim) if config.embed_dim else None
        self.bigram: Bigram | None = None
        if config.bigram_vocab_size:
            rows, width = config.bigram_vocab_size, config.bigram_dim
            self.bigram = Bigram(rows, width, dim, trigram=config.trigram, bos_id=bos_id)
        self.smear: FixedSmear | GatedSmear | None = None
        if config.smear != "none":
            gated = config.smear == "gated"
            self.smear = GatedSmear(config.gate_window, bos_id) if gated else FixedSmear(dim, bos_id)
        self.value_embed: ValueEmbedding | None = None
        if config.value_embed_layers:
            width, layers = config.value_embed_dim, config.value_embed_layers
            self.value_embed = ValueEmbedding(config.vocab_size, width, config.kv_dim, layers)
        self.rotary = Rotary(config.rotary_dims, config.rope_base, config.rope_train_seq_len)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.skip_weights = nn.Parameter(torch.ones(config.num_skips, dim))
        self.skip_gates = nn.Parameter(torch.zeros(config.num_skips, dim)) if config.skip_gates else None
        self.lane_keeps: nn.Parameter | None = None
        self.lane_writes: nn.Parameter | None = None
        if self._lanes_from is not None:
            self.lane_keeps = nn.Parameter(torch.full((config.num_layers, 2), 1.1))
            self.lane_writes = nn.Parameter(torch.ones(config.num_layers, 2, 2))
        self.lm_head = None if config.tie_embeddings else Linear(dim, config.vocab_size)
        if self.lm_head is not None:
            nn.init.zeros_(self.lm_head.weight)
        capped = config.softcap == "asymmetric"
        self.softcaps = nn.Parameter(torch.full((2,), config.logit_softcap)) if capped else None
        if config.orthogonal_init:
            orthogonal(self)

    @property
    def _lanes_from(self) -> int | None:
        return self.config.parallel_start_layer if self.config.parallel == "lanes" else None

    def forward(
        self,
        ids: Tensor,
        before: Tensor | None = None,
        bounds: Bounds | None = None,
        *,
        tail: int | None = None,
        past: Past | None = None,
    ) -> Tensor:
        """Logits of the next token: ids (batch, length) int64 → (batch, length, vocab_size) float32.

        Args:
            ids: what is attended to and answered.
            before: (batch, up to 3) tokens right before `ids`, for the embeddings that look back; nothing else does.
            bounds: of segments that do not see each other; None: rows, and documents if they are to be isolated.
            tail: answer for the last so many places alone, which spares most of the last layer; None: for all.
            past: what comes before `ids` and is attended to, too; None: nothing does.
        """
        return self._cap(self._project(self._hidden(ids, before, bounds, tail, past)).float())

    def loss(
        self,
        ids: Tensor,
        targets: Tensor,
        reduction: Literal["mean", "none"] = "mean",
        bounds: Bounds | None = None,
    ) -> Tensor:
        """Cross-entropy in nats, computed in fp32: 0-d for "mean", (batch, length) for "none".

        Args:
            ids: (batch, length) int64 tokens.
            targets: (batch, length) int64, the token after each; if there are fewer, after the last so many.
            reduction: of the losses.
            bounds: as in `forward`.
        """
        tail = targets.shape[1] if targets.shape[1] < ids.shape[1] else None
        if self.way != "eager" and reduction == "mean" and self.training and torch.is_grad_enabled():
            projected = self._project(self._hidden(ids, None, bounds, tail)).flatten(0, 1)
            return capped_loss(projected, targets.flatten(), self.config.logit_softcap, self.way)
        logits = self(ids, bounds=bounds, tail=tail)
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
        return nats if reduction == "mean" else nats.view_as(targets)

    def fuse(self, wanted: bool = True, *, compiled: bool = False) -> Way:
        """Compute cap and loss in one piece in training, where there is a way to; returns the way (`fused`).

        Args:
            wanted: False: the eager way.
            compiled: whether `loss` is going to be compiled.
        """
        fusible = wanted and self.config.softcap == "tanh"
        self.way = way_for(self.tok_emb.weight.device, compiled=compiled) if fusible else "eager"
        return self.way

    def fuse_mlps(self, wanted: bool = True) -> bool:
        """Take the kernels of `mlp_kernels` in training, where they can run; returns whether they will."""
        kernels = self.tok_emb.weight.device.type == "cuda" and find_spec("triton") is not None
        fused = wanted and kernels and self.config.activation != "swiglu"
        for block in self.blocks:
            block.mlp.fused = fused  # type: ignore[union-attr]
        return fused

    def named_matrices(self) -> Iterator[tuple[str, Tensor]]:
        """(name, weight) of each matrix that a product or a look-up uses: (outputs, inputs), or (vocab_size, dim)."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                yield f"{name}.weight", module.weight

    def symmetries(self) -> tuple[Symmetry, ...]:
        """What can change places without changing the function, as `symmetry_units` reads it."""
        return symmetries(self.config)

    def _hidden(
        self,
        ids: Tensor,
        before: Tensor | None = None,
        bounds: Bounds | None = None,
        tail: int | None = None,
        past: Past | None = None,
    ) -> Tensor:
        """Normalised output of the last layer, (batch, length or tail, dim) in `compute_dtype`."""
        x0 = x = self._embedded(ids, before)
        values = {} if self.value_embed is None else self.value_embed(ids, x.dtype)
        around = Surroundings(*self._around(ids, bounds, past, x.dtype), values)
        encoder, decoder = self.config.layers(self.looping)
        runs = len(encoder) + len(decoder)
        first: Tensor | None = None
        outputs: list[Tensor] = []
        other: Tensor | None = None  # the second lane, once there is one
        for place, layer in enumerate((*encoder, *decoder)):
            if place >= len(encoder) and outputs:
                x = self._skipped(x, outputs.pop(), place - len(encoder))
            if layer == self._lanes_from:
                other = x
            last = tail if place == runs - 1 and around.attends[self._windowed(layer)].shortens else None
            if other is None:
                x, own = self.blocks[layer](x, x0, around, first, last)
            else:
                x, other, own = self._in_lanes(layer, (x, other), x0, around, first, last)
            first = own if first is None else first
            if place < len(encoder):
                outputs.append(x)
        x = x if other is None else (x + other) / 2
        return norm(x if tail is None else x[:, -tail:])

    def _embedded(self, ids: Tensor, before: Tensor | None) -> Tensor:
        """x₀, (batch, length, dim)."""
        every = ids if before is None else torch.cat((before, ids), dim=1)
        x: Tensor = self.tok_emb(every).to(self.compute_dtype)
        if self.embed_proj is not None:
            x = self.embed_proj(x)
        if self.bigram is not None:
            x = x + self.bigram(every, x.dtype)
        if isinstance(self.smear, GatedSmear):
            x = self.smear(x, every)
        x = norm(x)
        if isinstance(self.smear, FixedSmear):
            x = self.smear(x, every)
        return x if before is None else x[:, before.shape[1] :]

    def _around(
        self, ids: Tensor, bounds: Bounds | None, past: Past | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, tuple[Attending, Attending]]:
        """Rotary tables of this batch, and how layers attend: those without a window, and those with one."""
        if past is not None:
            return past.surround(ids, dtype)
        config = self.config
        cos, sin = self.rotary(ids.shape[1], ids.device, dtype)
        bos_id = config.bos_id if config.isolate_documents else None
        whole = attending(self.attend, self.kernels, ids, bounds, bos_id, 0)
        if not config.attn_window:
            return cos, sin, (whole, whole)
        return cos, sin, (whole, attending(self.attend, self.kernels, ids, bounds, bos_id, config.attn_window))

    def _windowed(self, layer: int) -> bool:
        windowed: bool = self.blocks[layer].attn.windowed  # type: ignore[union-attr, assignment]
        return windowed

    def _skipped(self, x: Tensor, output: Tensor, place: int) -> Tensor:
        weight = self.skip_weights[place].to(x.dtype)
        if self.skip_gates is None:
            return torch.addcmul(x, weight, output)
        return torch.lerp(weight * output, x, torch.sigmoid(self.skip_gates[place]).to(x.dtype))

    def _in_lanes(
        self,
        layer: int,
        lanes: tuple[Tensor, Tensor],
        x0: Tensor,
        around: Surroundings,
        first: Tensor | None,
        tail: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self.lane_keeps is not None
        assert self.lane_writes is not None
        branches = self.blocks[layer].branches(lanes, x0, around, first, tail)  # type: ignore[operator]
        attended, transformed, own = branches
        if tail is not None:
            lanes = lanes[0][:, -tail:], lanes[1][:, -tail:]
        keeps, writes = (each[layer].to(attended.dtype) for each in (self.lane_keeps, self.lane_writes))
        one, two = (
            keeps[lane] * lanes[lane] + writes[0, lane] * attended + writes[1, lane] * transformed for lane in (0, 1)
        )
        return one, two, own

    def _project(self, x: Tensor) -> Tensor:
        if self.lm_head is not None:
            logits = F.linear(x, self.lm_head.weight.to(x.dtype))
        else:
            y = x if self.embed_proj is None else x @ self.embed_proj.weight.to(x.dtype)
            logits = F.linear(y, self.tok_emb.weight.to(x.dtype))
        return logits if self.beside_head is None else self.beside_head(x, logits)

    def _cap(self, logits: Tensor) -> Tensor:
        cap = self.config.logit_softcap
        if self.config.softcap == "poly":  # what a series of tanh gives, bent to meet ±1
            z = (logits / cap).clamp(-2, 2)
            square = z * z
            bent: Tensor = cap * (z * (1 - square / 3 + square * square / 15)).clamp(-1, 1)
            return bent
        if self.softcaps is not None:
            above, below = self.softcaps[0] * torch.tanh(logits / self.softcaps[0]), self.softcaps[1]
            return torch.where(logits > 0, above, below * torch.tanh(logits / below))
        return cap * torch.tanh(logits / cap)


def norm(x: Tensor) -> Tensor:
    """x over its root mean square along the last axis; no weight."""
    return F.rms_norm(x, x.shape[-1:])
