"""The laws of training, models and scoring hold on a GPU, where there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.device import moved_draw

LAWS = ("tests/train", "tests/model", "tests/score")


@pytest.mark.slow
def test_the_laws_hold_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA: the laws of training, models and scoring were tested on the CPU only")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not nightly", *LAWS]
    environment = os.environ | {"BIRDIE_TEST_DEVICE": "cuda"}
    root = Path(__file__).resolve().parents[1]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:]


def test_what_a_generator_draws_is_moved_unless_a_device_is_named() -> None:
    draw = moved_draw(torch.randn, torch.device("meta"))
    assert draw(3, generator=torch.Generator(), requires_grad=True).is_meta
    assert draw(3, device="meta").is_meta
    named = draw(3, generator=torch.Generator().manual_seed(1), device="cpu")
    assert torch.equal(named, torch.randn(3, generator=torch.Generator().manual_seed(1)))
