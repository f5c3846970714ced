"""The fastest installed kernel is chosen; a broken package counts as missing."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from birdie.gpt.model import attention_kernels
from tests.gpt.model.varlen_reference import older_torch_varlen, segments_one_by_one

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


@pytest.mark.parametrize("error", ["OSError('libcudart.so.12: cannot open shared object')", "RuntimeError('twice')"])
def test_a_package_that_cannot_be_loaded_counts_as_missing(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn_interface.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, VARLEN, None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert attention_kernels.best_kernels(torch.device("cuda"), torch.bfloat16).name == "SDPA"


def test_the_stand_in_kernel_equals_sdpa() -> None:
    q, k, v = (torch.randn(1, heads, 9, 8) for heads in (4, 2, 2))
    flat_q, flat_k, flat_v = (x[0].transpose(0, 1) for x in (q, k, v))
    y = segments_one_by_one(flat_q, flat_k, flat_v, torch.tensor([0, 9]), 9, 0)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(y.transpose(0, 1)[None], expected)
