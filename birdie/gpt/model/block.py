"""One layer of the model: mix in the embedding, attend, transform.

    x ← mix₀ ⊙ x + mix₁ ⊙ x₀
    x ← x + attn_scale ⊙ attention(norm(x))
    x ← x + mlp_scale ⊙ mlp(norm(x))

- ln_scale (openai/parameter-golf #315): normalized inputs of layer i are divided by √(i + 1); no parameters, one pass
  over x. *Experimental*; measured (docs/techniques.md): −0.004 ± 0.006.
- phased_init: see `initialization`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from birdie.gpt.model.attention import Attention
from birdie.gpt.model.attention_context import AttentionContext
from birdie.gpt.model.config import GPTConfig
from birdie.gpt.model.initialization import phased_share
from birdie.gpt.model.layers import norm
from birdie.gpt.model.mlp import MLP
from birdie.gpt.model.technique import Technique
from birdie.gpt.model.techniques.parallel_residual import Streams, is_joint

if TYPE_CHECKING:
    from birdie.gpt.model.gpt import GPT


def _diagnostics(model: "GPT") -> Iterator[str]:
    if model.config.ln_scale:
        yield f"LN scale: inputs of the last layer times {model.config.num_layers**-0.5:.3g}"


BLOCK = Technique(groups=dict.fromkeys(("attn_scale", "mlp_scale", "resid_mix"), "scalars"), diagnostics=_diagnostics)


class Block(nn.Module):
    """One layer: attention and MLP around the residual stream."""

    techniques: ClassVar[tuple[Technique, ...]] = (BLOCK,)

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        dim = config.model_dim
        self.attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.attn_scale = nn.Parameter(torch.ones(dim))
        self.mlp_scale = nn.Parameter(torch.ones(dim))
        share = phased_share(layer, config.num_layers) if config.phased_init else 1.0
        self.resid_mix = nn.Parameter(torch.stack((torch.full((dim,), share), torch.full((dim,), 1 - share))))
        self.input_scale = (layer + 1) ** -0.5 if config.ln_scale else 1.0
        self.joint = is_joint(config, layer)

    def forward(
        self,
        x: Tensor,
        x0: Tensor,
        context: AttentionContext,
        first_values: Tensor | None,
        last_n: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output, (batch, length or last_n, dim), and the values of this layer, as `Attention` does.

        Args:
            x: residual stream, (batch, length, dim).
            x0: embedding, of the same shape.
            first_values: values of the first layer that ran; None in that layer.
            last_n: compute the output of the last n positions only; None: of all.
        """
        x = self._mix(x, x0)
        attended, values = self.attn(self._norm(x), context, first_values, last_n)
        x = attention_input = x if last_n is None else x[:, -last_n:]
        x = torch.addcmul(x, self.attn_scale.to(x.dtype), attended)
        transformed = self.mlp(self._norm(attention_input if self.joint else x))
        return torch.addcmul(x, self.mlp_scale.to(x.dtype), transformed), values

    def branches(
        self,
        streams: Streams,
        x0: Tensor,
        context: AttentionContext,
        first_values: Tensor | None,
        last_n: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scaled outputs of attention, which reads stream 0, and of the MLP (stream 1), and the values."""
        attended, values = self.attn(self._norm(self._mix(streams[0], x0)), context, first_values, last_n)
        transformed = self.mlp(self._norm(streams[1] if last_n is None else streams[1][:, -last_n:]))
        dtype = attended.dtype
        return self.attn_scale.to(dtype) * attended, self.mlp_scale.to(dtype) * transformed, values

    def _mix(self, x: Tensor, x0: Tensor) -> Tensor:
        mix = self.resid_mix.to(x.dtype)
        return torch.addcmul(mix[0] * x, mix[1], x0)

    def _norm(self, x: Tensor) -> Tensor:
        return norm(x) if self.input_scale == 1.0 else norm(x) * self.input_scale
