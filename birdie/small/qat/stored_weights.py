"""Weights that are trained as they are stored: layers use what is decoded, plus the movement since it was encoded.

    parameter ─► + offset ─► the weight that a layer uses
        │          ▲
        └─► encode, decode ─► minus parameter, now and then

The gradient goes straight through to the parameter (Bengio et al. 2013, arXiv 1308.3432). Encoding is left to the
caller (`birdie.small.stored_training`), so that it may take a trellis, error feedback and a budget for all tensors
together.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from birdie.compress.registry import decode
from birdie.compress.scheme import Encoded, Scheme, Sensitivity
from birdie.compress.state import FORMS
from birdie.errors import WeightsError
from birdie.small.qat.quantized_layers import Layer, parameter, read_plainly, read_through


@dataclass(frozen=True, slots=True)
class StoredAsTrained(Scheme):
    """Scheme of one tensor that is encoded already, whatever its scheme."""

    encoded: Encoded

    def encode(
        self,
        name: str,  # noqa: ARG002 (the encoding exists already)
        weight: Tensor,  # noqa: ARG002
        *,
        sensitivity: Sensitivity | None = None,  # noqa: ARG002
    ) -> Encoded:
        """Return the encoding."""
        return self.encoded


@dataclass(slots=True)
class StoredForm:
    """Stored form of a parameter; its layers keep it beside it, so copies of a module have copies of it."""

    # difference between what was decoded and the parameter at that time, for layers that use what is decoded; None:
    # they use the parameter
    offset: Tensor | None = None
    encoded: Encoded | None = None  # what a file will hold; None before the first encoding

    def stored_as(self, name: str, weight: Tensor) -> Scheme:
        """Return the scheme that stores the parameter `name` as it was trained, unless it has another value now."""
        assert self.encoded is not None
        if not torch.equal(decode(self.encoded).to(weight).view_as(weight), weight):
            raise WeightsError(
                f"tensor {name!r} has been trained on since it was quantized; finish birdie.fine_tune, or call "
                "birdie.plain(model) to compress the weights anew"
            )
        return StoredAsTrained(self.encoded)


def use_decoded(layers: Iterable[Layer], *, in_evaluation: bool) -> None:
    """Make layers use what `hold` says is decoded of their parameters; until then the parameters themselves.

    Args:
        layers: whose class changes, until `plain`.
        in_evaluation: whether they use it in evaluation mode as well.
    """
    layers = list(layers)
    read_through(layers, _decoded, in_evaluation=in_evaluation)
    forms: dict[int, StoredForm] = {}  # of tied parameters there is one
    for layer, key in layers:
        weight = parameter(layer, key)
        vars(layer).setdefault(FORMS, {})[key] = forms.setdefault(id(weight), StoredForm(torch.zeros_like(weight)))


def hold(layer: nn.Module, key: str, encoded: Encoded, decoded: Tensor) -> None:
    """Set what a file will hold of a parameter, and what that decodes to."""
    form = vars(layer).setdefault(FORMS, {}).setdefault(key, StoredForm())
    form.encoded = encoded
    if form.offset is not None:
        torch.sub(decoded, parameter(layer, key).detach(), out=form.offset)


def offset_of(layer: nn.Module, key: str) -> Tensor:
    """Return the offset of a parameter; see `StoredForm`."""
    offset = vars(layer)[FORMS][key].offset
    assert isinstance(offset, Tensor)
    return offset


def is_stored(model: nn.Module) -> bool:
    """Return whether weights of the model are trained as they are stored."""
    return any(FORMS in vars(module) for module in model.modules())


def plain(model: nn.Module, *, latent: bool = False) -> nn.Module:
    """Make a model that `birdie.fine_tune` trained a plain one, whose weights can be trained or compressed in any way.

    Args:
        model: any module; one that was not fine-tuned is left as it is.
        latent: take the latent weights instead of those that the layers use; they differ until the end of the training.
    """
    seen: set[int] = set()
    for layer in model.modules():
        for key, form in vars(layer).pop(FORMS, {}).items():
            weight = layer._parameters.get(key)
            if form.offset is not None:
                read_plainly([layer])
                if not latent and weight is not None and id(weight) not in seen:
                    with torch.no_grad():
                        weight.add_(form.offset.to(weight))
            seen.add(id(weight))
    return model


def _decoded(layer: nn.Module, key: str) -> Tensor:
    weight = parameter(layer, key)
    return weight + offset_of(layer, key).to(weight)  # the module may have moved
