"""The MLP of a block and its activations.

relu2         down(relu(u)²)                 Primer (So et al. 2021)
leaky_relu2   down(leaky_relu(u)²)           openai/parameter-golf #493, #549: negative inputs get a gradient too
swiglu        down(silu(gate(x)) ⊙ u)        Shazeer 2020 (arXiv 2002.05202); a third matrix: reduce the width by 1/3

with u = up(x). Measured (docs/techniques.md): leaky_relu2 −0.021, swiglu with as many weights −0.032.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from birdie.gpt.model.config import GPTConfig
from birdie.gpt.model.layers import Linear
from birdie.gpt.model.symmetries import Symmetry
from birdie.gpt.model.technique import Technique

if TYPE_CHECKING:
    from birdie.gpt.model.gpt import GPT


def _diagnostics(model: "GPT") -> Iterator[str]:
    if model.config.activation != "relu2":
        yield f"activation: {model.config.activation}"
    fused = [block for block in model.blocks if block.mlp.fused]  # type: ignore[union-attr]
    if fused:
        yield f"fused MLPs: product and activation by a Triton kernel in {len(fused)} layers"


ACTIVATION = Technique(
    groups=dict.fromkeys(("fc.weight", "gate.weight", "proj.weight"), "matrices"), diagnostics=_diagnostics
)


class MLP(nn.Module):
    """down(activation(up(x))), where `down` (`proj`) starts at zero.

    Attributes:
        fused: whether training uses the kernels of `mlp_kernels`, which support relu2 and leaky_relu2.
    """

    techniques: ClassVar[tuple[Technique, ...]] = (ACTIVATION,)

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        dim, hidden = config.model_dim, config.mlp_hidden
        self.slope = config.leaky_slope if config.activation == "leaky_relu2" else 0.0
        self.fc = Linear(dim, hidden)
        self.gate = Linear(dim, hidden) if config.activation == "swiglu" else None
        self.proj = Linear(hidden, dim)
        nn.init.zeros_(self.proj.weight)
        self.fused = False

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, length, dim) → the same shape."""
        if self.fused and self.training:
            from birdie.gpt.model.mlp_kernels import leaky_square_mlp

            up, down = (layer.weight.to(x.dtype) for layer in (self.fc, self.proj))
            y: Tensor = leaky_square_mlp(x.flatten(0, -2), up, down, self.slope)[0]
            return y.view(x.shape)
        hidden = self.fc(x)
        if self.gate is not None:
            hidden = F.silu(self.gate(x)) * hidden
        else:
            hidden = F.leaky_relu(hidden, self.slope) if self.slope else F.relu(hidden)
            hidden = hidden * hidden  # the backward of square() would use a slow power
        out: Tensor = self.proj(hidden)
        return out


def hidden_symmetry(config: GPTConfig, layer: int) -> Symmetry:
    """Return the symmetry of the hidden units of a layer."""
    up, gate, down = (f"blocks.{layer}.mlp.{name}.weight" for name in ("fc", "gate", "proj"))
    rows = [up, gate] if config.activation == "swiglu" else [up]
    return *((name, 0, 1) for name in rows), (down, 1, 1)
