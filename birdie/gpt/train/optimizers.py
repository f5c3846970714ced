"""Optimizer groups, and the pair of optimizers, Muon for matrices and AdamW for all else, as one.

A model declares the group of each parameter (`parameter_groups`); of any other module, matrices go to Muon, embeddings
and the rest to AdamW. Every trainable parameter must be in exactly one group: a parameter without an optimizer stays at
its initial value without any message, which has cost whole runs.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from birdie.errors import ConfigError
from birdie.gpt.train.banks import make_banks
from birdie.gpt.train.muon import load_into
from birdie.gpt.train.parallel_muon import ParallelMuon, Reduction
from birdie.gpt.train.plan import StepPlan
from birdie.gpt.train.settings import OptimizerSettings
from birdie.system.distributed import World
from birdie.system.ranges import named_range

GROUPS = ("matrices", "embedding", "head", "scalars")
"""Matrices are Muon's; the others are AdamW's, each with a learning rate and a weight decay of its own."""


Groups = dict[str, dict[str, nn.Parameter]]
"""Parameters by group and name."""


def split_parameters(model: nn.Module) -> Groups:
    """Return the trainable parameters of `model` by group and name; groups without members are left out."""
    declare: Callable[[], Mapping[str, str]] | None = getattr(model, "parameter_groups", None)
    declared = _default_groups(model) if declare is None else declare()
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
        self.muon: ParallelMuon | None = None
        if self.banks:
            self.muon = ParallelMuon(
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
        self.adam: torch.optim.AdamW | None = None
        if adam_groups:
            self.adam = torch.optim.AdamW(
                [
                    {"params": list(members.values()), "lr": self.rates[group], "name": group}
                    for group, members in adam_groups.items()
                ],
                betas=(settings.beta1, settings.beta2),
                eps=settings.adam_eps,
                weight_decay=0.0,
                fused=True,
            )

    def step(self, loss: Tensor, plan: StepPlan, check: Callable[[float, float], None]) -> tuple[float, float]:
        """Update every parameter once, from the gradient that is the sum of the ranks' gradients.

        Args:
            loss: this rank's share of the loss, 0-d.
            plan: rates, momentum and weight decay of the step.
            check: called with (loss, gradient norm) before any weight changes; may raise.

        Returns:
            The loss, and the norm of the gradient of all parameters before clipping.
        """
        self._set_rates(plan)
        reduction = Reduction(self.muon, self._adam_parameters.values(), loss, self.world)
        # Clipping follows the reduction, so that it does not depend on the number of ranks, and it precedes the first
        # momentum update. Without it, the first bank is orthogonalized while the rest is still being reduced.
        clipped = reduction.totals(self._limit) if self._limit else None
        if self.muon is not None:
            self.muon.begin()
        total, norm = (reduction.totals(0.0) if clipped is None else clipped).tolist()  # one transfer for both
        check(total, norm)
        if self.adam is not None:  # while the first updates of Muon are sent
            with named_range("optimizer/adam"):
                self.adam.step()
        if self.muon is not None:
            self.muon.finish()
        return total, norm

    def _set_rates(self, plan: StepPlan) -> None:
        groups = [] if self.adam is None else [(group["name"], group) for group in self.adam.param_groups]
        if self.muon is not None:
            groups.append(("matrices", self.muon.settings))
        for name, group in groups:
            group["lr"], group["weight_decay"] = self.rates[name] * plan.rate, self.decays[name] * plan.decay
            if name == "matrices":
                group["momentum"] = plan.momentum

    def copy_gradients(self) -> None:
        """Let gradients of AdamW be copies from now on: autograd may take a tensor that a CUDA graph overwrites.

        Muon's have memory of their own, to which autograd adds.
        """
        for p in self._adam_parameters.values():
            p.register_post_accumulate_grad_hook(_copy_gradient)  # type: ignore[no-untyped-call]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for bank in self.banks:
            bank.zero_grad()
        for p in self._adam_parameters.values():
            p.grad = None

    def full_state(self) -> dict[str, Tensor]:
        """Return copies of all state by "parameter/tensor", Muon's gathered from all ranks. Every rank must call it."""
        state = self._adam_state()
        if self.muon is not None:
            for name, key, value in self.muon.full_state():
                state[f"{name}/{key}"] = value.detach().clone()
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace all state by `state`, which `full_state` returned on any number of ranks; zero is what is not in it.

        Whoever reads it from a file has checked it (`birdie.gpt.train.resuming`).
        """
        if self.muon is not None:
            self.muon.load_state(lambda name, key: state.get(f"{name}/{key}"))
        if self.adam is not None:
            for kept in self.adam.state.values():
                for tensor in kept.values():
                    tensor.zero_()
            for key, value in state.items():
                name, _, entry = key.rpartition("/")
                if name in self._adam_parameters:
                    p = self._adam_parameters[name]
                    load_into(self.adam.state[p], entry, value, p.device)

    def _adam_state(self) -> dict[str, Tensor]:
        """Return the state of all parameters or, before the first step, of none."""
        if self.adam is None or not self.adam.state:
            return {}
        return {
            f"{name}/{key}": value.detach().clone()
            for name, p in self._adam_parameters.items()
            for key, value in (self.adam.state.get(p) or _first_state(p)).items()
        }


def _copy_gradient(p: Tensor) -> None:
    assert p.grad is not None
    p.grad = p.grad.clone()


def _first_state(p: nn.Parameter) -> dict[str, Tensor]:
    """Return AdamW's state of a parameter that had no gradient yet."""
    step = torch.zeros((), dtype=torch.float32, device=p.device)
    return {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
