"""Which optimizer owns which parameter, and the pair of optimizers, Muon and Adam, as one.

Ownership goes by name and number of dimensions, and every trainable parameter must be claimed by exactly one group: a
parameter that no optimizer holds is frozen without a word, which has cost whole runs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from cyclopts import Parameter
from torch import Tensor, nn

from birdie.device import DtypeName
from birdie.distributed import World
from birdie.errors import ConfigError, WeightsError
from birdie.train.muon import Muon

# vectors of gains, and the matrices that are pairs of such vectors: Adam's, whatever their number of dimensions
CONTROLS = (
    *("attn_scale", "mlp_scale", "resid_mix", "q_gain", "value_mix", "head_gate"),  # of a block
    *("skip_weights", "skip_gates", "lane_keeps", "lane_writes", "softcaps"),
    *("bigram.scale", "smear.gate", "smear.amount", "value_embed.scale", "value_embed.layer_scales"),
)
TABLES = ("tok_emb.weight", "bigram.embed.weight", "value_embed.embed.weight")
PROJECTIONS = ("embed_proj.weight", "bigram.proj.weight", "value_embed.proj.weight")


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """Learning rates, momenta and precision of the optimizers; the defaults are the challenge's.

    Raises:
        ConfigError: a value is out of range.
    """

    matrix_lr: Annotated[float, Parameter(env_var="MATRIX_LR", help="Muon's rate for the blocks' matrices.")] = 0.04
    tied_embed_lr: Annotated[float, Parameter(env_var="TIED_EMBED_LR", help="Rate of a tied embedding.")] = 0.05
    embed_lr: Annotated[float, Parameter(env_var="EMBED_LR", help="Rate of an untied embedding.")] = 0.6
    head_lr: Annotated[float, Parameter(env_var="HEAD_LR", help="Rate of an untied output head.")] = 0.008
    scalar_lr: Annotated[float, Parameter(env_var="SCALAR_LR", help="Rate of gains, scales and skip weights.")] = 0.04
    muon_momentum: Annotated[float, Parameter(env_var="MUON_MOMENTUM", help="Muon's momentum after warm-up.")] = 0.95
    muon_momentum_warmup_start: Annotated[
        float, Parameter(env_var="MUON_MOMENTUM_WARMUP_START", help="Muon's momentum at the first step.")
    ] = 0.85
    muon_momentum_warmup_steps: Annotated[
        int, Parameter(env_var="MUON_MOMENTUM_WARMUP_STEPS", help="Steps over which the momentum rises.")
    ] = 500
    muon_backend_steps: Annotated[int, Parameter(env_var="MUON_BACKEND_STEPS", help="Newton–Schulz iterations.")] = 5
    newton_schulz_dtype: Annotated[
        DtypeName, Parameter(help="Dtype of Newton–Schulz; auto: bfloat16 where it is fast, else float32.")
    ] = "auto"
    beta1: Annotated[float, Parameter(env_var="BETA1", help="Adam's decay of the mean gradient.")] = 0.9
    beta2: Annotated[float, Parameter(env_var="BETA2", help="Adam's decay of the mean squared gradient.")] = 0.95
    adam_eps: Annotated[float, Parameter(env_var="ADAM_EPS", help="Adam's ε.")] = 1e-8
    grad_clip_norm: Annotated[
        float, Parameter(env_var="GRAD_CLIP_NORM", help="Largest norm of the whole gradient; 0: no limit.")
    ] = 0.0

    def __post_init__(self) -> None:
        for name in ("matrix_lr", "tied_embed_lr", "embed_lr", "head_lr", "scalar_lr", "adam_eps", "grad_clip_norm"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a number of at least 0")
        for name in ("muon_momentum", "muon_momentum_warmup_start", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be in [0, 1)")
        for name in ("muon_backend_steps", "muon_momentum_warmup_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")


def _is_control(name: str) -> bool:
    return name in CONTROLS or (name.startswith("blocks.") and name.rpartition(".")[2] in CONTROLS)


RULES: Mapping[str, Callable[[str, nn.Parameter], bool]] = {
    "matrices": lambda name, p: (
        name in PROJECTIONS or (name.startswith("blocks.") and p.ndim == 2 and not _is_control(name))
    ),
    "embedding": lambda name, _: name in TABLES,
    "head": lambda name, _: name == "lm_head.weight",
    "scalars": lambda name, p: _is_control(name) or (name.startswith("blocks.") and p.ndim < 2),
}

Groups = dict[str, dict[str, nn.Parameter]]


def split_parameters(named: Iterable[tuple[str, nn.Parameter]]) -> Groups:
    """Trainable parameters by group and name; groups without members are left out.

    Raises:
        ConfigError: no group, or more than one, claims a parameter.
    """
    groups: Groups = {group: {} for group in RULES}
    for name, p in named:
        if not p.requires_grad:
            continue
        claims = [group for group, rule in RULES.items() if rule(name, p)]
        if len(claims) != 1:
            owners = " and ".join(claims) or "none"
            raise ConfigError(
                f"parameter {name!r} of shape {tuple(p.shape)} must be in exactly one optimizer group, but is in "
                f"{owners}; name it so that one rule of birdie.train.groups claims it, or freeze it"
            )
        groups[claims[0]][name] = p
    return {group: members for group, members in groups.items() if members}


class Optimizers:
    """Muon for the matrices, Adam for all else, with one schedule over both.

    Attributes:
        groups: the parameters by group and name.
        rates: learning rate of each group before the schedule.
        parameters: all of them, in one fixed order.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        settings: OptimizerSettings,
        *,
        newton_schulz_dtype: torch.dtype,
        world: World,
    ) -> None:
        self.world = world
        self.groups = split_parameters(named)
        embed_lr = settings.embed_lr if "head" in self.groups else settings.tied_embed_lr
        rates = {
            "matrices": settings.matrix_lr,
            "embedding": embed_lr,
            "head": settings.head_lr,
            "scalars": settings.scalar_lr,
        }
        self.rates = {group: rates[group] for group in self.groups}
        self.parameters = [p for members in self.groups.values() for p in members.values()]
        self._muon: Muon | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        if "matrices" in self.groups:
            self._muon = Muon(
                self._param_groups("matrices"),
                settings.matrix_lr,
                steps=settings.muon_backend_steps,
                dtype=newton_schulz_dtype,
                world=world,
            )
            self._optimizers.append(self._muon)
        others = self._param_groups(*(group for group in self.groups if group != "matrices"))
        if others:
            betas = (settings.beta1, settings.beta2)
            self._optimizers.append(torch.optim.Adam(others, betas=betas, eps=settings.adam_eps, fused=True))

    def _param_groups(self, *groups: str) -> list[dict[str, Any]]:
        return [{"params": list(self.groups[g].values()), "lr": self.rates[g], "name": g} for g in groups]

    def step(self, lr_multiplier: float, momentum: float) -> None:
        """One update of every parameter from its gradient, with the rates times `lr_multiplier`."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rates[group["name"]] * lr_multiplier
                if optimizer is self._muon:
                    group["momentum"] = momentum
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for p in self.parameters:
            p.grad = None

    def local_state(self) -> dict[str, Tensor]:
        """Copies of this rank's state tensors, as "parameter/tensor"."""
        return {
            f"{name}/{key}": value.detach().clone()
            for optimizer, members in self._members()
            for name, p in members.items()
            for key, value in optimizer.state.get(p, {}).items()
        }

    def full_state(self) -> dict[str, Tensor]:
        """As `local_state`, with the momentum gathered from the ranks that own it. Every rank must call it."""
        state = self.local_state()
        if self._muon is None or self.world.size == 1:
            return state
        for name, p in self.groups["matrices"].items():
            key = f"{name}/momentum_buffer"
            # a rank that does not own the matrix adds zeros; before the first step so does the owner
            state[key] = self.world.sum_(state.get(key, torch.zeros_like(p, requires_grad=False)))
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace all state by `state` (of `local_state` or `full_state`, of any number of ranks).

        Raises:
            WeightsError: a tensor belongs to no parameter here or has another shape.
        """
        parameters = {name: p for members in self.groups.values() for name, p in members.items()}
        for key, value in state.items():
            p = parameters.get(key.rpartition("/")[0])
            if p is None:
                raise WeightsError(
                    f"optimizer tensor {key!r} has no parameter here; resume with the model that was saved"
                )
            if value.ndim and value.shape != p.shape:
                raise WeightsError(
                    f"optimizer tensor {key!r} has shape {tuple(value.shape)} but its parameter {tuple(p.shape)}; "
                    "resume with the model that was saved"
                )
        for optimizer, members in self._members():
            optimizer.state.clear()
            mine = [p for group in self._muon.param_groups for p in self._muon.owned(group)] if self._muon else []
            for key, value in state.items():
                name, _, entry = key.rpartition("/")
                p = members.get(name)
                if p is not None and (optimizer is not self._muon or any(p is q for q in mine)):
                    optimizer.state[p][entry] = value.to(p.device).clone()

    def _members(self) -> Iterator[tuple[torch.optim.Optimizer, dict[str, nn.Parameter]]]:
        """Each optimizer with its parameters by name."""
        for optimizer in self._optimizers:
            members: dict[str, nn.Parameter] = {}
            for group in optimizer.param_groups:
                members |= self.groups[group["name"]]
            yield optimizer, members
