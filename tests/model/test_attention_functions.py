"""A registered attention function is used under its name; it has no KV cache."""

import pytest
import torch
from torch import Tensor

from birdie.errors import ConfigError
from birdie.model.attention_functions import register, softmax
from birdie.model.cache import Cache
from birdie.model.gpt import GPT
from tests.model.technique_table import SMALL, tokens, with_settings


def test_a_registered_function_is_used_by_its_name() -> None:
    calls = []

    def counted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        calls.append(q.shape)
        return softmax(q, k, v, mask)

    with pytest.raises(ConfigError, match=r"'counted'.* softmax"):
        GPT(with_settings({"attention": "counted"}))
    register("counted", counted)
    with pytest.raises(ConfigError, match="'counted'"):
        register("counted", softmax)
    torch.manual_seed(0)
    model = GPT(with_settings({"attention": "counted"}))
    torch.manual_seed(0)
    ids = tokens(2, 9)
    torch.testing.assert_close(model(ids), GPT(SMALL)(ids))
    assert len(calls) == SMALL.num_layers
    assert model.diagnostics() == ["attention function: counted in 5 layers"]
    torch.testing.assert_close(model(ids, last_n=2), model(ids)[:, -2:])
    with pytest.raises(ConfigError, match="'counted'"):
        Cache(model, 1, 4)
