"""Devices and the compiler of torch: a missing one is refused, a failing one is done without."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from birdie.errors import ConfigError
from birdie.system.device import choose_device, make_current
from birdie.system.torch_compile import CompiledOrEager


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


def test_the_gpu_of_a_run_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton, CUDA graphs and the random generator take the current GPU, whatever device the tensors are on."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name in ("cuda:1", "cuda", "cpu", "meta"):
        make_current(torch.device(name))
    assert current == [torch.device("cuda", 1)]


def identity_compiler(graph: Callable[..., object], _example: object) -> Callable[..., object]:
    return graph


def failing_compiler(_graph: object, _example: object) -> Callable[..., object]:
    raise RuntimeError("no compiler")


@pytest.mark.parametrize("direction", ["fw_compiler", "bw_compiler"])
def test_a_forward_or_backward_that_does_not_compile_falls_back_to_eager(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers = {"fw_compiler": identity_compiler, "bw_compiler": identity_compiler, direction: failing_compiler}
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=aot_autograd(**compilers)))
    messages: list[str] = []
    cube = CompiledOrEager(lambda x: (x**3).sum(), messages.append)
    for _ in range(2):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        cube(x).backward()
        assert x.grad is not None
        assert x.grad.tolist() == [3, 12]
    assert len(messages) == 1
    assert "torch.compile failed" in messages[0]


def test_out_of_memory_is_raised_and_does_not_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_out_of_memory(_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "compile", lambda _function, **_settings: raise_out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        CompiledOrEager(lambda x: x, pytest.fail)(torch.zeros(1))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_each_call_of_a_cuda_graph_begins_a_step(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the mark torch takes the micro-batches of a step for one, and keeps the results of all."""
    modes, steps = list[str](), list[int]()

    def compiled(function: Callable[..., torch.Tensor], *, mode: str, **_: object) -> Callable[..., torch.Tensor]:
        modes.append(mode)
        return function

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: steps.append(1))
    double = CompiledOrEager(lambda x: 2 * x, pytest.fail, mode)
    assert [float(double(torch.tensor(value))) for value in (1.0, 2.0)] == [2.0, 4.0]
    assert modes == [mode]
    assert len(steps) == (2 if mode == "reduce-overhead" else 0)
