"""The network of a wrapped model is trained alike on every rank, and the compiled model is the eager one."""

import gc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

from birdie.small.spectral.wrap import quantization_loss, spectral
from tests.ranks import start_ranks
from tests.small.spectral.test_wrap import data, mlp


def train_as_rank(rank: int, world: int, rendezvous: str, results: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    torch.save(train(rank, world), f"{results}.{rank}")
    gc.collect()  # else the parallel module, freed last, waits with the GIL for gloo's thread, which waits for the GIL
    distributed.destroy_process_group()


def train(rank: int, world: int) -> list[Tensor]:
    """Return the weights of the network after four steps."""
    torch.manual_seed(0)
    model = mlp()
    q_net = spectral(model, transform="dct")
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = (part[rank::world] for part in data())
    for step in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(x), y)
        # One step without the rate: the network must not be missed then.
        (loss if step == 1 else loss + 0.1 * quantization_loss(model)).backward()
        optimizer.step()
    return [weight.detach() for weight in q_net.network.parameters()]


@pytest.mark.slow
def test_ranks_agree_on_the_network(tmp_path: Path) -> None:
    start_ranks(train_as_rank, (2, str(tmp_path / "meet"), str(tmp_path / "found")), 2)
    first, second = (torch.load(tmp_path / f"found.{rank}", weights_only=True) for rank in range(2))
    torch.manual_seed(0)
    start = list(spectral(mlp(), transform="dct").network.parameters())
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    assert not all(torch.equal(one, two) for one, two in zip(first, start, strict=True))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_is_eager() -> None:
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(20, 16), data()
    spectral(model, transform="dct")
    results = []
    for forward in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        F.cross_entropy(forward(x), y).backward()
        results.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
    torch.testing.assert_close(results[0], results[1])
