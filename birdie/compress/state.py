"""State of a model as name → tensor: checks and tied tensors."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from birdie.compress.coding import Quantized, decode
from birdie.compress.exact import Roles, exact_tensors
from birdie.compress.parametrized import Parametrized
from birdie.compress.scheme import Scheme
from birdie.compress.scripted import require_weights
from birdie.compress.tensors import FORMATS
from birdie.errors import WeightsError
from birdie.system.device import dtype_name

FORMS = "_birdie_forms"  # attribute of a module: its parameter → its `StoredForm`, if it is trained in that
EXTRA_STATE = "_extra_state"  # the last part of the name under which torch has what get_extra_state returns
# A view may have more elements than its memory (`expand`); beyond these limits it is refused, as a small file is that
# declares a huge tensor.
MIN_VIEW_LIMIT = 1 << 30
VIEW_PER_BYTE = 64


@dataclass(frozen=True, slots=True)
class ModelState:
    """The tensors of a model, before encoding.

    Attributes:
        by_name: name → tensor, sorted by name, tied tensors under each of their names.
        tensors: the same, tied tensors only under the first of their names.
        ties: second name → first name.
        stored_as: name → scheme of tensors that were trained in the form in which they are stored (`birdie.spectral`,
            `birdie.fine_tune`).
        exact: names of floats that are no weights and keep every bit (birdie.compress.exact): buffers, masks, tables.
        doubtful: names of vectors that may be such tables, and are exact where that costs little.
        embeddings: names of weights of `nn.Embedding`; of a state dict alone nothing is known.
    """

    by_name: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    ties: Mapping[str, str]
    stored_as: Mapping[str, Scheme]
    exact: frozenset[str] = frozenset()
    doubtful: frozenset[str] = frozenset()
    embeddings: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, model: nn.Module | Mapping[str, Tensor], *, rebase: bool = False, roles: Roles | None = None
    ) -> "ModelState":
        """Return the state of a module or a state dict; nothing is copied.

        Args:
            model: the module or state dict.
            rebase: whether parametrized weights may be written in another way (birdie.compress.parametrized).
            roles: of the tensors of a state dict, if something else than a module tells them.
        """
        known = Parametrized.of(model, rebase=rebase) if isinstance(model, nn.Module) else Parametrized()
        by_name = named_tensors(model) | known.rebased
        tensors, ties = without_ties(by_name)
        schemes: dict[int, Scheme] = {}  # of tied weights there is one
        stored_as = {}
        for name, form, weight in _trained(model) if isinstance(model, nn.Module) else ():
            if id(form) not in schemes:
                schemes[id(form)] = form.stored_as(name, weight)
            stored_as[name] = schemes[id(form)]
        embeddings = set() if roles is None else {*roles.embeddings}
        if isinstance(model, nn.Module):
            embeddings = {ties.get(name, name) for name in embeddings_of(model) & by_name.keys()}
            roles = Roles.of(model, ties, known.factors)
        ordered = [name for name in (by_name if isinstance(model, nn.Module) else model) if name in tensors]
        exact = exact_tensors({name: tensors[name] for name in ordered}, roles)
        kept = exact.names | known.exact
        return cls(
            by_name,
            tensors,
            ties,
            stored_as,
            kept - stored_as.keys(),
            exact.doubtful - kept - stored_as.keys(),
            frozenset(embeddings),
        )


def embeddings_of(module: nn.Module) -> set[str]:
    """Return the names of the weights of `nn.Embedding`, all names of tied ones."""
    parts = module.named_modules(remove_duplicate=False)
    return {f"{name}.weight".lstrip(".") for name, part in parts if isinstance(part, nn.Embedding)}


@dataclass(frozen=True, slots=True, weakref_slot=True)
class EncodedState:
    """The tensors of a model after encoding."""

    tensors: Mapping[str, Quantized]  # name → encoded tensor, coded or not, tied ones once
    ties: Mapping[str, str]  # second name → first name

    def decode(self, workers: int | None = None) -> dict[str, Tensor]:
        """Return the tensors that a file of this state decodes to, tied ones under each of their names."""
        with ThreadPoolExecutor(workers) as pool:
            decoded = dict(zip(self.tensors, pool.map(decode, self.tensors.values()), strict=True))
        return decoded | {name: decoded[first] for name, first in self.ties.items()}


def named_tensors(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of `model`, sorted by name."""
    state: Any = plain_state(model) if isinstance(model, nn.Module) else model
    if isinstance(model, nn.Module):
        require_weights(model, state)
    if not isinstance(state, Mapping):
        raise WeightsError(
            f"the model is a {type(state).__name__}, not a module or a dict of tensors; give one of the two"
        )
    state = {name: item for name, item in state.items() if not is_extra(name, item, isinstance(model, nn.Module))}
    for name, weight in state.items():
        if not isinstance(name, str) or not isinstance(weight, Tensor):
            kind = type(weight).__name__
            raise WeightsError(
                f"item {name!r} is a {kind}, not a named tensor; give a flat dict of tensors (a state_dict), "
                "or keep nested values losslessly with birdie.save_object"
            )
        if not is_text(name):
            raise WeightsError(f"tensor {name!r} cannot be stored under a name that is not text; rename it")
        problem = problem_of(weight)
        if problem and is_lazy(weight):
            raise WeightsError(f"tensor {name!r} ({problem}) cannot be stored; run the module once on a batch first")
        if problem:
            raise unstorable(name, problem)
    return {name: state[name] for name in sorted(state)}


def keys_of(model: nn.Module | Mapping[str, Any]) -> list[str]:
    """Return the names of tensors and extra states in the order of the state dict."""
    return list(plain_state(model) if isinstance(model, nn.Module) else model)


def is_extra(name: Any, item: Any, of_module: bool) -> bool:
    """Return whether an item of a state dict is extra state of a module (`get_extra_state`), and no weight.

    Args:
        of_module: it is that of a module, so whatever is no tensor is extra state.
    """
    named = isinstance(name, str) and name.rpartition(".")[2] == EXTRA_STATE
    return named or (of_module and not isinstance(item, Tensor))


def folded(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return plain name → (owner, attribute) of weights that are trained in a form other than that of the state dict.

    These are parametrizations (`torch.nn.utils.parametrize`) whose first step has `folds = True` and a method
    `stored_as(name, original)`, which returns the scheme that stores the trained form.
    """
    weights = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        chains = getattr(owner, "parametrizations", None)
        if isinstance(chains, nn.ModuleDict):
            for attribute, chain in chains.items():
                if getattr(chain[0], "folds", False):  # type: ignore[index]
                    weights[f"{prefix}.{attribute}" if prefix else attribute] = (owner, attribute)
    return weights


def _trained(module: nn.Module) -> Iterator[tuple[str, Any, Tensor]]:
    """Yield (name, form, parameter) of weights that are trained in the form in which they are stored.

    The form has a method `stored_as(name, parameter)`, which returns the scheme that stores it.
    """
    for name, (owner, attribute) in folded(module).items():
        chain: Any = owner.parametrizations[attribute]  # type: ignore[index]
        yield name, chain[0], chain.original
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for attribute, form in vars(owner).get(FORMS, {}).items():
            weight = owner._parameters.get(attribute)
            if weight is not None and form.encoded is not None:
                yield f"{prefix}.{attribute}" if prefix else attribute, form, weight


def plain_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's state dict, `folded` weights under their plain names; tied weights share their memory."""
    state: dict[str, Tensor] = module.state_dict()
    weights: dict[int, Tensor] = {}
    for name, (owner, attribute) in folded(module).items():
        prefix = name.removesuffix(attribute) + f"parametrizations.{attribute}."
        chain = owner.parametrizations[attribute]  # type: ignore[index]
        if id(chain) not in weights:
            weights[id(chain)] = getattr(owner, attribute).detach()
        plain = name, weights[id(chain)]
        state = dict(plain if item[0].startswith(prefix) else item for item in state.items())
    return state


def is_text(name: str) -> bool:
    """Return whether a file can hold the name: it has no NUL and no unpaired surrogate."""
    return "\0" not in name and not any("\ud800" <= letter <= "\udfff" for letter in name)


def problem_of(weight: Tensor) -> str | None:
    """Return why `weight` cannot be stored, or None."""
    problem = lacks_elements(weight)
    if problem or not weight.numel():
        return problem
    stored = weight.untyped_storage().nbytes()
    if weight.nbytes > max(MIN_VIEW_LIMIT, VIEW_PER_BYTE * stored):
        return f"{tuple(weight.shape)}, which repeats {stored:,} bytes of memory up to {weight.nbytes:,}"
    return None


def lacks_elements(weight: Tensor) -> str | None:
    """Return why `weight` is no tensor of plain elements in memory, or None."""
    if is_lazy(weight):
        return "lazy, without a shape until its module has run"
    if weight.is_nested:
        return "nested"
    if weight.layout is not torch.strided or weight.is_quantized or weight.dtype not in FORMATS:
        return f"{dtype_name(weight.dtype)}, {weight.layout}"
    try:
        storage = weight.untyped_storage()
        backed = storage.device.type != "meta" and storage.data_ptr()  # asking a fake tensor for it is a warning
        stored = storage.nbytes() if backed else 0
    except (RuntimeError, NotImplementedError):  # subclasses that only wrap other tensors
        return f"a {type(weight).__name__} without memory of its own"
    if (weight.numel() and not stored) or weight.is_meta:
        return f"a {'meta' if weight.is_meta else type(weight).__name__} tensor without data"
    return None


def unstorable(name: str, problem: str) -> WeightsError:
    """Return the error of a tensor that cannot be stored, with the ways out."""
    return WeightsError(
        f"tensor {name!r} ({problem}) cannot be stored; make it dense and of a plain dtype, for example by "
        "dequantize(), to_dense() or full_tensor()"
    )


def without_ties(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (tensors by their first name, second name → first name); tied means the same view of the same memory."""
    first: dict[tuple[object, ...], str] = {}
    ties: dict[str, str] = {}
    for name, weight in state.items():
        if weight.numel():
            memory = (weight.device, weight.untyped_storage().data_ptr(), weight.storage_offset())
            view = (tuple(weight.shape), weight.stride(), weight.dtype, weight.is_conj(), weight.is_neg())
            target = first.setdefault((*memory, *view), name)
            if target != name:
                ties[name] = target
    return {name: weight for name, weight in state.items() if name not in ties}, ties


def moved(weight: Tensor, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    """Return `weight` on `device`, cast to `dtype` if it is floating."""
    return weight.to(device=device, dtype=dtype if weight.is_floating_point() else None)
