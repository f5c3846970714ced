"""The MLP of a block, and what is between its two layers.

relu2         down(relu(u)²)                 Primer (So et al. 2021)
leaky_relu2   down(leaky_relu(u)²)           openai/parameter-golf #493, #549: the half below zero learns too
swiglu        down(silu(gate(x)) ⊙ u)        Shazeer 2020; a third matrix: narrow it by 2/3 to compare
"""

import torch.nn.functional as F
from torch import Tensor, nn

from birdie.model.attention import Linear
from birdie.model.config import Activation


class MLP(nn.Module):
    """down(activation(up(x))), `down` zero at first.

    Attributes:
        fused: whether training takes the kernels of `mlp_kernels`, which are for ReLU² and its leaky form.
    """

    def __init__(self, dim: int, hidden: int, activation: Activation = "relu2", slope: float = 0.5) -> None:
        super().__init__()
        self.activation, self.slope = activation, slope
        self.fc = Linear(dim, hidden)
        self.gate = Linear(dim, hidden) if activation == "swiglu" else None
        self.proj = Linear(hidden, dim)
        nn.init.zeros_(self.proj.weight)
        self.fused = False

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, length, dim) → the same shape."""
        if self.fused and self.training:
            from birdie.model.mlp_kernels import leaky_square_mlp

            up, down = (each.weight.to(x.dtype) for each in (self.fc, self.proj))
            y: Tensor = leaky_square_mlp(x.flatten(0, -2), up, down, self._slope)[0]
            return y.view(x.shape)
        hidden = self.fc(x)
        if self.gate is not None:
            hidden = F.silu(self.gate(x)) * hidden
        else:
            hidden = F.leaky_relu(hidden, self._slope) if self._slope else F.relu(hidden)
            hidden = hidden * hidden  # the gradient of square() takes a slow power
        out: Tensor = self.proj(hidden)
        return out

    @property
    def _slope(self) -> float:
        return self.slope if self.activation == "leaky_relu2" else 0.0
