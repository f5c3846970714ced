"""Polynomial softcap: close to tanh for moderate logits, monotone, bounded."""

import torch

from birdie.gpt.model.techniques.softcap import softcap
from tests.gpt.model.technique_table import with_settings


def test_the_polynomial_is_close_to_tanh_near_zero_and_never_falls() -> None:
    logits = torch.linspace(-100, 100, 4001)
    capped = softcap(logits, with_settings({"softcap": "poly"}), None)
    assert bool((capped.diff() >= 0).all())
    assert capped.abs().max() == 30
    near = logits.abs() < 15
    torch.testing.assert_close(capped[near], 30 * torch.tanh(logits[near] / 30), rtol=0.01, atol=1e-4)
