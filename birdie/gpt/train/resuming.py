"""Check of a checkpoint before a run resumes from it, and a report of the settings that have changed since.

The digests of a checkpoint say that its files are those that were written, and whoever can write files can write
digests. So every tensor is compared with the model, and states are only accepted that a run can leave.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from birdie.errors import WeightsError
from birdie.gpt.train.average import TERMS
from birdie.gpt.train.bandit import Bandit
from birdie.gpt.train.loop import tensors_of
from birdie.gpt.train.muon import STATE
from birdie.gpt.train.optimizers import Groups, split_parameters
from birdie.gpt.train.settings import TrainingTables
from birdie.gpt.train.training_checkpoint import TrainingCheckpoint

STATE_SHAPES: Mapping[str, Callable[[torch.Size], torch.Size]] = {
    **dict.fromkeys(("momentum_buffer", "exp_avg", "exp_avg_sq"), lambda shape: shape),
    "row_square": lambda shape: torch.Size((*shape[:-1], 1)),
    "step": lambda _: torch.Size(()),
}
"""Shape of each tensor of a parameter's optimizer state, as a function of the shape of the parameter."""

_MUON, _ADAM = STATE, ("step", "exp_avg", "exp_avg_sq")
_SIGNED = ("momentum_buffer", "exp_avg")


def require_resumable(checkpoint: TrainingCheckpoint, model: nn.Module, tables: TrainingTables) -> None:
    """Check that a run can resume from `checkpoint`; the position of the loader is left to the caller.

    Args:
        checkpoint: read from a file.
        model: of the run, with any weights.
        tables: settings of the run; what has changed since the checkpoint begins anew.

    Raises:
        WeightsError: it cannot.
    """
    averaging, bandit = tables.average, tables.bandit
    _require_weights(checkpoint.weights, dict(model.named_parameters()), dict(model.named_buffers()))
    square = checkpoint.settings.get("muon_beta2", tables.optimizer.muon_beta2)
    require_optimizer(split_parameters(model), checkpoint.optimizer, checkpoint.step, row_square=bool(square))
    require_rng_state(checkpoint.rng)
    if checkpoint.average:
        require_average(checkpoint.average, tensors_of(model), checkpoint.step)
    elif averaging.kind != "none" and checkpoint.settings.get("average.kind") == averaging.kind:
        raise WeightsError(f"its {averaging.kind.upper()} of the weights is missing")
    if bandit.every:
        if not checkpoint.bandit and checkpoint.settings.get("bandit.every"):
            raise WeightsError("the state of its learning-rate bandit is missing")
        Bandit(bandit, 0).load_state(checkpoint.bandit)


def changes(checkpoint: TrainingCheckpoint, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line about each of the settings in effect that differs from the checkpoint's, and of a new average."""
    for name, value in settings.items():
        if name in checkpoint.settings and checkpoint.settings[name] != value:
            yield f"resuming with {name} = {value}; the checkpoint was trained with {checkpoint.settings[name]}"
    kind = settings["average.kind"]
    if kind != "none" and f"{kind}/{TERMS}" not in checkpoint.average:
        yield f"the checkpoint has no {kind.upper()} of weights; the average begins at its step"


def _require_weights(saved: dict[str, Tensor], parameters: dict[str, nn.Parameter], buffers: dict[str, Tensor]) -> None:
    tensors = {**parameters, **buffers}
    if different := sorted(tensors.keys() ^ saved.keys()):
        raise WeightsError(
            f"model and checkpoint differ in tensor {different[0]!r}; resume with the model that was saved"
        )
    for name, tensor in tensors.items():
        weight = saved[name]
        if weight.shape != tensor.shape or weight.dtype != tensor.dtype:
            raise WeightsError(
                f"tensor {name!r} is {weight.dtype} of shape {tuple(weight.shape)} in the checkpoint and "
                f"{tensor.dtype} of shape {tuple(tensor.shape)} in the model; resume with the model that was saved"
            )
        if name in parameters and not bool(weight.isfinite().all()):
            raise WeightsError(f"tensor {name!r} of the checkpoint has values that are not finite")


def require_rng_state(states: Mapping[str, Tensor]) -> None:
    """Check that `set_rng_state` can restore `states`."""
    if "cpu" not in states or not states.keys() <= {"cpu", "cuda"}:
        raise WeightsError(f"it has random states of {sorted(states)}, not of cpu and cuda")
    for name, state in states.items():
        if state.dtype != torch.uint8 or state.ndim != 1:
            raise WeightsError(f"its random state of {name} is {state.dtype} of shape {tuple(state.shape)}, not bytes")
        if name == "cpu" or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            try:
                torch.Generator(name).set_state(state)
            except (RuntimeError, TypeError) as error:
                reason = str(error).splitlines()[0]
                raise WeightsError(f"its random state of {name} is none of a generator ({reason})") from error


def require_optimizer(groups: Groups, state: Mapping[str, Tensor], step: int, *, row_square: bool) -> None:
    """Check that `state` is the optimizer state of these parameters after `step` steps.

    Args:
        groups: the parameters, from `split_parameters`.
        state: of `Optimizers.full_state`.
        row_square: whether the state has that tensor of Muon's.
    """
    parameters = {name: p for members in groups.values() for name, p in members.items()}
    for key, value in state.items():
        name, _, entry = key.rpartition("/")
        if name not in parameters or entry not in (_MUON if name in groups.get("matrices", {}) else _ADAM):
            raise WeightsError(
                f"optimizer tensor {key!r} belongs to no parameter of this model; resume with the model that was saved"
            )
        p = parameters[name]
        expected = STATE_SHAPES[entry](p.shape)
        if value.shape != expected:
            raise WeightsError(
                f"optimizer tensor {key!r} has shape {tuple(value.shape)}, but a parameter of shape "
                f"{tuple(p.shape)} needs {tuple(expected)}; resume with the model that was saved"
            )
        if value.dtype not in (p.dtype, torch.float32):
            raise WeightsError(f"optimizer tensor {key!r} is {value.dtype}, not {p.dtype}")
        if not bool(torch.isfinite(value).all()) or (entry not in _SIGNED and bool((value < 0).any())):
            raise WeightsError(f"optimizer tensor {key!r} has values that no optimizer computes")
        if entry == "step" and value.item() > step:
            raise WeightsError(f"optimizer tensor {key!r} is {value.item():g} after {step} steps")
    for name in parameters:
        matrix = name in groups.get("matrices", {})
        needed = (_MUON[: 1 + row_square] if matrix else _ADAM) if step else ()
        if missing := [entry for entry in needed if f"{name}/{entry}" not in state]:
            raise WeightsError(f"the optimizer state of {name!r} lacks {missing[0]} after {step} steps")


def require_average(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor], step: int) -> None:
    """Check that `state` is the average of some kind of these weights after `step` steps.

    Args:
        state: of `Average.state`.
        tensors: parameters and buffers of the model by name.
    """
    kinds = {key.partition("/")[0] for key in state}
    kind = next(iter(kinds), "")
    terms = state.get(f"{kind}/{TERMS}")
    if len(kinds) != 1 or terms is None or terms.shape or terms.dtype != torch.int64 or not 0 <= int(terms) <= step:
        raise WeightsError(f"its average of the weights has no number of terms from 0 to {step}")
    slots: dict[str, set[str]] = {}
    for key, value in state.items():
        if key == f"{kind}/{TERMS}":
            continue
        _, number, name = [*key.split("/", 2), "", ""][:3]
        tensor = tensors.get(name)
        if tensor is None or value.shape != tensor.shape or not number.isdecimal():
            raise WeightsError(
                f"the average of {name!r} in the checkpoint does not fit this model; resume with the model that was "
                "saved"
            )
        if not value.is_floating_point() or not bool(torch.isfinite(value).all()):
            raise WeightsError(f"the average of {name!r} in the checkpoint has values that are no average")
        slots.setdefault(number, set()).add(name)
    averaged = {
        name for name, t in tensors.items() if t.is_floating_point() and bool(torch.isfinite(t).all())
    }  # as `Average` chooses them
    count = min(int(terms), len(slots)) if kind == "lawa" else 1
    for number in [*map(str, range(count)), *slots]:
        for name in sorted(averaged ^ slots.get(number, set())):
            raise WeightsError(
                f"the average of {name!r} in the checkpoint does not fit this model; it has other tensors"
            )
    if len(slots) != count:
        raise WeightsError(f"its average of the weights has {len(slots)} copies, not {count}")
