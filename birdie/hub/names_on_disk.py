"""A model whose state dict has the names of its checkpoint.

from_pretrained renames what old versions of a library wrote ("h.0.attn.c_attn.weight" of GPT-2 is now
"transformer.h.0.attn.c_attn.weight"), and of tied weights a checkpoint has one name. Files keep the names on disk, so
the sensitivities of a calibration must have them too.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from birdie.errors import WeightsError


class NamesOnDisk(nn.Module):
    """Runs a model, and names its tensors as its checkpoint does.

    Args:
        model: of transformers.
        state: the tensors on disk.
        where: the checkpoint, for error messages.
        options: of the model's forward function.

    Raises:
        WeightsError: a parameter of the model is not the tensor of the same name on disk.
    """

    def __init__(self, model: nn.Module, state: Mapping[str, Tensor], where: Path, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options
        self.names = names_in(model, state, where)
        self.unused = {name: tensor.clone() for name, tensor in state.items() if name not in self.names}

    @property
    def config(self) -> Any:
        """The configuration of the model."""
        return self.model.config

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Return what the model returns: `logits` of token ids, (rows, length, vocabulary), or of images."""
        return self.model(*inputs, **self.options, **keywords)

    def assign(self, state: Mapping[str, Tensor]) -> None:
        """Use the very tensors of a checkpoint as weights, which frees the copies of a model of their dtypes."""
        inner = dict(self.model.named_parameters(remove_duplicate=False))
        for name, other in self.names.items():
            if other in inner and inner[other].dtype == state[name].dtype:
                inner[other].data = state[name]

    def state_dict(self, *_: Any, keep_vars: bool = False, **__: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Return name on disk → tensor; tensors that the model does not use are copies."""
        inner = self.model.state_dict(keep_vars=keep_vars)
        return {name: inner[other] for name, other in self.names.items()} | self.unused

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy tensors by their names on disk."""
        self._require_names(state_dict, strict)
        inner = {self.names[name]: tensor for name, tensor in state_dict.items() if name in self.names}
        return self.model.load_state_dict(inner, strict=False, assign=assign)  # of tied names one is enough

    def _require_names(self, state: Mapping[str, Any], strict: bool) -> None:
        if strict and (different := sorted(state.keys() ^ (self.names.keys() | self.unused.keys()))):
            raise WeightsError(f"tensor {different[0]!r} is not in both state dicts; give those of one checkpoint")

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,  # noqa: ARG002  (as nn.Module has it)
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by their names on disk."""
        inner = dict(self.model.named_parameters(remove_duplicate=False))
        known: set[int] = set()
        for name, other in self.names.items():
            if other in inner and not (remove_duplicate and id(inner[other]) in known):
                known.add(id(inner[other]))
                yield f"{prefix}.{name}".lstrip("."), inner[other]


def names_in(model: nn.Module, state: Mapping[str, Tensor], where: Path) -> dict[str, str]:
    """Return name on disk → name in the model, for all tensors that the model has.

    A name on disk may lack the prefix of the base model, have one that the model lacks, or be one that transformers
    renames. Values are compared, so that a weight which it has split, merged or transposed is not taken for another.

    Raises:
        WeightsError: a parameter has no tensor on disk, or another one.
    """
    inner = model.state_dict()
    prefix, renamed = f"{getattr(model, 'base_model_prefix', '')}.", _renamed(model, inner)
    names = {}
    for name, tensor in state.items():
        candidates = (name, prefix + name, name.removeprefix(prefix), renamed.get(name, name))
        other = next((one for one in candidates if one in inner), None)
        if other is not None and _is_same(inner[other], tensor):
            names[name] = other
    loaded = {inner[other].data_ptr() for other in names.values()}
    for other, parameter in model.named_parameters():
        if parameter.data_ptr() not in loaded:
            raise WeightsError(
                f"parameter {other!r} of the {type(model).__name__} is no tensor of {where} under this name: "
                "transformers has converted it, so the folder cannot be calibrated; calibrate the module in Python, "
                "with birdie.save(model, …, calibration=(model, batches, loss))"
            )
    return names


def _renamed(model: nn.Module, inner: Mapping[str, Tensor]) -> dict[str, str]:
    """Return name on disk → name in the model of tensors that transformers (from version 5) renames as it loads."""
    try:
        saved = import_module("transformers.core_model_loading").revert_weight_conversion(model, dict(inner))
    except Exception:  # another version, or a conversion without a way back: the names that agree are enough, or not
        return {}
    names = {id(tensor): name for name, tensor in inner.items()}
    return {name: names[id(tensor)] for name, tensor in saved.items() if id(tensor) in names}


def _is_same(loaded: Tensor, tensor: Tensor) -> bool:
    if loaded.shape != tensor.shape:
        return False
    return torch.equal(loaded.cpu(), tensor.to(loaded.dtype))
