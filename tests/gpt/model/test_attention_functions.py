"""A registered attention function is used under its name; it has no KV cache."""

import pytest
import torch
from torch import Tensor

from birdie.errors import ConfigError
from birdie.gpt.model import attention_functions
from birdie.gpt.model.attention_functions import register, softmax
from birdie.gpt.model.cache import Cache
from birdie.gpt.model.gpt import GPT
from tests.gpt.model.technique_table import SMALL, tokens, with_settings


@pytest.mark.parametrize("masked", [False, True])
def test_copies_of_shared_keys_change_nothing(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 9, 8, requires_grad=True) for heads in (6, 2, 2))
    mask = torch.ones(9, 9, dtype=torch.bool).tril() if masked else None

    def attend() -> list[Tensor]:
        y = attention_functions.grouped_attention(q, k, v, mask, is_causal=not masked)
        return [y, *torch.autograd.grad(y.square().sum(), (q, k, v))]

    shared = attend()
    monkeypatch.setattr(attention_functions, "_needs_copies", lambda *_, **__: True)
    for a, b in zip(attend(), shared, strict=True):
        torch.testing.assert_close(a, b)


def test_keys_are_copied_where_a_gpu_would_store_all_scores() -> None:
    needs = attention_functions._needs_copies
    assert needs("cuda", torch.bfloat16, masked=True)
    assert needs("cuda", torch.float32, masked=False)
    assert not needs("cuda", torch.bfloat16, masked=False)
    assert not needs("cpu", torch.float32, masked=True)


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
