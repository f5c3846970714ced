"""Leftovers of a killed run beside an output: another run does not use them, its file has the bytes of one alone."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import birdie
from birdie.artifact import resume, saving
from birdie.artifact.resume import Resume
from birdie.compress.coding import Coded


def weights(seed: int = 0, count: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"blocks.{index}.w": torch.randn(64 + 8 * index, 96, generator=generator) for index in range(count)}


def near(seed: int) -> dict[str, Tensor]:
    """Return weights like those of seed 0."""
    noise = weights(seed)
    return {name: weight + 0.01 * noise[name] for name, weight in weights().items()}


def changed() -> dict[str, Tensor]:
    """Return weights that differ in one element of each."""
    state = weights()
    for weight in state.values():
        weight[0, 0] += 1e-3
    return state


RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    "4 bits": lambda: {"model": weights(), "bits": 4.0},
    "5 bits": lambda: {"model": weights(), "bits": 5.0},
    "other weights": lambda: {"model": weights(1), "bits": 4.0},
    "one element": lambda: {"model": changed(), "bits": 4.0},
    "max": lambda: {"model": weights(), "bits": 4.0, "effort": "max"},
    "int4": lambda: {"model": weights(), "scheme": "int4"},
    "int4 in groups": lambda: {"model": weights(), "scheme": "int4:group_size=32"},
    "lossless": lambda: {"model": weights(), "lossless": True},
    "a base": lambda: {"model": weights(), "bits": 4.0, "base": near(1)},
    "another base": lambda: {"model": weights(), "bits": 4.0, "base": near(2)},
    "a lossless base": lambda: {"model": weights(), "lossless": True, "base": near(1)},
    "another lossless base": lambda: {"model": weights(), "lossless": True, "base": near(2)},
}


def save(run: dict[str, Any], path: Any) -> None:
    birdie.save(path=path, **{"effort": "fast", "workers": 1, **run})


def interrupt(run: dict[str, Any], path: Path, version: str | None = None) -> int:
    """Stop a run after three records, as a kill does; return how many records it left."""
    keep, count = Resume.keep, [0]

    def stop(self: Resume, key: str, coded: Coded) -> Coded:
        if count[0] == 3:
            raise KeyboardInterrupt
        count[0] += 1
        return keep(self, key, coded)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Resume, "keep", stop)
        if version is not None:
            patch.setattr(resume, "versions", lambda: {"birdie": version})
        with pytest.raises(KeyboardInterrupt):
            save(run, path)
    return count[0]


@pytest.fixture(autouse=True)
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep coded tensors of small models on disk, too."""
    monkeypatch.setattr(saving, "_ON_DISK", 1)


EVERY_DAY = {("4 bits", "one element"), ("a base", "another base")}
PAIRS = [
    pytest.param(name, other, marks=() if (name, other) in EVERY_DAY else pytest.mark.nightly)
    for name in RUNS
    for other in RUNS
    if name != other
]


@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_another_run_has_the_bytes_of_an_undisturbed_one(name: str, other: str, tmp_path: Path) -> None:
    assert interrupt(RUNS[other](), tmp_path / "x.birdie")
    plain = io.BytesIO()
    save(RUNS[name](), plain)
    save(RUNS[name](), tmp_path / "x.birdie")
    assert (tmp_path / "x.birdie").read_bytes() == plain.getvalue()
    assert list(tmp_path.iterdir()) == [tmp_path / "x.birdie"]


def test_another_version_of_birdie_takes_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert interrupt(RUNS["4 bits"](), tmp_path / "x.birdie", version="99")
    recalled: list[Coded | None] = []
    recall = Resume.recall
    monkeypatch.setattr(Resume, "recall", lambda self, key: recalled.append(recall(self, key)) or recalled[-1])
    save(RUNS["4 bits"](), tmp_path / "x.birdie")
    assert recalled
    assert not any(recalled)
    assert list(tmp_path.iterdir()) == [tmp_path / "x.birdie"]
