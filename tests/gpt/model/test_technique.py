"""Techniques: declared once, also from outside; what a table cannot say of those of birdie."""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from birdie.errors import ConfigError
from birdie.gpt.model.config import GPTConfig
from birdie.gpt.model.gpt import GPT
from birdie.gpt.model.technique import Technique, techniques_of
from birdie.gpt.model.techniques.depth_recurrence import DepthRecurrence
from birdie.gpt.model.techniques.skips import skip_count
from birdie.gpt.model.techniques.softcap import softcap
from birdie.gpt.train.optimizers import split_parameters
from tests.gpt.model.technique_table import SMALL, randomized, tokens, with_settings


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


def test_before_it_begins_the_plain_model_runs() -> None:
    model = randomized(with_settings({"num_loops": 2, "loop_start": 1, "loop_end": 2}))
    plain, ids = GPT(SMALL), tokens(2, 9)
    state = model.state_dict()
    plain.load_state_dict(state | {"skip_weights": state["skip_weights"][: skip_count(SMALL)]})
    assert not torch.allclose(model(ids), plain(ids))
    model.depth_recurrence = False
    torch.testing.assert_close(model(ids), plain(ids))


def test_it_begins_at_its_fraction_of_the_run_and_reports_that_once() -> None:
    config = with_settings({"num_loops": 1, "loop_start": 1, "loop_end": 2, "enable_looping_at": 0.35})
    lines: list[str] = []
    (hook,) = (model := GPT(config)).step_hooks(lines.append)
    assert isinstance(hook, DepthRecurrence)
    assert hook.changes == (0.35,)
    states = []
    for step in range(10):
        hook.before_step(step, step / 10, 1.0)
        states.append(model.depth_recurrence)
    assert states == [False] * 4 + [True] * 6
    assert lines == ["depth recurrence from step 5 on: layers 0,1,2,1,2,3,4"]
    assert GPT(config).depth_recurrence  # a model that is loaded for scoring repeats its layers
    assert GPT(SMALL).step_hooks(lines.append) == []


def test_the_polynomial_is_close_to_tanh_near_zero_and_never_falls() -> None:
    logits = torch.linspace(-100, 100, 4001)
    capped = softcap(logits, with_settings({"softcap": "poly"}), None)
    assert bool((capped.diff() >= 0).all())
    assert capped.abs().max() == 30
    near = logits.abs() < 15
    torch.testing.assert_close(capped[near], 30 * torch.tanh(logits[near] / 30), rtol=0.01, atol=1e-4)
