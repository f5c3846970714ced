"""Attention: registered functions, and kernels by device, dtype and packages."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from birdie.errors import ConfigError
from birdie.gpt.model import attention_functions, attention_kernels
from birdie.gpt.model.attention_functions import register, softmax
from birdie.gpt.model.cache import Cache
from birdie.gpt.model.gpt import GPT
from tests.gpt.model.technique_table import SMALL, tokens, with_settings
from tests.gpt.model.varlen_reference import older_torch_varlen


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


CPU, VARLEN = torch.device("cpu"), "torch.nn.attention.varlen"


def test_the_kernel_depends_on_device_dtype_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, half = torch.device("cuda"), torch.bfloat16
    assert attention_kernels.best_kernels(CPU, half).name == "SDPA"
    assert attention_kernels.best_kernels(cuda, torch.float32).name == "SDPA"
    flash = SimpleNamespace(flash_attn_func=None, flash_attn_varlen_func=None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash)
    monkeypatch.setitem(sys.modules, VARLEN, SimpleNamespace(varlen_attn=older_torch_varlen))
    for capability, name in (((9, 0), "FlashAttention-3"), ((8, 0), "torch varlen"), ((7, 5), "SDPA")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, result=capability: result)
        assert attention_kernels.best_kernels(cuda, half).name == name
    for package in ("flash_attn_interface", VARLEN):
        monkeypatch.setitem(sys.modules, package, None)
    assert attention_kernels.best_kernels(cuda, half).name == "SDPA"


def test_heads_that_the_kernels_do_not_take_use_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setitem(sys.modules, VARLEN, SimpleNamespace(varlen_attn=older_torch_varlen))
    names = [attention_kernels.best_kernels(torch.device("cuda"), torch.bfloat16, d).name for d in (12, 64, 264)]
    assert names == ["SDPA", "torch varlen", "SDPA"]
