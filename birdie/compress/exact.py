"""Tensors that stay exact, because they are no weights: buffers, masks, frequencies, statistics, tables, counters.

What a tensor is for decides, not how precise 16 bits are: a rotary frequency off by 1/4096 turns the phase at position
8,191 by two radians. A module tells which tensors are buffers; of a state dict names, shapes, dtypes and the number of
different values tell. docs/compress.md has the rule as a table.
"""

import re

import torch
from torch import Tensor

from birdie.compress.small_tensors import SMALL
from birdie.compress.tensors import REAL_DTYPES, has_nonfinite, parts, planes

FEW = 16  # different values up to which a tensor is a mask, a one-hot table or the like; a large one: FEW_OF_LARGE
FEW_OF_LARGE = 4
LARGE = 1 << 16  # elements
_EXACT_INTEGERS = 1 << 24  # beyond, every float32 is one
_SAMPLES = 1 << 6, 1 << 12  # elements of a part that are looked at first
# The last part of the names that torch, torchvision and transformers give to buffers, whatever their shape.
_BUFFERS = {
    *("running_mean", "running_var", "num_batches_tracked", "n_averaged", "inv_freq", "original_inv_freq"),
    *("cos_cached", "sin_cached", "weight_u", "weight_v", "_u", "_v", "weight_mask", "bias_mask", "masked_bias"),
    *("attn_mask", "causal_mask", "position_ids", "token_type_ids", "freqs_cis"),
}
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


def is_exact(name: str, weight: Tensor, *, is_buffer: bool | None, doubles: bool = False) -> bool:
    """Return whether a tensor of floats must keep every bit; integers and booleans are stored losslessly anyway.

    Args:
        name: in the state dict.
        weight: the tensor.
        is_buffer: whether a module has it as a buffer; None: a state dict alone does not tell.
        doubles: whether all matrices of the model are float64, which then tells nothing about one of them.
    """
    if not (weight.dtype in REAL_DTYPES or weight.is_complex()) or not weight.numel():
        return False
    if is_buffer:
        return True
    if _is_no_weight(name, weight, doubles):
        return not has_nonfinite(weight)  # NaN in a tensor that is not known to be a buffer is refused
    weight = planes(weight)
    if weight.ndim < 2 and weight.numel() < SMALL and bool((weight == weight.to(torch.float16)).all()):
        return False  # a norm of ones, a bias of zeros: 16 bits keep them, and a refit may tune them
    if is_buffer is False and weight.ndim > 1:
        return False  # the module says that it is a parameter: a matrix that begins at zero will be trained
    return _has_few_values(weight, masked=is_buffer is None)


def _is_no_weight(name: str, weight: Tensor, doubles: bool) -> bool:
    if _last_part(name) in _BUFFERS or weight.numel() == 1:
        return True
    if weight.numel() >= SMALL:
        return False
    is_vector = sum(size > 1 for size in weight.shape) < 2
    if weight.dtype in (torch.float64, torch.complex128):
        return is_vector or not doubles
    return is_vector and not _is_relative(name)


def _is_relative(name: str) -> bool:
    """Return whether the name is that of a parameter (norm, bias, gain) whose relative error counts."""
    last = _last_part(name)
    if _ABSOLUTE & _words(name):
        return False
    return last in _RELATIVE_SCALES or bool(_RELATIVE & _words(last))


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
