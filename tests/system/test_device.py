"""The choice of a device: a device that is missing is an error that names it."""

import pytest
import torch

from birdie.errors import ConfigError
from birdie.system.device import choose_device, has_fast_bfloat16, make_current


def test_a_local_rank_beyond_the_number_of_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", 1) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=r"local rank 2 .* has 2"):
        choose_device("cuda", 2)


@pytest.mark.parametrize("name", ["cuda", "mps", "tpu"])
def test_a_device_that_is_missing_or_unknown_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match=f"device '{name}'"):
        choose_device(name)


def test_cudnn_attention_is_off_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", calls.append)
    assert choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cpu") == torch.device("cpu")
    assert calls == [False]


def test_emulated_bfloat16_is_not_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert not has_fast_bfloat16(torch.device("cuda"))


def test_the_gpu_of_a_run_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton, CUDA graphs and the random generator take the current GPU, whatever device the tensors are on."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("cuda:1", "cuda", "cpu", "meta"):
        make_current(torch.device(name))
    assert current == [torch.device("cuda", 1)]
