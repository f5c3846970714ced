"""A model whose state dict has the names of its checkpoint.

from_pretrained renames what old versions of a library wrote ("h.0.attn.c_attn.weight" of GPT-2 is now
"transformer.h.0.attn.c_attn.weight"), of tied weights a checkpoint has one name, the experts of a layer, each with
tensors of its own on disk, become one parameter, and q, k and v of one tensor three. Files keep the names on disk, so
the sensitivities of a calibration must have them too.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from birdie.compress.calibration.tensor_pieces import Divided, Fused, Piece, Portion
from birdie.errors import WeightsError


class NamesOnDisk(nn.Module):
    """Runs a model, and names its tensors as its checkpoint does.

    Args:
        model: of transformers.
        state: the tensors on disk.
        where: the checkpoint, for error messages.
        options: of the model's forward function.
    """

    def __init__(self, model: nn.Module, state: Mapping[str, Tensor], where: Path, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options
        self.names, self.pieces, self.divided = names_in(model, state, where)
        implement: Any = getattr(model, "set_experts_implementation", None)
        if self.pieces and callable(implement):
            implement("eager")  # one product for each expert, whose inputs are seen
        pieces = {piece.name: piece for fused in self.pieces.values() for piece in fused}
        # what is no view of a parameter is a copy: values that are written to it go to the model with the next call
        self.copies = {
            piece.name: piece.of(self._parameter(other).detach())
            for other, fused in self.pieces.items()
            for piece in fused
            if piece.strides is None
        }
        for one in self.divided_weights():
            joined = self.copies.setdefault(one.tensor, one.parameter.detach().new_empty(one.shape))
            joined[one.rows] = one.parameter.detach().reshape(-1, *one.shape[1:])
        used = self.names.keys() | pieces.keys() | self.copies.keys()
        self.unused = {name: tensor.clone() for name, tensor in state.items() if name not in used}
        self._written = self._versions()

    @property
    def config(self) -> Any:
        """The configuration of the model."""
        return self.model.config

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Return what the model returns: `logits` of token ids, (rows, length, vocabulary), or of images."""
        versions = self._versions()
        for one in self.portions() if versions != self._written else ():
            flat = one.parameter.detach().view(-1)
            for piece in one.pieces if isinstance(one, Fused) else ():
                if piece.name in self.copies:
                    flat[piece.numbers.reshape(-1)] = self.copies[piece.name].reshape(-1).to(flat.device)
            if isinstance(one, Divided):
                flat.copy_(self.copies[one.tensor][one.rows].reshape(-1))
        self._written = versions
        return self.model(*inputs, **self.options, **keywords)

    def _versions(self) -> list[int]:
        """Return what changes when a value is written to a copy."""
        return [copy._version for copy in self.copies.values()]

    def portions(self) -> list[Portion]:
        """Return the parameters that are several tensors on disk, or some rows of one."""
        fused = [Fused(name, self._parameter(name), pieces) for name, pieces in self.pieces.items()]
        return [*fused, *self.divided_weights()]

    def divided_weights(self) -> list[Divided]:
        """Return the parameters that are some rows of a tensor on disk."""
        return [Divided(name, self._parameter(name), *where) for name, where in self.divided.items()]

    def _parameter(self, name: str) -> Tensor:
        return self.model.get_parameter(name)

    def assign(self, state: Mapping[str, Tensor]) -> None:
        """Use the very tensors of a checkpoint as weights, which frees the copies of a model of their dtypes."""
        inner = dict(self.model.named_parameters(remove_duplicate=False))
        for name, other in self.names.items():
            if other in inner and inner[other].dtype == state[name].dtype:
                inner[other].data = state[name]

    def state_dict(self, *_: Any, keep_vars: bool = False, **__: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Return name on disk → tensor; tensors that the model does not use are copies."""
        inner = self.model.state_dict(keep_vars=keep_vars)
        pieces = {
            piece.name: piece.of(one.parameter.detach())
            for one in self.portions()
            for piece in (one.pieces if isinstance(one, Fused) else ())
            if piece.name not in self.copies
        }
        return {name: inner[other] for name, other in self.names.items()} | pieces | self.copies | self.unused

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy tensors by their names on disk."""
        self._require_names(state_dict, strict)
        weights = self.state_dict()
        for name in {tensor for one in self.portions() for tensor in one.names} & state_dict.keys():
            weights[name].copy_(state_dict[name])
        inner = {self.names[name]: tensor for name, tensor in state_dict.items() if name in self.names}
        return self.model.load_state_dict(inner, strict=False, assign=assign)  # of tied names one is enough

    def _require_names(self, state: Mapping[str, Any], strict: bool) -> None:
        if strict and (different := sorted(state.keys() ^ self.state_dict().keys())):
            raise WeightsError(f"tensor {different[0]!r} is not in both state dicts; give those of one checkpoint")

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,  # noqa: ARG002  (as nn.Module has it)
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by their names on disk; those in other portions by their names in the model."""
        inner = dict(self.model.named_parameters(remove_duplicate=False))
        known: set[int] = set()
        for name, other in (*self.names.items(), *((name, name) for name in [*self.pieces, *self.divided])):
            if other in inner and not (remove_duplicate and id(inner[other]) in known):
                known.add(id(inner[other]))
                yield f"{prefix}.{name}".lstrip("."), inner[other]


Pieces = dict[str, list[Piece]]
Rows = dict[str, tuple[str, tuple[int, ...], Tensor]]
"""Name of a parameter → name and shape of a tensor on disk, and the rows of it that the parameter has."""


def names_in(model: nn.Module, state: Mapping[str, Tensor], where: Path) -> tuple[dict[str, str], Pieces, Rows]:
    """Return name on disk → name in the model of all tensors that the model has, and the pieces or rows of the others.

    A name on disk may lack the prefix of the base model, have one that the model lacks, or be one that transformers
    renames. What transformers merges, splits or transposes as it loads is found by undoing that with the numbers of the
    elements in place of their values. Values are compared, so that no weight is taken for another.
    """
    inner = model.state_dict()
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    meta = {name: tensor.to("meta") for name, tensor in inner.items()}
    originals = {id(tensor): name for name, tensor in meta.items()}
    renamed = {name: originals[id(tensor)] for name, tensor in _undone(model, meta).items() if id(tensor) in originals}
    names = {}
    for name, tensor in state.items():
        candidates = (*_with_and_without(name, prefix), renamed.get(name, name))
        other = next((one for one in candidates if one in inner), None)
        if other is not None and _is_same(inner[other], tensor):
            names[name] = other
    loaded = {inner[other].data_ptr() for other in names.values()}
    others = {name: weight for name, weight in model.named_parameters() if weight.data_ptr() not in loaded}
    pieces, divided = _portions(model, others, state, prefix) if others else ({}, {})
    for other, parameter in others.items():
        held = sum(prod(piece.shape) for piece in pieces.get(other, ()))
        if other not in divided and held != parameter.numel():
            raise WeightsError(
                f"parameter {other!r} of the {type(model).__name__} is no tensor of {where} under this name: "
                "transformers has converted it, so the folder cannot be calibrated; calibrate the module in Python, "
                "with birdie.save(model, …, calibration=(model, batches, loss))"
            )
    return names, pieces, divided


def _portions(
    model: nn.Module, parameters: Mapping[str, Tensor], state: Mapping[str, Tensor], prefix: str
) -> tuple[Pieces, Rows]:
    """Return what on disk parameters are made of: several tensors, one in another order, or some rows of one."""
    numbered: dict[str, Tensor] = {}
    starts: dict[str, int] = {}
    count = 0
    for name, parameter in parameters.items():
        numbered[name] = torch.arange(count, count + parameter.numel()).view(parameter.shape)
        starts[name] = count
        count += parameter.numel()
    ordered, bounds = list(starts), torch.tensor(list(starts.values()))
    pieces: Pieces = {}
    divided: Rows = {}
    for saved, numbers in _undone(model, numbered).items():
        name = next((one for one in _with_and_without(saved, prefix) if one in state), "")
        if not name or numbers.shape != state[name].shape or not numbers.numel():
            continue
        owners = torch.searchsorted(bounds, numbers.reshape(-1), right=True) - 1
        inside = [ordered[index] for index in torch.bincount(owners).nonzero().flatten().tolist()]
        if not all(parameters[one].is_contiguous() for one in inside):
            continue
        if len(inside) > 1:
            rows = {one: _rows(numbers, starts[one], parameters[one]) for one in inside}
            values = {one: state[name][rows[one]].reshape(parameters[one].shape) for one in inside if len(rows[one])}
            if len(values) == len(inside) and all(_is_same(parameters[one].detach(), values[one]) for one in inside):
                divided |= {one: (name, tuple(numbers.shape), rows[one]) for one in inside}
            continue
        piece = Piece.at(name, numbers - starts[inside[0]])
        if piece is not None and _is_same(piece.of(parameters[inside[0]].detach()), state[name]):
            pieces.setdefault(inside[0], []).append(piece)
    return pieces, divided


def _rows(numbers: Tensor, start: int, parameter: Tensor) -> Tensor:
    """Return which rows of a tensor with these numbers are those of a parameter, in its order; none if it is cut."""
    columns = numbers[0].numel()
    if parameter.numel() % columns or len(parameter) * columns != parameter.numel():
        return torch.empty(0, dtype=torch.int64)
    matrix = numbers.reshape(len(numbers), columns)
    order = torch.argsort(matrix[:, 0])
    wanted = torch.arange(start, start + parameter.numel()).view(-1, columns)
    rows = order[torch.searchsorted(matrix[order, 0], wanted[:, 0]).clamp_max(len(order) - 1)]
    return rows if torch.equal(matrix[rows], wanted) else rows[:0]


def _with_and_without(name: str, prefix: str) -> tuple[str, str, str]:
    return name, prefix + name, name.removeprefix(prefix)


def _undone(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return name on disk → tensor, as transformers (from version 5) writes the tensors of a model.

    Of another version, or of a conversion without a way back, there are none.
    """
    try:
        undone = import_module("transformers.core_model_loading").revert_weight_conversion(model, dict(tensors))
    except Exception:  # the names that agree are enough, or not
        return {}
    return {name: tensor for name, tensor in undone.items() if isinstance(tensor, Tensor)}


def _is_same(loaded: Tensor, tensor: Tensor) -> bool:
    if loaded.shape != tensor.shape:
        return False
    return torch.equal(loaded.cpu(), tensor.to(loaded.dtype))
