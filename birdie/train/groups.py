"""Which optimizer owns which parameter, and the pair of optimizers, Muon over banks and AdamW, as one.

Ownership goes by name and number of dimensions, and every trainable parameter must be claimed by exactly one group: a
parameter that no optimizer holds is frozen without a word, which has cost whole runs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from cyclopts import Parameter
from torch import Tensor, nn

from birdie.errors import ConfigError, WeightsError
from birdie.runtime.device import DtypeName
from birdie.runtime.distributed import World
from birdie.runtime.nvtx import nvtx_range
from birdie.train.banks import banked
from birdie.train.muon import Coefficients
from birdie.train.parallel import ParallelMuon, Reduction

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
    muon_coefficients: Annotated[
        Coefficients, Parameter(help="Of the Newton–Schulz polynomials: classic, or polar_express (another each step).")
    ] = "classic"
    muon_row_normalize: Annotated[
        bool, Parameter(env_var="MUON_ROW_NORMALIZE", help="Rows are brought to norm 1 before (MuonEq-R).")
    ] = False
    muon_nesterov: Annotated[bool, Parameter(help="Muon looks ahead by the gradient.")] = True
    muon_beta2: Annotated[
        float, Parameter(env_var="MUON_BETA2", help="Decay of each row's mean square after it (NorMuon); 0: none.")
    ] = 0.0
    muon_weight_decay: Annotated[
        float, Parameter(env_var="MUON_WD", help="Decoupled weight decay of the matrices, times their rate.")
    ] = 0.0
    adam_weight_decay: Annotated[
        float, Parameter(env_var="ADAM_WD", help="Decoupled weight decay of all else, times its rate.")
    ] = 0.0
    embed_weight_decay: Annotated[
        float | None, Parameter(env_var="EMBED_WD", help="The same of the embeddings; default: as all else.")
    ] = None
    decay_full: Annotated[
        float, Parameter(help="Share of the run before which weight decay is whole; 1: to the end.")
    ] = 1.0
    decay_final: Annotated[float, Parameter(help="Factor on weight decay at the end, if it falls before.")] = 0.5
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
        rates = ("matrix_lr", "tied_embed_lr", "embed_lr", "head_lr", "scalar_lr")
        decays = ("muon_weight_decay", "adam_weight_decay", "embed_weight_decay")
        for name in (*rates, *decays, "adam_eps", "grad_clip_norm"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a number of at least 0")
        for name in ("muon_momentum", "muon_momentum_warmup_start", "muon_beta2", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be in [0, 1)")
        for name in ("muon_backend_steps", "muon_momentum_warmup_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")
        for name in ("decay_full", "decay_final"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it is a share, from 0 to 1")
        if self.muon_coefficients not in ("classic", "polar_express"):
            raise ConfigError(f"muon_coefficients is {self.muon_coefficients!r}; choose classic or polar_express")


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

SHAPES: Mapping[str, Callable[[torch.Size], torch.Size]] = {
    **dict.fromkeys(("momentum_buffer", "exp_avg", "exp_avg_sq"), lambda own: own),
    "row_square": lambda own: torch.Size((*own[:-1], 1)),
    "step": lambda _: torch.Size(()),
}
"""The shape of a parameter's state by the shape of the parameter."""

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
    """Muon for the matrices, AdamW for all else, with one schedule over both.

    Attributes:
        groups: the parameters by group and name.
        rates: learning rate of each group before the schedule.
        parameters: all of them, in one fixed order.
        banks: what the matrices have become.
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
        self.banks = banked(self.groups.get("matrices", {}))
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
        self._others = {name: p for g, members in self.groups.items() if g != "matrices" for name, p in members.items()}
        self._adam: torch.optim.AdamW | None = None
        if self._others:
            self._adam = torch.optim.AdamW(
                [
                    {"params": list(members.values()), "lr": self.rates[g], "name": g}
                    for g, members in self.groups.items()
                    if g != "matrices"
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
        """One update of every parameter from the ranks' gradients, whose sum is the gradient.

        Clipping comes after the reduction, so that it does not depend on the number of ranks; it must then have all of
        the gradient before the first momentum, which costs some of the overlap.

        Args:
            loss: this rank's part of it, 0-d.
            lr_multiplier: factor on all rates.
            momentum: of Muon.
            decay_multiplier: factor on all weight decays.
            check: gets (loss, norm) before any weight changes, and may raise.

        Returns:
            The loss, and the norm of the whole gradient before clipping.
        """
        self._set(lr_multiplier, momentum, decay_multiplier)
        read: list[tuple[float, float]] = []
        reduction = Reduction(self._muon, self._others.values(), loss, self.world)

        def rest() -> None:
            if not read:
                read.append(reduction.read(self._limit))
                check(*read[0])
            if self._adam is not None:
                with nvtx_range("optimizer/adam"):
                    self._adam.step()

        if self._limit:  # the factor is needed first
            read.append(reduction.read(self._limit))
            check(*read[0])
        if self._muon is None:
            rest()
        else:
            self._muon.finish(meanwhile=rest)
        return read[0]

    def _set(self, lr_multiplier: float, momentum: float, decay_multiplier: float) -> None:
        adam = [] if self._adam is None else self._adam.param_groups
        muon = [] if self._muon is None else [self._muon.settings]
        for name, group in [*((group["name"], group) for group in adam), *(("matrices", group) for group in muon)]:
            group["lr"] = self.rates[name] * lr_multiplier
            group["weight_decay"] = self.decays[name] * decay_multiplier
        for group in muon:
            group["momentum"] = momentum

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for bank in self.banks:
            bank.zero_grad()
        for p in self._others.values():
            p.grad = None

    def full_state(self) -> dict[str, Tensor]:
        """Copies of all state by "parameter/tensor", Muon's gathered from the ranks. Every rank must call it."""
        state = self._adam_state()
        if self._muon is not None:
            for name, key, value in self._muon.full_state():
                state[f"{name}/{key}"] = value.detach().clone()
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace all state by `state` (of `full_state`, of any number of ranks).

        Raises:
            WeightsError: a tensor belongs to no parameter here or has another shape.
        """
        parameters = {name: p for members in self.groups.values() for name, p in members.items()}
        for key, value in state.items():
            name, _, entry = key.rpartition("/")
            p = parameters.get(name)
            if p is None:
                raise WeightsError(
                    f"optimizer tensor {key!r} has no parameter here; resume with the model that was saved"
                )
            fits = SHAPES[entry](p.shape) if entry in SHAPES else value.shape
            if value.shape != fits:
                raise WeightsError(
                    f"optimizer tensor {key!r} has shape {tuple(value.shape)}, but its parameter of "
                    f"{tuple(p.shape)} wants {tuple(fits)}; resume with the model that was saved"
                )
        if self._muon is not None:
            self._muon.load_state(lambda name, key: state.get(f"{name}/{key}"))
        if self._adam is not None:
            self._adam.state.clear()
            for key, value in state.items():
                name, _, entry = key.rpartition("/")
                if name in self._others:
                    p = self._others[name]
                    self._adam.state[p][entry] = value.to(p.device).clone()

    def _adam_state(self) -> dict[str, Tensor]:
        return {
            f"{name}/{key}": value.detach().clone()
            for name, p in self._others.items()
            for key, value in (self._adam.state.get(p, {}) if self._adam is not None else {}).items()
        }
