"""The process group: an inconsistent environment is one clear sentence, and one rank needs no group."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from birdie.errors import ConfigError
from birdie.system import distributed
from birdie.system.distributed import World, process_group, share_out, world_from_environment
from tests.ranks import run_in_process_group

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "only RANK is set"),
        ({"WORLD_SIZE": "2"}, "only WORLD_SIZE is set"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK is 'zero'"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE is ''"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK 2 of WORLD_SIZE 2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK 0 of WORLD_SIZE 0"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "cannot join"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "cannot join"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "x"}, "cannot join"),
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


def test_without_torchrun_there_is_one_rank_and_collectives_return_their_input(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    world = world_from_environment()
    assert world == World()
    assert world.any(True, CPU)
    assert not world.any(False, CPU)
    assert world.broadcast("value") == "value"
    assert world.all_gather_strings("value") == ["value"]
    assert world.start_all_gather(part := torch.ones(2), torch.zeros(2)).wait() is part


@pytest.mark.parametrize(("device", "left"), [("cuda", False), ("cpu", True)])
def test_after_an_error_a_gpu_leaves_its_group_to_the_end_of_the_process(
    device: str, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's leaving waits for all ranks: the failing one would hang, without a message and without a restart."""
    calls: list[str] = []

    def fake(name: str, result: Any = None) -> Any:
        def call(*_: object, **__: object) -> Any:
            calls.append(name)
            return result

        return call

    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "set_device", fake("set_device"))
    monkeypatch.setattr(distributed, "rendezvous", fake("rendezvous", itertools.repeat((None, 0, 2))))
    monkeypatch.setattr(torch.distributed, "init_process_group", fake("init"))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", fake("destroy"))
    with pytest.raises(ZeroDivisionError), process_group(torch.device(device)):
        raise ZeroDivisionError
    assert ("destroy" in calls) == left
    with process_group(torch.device(device)):
        calls.clear()
    assert calls == ["destroy"]


def _shares(world: World, folder: Path) -> None:
    sizes = {f"tensor {index}": 1 + index * index for index in range(7)}
    done: list[str] = []

    def work(names: Sequence[str]) -> dict[str, tuple[int, str]]:
        done.extend(names)
        return {name: (world.rank, name.upper()) for name in names}

    results = share_out(world, sizes, work)
    assert list(results) == list(sizes)
    assert all(text == name.upper() for name, (_, text) in results.items())
    assert sorted(done) == sorted(name for name, (rank, _) in results.items() if rank == world.rank)
    loads = [sum(sizes[name] for name, (rank, _) in results.items() if rank == one) for one in range(world.size)]
    assert max(loads) - min(loads) <= max(sizes.values())

    def fails(names: Sequence[str]) -> dict[str, int]:
        if "tensor 3" in names:
            raise ConfigError("tensor 3 is wrong")
        return {}

    with pytest.raises(ConfigError, match="tensor 3 is wrong"):
        share_out(world, sizes, fails)
    (folder / f"done {world.rank}").touch()


@pytest.mark.parametrize("size", [1, 3])
def test_work_is_shared_out_and_an_error_is_everyones(tmp_path: Path, size: int) -> None:
    if size == 1:
        _shares(World(), tmp_path)
    else:
        run_in_process_group(_shares, size, tmp_path)
    assert len(list(tmp_path.glob("done *"))) == size
