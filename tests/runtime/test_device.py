"""Choosing a device, the way back from torch.compile, and joining other ranks: each failure is one clear sentence."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from birdie.errors import ConfigError
from birdie.runtime.device import choose_device, compile_or_eager
from birdie.runtime.distributed import World, process_group, world_from_environment

CPU = torch.device("cpu")


def test_a_rank_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", 1) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="local rank 2 finds no GPU of its own, as this machine shows 2"):
        choose_device("cuda", 2)


def as_it_is(graph: Callable[..., object], _example: object) -> Callable[..., object]:
    return graph


def broken(_graph: object, _example: object) -> Callable[..., object]:
    raise RuntimeError("no compiler here")


@pytest.mark.parametrize("broken_part", ["fw_compiler", "bw_compiler"])
def test_where_forward_or_backward_does_not_compile_eager_goes_on(
    broken_part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers = {"fw_compiler": as_it_is, "bw_compiler": as_it_is, broken_part: broken}
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=aot_autograd(**compilers)))
    notes: list[str] = []
    cube = compile_or_eager(lambda x: (x**3).sum(), notes.append)
    for _ in range(2):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        cube(x).backward()
        assert x.grad is not None
        assert x.grad.tolist() == [3, 12]
    assert len(notes) == 1
    assert "torch.compile does not work here" in notes[0]


def test_running_out_of_memory_is_no_reason_for_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "compile", lambda _function, **_settings: full)
    with pytest.raises(torch.OutOfMemoryError):
        compile_or_eager(lambda x: x, pytest.fail)(torch.zeros(1))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "only RANK is set"),
        ({"WORLD_SIZE": "2"}, "only WORLD_SIZE is set"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK is 'zero', not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE is '', not a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK 2 of WORLD_SIZE 2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK 0 of WORLD_SIZE 0"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "cannot join the other ranks"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "cannot join the other ranks"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"}, "cannot join the other"),
    ],
)
def test_an_environment_that_describes_no_ranks_is_refused(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message), process_group(CPU):
        pass


def test_without_torchrun_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    world = world_from_environment()
    assert world == World()
    assert world.any(True, CPU)
    assert not world.any(False, CPU)
    assert world.share("value") == "value"
