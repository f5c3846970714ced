"""Two checkpoints are compared tensor by tensor, and a file is verified entry by entry."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import birdie
from birdie.artifact.comparison import compare
from birdie.artifact.options import Limits
from birdie.artifact.verification import damaged_tensors
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.errors import ArtifactError, ConfigError


def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "up": torch.randn(96, 64, generator=generator),
        "half": torch.randn(64, generator=generator).half(),
        "steps": torch.arange(9),
        "nan": torch.tensor([math.nan]),
        "empty": torch.zeros(0),
    }


def test_a_tensor_is_equal_to_the_bit_or_so_many_decibels_away() -> None:
    a, b = state(), state()
    b["up"] = b["up"] + 0.01 * b["up"].flip(0)
    b["half"] = b["half"].float()
    b["steps"] = b["steps"][:5]
    b["other"] = b.pop("empty")
    rows = {row.name: row for row in compare(a, b)}
    assert rows["nan"].relation == "equal"
    assert rows["up"].relation == rows["half"].relation == "differs"
    assert rows["up"].decibels == pytest.approx(40, abs=0.1)
    assert rows["half"].decibels == math.inf  # the same values in another dtype
    assert (rows["steps"].relation, rows["steps"].decibels) == ("shape", None)
    assert (rows["empty"].relation, rows["other"].relation) == ("only in a", "only in b")
    assert all(row.relation == "equal" for row in compare(a, state()))


def test_the_command_compares_files_of_any_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(state(), tmp_path / "a.pt")
    birdie.save(state(), tmp_path / "exact.birdie", lossless=True)
    birdie.save({**state(), "nan": torch.ones(1)}, tmp_path / "small.birdie", scheme="int4")
    a, exact, small = (str(tmp_path / name) for name in ("a.pt", "exact.birdie", "small.birdie"))
    assert run(build_app, ["diff", a, exact]) == 0
    assert "5 of 5 tensors are equal" in capsys.readouterr().out
    assert run(build_app, ["diff", exact, small, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    by_name = {row["name"]: row for row in answer["tensors"]}
    assert 10 < by_name["up"]["decibels"] < 30
    assert by_name["up"]["bytes"][0] > 4 * by_name["up"]["bytes"][1] > 0
    assert run(build_app, ["diff", a, str(tmp_path / "none.pt")]) == 1


def test_every_damaged_tensor_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.birdie"
    birdie.save(state(), path, scheme="int8")
    assert damaged_tensors(path, Limits()) == {}
    assert run(build_app, ["verify", str(path)]) == 0
    data = bytearray(path.read_bytes())
    position = len(data) - birdie.inspect(path).tensors[0].bytes // 2  # "up" is the last entry
    data[position] ^= 1
    assert damaged_tensors(bytes(data), Limits()).keys() == {"up"}
    path.write_bytes(data)
    capsys.readouterr()
    assert run(build_app, ["verify", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["damaged"].keys() == {"up"}
    with pytest.raises(ArtifactError, match="max_bytes"):
        damaged_tensors(path, Limits(max_bytes=10))


def test_a_file_of_deltas_is_verified_with_its_base(tmp_path: Path) -> None:
    later = {name: value + 1 if name == "steps" else value for name, value in state().items()}
    birdie.save(later, tmp_path / "x.birdie", lossless=True, base=state())
    with pytest.raises((ArtifactError, ConfigError), match="base"):
        damaged_tensors(tmp_path / "x.birdie", Limits())
    assert damaged_tensors(tmp_path / "x.birdie", Limits(base=state())) == {}
