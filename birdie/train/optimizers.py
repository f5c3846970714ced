"""Optimizer groups, and the pair of optimizers, Muon for matrices and AdamW for all else, as one.

A model declares the group of each parameter (`parameter_groups`); of any other module, matrices go to Muon, embeddings
and the rest to AdamW. Every trainable parameter must be in exactly one group: a parameter without an optimizer stays at
its initial value without any message, which has cost whole runs.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from birdie.errors import ConfigError, WeightsError
from birdie.runtime.distributed import World
from birdie.runtime.nvtx import nvtx_range
from birdie.train.banks import make_banks
from birdie.train.muon import STATE, load_into
from birdie.train.parallel_muon import ParallelMuon, Reduction
from birdie.train.protocols import DeclaresGroups
from birdie.train.settings import OptimizerSettings

GROUPS = ("matrices", "embedding", "head", "scalars")
"""Matrices are Muon's; the others are AdamW's, each with a learning rate and a weight decay of its own."""


STATE_SHAPES: Mapping[str, Callable[[torch.Size], torch.Size]] = {
    **dict.fromkeys(("momentum_buffer", "exp_avg", "exp_avg_sq"), lambda shape: shape),
    "row_square": lambda shape: torch.Size((*shape[:-1], 1)),
    "step": lambda _: torch.Size(()),
}
"""Shape of each tensor of a parameter's optimizer state, as a function of the shape of the parameter."""

_MUON, _ADAM = STATE, ("step", "exp_avg", "exp_avg_sq")
_SIGNED = ("momentum_buffer", "exp_avg")

Groups = dict[str, dict[str, nn.Parameter]]
"""Parameters by group and name."""


def split_parameters(model: nn.Module) -> Groups:
    """Return the trainable parameters of `model` by group and name; groups without members are left out."""
    declared = model.parameter_groups() if isinstance(model, DeclaresGroups) else _default_groups(model)
    groups: Groups = {group: {} for group in GROUPS}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        group = declared.get(name)
        if group not in groups:
            where = "none" if group is None else f"the unknown group {group!r}"
            raise ConfigError(
                f"parameter {name!r} of shape {tuple(p.shape)} must be in exactly one optimizer group "
                f"({', '.join(GROUPS)}), but is in {where}; declare its group where the module is defined, or freeze it"
            )
        groups[group][name] = p
    return {group: members for group, members in groups.items() if members}


def _default_groups(model: nn.Module) -> dict[str, str]:
    """Return groups for a model that declares none: embeddings, other matrices, and everything else."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}

    def group(p: nn.Parameter) -> str:
        if id(p) in embeddings:
            return "embedding"
        return "matrices" if p.ndim == 2 else "scalars"

    return {name: group(p) for name, p in model.named_parameters()}


class Optimizers:
    """Muon for the matrices and AdamW for all else, with one schedule for both.

    Attributes:
        groups: the parameters by group and name.
        rates: learning rate of each group before the schedule.
        decays: weight decay of each group before the schedule.
        parameters: all parameters, in a fixed order.
        banks: that hold the matrices.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: OptimizerSettings,
        *,
        newton_schulz_dtype: torch.dtype,
        world: World,
    ) -> None:
        self.world = world
        self.groups = split_parameters(model)
        embed_lr = settings.embed_lr if "head" in self.groups else settings.tied_embed_lr
        rates = {
            "matrices": settings.matrix_lr,
            "embedding": embed_lr,
            "head": settings.head_lr,
            "scalars": settings.scalar_lr,
        }
        decay, embed_decay = settings.adam_weight_decay, settings.embed_weight_decay
        decays = {
            "matrices": settings.muon_weight_decay,
            "embedding": decay if embed_decay is None else embed_decay,
            "head": decay,
            "scalars": decay,
        }
        self.rates = {group: rates[group] for group in self.groups}
        self.decays = {group: decays[group] for group in self.groups}
        self.parameters = [p for members in self.groups.values() for p in members.values()]
        self.banks = make_banks(self.groups.get("matrices", {}))
        self._limit = settings.grad_clip_norm
        self._muon: ParallelMuon | None = None
        if self.banks:
            self._muon = ParallelMuon(
                self.banks,
                settings.matrix_lr,
                world=world,
                nesterov=settings.muon_nesterov,
                steps=settings.muon_backend_steps,
                dtype=newton_schulz_dtype,
                coefficients=settings.muon_coefficients,
                row_normalize=settings.muon_row_normalize,
                beta2=settings.muon_beta2,
            )
        adam_groups = {group: members for group, members in self.groups.items() if group != "matrices"}
        self._adam_parameters = {name: p for members in adam_groups.values() for name, p in members.items()}
        self._adam: torch.optim.AdamW | None = None
        self._held: Tensor | None = None  # rates on the device: lr and decay of each group, then the momentum
        self._held_decays: dict[str, Tensor] = {}
        if adam_groups:
            self._adam = torch.optim.AdamW(
                [
                    {"params": list(members.values()), "lr": self.rates[group], "name": group}
                    for group, members in adam_groups.items()
                ],
                betas=(settings.beta1, settings.beta2),
                eps=settings.adam_eps,
                weight_decay=0.0,
                fused=True,
            )

    def step(
        self,
        loss: Tensor,
        lr_multiplier: float,
        momentum: float,
        *,
        decay_multiplier: float = 1.0,
        check: Callable[[float, float], None] = lambda _loss, _norm: None,
    ) -> tuple[float, float]:
        """Update every parameter once, from the gradient that is the sum of the ranks' gradients.

        Clipping comes after the reduction, so that it does not depend on the number of ranks. It needs the complete
        gradient before the first momentum update, which gives up some overlap of communication and computation.

        Args:
            loss: this rank's share of the loss, 0-d.
            lr_multiplier: factor on all learning rates.
            momentum: of Muon.
            decay_multiplier: factor on all weight decays.
            check: called with (loss, gradient norm) before any weight changes; may raise.

        Returns:
            The loss, and the norm of the gradient of all parameters before clipping.
        """
        self.schedule(lr_multiplier, momentum, decay_multiplier)
        totals: list[tuple[float, float]] = []
        reduction = Reduction(self._muon, self._adam_parameters.values(), loss, self.world)

        def read_and_check() -> None:
            loss, norm = reduction.totals(self._limit).tolist()  # one transfer for both
            totals.append((loss, norm))
            check(loss, norm)

        def update_others() -> None:
            if not totals:
                read_and_check()
            self._update_others()

        if self._limit:  # the clipping factor is needed before Muon begins
            read_and_check()
        if self._muon is None:
            update_others()
        else:
            self._muon.finish(meanwhile=update_others)
        return totals[0]

    def schedule(self, lr_multiplier: float, momentum: float, decay_multiplier: float) -> None:
        """Set learning rates, momentum and weight decays of the next step."""
        groups = self._scheduled_groups()
        values = [(self.rates[name] * lr_multiplier, self.decays[name] * decay_multiplier) for name, _ in groups]
        if self._held is not None:
            self._held.copy_(torch.tensor([*(value for pair in values for value in pair), momentum]))
            return
        for (name, group), (rate, decay) in zip(groups, values, strict=True):
            group["lr"], group["weight_decay"] = rate, decay
            if name == "matrices":
                group["momentum"] = momentum

    def _scheduled_groups(self) -> list[tuple[str, dict[str, Any]]]:
        """Return (name, parameter group of torch) of all groups."""
        adam = [] if self._adam is None else [(group["name"], group) for group in self._adam.param_groups]
        return adam if self._muon is None else [*adam, ("matrices", self._muon.settings)]

    def hold_rates(self, device: torch.device) -> None:
        """From now on keep learning rates, decays and momentum on `device`, where a CUDA graph reads them.

        Steps are then `schedule`, `totals` and `update`; only `schedule` transfers anything.
        """
        groups = self._scheduled_groups()
        self._held = torch.zeros(2 * len(groups) + 1, device=device)
        for number, (name, group) in enumerate(groups):
            group["lr"], group["weight_decay"] = self._held[2 * number], self._held[2 * number + 1]
            if name == "matrices":
                group["momentum"] = self._held[-1]
            else:  # torch's kernel takes no tensor for the decay: `update` applies it
                self._held_decays[name], group["weight_decay"] = group["weight_decay"], 0.0
                group["capturable"] = device.type == "cuda"

    def totals(self, loss: Tensor) -> Tensor:
        """Reduce and clip the gradient; return [loss, norm of the gradient before clipping] on the device."""
        return Reduction(self._muon, self._adam_parameters.values(), loss, self.world).totals(self._limit)

    def update(self) -> None:
        """Update every parameter from the gradient that `totals` left, by the rates of `hold_rates`."""
        if self._muon is not None:
            self._muon.finish()
        self._update_others()

    @torch.no_grad()
    def _update_others(self) -> None:
        if self._adam is None:
            return
        with nvtx_range("optimizer/adam"):
            for group in self._adam.param_groups:
                if (decay := self._held_decays.get(group["name"])) is not None:
                    decayed: list[Tensor] = [p for p in group["params"] if p.grad is not None]
                    torch._foreach_mul_(decayed, 1 - group["lr"] * decay)
            self._adam.step()

    def state_tensors(self) -> list[Tensor]:
        """Return all tensors of this rank's state, not copied, in an order that steps do not change."""
        optimizers: list[torch.optim.Optimizer] = [o for o in (self._muon, self._adam) if o is not None]
        return [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for bank in self.banks:
            bank.zero_grad()
        for p in self._adam_parameters.values():
            p.grad = None

    def full_state(self) -> dict[str, Tensor]:
        """Return copies of all state by "parameter/tensor", Muon's gathered from all ranks. Every rank must call it."""
        state = self._adam_state()
        if self._muon is not None:
            for name, key, value in self._muon.full_state():
                state[f"{name}/{key}"] = value.detach().clone()
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace all state by `state`, which `full_state` returned on any number of ranks; zero is what is not in it.

        Whoever reads it from a file has called `require_state`.
        """
        if self._muon is not None:
            self._muon.load_state(lambda name, key: state.get(f"{name}/{key}"))
        if self._adam is not None:
            for kept in self._adam.state.values():  # in place: graphs hold these tensors
                for tensor in kept.values():
                    tensor.zero_()
            for key, value in state.items():
                name, _, entry = key.rpartition("/")
                if name in self._adam_parameters:
                    p = self._adam_parameters[name]
                    load_into(self._adam.state[p], entry, value, p.device)

    def _adam_state(self) -> dict[str, Tensor]:
        """Return the state of all parameters or, before the first step, of none."""
        if self._adam is None or not self._adam.state:
            return {}
        return {
            f"{name}/{key}": value.detach().clone()
            for name, p in self._adam_parameters.items()
            for key, value in (self._adam.state.get(p) or _first_state(p)).items()
        }


def _first_state(p: nn.Parameter) -> dict[str, Tensor]:
    """Return AdamW's state of a parameter that had no gradient yet."""
    step = torch.zeros((), dtype=torch.float32, device=p.device)
    return {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


def require_state(groups: Groups, state: Mapping[str, Tensor], step: int, *, row_square: bool, every: bool) -> None:
    """Check that `state` is the optimizer state of these parameters after `step` steps.

    Args:
        groups: the parameters, from `split_parameters`.
        state: of `Optimizers.full_state`.
        step: finished steps.
        row_square: whether the state has that tensor of Muon's.
        every: whether parameters have a state that had no gradient yet.
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
        present = [entry for entry in (_MUON if matrix else _ADAM) if f"{name}/{entry}" in state]
        missing = [entry for entry in needed if entry not in present]
        if missing and (matrix or every or present or not state):
            raise WeightsError(f"the optimizer state of {name!r} lacks {missing[0]} after {step} steps")
