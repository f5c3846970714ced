"""Weights that are trained as what the file will hold of them.

    latent ─► + offset ─► the weight that a layer uses
       │        ▲
       └─► encode, decode ─► minus latent, now and then

A layer computes with the decoded weight, plus what the latent weight has moved since it was encoded; the gradient goes
straight through to the latent (Bengio et al. 2013, arXiv 1308.3432). Once symbols are fixed, gains of rows and columns
are trained instead, and become scales of the file (learned scales: LSQ, Esser et al. 2020, arXiv 1902.08153). Encoding
is left to the caller (`birdie.run.requantization`), so that it may take a trellis, error feedback and a budget for all
tensors together.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from birdie.compress.parametrized import Owner, owners_of, parametrize_weights, plain_weights
from birdie.compress.registry import decode
from birdie.compress.scheme import Encoded, Scheme, Sensitivity
from birdie.compress.schemes.trellis import DECODER, rescaled
from birdie.compress.tensors import rows_columns
from birdie.errors import ConfigError, WeightsError


@dataclass(frozen=True, slots=True)
class Stored(Scheme):
    """Scheme of one tensor that is encoded already."""

    decoder = DECODER

    encoded: Encoded

    def encode(
        self,
        name: str,  # noqa: ARG002 (the encoding exists already)
        weight: Tensor,  # noqa: ARG002
        *,
        sensitivity: Sensitivity | None = None,  # noqa: ARG002
        lam: float = 0.0,  # noqa: ARG002
    ) -> Encoded:
        """Return the encoding."""
        return self.encoded


class TrainedWeight(nn.Module):
    """Parametrization of one tensor: latent → latent + offset, or, once fixed, decoded · 2^(gain of row + of column).

    Attributes:
        offset: difference between what was decoded and the latent at that time; the decoded weight once fixed.
        rows, columns: log2 of the gains, (rows, 1) and (1, columns).
        encoded: what a file will hold; None before the first encoding.
        fixed: whether symbols are fixed and gains are trained.
    """

    folds = True  # a file stores the resulting weight under its plain name (birdie.compress.state.folded)
    offset: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shape = rows_columns(tuple(weight.shape))
        self.register_buffer("offset", torch.zeros_like(weight))
        self.rows = nn.Parameter(weight.new_zeros(self.shape[0], 1))
        self.columns = nn.Parameter(weight.new_zeros(1, self.shape[1]))
        self.encoded: Encoded | None = None
        self.fixed = False

    def forward(self, latent: Tensor) -> Tensor:
        """Return the weight that the layer uses."""
        if not self.fixed:
            return latent + self.offset
        return (self.offset.reshape(self.shape) * torch.exp2(self.rows + self.columns)).view_as(latent)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the latent of a weight."""
        return weight.detach() if self.fixed else weight.detach() - self.offset

    def hold(self, latent: Tensor, encoded: Encoded, *, final: bool = False) -> None:
        """Make the weight what `encoded` decodes to.

        Args:
            latent: the parameter.
            encoded: encoding of the latent.
            final: change the latent, so that the weight has the very bits of the file; gains are used up.
        """
        with torch.no_grad():
            decoded = decode(encoded).to(latent).view_as(latent)
            if final:
                latent.copy_(decoded)
                for tensor in (self.offset, self.rows, self.columns):
                    tensor.zero_()
            else:
                torch.sub(decoded, latent, out=self.offset)
            self.encoded, self.fixed = encoded, False

    def fix(self, latent: Tensor) -> None:
        """Fix the symbols that the weight holds, and train gains from now on."""
        with torch.no_grad():
            self.offset.add_(latent)
        self.fixed = True

    def with_gains(self, resolution: int) -> Encoded:
        """Return the encoding with its scales multiplied by the gains, in so many steps per octave."""
        assert self.encoded is not None
        rows, columns = (gains.detach().flatten().double().cpu().numpy() for gains in (self.rows, self.columns))
        return rescaled(self.encoded, rows, columns, resolution)

    def stored_as(self, name: str, latent: Tensor) -> Scheme:
        """Return the scheme that stores the weight as it was trained.

        Raises:
            WeightsError: the weight has moved since it was encoded.
        """
        encoded = self.encoded
        if encoded is None or self.fixed or not torch.equal(decode(encoded).to(latent).view_as(latent), self(latent)):
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
        """Trained parameter."""
        parameter = self.module.parametrizations[self.attribute].original  # type: ignore[union-attr, index]
        assert isinstance(parameter, nn.Parameter)
        return parameter


def trained_weights(model: nn.Module) -> Iterator[Trained]:
    """Yield all tensors that are trained as they will be stored, tied tensors once per name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        lists = getattr(module, "parametrizations", None)
        if not isinstance(lists, nn.ModuleDict) or ".parametrizations." in f".{prefix}.":
            continue
        for attribute, chain in lists.items():
            if isinstance(chain, parametrize.ParametrizationList) and isinstance(chain[0], TrainedWeight):
                yield Trained(f"{prefix}.{attribute}" if prefix else attribute, module, attribute, chain[0])


def train_as_stored(model: nn.Module, names: Mapping[str, object]) -> None:
    """Make the layers of a model use what will be stored of these weights, once `TrainedWeight.hold` says what it is.

    Args:
        model: any module.
        names: of parameters, tied ones under one of their names.

    Raises:
        ConfigError: a name is no parameter of the model.
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
