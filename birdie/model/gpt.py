"""The challenge's baseline GPT: RMS-normalised, rotary, grouped heads, squared ReLU, U-Net skips, soft-capped logits.

    ids ─► tok_emb ─► norm = x₀ ─► block 0 … n/2−1, each output pushed ─┐
                                                                       ▼
                                   block n/2 … n−1, each first adds skip_weights ⊙ the output popped last
                                                                       ▼
                            logits = c · tanh(norm(x) · Eᵀ / c) ◄──── norm

    block:  x ← mix₀ ⊙ x + mix₁ ⊙ x₀
            x ← x + attn_scale ⊙ attention(norm(x))
            x ← x + mlp_scale ⊙ down(relu(up(norm(x)))²)

Notable: norms have no weights; every block sees the embedding x₀ again; the last layer of each branch starts at zero,
so that a new model does nothing but add skips; input and output share one embedding. 17,059,912 parameters by default.

Source: the baseline script of OpenAI's Parameter Golf, itself a child of modded-nanogpt.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from cyclopts import Parameter
from torch import Tensor, nn

from birdie.errors import ConfigError
from birdie.model.attention import Attention, Linear, Rotary


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Shape and initial values of a `GPT`.

    Raises:
        ConfigError: a value is out of range or two contradict each other.
    """

    vocab_size: Annotated[int, Parameter(env_var="VOCAB_SIZE", help="Number of token ids.")] = 1024
    num_layers: Annotated[int, Parameter(env_var="NUM_LAYERS", help="Number of blocks.")] = 9
    model_dim: Annotated[int, Parameter(env_var="MODEL_DIM", help="Width of the residual stream.")] = 512
    num_heads: Annotated[int, Parameter(env_var="NUM_HEADS", help="Query heads.")] = 8
    num_kv_heads: Annotated[
        int, Parameter(env_var="NUM_KV_HEADS", help="Key–value heads; divides the query heads.")
    ] = 4
    mlp_mult: Annotated[int, Parameter(env_var="MLP_MULT", help="Width of the MLP over the model's.")] = 2
    tie_embeddings: Annotated[bool, Parameter(env_var="TIE_EMBEDDINGS", help="Input and output embedding are one.")] = (
        True
    )
    rope_base: Annotated[float, Parameter(env_var="ROPE_BASE", help="Base of the rotary frequencies.")] = 10_000.0
    logit_softcap: Annotated[float, Parameter(env_var="LOGIT_SOFTCAP", help="Bound c of c·tanh(logits/c).")] = 30.0
    qk_gain_init: Annotated[float, Parameter(env_var="QK_GAIN_INIT", help="First gain of each query head.")] = 1.5
    tied_embed_init_std: Annotated[
        float, Parameter(env_var="TIED_EMBED_INIT_STD", help="Standard deviation of a new tied embedding.")
    ] = 0.005

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads", "mlp_mult"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("rope_base", "logit_softcap", "tied_embed_init_std"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}")
        if self.model_dim % (2 * self.num_heads):
            raise ConfigError(
                f"model_dim {self.model_dim} over num_heads {self.num_heads} is not an even head size, "
                f"which rotary positions need; choose a multiple of {2 * self.num_heads}"
            )


class MLP(nn.Module):
    """down(relu(up(x))²); the square follows Primer (So et al. 2021)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc = Linear(dim, hidden)
        self.proj = Linear(hidden, dim)
        nn.init.zeros_(self.proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.fc(x))
        out: Tensor = self.proj(hidden * hidden)  # the gradient of square() takes a slow power
        return out


class Block(nn.Module):
    """One layer: mix in the embedding, attend, transform."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        dim = config.model_dim
        self.attn = Attention(dim, config.num_heads, config.num_kv_heads, config.qk_gain_init)
        self.mlp = MLP(dim, dim * config.mlp_mult)
        self.attn_scale = nn.Parameter(torch.ones(dim))
        self.mlp_scale = nn.Parameter(torch.ones(dim))
        self.resid_mix = nn.Parameter(torch.stack((torch.ones(dim), torch.zeros(dim))))

    def forward(self, x: Tensor, x0: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x, x0: (batch, length, dim) → the same shape."""
        mix = self.resid_mix.to(x.dtype)
        x = torch.addcmul(mix[0] * x, mix[1], x0)
        x = torch.addcmul(x, self.attn_scale.to(x.dtype), self.attn(norm(x), cos, sin))
        return torch.addcmul(x, self.mlp_scale.to(x.dtype), self.mlp(norm(x)))


class GPT(nn.Module):
    """The model. `torch.manual_seed` before the constructor decides the initial weights.

    All parameters are fp32 masters; products run in `compute_dtype`, to which they are cast at each use. The embedding
    is a master too: in bfloat16 an Adam update below 2⁻⁹ of a weight would vanish.

    Attributes:
        compute_dtype: dtype of the activations; set it at any time.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32
        encoders = config.num_layers // 2
        self.num_skips = encoders  # never more than the decoders: there are at least as many
        self.tok_emb = nn.Embedding(config.vocab_size, config.model_dim)
        if config.tie_embeddings:
            nn.init.normal_(self.tok_emb.weight, std=config.tied_embed_init_std)
        self.rotary = Rotary(config.model_dim // config.num_heads, config.rope_base)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.skip_weights = nn.Parameter(torch.ones(self.num_skips, config.model_dim))
        self.lm_head = None if config.tie_embeddings else Linear(config.model_dim, config.vocab_size)
        if self.lm_head is not None:
            nn.init.zeros_(self.lm_head.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token: ids (batch, length) int64 → (batch, length, vocab_size) float32."""
        return self._cap(self._project(self._hidden(ids)).float())

    def loss(self, ids: Tensor, targets: Tensor, reduction: Literal["mean", "none"] = "mean") -> Tensor:
        """Cross-entropy in nats, computed in fp32: 0-d for "mean", (batch, length) for "none".

        Args:
            ids: (batch, length) int64 tokens.
            targets: (batch, length) int64, the token after each.
        """
        logits = self(ids)
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
        return nats if reduction == "mean" else nats.view_as(targets)

    def named_matrices(self) -> Iterator[tuple[str, Tensor]]:
        """(name, weight) of each matrix that a product or a look-up uses: (outputs, inputs), or (vocab_size, dim)."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                yield f"{name}.weight", module.weight

    def symmetries(self) -> tuple[tuple[tuple[str | int, ...], ...], ...]:
        """What can change places without changing the function, as `birdie.compress.units` reads it.

        In each block: hidden units of the MLP, value channels within a head, query heads that share a key–value head,
        key–value heads with their query heads. Hidden units and value channels can be rescaled as well: the square of
        ReLU takes a unit times a to a², and attention is linear in values.
        """
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        d, group = self.config.model_dim // heads, heads // kv_heads
        hidden = self.config.model_dim * self.config.mlp_mult
        found: list[tuple[tuple[str | int, ...], ...]] = []
        for i in range(self.config.num_layers):
            q, k, v, out = (f"blocks.{i}.attn.{name}.weight" for name in ("c_q", "c_k", "c_v", "proj"))
            gain, up, down = f"blocks.{i}.attn.q_gain", f"blocks.{i}.mlp.fc.weight", f"blocks.{i}.mlp.proj.weight"
            found.append(((up, 0, 1, 0, hidden, 1), (down, 1, 1, 0, hidden, -2)))
            for j in range(kv_heads):
                first, last = group * j, group * (j + 1)
                readers = [(out, 1, 1, d * h, d * (h + 1), -1) for h in range(first, last)]
                found.append(((v, 0, 1, d * j, d * (j + 1), 1), *readers))
                if group > 1:
                    span = (d, d * first, d * last)
                    found.append(((q, 0, *span), (out, 1, *span), (gain, 0, 1, first, last)))
            if kv_heads > 1:
                found.append(((q, 0, d * group), (k, 0, d), (v, 0, d), (out, 1, d * group), (gain, 0, group)))
        return tuple(found)

    def _hidden(self, ids: Tensor) -> Tensor:
        """Normalised output of the last block, (batch, length, dim) in `compute_dtype`."""
        x = norm(self.tok_emb(ids).to(self.compute_dtype))
        cos, sin = self.rotary(ids.shape[1], x.device, x.dtype)
        x0 = x
        outputs: list[Tensor] = []
        skip_weights = self.skip_weights.to(x.dtype)
        for i, block in enumerate(self.blocks):
            if i >= self.config.num_layers // 2 and outputs:
                x = torch.addcmul(x, skip_weights[i - self.config.num_layers // 2], outputs.pop())
            x = block(x, x0, cos, sin)
            if i < self.config.num_layers // 2:
                outputs.append(x)
        return norm(x)

    def _project(self, x: Tensor) -> Tensor:
        weight = self.tok_emb.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(x, weight.to(x.dtype))

    def _cap(self, logits: Tensor) -> Tensor:
        return self.config.logit_softcap * torch.tanh(logits / self.config.logit_softcap)


def norm(x: Tensor) -> Tensor:
    """x over its root mean square along the last axis; no weight."""
    return F.rms_norm(x, x.shape[-1:])
