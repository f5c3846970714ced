"""Tensors that stay exact, because they are no weights: buffers, masks, frequencies, statistics, tables, counters.

What a tensor is for decides, not how precise 16 bits are: a rotary frequency off by 1/4096 turns the phase at position
8,191 by two radians. A module tells which tensors are buffers; of a state dict names, shapes, dtypes and the number of
different values tell. A name that tells nothing leaves a vector exact, unless it is as long as a side of a matrix, as
biases and norms are, and neither counts up nor stands where a batch norm has its statistics. docs/compress.md has the
rule as a table.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import groupby, zip_longest

import torch
from torch import Tensor

from birdie.compress.small_tensors import SMALL
from birdie.compress.tensors import REAL_DTYPES, has_nonfinite, parts, planes

FEW = 16  # different values up to which a tensor is a mask, a one-hot table or the like; a large one: FEW_OF_LARGE
FEW_OF_LARGE = 4
LARGE = 1 << 16  # elements
_PACKED = {torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2}  # of quantized matrices
_EXACT_INTEGERS = 1 << 24  # beyond, every float32 is one
_SAMPLES = 1 << 6, 1 << 12  # elements of a part that are looked at first
# The last part of the names that torch, torchvision and transformers give to buffers, whatever their shape.
_BUFFERS = {
    *("running_mean", "running_var", "num_batches_tracked", "n_averaged", "inv_freq", "original_inv_freq"),
    *("cos_cached", "sin_cached", "weight_mask", "bias_mask", "masked_bias"),
    *("attn_mask", "causal_mask", "position_ids", "token_type_ids", "freqs_cis"),
}
_SINGULAR_VECTORS = {"weight_u", "weight_v", "_u", "_v"}  # of spectral norm; weight norm calls its matrices weight_v
# Words of names of vectors whose errors count absolutely, and those of parameters whose errors count relatively.
_ABSOLUTE = {
    *("freq", "freqs", "frequency", "frequencies", "energy", "energies", "atomref", "e0", "shift", "offset", "offsets"),
    *("mean", "means", "std", "stds", "var", "variance", "stats", "statistics", "normalizer", "scaler"),
    *("ids", "index", "indices"),
}
_RELATIVE = {
    *("weight", "weights", "bias", "biases", "gain", "gains", "gamma", "beta", "norm", "ln", "mix", "gate", "lambdas"),
    *("token", "tokens", "embed", "embedding", "embeddings"),
}
_RELATIVE_SCALES = {"attn_scale", "mlp_scale", "layer_scale", "resid_scale"}


def exact_names(
    tensors: Mapping[str, Tensor], buffers: Collection[str] | None, factors: Collection[str] = ()
) -> frozenset[str]:
    """Return the names of tensors of real floats that must keep every bit.

    Args:
        tensors: of a model, in the order of its state dict.
        buffers: names of its buffers; None: a state dict alone does not tell.
        factors: names of buffers that are a part of a weight, or a mask of it.
    """
    floats = (tensor for tensor in tensors.values() if tensor.dtype in REAL_DTYPES or tensor.is_complex())
    matrices = [tensor for tensor in floats if tensor.ndim > 1]
    doubles = {tensor.dtype for tensor in matrices} <= {torch.float64, torch.complex128}
    sides = {size for tensor in matrices if not _is_vector(tensor) for size in tensor.shape[:2]}
    statistics = set(_statistics(tensors)) if buffers is None else set()
    return frozenset(_scales(tensors)) | frozenset(
        name
        for name, tensor in tensors.items()
        if is_exact(
            name,
            tensor,
            is_buffer=None if buffers is None or name in factors else name in buffers,
            doubles=doubles,
            in_layer=tensor.numel() in sides and name not in statistics,
        )
    )


def is_exact(
    name: str, weight: Tensor, *, is_buffer: bool | None, doubles: bool = False, in_layer: bool = False
) -> bool:
    """Return whether a tensor of floats must keep every bit; integers and booleans are stored losslessly anyway.

    Args:
        name: in the state dict.
        weight: the tensor.
        is_buffer: whether a module has it as a buffer; None: a state dict alone does not tell.
        doubles: whether all matrices of the model are float64, which then tells nothing about one of them.
        in_layer: whether a matrix has as many rows or columns as a vector elements, and no batch norm is around it.
    """
    if not (weight.dtype in REAL_DTYPES or weight.is_complex()) or not weight.numel():
        return False
    if is_buffer:
        return True
    if _is_no_weight(name, weight, doubles, in_layer):
        return not bool(weight.isnan().any())  # refused where it is not known to be a buffer; infinite bounds are not
    weight = planes(weight)
    if weight.ndim < 2 and weight.numel() < SMALL and bool((weight == weight.to(torch.float16)).all()):
        return False  # a norm of ones, a bias of zeros: 16 bits keep them, and tuning may change them
    if is_buffer is False and weight.ndim > 1:
        return False  # the module says that it is a parameter: a matrix that begins at zero will be trained
    return _has_few_values(weight, masked=is_buffer is None)


def _scales(tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names of floats beside a larger matrix of a module that is quantized already: scales, zeros, tables.

    Another quantization of the scales (GPTQ, AWQ, bitsandbytes, FP8) would change all weights of a group at once.
    """
    largest: dict[str, int] = {}
    for name, tensor in tensors.items():
        if tensor.dtype in _PACKED and tensor.ndim > 1:
            for owner in (name, name.rpartition(".")[0]):  # bitsandbytes: "q_proj.weight.absmax"
                largest[owner] = max(largest.get(owner, 0), tensor.numel())
    return {
        name
        for name, tensor in tensors.items()
        if tensor.dtype in REAL_DTYPES
        and tensor.numel() < largest.get(name.rpartition(".")[0], 0)
        and not has_nonfinite(tensor)
    }


def _is_no_weight(name: str, weight: Tensor, doubles: bool, in_layer: bool) -> bool:
    last = _last_part(name)
    if last in _BUFFERS or (last in _SINGULAR_VECTORS and weight.ndim < 2) or weight.numel() == 1:
        return True
    if weight.numel() >= SMALL:
        return False
    if weight.dtype in (torch.float64, torch.complex128):
        return _is_vector(weight) or not doubles
    if not _is_vector(weight) or _ABSOLUTE & _words(name):
        return _is_vector(weight)
    return not (_is_relative(name) or (in_layer and not _counts(weight)))


def _is_vector(weight: Tensor) -> bool:
    return sum(size > 1 for size in weight.shape) < 2


def _is_relative(name: str) -> bool:
    """Return whether the name is that of a parameter (norm, bias, gain) whose relative error counts."""
    last = _last_part(name)
    return last in _RELATIVE_SCALES or bool(_RELATIVE & _words(last))


def _counts(weight: Tensor) -> bool:
    """Return whether the values of a vector only rise or only fall, as frequencies and positions do."""
    steps = weight.flatten().double().diff()
    return bool((steps > 0).all() or (steps < 0).all())


def _statistics(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the names of running statistics: gains, shifts, means and variances, or the two before a counter."""
    groups = groupby(tensors.items(), lambda item: len(item[1]) if item[1].ndim == 1 else None)
    runs = [(size, list(items)) for size, items in groups]
    for (size, run), (_, after) in zip_longest(runs, runs[1:], fillvalue=(None, [])):
        counted = bool(after) and after[0][1].ndim == 0 and not after[0][1].is_floating_point()
        for index in range(1, len(run)) if size is not None else ():
            mean, variance = run[index - 1], run[index]
            last = index == len(run) - 1
            fourth = index > 2 and (len(run) - index) % 4 == 1 and bool((variance[1] > 0).all() and (mean[1] < 0).any())
            if fourth or (last and counted):
                yield from (mean[0], variance[0])


def _last_part(name: str) -> str:
    return re.split("[./]", name)[-1]  # "/" in the names of a nested checkpoint's tensors (birdie.artifact.pytree)


def _words(name: str) -> set[str]:
    return set(re.split(r"[./_\d]+", name.lower()))


def _has_few_values(weight: Tensor, *, masked: bool) -> bool:
    """Return whether floats have few different values, or, up to `LARGE` of them, are integers.

    Args:
        weight: real floats.
        masked: whether 0 and −inf together are such values as well, as in a causal mask; else all must be finite.
    """
    few, integers = (FEW_OF_LARGE, False) if weight.numel() >= LARGE else (FEW, True)
    sample = set(weight.reshape(-1)[: 2 * few].tolist()) if weight.is_contiguous() else set()
    if len(sample) > few and not all(value.is_integer() for value in sample):  # most weights, without a sort
        return False
    seen: Tensor | None = None
    for part in parts(weight):
        flat = part.reshape(-1)
        steps = {max(1, flat.numel() // sample) for sample in _SAMPLES} | {1}
        for step in sorted(steps, reverse=True):  # a sample is enough to tell most weights
            values = torch.unique(flat[::step].double())
            integers = integers and bool(((values == values.round()) & (values.abs() <= _EXACT_INTEGERS)).all())
            if len(values) > few and not integers:
                return False
        seen = values if seen is None else torch.unique(torch.cat([seen, values]))
        if len(seen) > few and not integers:
            return False
    if seen is None or bool(seen.isfinite().all()):
        return True
    return masked and len(seen) == 2 and bool((seen == 0).any()) and bool((seen == -torch.inf).any())
