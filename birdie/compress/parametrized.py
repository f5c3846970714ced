"""Weights that a module computes from others (`torch.nn.utils.parametrize`): which of these are stored precisely.

A parametrization may be any function of its parameters and buffers, so nothing but running it tells what an error of
one of them does to the weight. Rounded to eight bits, the two parts of a weight norm change it as much as its own
rounding does; the exponents and reflections of an orthogonal weight change it several times as much, and stay exact.
Its `base`, a buffer by which the result is multiplied, is as good as a weight.

An orthogonal weight may be written with any other base: a weight W is W times the exponential of zero. So without
calibration the weight itself becomes the base (`right_inverse`, as assigning it does), and one matrix is stored:

    base · exp(original) = W · exp(0)
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from birdie.compress.tensors import REAL_DTYPES
from birdie.system.settings import kept_settings

_FEW = 4  # different values of a parameter that holds nothing, such as a unit matrix
_SAME = 1e-4  # relative difference of two ways to compute a weight
_DELICATE = 2.0  # times the change of a weight by its own rounding


@dataclass(frozen=True, slots=True)
class Parametrized:
    """Tensors of a module's parametrizations."""

    rebased: dict[str, Tensor] = field(default_factory=dict)  # name → other values that give the same weight
    # names of parameters whose rounding changes a weight far more than its own
    exact: set[str] = field(default_factory=set)
    factors: set[str] = field(default_factory=set)  # names of buffers whose rounding does not

    @classmethod
    def of(cls, module: nn.Module, *, rebase: bool) -> "Parametrized":
        """Return what is known of a module's parametrizations; `rebase` looks for other values with less in them."""
        parametrized, twins = cls(), dict[int, _ParametrizationChain]()
        for prefix, chain in module.named_modules(remove_duplicate=False):
            if isinstance(chain, ParametrizationList) and _can_run(chain):
                if id(chain) not in twins:
                    twins[id(chain)] = _ParametrizationChain.of(chain, rebase)
                known = twins[id(chain)]
                parametrized.rebased.update({f"{prefix}.{name}": tensor for name, tensor in known.rebased.items()})
                parametrized.exact.update(f"{prefix}.{name}" for name in known.exact)
                parametrized.factors.update(f"{prefix}.{name}" for name in known.factors)
        return parametrized


@dataclass(frozen=True, slots=True)
class _ParametrizationChain(Parametrized):
    """The same of one weight, by names within its parametrization."""

    @classmethod
    def of(cls, chain: ParametrizationList, rebase: bool) -> "_ParametrizationChain":  # type: ignore[override]
        originals = {name for name, _ in chain.named_parameters(recurse=False)}
        sides = {size for name in originals for size in getattr(chain, name).shape}
        factors = {
            name
            for name, buffer in chain.named_buffers()
            if buffer.ndim > 1 and buffer.dtype in REAL_DTYPES and {*buffer.shape} <= sides
        }
        twin = copy.deepcopy(chain).eval()  # in training a spectral norm takes a step of its power iteration
        with kept_settings(), torch.no_grad():
            weight = twin()
            plain = _difference(_rounded(weight), weight)
            exact = {*originals} if _change(twin, originals, weight) > _DELICATE * plain else set[str]()
            factors = factors if factors and _change(twin, factors, weight) <= _DELICATE * plain else set()
            if rebase and exact and factors and _rebase(twin, weight):
                return cls(dict(twin.state_dict()), exact, factors)
        return cls({}, exact, factors)


def _can_run(chain: ParametrizationList) -> bool:
    if getattr(chain[0], "folds", False):  # stored under the plain name of the weight (birdie.compress.state)
        return False
    return all(tensor.dtype in REAL_DTYPES and not tensor.is_meta for tensor in chain.parameters())


def _rebase(chain: ParametrizationList, weight: Tensor) -> bool:
    """Assign a weight to its parametrization, and return whether that gives it back from fewer numbers."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # a rectangular weight is completed to an orthogonal matrix at random
            chain.right_inverse(weight)
    except (NotImplementedError, RuntimeError, ValueError):  # it has no inverse
        return False
    originals = chain.parameters(recurse=False)
    return _difference(chain(), weight) < _SAME and all(len(torch.unique(original)) <= _FEW for original in originals)


def _change(chain: ParametrizationList, names: set[str], weight: Tensor) -> float:
    """Return the relative change of the weight by eight bits in place of these tensors of its parametrization."""
    rounded = copy.deepcopy(chain)
    state: Mapping[str, Tensor] = rounded.state_dict()
    for name in names:
        state[name].copy_(_rounded(state[name]))
    return _difference(rounded(), weight)


def _rounded(tensor: Tensor) -> Tensor:
    rows = tensor.flatten(1) if tensor.ndim > 1 else tensor[None]
    scale = rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny) / 127
    return ((rows / scale).round() * scale).reshape(tensor.shape) if rows.numel() else tensor


def _difference(tensor: Tensor, other: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(other.double()))
    return float(torch.linalg.vector_norm(tensor.double() - other.double())) / norm if norm else 0.0
