"""The benchmark of lazy loading: layers repeat the coded ones, and every way of loading computes the same output."""

from pathlib import Path

import pytest
import torch

import birdie
from benchmarks import lazy, memory


def test_layers_repeat_those_that_are_coded(tmp_path: Path) -> None:
    path = lazy.saved(tmp_path, 6, 16, "int4")
    state = birdie.load(path)
    assert state.keys() == lazy.build(6, 16).state_dict().keys()
    for layer in range(6):
        assert torch.equal(state[f"{2 * layer}.weight"], state[f"{2 * (layer % lazy.DISTINCT)}.weight"])
    assert not torch.equal(state["0.weight"], state["2.weight"])
    assert lazy.saved(tmp_path, 6, 16, "int4") == path


@pytest.mark.skipif(not memory.can_measure(), reason="needs /proc")
def test_every_way_of_loading_computes_the_same_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _count: None)  # of this process: later tests need theirs
    path = lazy.saved(tmp_path, 5, 32, "int4")
    rows = [
        lazy.measure_way(path, 5, 32, way, cache) for way, cache in (("eager", None), ("lazy", None), ("lazy", 0.01))
    ]
    for row in rows:
        assert list(row) == ["peak_mb", "load_s", "first_s", "second_s", "output"]
    assert len({row["output"] for row in rows}) == 1
