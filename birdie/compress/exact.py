"""Tensors that stay exact, because they are no weights: buffers, masks, frequencies, statistics, tables, counters.

What a tensor is for decides, not how precise 16 bits are: a rotary frequency off by 1/4096 turns the phase at position
8,191 by two radians. A module tells which tensors are buffers and which vectors belong to torch's layers; of a state
dict, structure and content tell: what stands beside the codes of a quantized matrix (birdie.compress.packed), numbers
that follow from one another (birdie.compress.constants), few values, integers, the order of a batch norm's tensors. A
vector of which nothing tells is exact, unless it is as long as a side of a matrix, as biases and norms are: it is in
doubt, and exact where that costs little (birdie.compress.small_tensors). docs/compress.md has the rule.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, zip_longest

import torch
from torch import Tensor, nn

from birdie.compress.constants import is_constant
from birdie.compress.packed import packed_names
from birdie.compress.small_tensors import SMALL, flat_vectors
from birdie.compress.tensors import REAL_DTYPES, parts, planes

FEW = 16  # different values up to which a tensor is a mask, a one-hot table or the like; a large one: FEW_OF_LARGE
FEW_OF_LARGE = 4
LARGE = 1 << 16  # elements
_EXACT_INTEGERS = 1 << 24  # beyond, every float32 is one
_SAMPLES = 1 << 6, 1 << 12  # elements of a part that are looked at first
_STATISTICS = {"running_mean", "running_var"}  # of torch's batch norm: safetensors sorts names, so order may not tell
# Words in the last part of the names of parameters whose errors count relatively: of norms, biases, gains, gates.
_RELATIVE = {
    *("weight", "weights", "bias", "biases", "gain", "gains", "gamma", "beta", "norm", "ln", "mix", "gate", "lambdas"),
    *("token", "tokens", "embed", "embedding", "embeddings"),
}
_RELATIVE_SCALES = {"attn_scale", "mlp_scale", "layer_scale", "resid_scale"}


@dataclass(frozen=True, slots=True)
class Roles:
    """Facts that a module, or a graph (checkpoints.onnx_roles), tells of its tensors, by their names."""

    buffers: frozenset[str] = frozenset()  # of the module, but for those that are tied to a parameter
    factors: frozenset[str] = frozenset()  # buffers that are a part of a weight, or a mask of it
    trained: frozenset[str] = frozenset()  # parameters that require a gradient
    layers: frozenset[str] = frozenset()  # weights and biases of torch's own layers
    embeddings: frozenset[str] = frozenset()  # tables that are looked up

    @classmethod
    def of(cls, module: nn.Module, ties: Mapping[str, str], factors: Collection[str]) -> "Roles":
        """Return the roles of a module's tensors.

        Args:
            module: the module.
            ties: second name of a tied tensor → first.
            factors: as the attribute.
        """
        buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        buffers -= {first for second, first in ties.items() if second not in buffers}
        trained = {
            ties.get(name, name)
            for name, weight in module.named_parameters(remove_duplicate=False)
            if weight.requires_grad
        }
        layers = {
            ties.get(name, name)
            for prefix, owner in module.named_modules(remove_duplicate=False)
            if _is_torch_layer(owner)
            for name in (f"{prefix}.{last}".lstrip(".") for last, _ in owner.named_parameters(recurse=False))
            if "weight" in name.rpartition(".")[2] or "bias" in name.rpartition(".")[2]
        }
        return cls(frozenset(buffers), frozenset(factors), frozenset(trained), frozenset(layers))


def _is_torch_layer(module: nn.Module) -> bool:
    """Return whether a class of torch that is more than a container made the parameters of a module."""
    return any(
        cls.__module__.startswith("torch.") and cls.__module__ not in (nn.Module.__module__, nn.Sequential.__module__)
        for cls in type(module).__mro__
    )


@dataclass(frozen=True, slots=True)
class Exact:
    """Names of tensors of floats that are no weights, or may be none."""

    names: frozenset[str] = frozenset()  # those that must keep every bit
    # vectors that are a parameter of a layer, or a table of frequencies, phases or energies
    doubtful: frozenset[str] = frozenset()


def exact_tensors(tensors: Mapping[str, Tensor], roles: Roles | None) -> Exact:
    """Return which tensors must keep every bit; integers and booleans are stored losslessly anyway.

    Args:
        tensors: of a model, in the order of its state dict.
        roles: facts that a module tells; None: there is a state dict alone.
    """
    floats = {name: tensor for name, tensor in tensors.items() if _is_float(tensor) and tensor.numel()}
    matrices = [tensor for tensor in floats.values() if tensor.ndim > 1]
    doubles = {tensor.dtype for tensor in matrices} <= {torch.float64, torch.complex128}
    sides = {size for tensor in matrices if not _is_vector(tensor) for size in tensor.shape[:2]}
    names = set(packed_names(tensors, () if roles is None else roles.trained))
    names |= set(_statistics(tensors)) if roles is None else (roles.buffers - roles.factors) & floats.keys()
    names |= {name for name, tensor in floats.items() if name not in names and _is_table(name, tensor, roles)}
    doubtful, settled = set[str](), names | flat_vectors(tensors)
    for name, tensor in floats.items():
        if name in settled:
            continue
        small = tensor.numel() < SMALL
        if small and tensor.dtype in (torch.float64, torch.complex128) and (_is_vector(tensor) or not doubles):
            names.add(name)
        elif _is_vector(tensor) and not (roles is not None and name in roles.layers):
            if tensor.ndim == 1 and _is_relative(name):
                doubtful |= set() if roles is None else {name}
            elif small or tensor.ndim == 1:
                in_doubt = roles is None and tensor.numel() in sides and not _counts(tensor)
                (doubtful if in_doubt else names).add(name)
    return Exact(frozenset(names), frozenset(doubtful))


def _statistics(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the names of running statistics: named so, or after gains and shifts, or before a counter."""
    groups = groupby(tensors.items(), lambda item: len(item[1]) if item[1].ndim == 1 else None)
    runs = [(size, list(items)) for size, items in groups]
    yield from (name for name in tensors if _last_part(name) in _STATISTICS)
    for (size, run), (_, after) in zip_longest(runs, runs[1:], fillvalue=(None, [])):
        counted = bool(after) and after[0][1].ndim == 0 and not after[0][1].is_floating_point()
        for index in range(1, len(run)) if size is not None else ():
            mean, variance = run[index - 1], run[index]
            last = index == len(run) - 1
            fourth = index > 2 and (len(run) - index) % 4 == 1 and bool((variance[1] > 0).all() and (mean[1] < 0).any())
            if fourth or (last and counted):
                yield from (mean[0], variance[0])


def _is_table(name: str, weight: Tensor, roles: Roles | None) -> bool:
    """Return whether the content of a tensor is that of a scalar, a mask or a table, as far as it may be no weight.

    A matrix that begins at zero will be trained, and so will a parameter that requires a gradient.
    """
    if weight.numel() == 1:
        return True
    is_parameter = roles is not None and name not in roles.factors
    reals = planes(weight)
    if weight.ndim < 2 and reals.numel() < SMALL and bool((reals == reals.to(torch.float16)).all()):
        return False  # a norm of ones, a bias of zeros: 16 bits keep them, and tuning may change them
    if not (is_parameter and weight.ndim > 1) and _has_few_values(reals, masked=roles is None):
        return True
    return not (roles is not None and name in roles.trained) and is_constant(reals)


def _is_float(weight: Tensor) -> bool:
    return weight.dtype in REAL_DTYPES or weight.is_complex()


def _is_vector(weight: Tensor) -> bool:
    return sum(size > 1 for size in weight.shape) < 2


def _is_relative(name: str) -> bool:
    """Return whether the name is that of a parameter (norm, bias, gain) whose relative error counts."""
    last = _last_part(name)
    return last in _RELATIVE_SCALES or bool(_RELATIVE & set(re.split(r"[_\d]+", last.lower())))


def _last_part(name: str) -> str:
    return re.split("[./]", name)[-1]  # "/" in the names of a nested checkpoint's tensors (birdie.checkpoints.pytree)


def _counts(weight: Tensor) -> bool:
    """Return whether the values of a vector only rise or only fall, as frequencies and positions do."""
    steps = planes(weight).flatten().double().diff()
    return bool((steps > 0).all() or (steps < 0).all())


def _has_few_values(weight: Tensor, *, masked: bool) -> bool:
    """Return whether floats have few different values, or are integers.

    Args:
        weight: real floats.
        masked: whether 0 and −inf together are such values as well, as in a causal mask; else all must be finite.
    """
    few = FEW_OF_LARGE if weight.numel() >= LARGE else FEW
    sample = set(weight.reshape(-1)[: 2 * few].tolist()) if weight.is_contiguous() else set()
    if len(sample) > few and not all(value.is_integer() for value in sample):  # most weights, without a sort
        return False
    integers, seen = True, torch.empty(0, dtype=torch.float64, device="cpu")
    for part in parts(weight):
        flat = part.reshape(-1)
        steps = {max(1, flat.numel() // sample) for sample in _SAMPLES} | {1}
        for step in sorted(steps, reverse=True):  # a sample is enough to tell most weights
            values = flat[::step].double()
            integers = integers and bool(((values == values.round()) & (values.abs() <= _EXACT_INTEGERS)).all())
            if len(seen) <= few:
                seen = torch.unique(torch.cat([seen, values]))
            if len(seen) > few and not integers:
                return False
    if integers or bool(seen.isfinite().all()):
        return True
    return masked and len(seen) == 2 and bool((seen == 0).any()) and bool((seen == -torch.inf).any())
