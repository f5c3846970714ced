"""The benchmark of decoding speed: its weights have the entropy it promises, and rows have the pinned keys."""

from pathlib import Path

import pytest
import torch

import birdie
from benchmarks import decode


@pytest.mark.parametrize("bits", [3.3, 5.0])
def test_gaussian_weights_have_the_entropy_of_their_name(bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MIN_WEIGHTS", 1)
    (weight,) = decode.gaussian(bits, seed=0).values()
    share = torch.unique(weight, return_counts=True)[1] / weight.numel()
    assert -(share * share.log2()).sum().item() == pytest.approx(bits, abs=0.15)


def test_rows_of_one_file_are_exact_and_have_the_pinned_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "python_peak", lambda *_: 100.0)  # takes a process each
    state = {"x": torch.randint(-9, 10, (64, 32), dtype=torch.int8)}
    path = tmp_path / "int8.birdie"
    birdie.save(state, path, lossless=True, coder="fast")
    kernel = decode.kernel_and_stream("small", path, 0.0)
    files = decode.files("small", path, state, "int8", 0.0)
    keys = ["what", "weights", "threads", "seconds", "M/s", "decoded_mb", "peak_mb", "exact"]
    assert [list(row) for row in [*kernel, *files]] == [keys] * 4
    assert [row["what"] for row in kernel] == ["small: kernel", "small: stream"]
    assert [(row["threads"], row["exact"], row["peak_mb"]) for row in files] == [(1, True, 0.0), (2, True, 0.0)]
    assert all(row["M/s"] == pytest.approx(64 * 32 / row["seconds"] / 1e6) for row in kernel)
