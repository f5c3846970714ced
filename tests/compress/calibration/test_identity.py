"""Digests of calibrations: equal for equal things in every process, and different for things that compute others."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.compress.calibration.blockwise import calibrate_blockwise
from birdie.compress.calibration.identity import digest_of, digest_of_loss, digest_of_module
from birdie.errors import ConfigError
from tests.compress.calibration.block_models import Batch, chain, classify, gpt, seeded

Loss = Callable[[nn.Module, Batch], Tensor]


def weighted(module: nn.Module, batch: Batch, factor: float = 1.0, weight: Tensor | None = None) -> Tensor:
    return factor * F.cross_entropy(module(batch[0]), batch[1], weight=weight, reduction="sum")


def closed(factor: float) -> Loss:
    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return factor * classify(module, batch)

    return loss


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        return self.factor * classify(module, batch)

    def method(self, module: nn.Module, batch: Batch) -> Tensor:
        return self(module, batch)


def with_default(factor: float) -> Loss:
    def loss(module: nn.Module, batch: Batch, factor: float = factor) -> Tensor:
        return factor * classify(module, batch)

    return loss


def of_a_teacher(factor: float) -> Loss:
    teacher = nn.Linear(12, 4)
    with torch.no_grad():
        teacher.weight.copy_(factor * seeded(4, 12))
        teacher.bias.zero_()
    return lambda module, batch: (module(batch[0]) - teacher(batch[0])).square().sum()


LOSSES: dict[str, Callable[[float], Loss]] = {
    "keyword": lambda factor: partial(weighted, factor=factor),
    "partial of a partial": lambda factor: partial(partial(weighted, factor=factor), weight=None),
    "tensor": lambda factor: partial(weighted, weight=torch.full((4,), factor)),
    "closure": closed,
    "object": Scaled,
    "method": lambda factor: Scaled(factor).method,
    "default": with_default,
    "another module": of_a_teacher,
    "code": lambda factor: (lambda m, b: 2 * classify(m, b)) if factor > 1 else (lambda m, b: 3 * classify(m, b)),
}


def attention(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.MultiheadAttention(**{"embed_dim": 12, "num_heads": 2, **settings})


def sequence(*activation: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *activation, nn.Linear(4, 4))


class Holder(nn.Module):
    def __init__(self, value: Any, *, tensor: float = 0.0) -> None:
        super().__init__()
        self.value = value
        self.register_buffer("hidden", torch.full((3,), tensor), persistent=False)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "activation": (lambda: sequence(nn.ReLU()), lambda: sequence(nn.GELU())),
    "form of an activation": (lambda: sequence(nn.GELU()), lambda: sequence(nn.GELU("tanh"))),
    "heads": (lambda: attention(num_heads=2), lambda: attention(num_heads=3)),
    "eps": (lambda: nn.LayerNorm(4, eps=1e-5), lambda: nn.LayerNorm(4, eps=1e-3)),
    "stride": (lambda: nn.AvgPool2d(2, 1), lambda: nn.AvgPool2d(2, 2)),
    "function": (lambda: Holder(F.silu), lambda: Holder(F.mish)),
    "number": (lambda: Holder(3), lambda: Holder(4)),
    "a buffer that is not saved": (lambda: Holder(3), lambda: Holder(3, tensor=1.0)),
    "name": (lambda: nn.Sequential(nn.ReLU()), lambda: nn.Sequential(nn.Identity(), nn.ReLU())),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_compute_something_else_differ(name: str) -> None:
    make = LOSSES[name]
    assert digest_of_loss(make(2.0)) == digest_of_loss(make(2.0)) != digest_of_loss(make(1.0))


@pytest.mark.parametrize("name", MODULES)
def test_modules_with_the_same_weights_that_compute_something_else_differ(name: str) -> None:
    make, other = MODULES[name]
    assert digest_of_module(make()) == digest_of_module(make()) != digest_of_module(other())
    assert digest_of_module(make().eval()) == digest_of_module(make().train())


def test_batches_differ_by_keys_and_by_what_belongs_together() -> None:
    x, y = seeded(4), seeded(4, seed=1)
    groups: list[Any] = [
        [{"ids": x, "labels": y}],
        [{"labels": x, "ids": y}],
        [{"ids": x}, {"labels": y}],
        [(x, y)],
        [(y, x)],
        [(x,), (y,)],
        [((x,), y)],
        [[x, y]],
        [x, y],
    ]
    assert len({digest_of(batches) for batches in groups}) == len(groups)


def test_the_folder_of_a_calibration_by_another_loss_of_the_same_name_is_refused(tmp_path: Path) -> None:
    module, batches, _ = chain()
    calibrate_blockwise(module, batches, partial(weighted, factor=1.0), tmp_path)
    calibrate_blockwise(module, batches, partial(weighted, factor=1.0), tmp_path)
    with pytest.raises(ConfigError, match="another loss"):
        calibrate_blockwise(module, batches, partial(weighted, factor=2.0), tmp_path)


def digests() -> list[str]:
    """Return digests of much, for comparison between processes."""
    cases = [chain(), gpt()]
    known = [digest for case in cases for digest in (digest_of_module(case.module), digest_of(case.batches))]
    return [
        *known,
        *(digest_of_loss(case.loss) for case in cases),
        *(digest_of_loss(LOSSES[name](2)) for name in LOSSES),
    ]


def test_another_process_gives_the_same_digests() -> None:
    code = f"from {__name__} import digests; print(*digests(), sep='|', end='')"
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split("|") == digests()
