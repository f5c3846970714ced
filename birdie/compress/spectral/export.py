"""What a wrapped model has become, ready to be packed: its symbols and steps as they are, nothing quantized again."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from birdie.compress.scheme import Encoded, Scheme, Sensitivity
from birdie.compress.schemes.lossless import Lossless
from birdie.compress.schemes.spectral import MOST, encoded
from birdie.compress.spectral.wrap import Wrapped, wrapped
from birdie.errors import WeightsError


@dataclass(frozen=True, slots=True)
class Ready:
    """A scheme for a tensor whose symbols are known."""

    found: Encoded

    def encode(
        self,
        name: str,  # noqa: ARG002  the contract's
        weight: Tensor,  # noqa: ARG002
        *,
        sensitivity: Sensitivity | None = None,  # noqa: ARG002
        lam: float = 0.0,  # noqa: ARG002
    ) -> Encoded:
        """What was trained."""
        return self.found


def trained(model: nn.Module) -> dict[str, Scheme]:
    """Plain name → the scheme that stores what `spectral` trained; empty for a model that is not wrapped.

    Raises:
        WeightsError: a coefficient is not finite.
    """
    by_weight: dict[int, Scheme] = {}
    return {each.name: by_weight.setdefault(id(each.weight), _scheme(each)) for each in wrapped(model)}


def _scheme(each: Wrapped) -> Scheme:
    symbols = each.symbols
    if not bool(torch.isfinite(symbols).all()):
        raise WeightsError(
            f"tensor {each.name!r} holds NaN or infinite coefficients; train on from an earlier checkpoint"
        )
    if float(symbols.abs().max()) > MOST:
        return Lossless()  # steps so fine that they say nothing
    weight = each.weight
    whole = symbols.cpu().numpy().astype(np.int32)
    return Ready(
        encoded(weight.shape, weight.dtype, whole, weight.steps()[1].cpu().numpy().astype(np.int32), weight.transform)
    )
