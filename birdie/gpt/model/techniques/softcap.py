"""Soft caps of the logits, which bound them smoothly by ±c.

    tanh         c · tanh(z / c)                               the baseline
    poly         c · clamp(u − u³/3 + u⁵/15, ±1),  u = clamp(z / c, ±2)      the series of tanh, made to reach ±1
    asymmetric   c₊ · tanh(z / c₊) above zero, c₋ · tanh(z / c₋) below; both caps are learned

Source: poly, the ternary record of openai/parameter-golf; asymmetric, #1945. *Experimental*: both measured 0.000 and
−0.001 at 1.30 and 1.42 times the time of an eager step.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from birdie.gpt.model.technique import Technique

if TYPE_CHECKING:
    from birdie.gpt.model.config import GPTConfig
    from birdie.gpt.model.gpt import GPT


def learned_caps(config: "GPTConfig") -> nn.Parameter | None:
    """Return (cap above zero, cap below zero), or None where the cap is a constant."""
    return nn.Parameter(torch.full((2,), config.logit_softcap)) if config.softcap == "asymmetric" else None


def softcap(logits: Tensor, config: "GPTConfig", caps: Tensor | None) -> Tensor:
    """Return capped logits, of the same shape; `caps` are the learned ones."""
    cap = config.logit_softcap
    if config.softcap == "poly":
        u = (logits / cap).clamp(-2, 2)
        square = u * u
        capped: Tensor = cap * (u * (1 - square / 3 + square * square / 15)).clamp(-1, 1)
        return capped
    if caps is not None:
        above, below = caps[0] * torch.tanh(logits / caps[0]), caps[1]
        return torch.where(logits > 0, above, below * torch.tanh(logits / below))
    return cap * torch.tanh(logits / cap)


def _diagnostics(model: "GPT") -> Iterator[str]:
    config = model.config
    if model.softcaps is not None:
        above, below = (float(cap) for cap in model.softcaps)
        yield f"asymmetric softcap: {config.logit_softcap:g} → {above:.3g} above zero, {below:.3g} below"
    elif config.softcap != "tanh":
        yield f"softcap: {config.softcap}"


SOFTCAP = Technique(groups={"softcaps": "scalars"}, diagnostics=_diagnostics)
