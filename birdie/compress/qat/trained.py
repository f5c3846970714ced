"""Weights that are trained as what the file will hold of them.

    latent ─► + offset ─► the weight that a layer uses
       │        ▲
       └─► encode, decode ─► minus latent, now and then

A layer computes with the decoded weight, plus what the latent weight has moved since it was encoded; the gradient goes
straight through to the latent (Bengio et al. 2013, arXiv 1308.3432). Encoding is left to the caller
(`birdie.run.requantization`), so that it may take a trellis, error feedback and a budget for all tensors together.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from birdie.compress.qat.parametrized import Owner, Stored, owners_of, parametrize_weights, parametrized, plain_weights
from birdie.compress.registry import decode
from birdie.compress.scheme import Encoded, Scheme
from birdie.errors import ConfigError, WeightsError


class TrainedWeight(nn.Module):
    """Parametrization of one tensor: latent → latent + offset.

    Attributes:
        offset: difference between what was decoded and the latent at that time.
        encoded: what a file will hold; None before the first encoding.
    """

    folds = True  # a file stores the resulting weight under its plain name (birdie.compress.state.folded)
    offset: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros_like(weight))
        self.encoded: Encoded | None = None

    def forward(self, latent: Tensor) -> Tensor:
        """Return the weight that the layer uses."""
        return latent + self.offset

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the latent of a weight."""
        return weight.detach() - self.offset

    def hold(self, latent: Tensor, encoded: Encoded, *, final: bool = False) -> None:
        """Make the weight what `encoded` decodes to.

        Args:
            latent: the parameter.
            encoded: encoding of the latent.
            final: change the latent, so that the weight has the very bits of the file.
        """
        with torch.no_grad():
            decoded = decode(encoded).to(latent).view_as(latent)
            if final:
                latent.copy_(decoded)
                self.offset.zero_()
            else:
                torch.sub(decoded, latent, out=self.offset)
            self.encoded = encoded

    def stored_as(self, name: str, latent: Tensor) -> Scheme:
        """Return the scheme that stores the weight as it was trained."""
        encoded = self.encoded
        if encoded is None or not torch.equal(decode(encoded).to(latent).view_as(latent), self(latent)):
            raise WeightsError(
                f"tensor {name!r} has been trained on since it was quantized; finish birdie.fine_tune, or call "
                "birdie.plain(model) to compress the weights anew"
            )
        return Stored(encoded)


@dataclass(frozen=True, slots=True)
class Trained:
    """A tensor that is trained as it will be stored: its plain name, its owner, and its parametrization."""

    name: str
    module: nn.Module
    attribute: str
    weight: TrainedWeight

    @property
    def latent(self) -> nn.Parameter:
        """Parameter that is trained: the latent weight."""
        return Owner(self.module, self.attribute, self.name).original


def trained_weights(model: nn.Module) -> Iterator[Trained]:
    """Yield all tensors that are trained as they will be stored, tied tensors once per name."""
    for owner, weight in parametrized(model, TrainedWeight):
        yield Trained(owner.name, owner.module, owner.attribute, weight)


def train_as_stored(model: nn.Module, names: Mapping[str, object]) -> None:
    """Make the layers of a model use what will be stored of these weights, once `TrainedWeight.hold` says what it is.

    Args:
        model: any module.
        names: of parameters, tied ones under one of their names.
    """
    wanted = {id(weight) for name, weight in model.named_parameters(remove_duplicate=False) if name in names}
    owners = owners_of(model, lambda _, weight: id(weight) in wanted)
    if missing := names.keys() - {owner.name for tied in owners.values() for owner in tied}:
        raise ConfigError(f"{sorted(missing)[0]!r} is no parameter of the model")
    weights = [getattr(first.module, first.attribute) for first, *_ in owners.values()]
    parametrize_weights(model, owners.values(), [TrainedWeight(weight) for weight in weights])


def plain(model: nn.Module, *, latent: bool = False) -> nn.Module:
    """Replace the parametrizations of `birdie.fine_tune` by plain parameters; tied ones stay tied.

    Args:
        model: any module; one that was not fine-tuned is left as it is.
        latent: take the latent weights instead of those that the layers use.
    """
    weights = {
        Owner(part.module, part.attribute, part.name): (
            id(part.weight),
            (part.latent if latent else part.weight(part.latent)).detach().clone(),
        )
        for part in trained_weights(model)
    }
    return plain_weights(model, weights) if weights else model
