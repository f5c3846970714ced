"""Declarations of techniques are collected from all modules of a model, whatever the technique is."""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from birdie.errors import ConfigError
from birdie.gpt.model.config import GPTConfig
from birdie.gpt.model.gpt import GPT
from birdie.gpt.model.technique import Technique, techniques_of
from birdie.gpt.train.optimizers import split_parameters
from tests.gpt.model.technique_table import SMALL


def _diagnostics(model: Any) -> Iterator[str]:
    yield f"output scale: 1 → {float(model.output_scale):.3g}"


OUTPUT_SCALE = Technique(groups={"output_scale": "scalars"}, diagnostics=_diagnostics, lookback=2)


class ScaledGPT(GPT):
    """A GPT with a technique that the package does not know."""

    techniques: ClassVar[tuple[Technique, ...]] = (*GPT.techniques, OUTPUT_SCALE)

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.output_scale = nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor, *rest: Any, **options: Any) -> Tensor:
        return self.output_scale * super().forward(ids, *rest, **options)


def test_a_technique_from_outside_gets_its_optimizer_group_and_its_line() -> None:
    model = ScaledGPT(SMALL)
    assert split_parameters(model)["scalars"]["output_scale"] is model.output_scale
    assert model.diagnostics() == ["output scale: 1 → 1"]
    assert techniques_of(model).count(OUTPUT_SCALE) == 1


def test_a_parameter_that_nothing_declares_is_in_no_group() -> None:
    model = GPT(SMALL)
    model.extra = nn.Linear(32, 1)
    assert "extra.weight" not in model.parameter_groups()
    assert model.parameter_groups()["tok_emb.weight"] == "embedding"


def test_two_declarations_of_one_parameter_are_refused() -> None:
    class Twice(ScaledGPT):
        techniques: ClassVar[tuple[Technique, ...]] = (
            *ScaledGPT.techniques,
            Technique(groups={"output_scale": "matrices"}),
        )

    with pytest.raises(ConfigError, match=r"'output_scale' .* \(scalars and matrices\)"):
        Twice(SMALL).parameter_groups()
