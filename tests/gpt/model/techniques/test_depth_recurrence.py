"""Depth recurrence: order of the layers, the plain model before it begins, and the hook that switches it on."""

import torch

from birdie.gpt.model.config import GPTConfig
from birdie.gpt.model.gpt import GPT
from birdie.gpt.model.techniques.depth_recurrence import DepthRecurrence, layer_order
from birdie.gpt.model.techniques.skips import skip_count
from tests.gpt.model.technique_table import SMALL, randomized, tokens, with_settings


def test_the_list_of_layers_is_halved_as_it_runs() -> None:
    config = GPTConfig(num_layers=11, num_loops=2, loop_start=3, loop_end=5)
    assert layer_order(config, True) == ((0, 1, 2, 3, 4, 5, 3, 4), (5, 3, 4, 5, 6, 7, 8, 9, 10))
    assert layer_order(config, False) == (tuple(range(5)), tuple(range(5, 11)))
    assert skip_count(config) == 8


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
