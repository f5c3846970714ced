"""Operations that several parts of the model share: linear layer with a float32 master weight, RMS norm, shift."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A linear layer without bias whose float32 master weight is cast to the dtype of the input at each call."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def norm(x: Tensor) -> Tensor:
    """Return x divided by its root mean square along the last axis (RMSNorm without a weight)."""
    return F.rms_norm(x, x.shape[-1:])


def shift(x: Tensor, back: int, fill: float) -> Tensor:
    """Shift x (batch, length, …) along its rows by `back` positions; the first positions become `fill`."""
    start = torch.full_like(x[:, :back], fill)
    return torch.cat((start, x[:, : x.shape[1] - back]), dim=1)[:, : x.shape[1]]


def rms(weight: Tensor) -> float:
    """Root mean square of all entries, as the diagnostics of the techniques print it."""
    return float(weight.float().square().mean().sqrt())
