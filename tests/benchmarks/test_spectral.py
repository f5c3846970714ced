"""The benchmark of the spectral rate: its data are read, its networks have their sizes, its rows are of files."""

import argparse
import gzip
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import spectral


def test_idx_files_are_read(tmp_path: Path) -> None:
    header = bytes([0, 0, 8, 2]) + (2).to_bytes(4, "big") + (3).to_bytes(4, "big")
    (tmp_path / "x.gz").write_bytes(gzip.compress(header + bytes(range(6))))
    assert torch.equal(spectral.idx(tmp_path / "x.gz"), torch.arange(6, dtype=torch.uint8).view(2, 3))


@pytest.mark.parametrize("name", spectral.NETS)
def test_networks_have_a_million_weights_or_more(name: str) -> None:
    model = spectral.NETS[name]()
    assert sum(weight.numel() for weight in model.parameters()) >= 1_000_000
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_an_epoch_has_every_image_once_and_the_order_depends_on_the_seed_only() -> None:
    numbers = torch.arange(1024)
    first, second = (spectral.Epochs((numbers, numbers), seed=0) for _ in range(2))
    for _ in range(2):
        epochs = [torch.cat([images for images, _ in batches]) for batches in (first, second)]
        assert torch.equal(*epochs)
        assert torch.equal(epochs[0].sort().values, numbers)


@pytest.mark.parametrize("way", spectral.WAYS)
def test_a_timed_step_computes_the_same_gradients_each_time(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 10))
    monkeypatch.setitem(spectral.TIMED_NETS, "small", (lambda: model, 8, (3, 4, 4)))
    step = spectral.stepper("small", way, "identity")
    gradients = []
    for _ in range(2):
        step()
        gradients.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
    assert len(gradients[0]) == (2 if way == "plain" else len(list(model.parameters())))
    assert all(torch.equal(first, second) for first, second in zip(*gradients, strict=True))


def test_step_rows_are_relative_to_the_plain_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        spectral.TIMED_NETS,
        "small",
        (lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 10)), 8, (3, 4, 4)),
    )

    def peak(command: list[str], **_: object) -> argparse.Namespace:
        return argparse.Namespace(stdout=str(10.0 + 5 * spectral.WAYS.index(command[-1])))

    monkeypatch.setattr(subprocess, "run", peak)
    rows = spectral.step_rows(argparse.Namespace(net="small", transform="identity", turns=3))
    assert [row["way"] for row in rows] == list(spectral.WAYS)
    assert rows[0]["over_plain"] == 1
    assert [row["peak_over_plain"] for row in rows] == [1.0, 1.5, 2.0]
    assert all(row["over_plain"] == row["step_ms"] / rows[0]["step_ms"] for row in rows)


@pytest.mark.nightly  # trains a network of 1.07 M weights
def test_rows_are_measured_on_files(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(512, 1, 28, 28), torch.randint(0, 10, (512,))
    monkeypatch.setenv("BIRDIE_DATA", ".")
    monkeypatch.setattr(spectral, "images", lambda _: {"train": (x, y), "test": (x, y)})
    options = argparse.Namespace(net="mlp", bits=[6.0], transform="identity", epochs=2, seed=0)
    plain, small = spectral.rows(options)
    assert plain["smaller"] == 0
    assert 0.5 < small["smaller"] < 0.9
    assert 0 <= small["accuracy"] <= 1
