"""The kernel quantizes as the CPU does, under Triton's interpreter."""

from typing import Any

import numpy as np
import pytest
import torch

from birdie.compress.device import device_encoding as encoding
from birdie.compress.schemes.trellis import Trellis
from birdie.compress.trellis import trellis_search as search
from birdie.compress.trellis.lanes import FeedbackFactors

CPU = torch.device("cpu")


def test_the_search_finds_the_paths_of_the_cpu(interpreted: dict[str, dict[str, Any]]) -> None:
    assert len(interpreted["encoding"]) == 5
    for name, result in interpreted["encoding"].items():
        assert result["differ"] <= 0.01, name  # ties
        assert result["error"] < 1.001 * result["error of the CPU"], name


def test_a_weight_on_a_gpu_is_quantized_there(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.from_numpy(np.random.default_rng(0).normal(0, 1, (70, 27)).astype(np.float32))
    calls: list[tuple[int, ...]] = []

    def quantize(part: torch.Tensor, factors: FeedbackFactors) -> torch.Tensor:
        calls.append(tuple(part.shape))
        assert factors.code[0] == 8
        return torch.ones(part.shape, dtype=torch.int16)

    monkeypatch.setattr(search, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(encoding, "searches", lambda _: True)
    monkeypatch.setattr(encoding, "quantize", quantize)
    encoded = Trellis(8, along=False).encode("w", weight)
    assert calls == [(70, 27)]
    assert encoded.params[0] == 8
    assert (encoded.streams[0] == 1).all()
    assert Trellis(8, along=True).encode("w", weight).params[0] == -8  # one path along the rows stays on the CPU
    assert len(calls) == 1


def test_without_kernels_weights_are_quantized_on_the_cpu_which_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(encoding, "find_spec", lambda _: None)
    encoding._works.cache_clear()
    for _ in range(2):
        assert not encoding._works(torch.device("cuda", 0))
    encoding._works.cache_clear()
    assert not encoding.searches(torch.zeros(2))
    assert len(caplog.records) == 1
    assert "quantized on the CPU" in caplog.text
