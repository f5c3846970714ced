"""torch.compile with a fallback: a compiler that fails leaves results and gradients as eager mode computes them."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from birdie.runtime.torch_compile import compile_or_eager


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
    cube = compile_or_eager(lambda x: (x**3).sum(), messages.append)
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
        compile_or_eager(lambda x: x, pytest.fail)(torch.zeros(1))
