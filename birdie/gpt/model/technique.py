"""Declarations of techniques, so that training, compression and the log do not have to know them by name.

    birdie/gpt/model/techniques/NAME.py ──► Technique(groups, symmetry of heads, diagnostics, hook)
                                            │ listed in the class attribute `techniques` of the module that calls it
    GPT.parameter_groups() · symmetries() · diagnostics() · step_hooks()  ◄── collected over all modules of the model

The computation is an ordinary module or function beside the declaration. The baseline's own parts are declared in the
same way. So a new technique is one module in `birdie.gpt.model.techniques`, its settings in `config`, and in the module
that computes with it the call and one entry in `techniques`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from birdie.errors import ConfigError
from birdie.system.callbacks import Notify, StepHook

if TYPE_CHECKING:
    from birdie.gpt.model.config import GPTConfig
    from birdie.gpt.model.gpt import GPT

Group = Literal["matrices", "embedding", "head", "scalars"]
"""Optimizer group: matrices are Muon's; the others are Adam's, each group with a learning rate of its own."""


def _no_lines(_model: "GPT") -> Iterable[str]:
    return ()


def _no_hook(_model: "GPT", _notify: Notify) -> None:
    return None


def _no_layers(_config: "GPTConfig") -> Sequence[int]:
    return ()


@dataclass(frozen=True, slots=True, eq=False)
class Technique:
    """Declaration of one technique; every default means "none".

    Attributes:
        groups: optimizer group of each parameter, by its name within the module that lists the technique. Parameters
            that are absent because the technique is off are ignored.
        diagnostics: (model) → lines for the log that show that the technique is active and how far its parameters
            have moved; no line when it is off.
        hook: (model, notify) → what it does before each training step, or None.
        lookback: tokens before a position on which its embedding depends.
        query_head_rows: parameters of an attention layer with one row per query head: permuted along with the heads.
        value_rows: parameters of the whole model whose rows are the value channels of `joined_layers`.
        joined_layers: (settings) → layers whose values it adds to one another, so that they share one order of
            value channels.
    """

    groups: Mapping[str, Group] = field(default_factory=dict)
    diagnostics: Callable[["GPT"], Iterable[str]] = _no_lines
    hook: Callable[["GPT", Notify], StepHook | None] = _no_hook
    lookback: int = 0
    query_head_rows: tuple[str, ...] = ()
    value_rows: tuple[str, ...] = ()
    joined_layers: Callable[["GPTConfig"], Sequence[int]] = _no_layers


def listed(model: nn.Module) -> Iterator[tuple[str, Technique]]:
    """Yield (path of the listing module, technique) for every technique that a module of `model` lists."""
    for path, module in model.named_modules():
        for technique in getattr(type(module), "techniques", ()):
            yield path, technique


def techniques_of(model: nn.Module) -> tuple[Technique, ...]:
    """Return the techniques that modules of `model` list, each once, in the order of the modules."""
    return tuple(dict.fromkeys(technique for _, technique in listed(model)))


def parameter_groups(model: nn.Module) -> dict[str, Group]:
    """Return the declared optimizer group of each parameter of `model`, by its full name.

    Undeclared parameters are left out; whoever builds the optimizers refuses them.
    """
    names = {name for name, _ in model.named_parameters()}
    groups: dict[str, Group] = {}
    for path, technique in listed(model):
        for name, group in technique.groups.items():
            full_name = f"{path}.{name}" if path else name
            if full_name in groups:
                raise ConfigError(
                    f"parameter {full_name!r} must be in exactly one optimizer group, but two techniques declare it "
                    f"({groups[full_name]} and {group}); remove one declaration"
                )
            if full_name in names:
                groups[full_name] = group
    return groups


@torch.no_grad()
def diagnostics(model: "GPT") -> list[str]:
    """Return the lines that show which techniques of `model` are active."""
    return [line for technique in techniques_of(model) for line in technique.diagnostics(model)]
