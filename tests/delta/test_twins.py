"""Nearly equal tensors of one lossless file: one is stored, and of the others the deltas to it."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import birdie
from birdie.artifact import container
from birdie.artifact import metadata as file_metadata
from birdie.artifact.container import Reader
from birdie.artifact.file import File
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.delta.twins import twins
from birdie.errors import ArtifactError, ConfigError
from tests.artifact.states import same_bits

NUMBERS = torch.Generator().manual_seed(0)


def average_beside_weights(dtype: torch.dtype = torch.float32, step: float = 1e-3) -> dict[str, Tensor]:
    """Return weights, and an average that lags behind them."""
    weights = {f"{i}.weight": torch.randn(64, 128, generator=NUMBERS) / 10 for i in range(3)}
    average = {name: w + step * torch.randn(w.shape, generator=NUMBERS) for name, w in weights.items()}
    return {f"model.{n}": w.to(dtype) for n, w in weights.items()} | {
        f"ema.{n}": w.to(dtype) for n, w in average.items()
    }


def all_equal(state: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return state.keys() == other.keys() and all(same_bits(state[name], other[name]) for name in state)


def saved(state: Any, **settings: Any) -> bytes:
    file = io.BytesIO()
    birdie.save(state, file, lossless=True, **settings)
    return file.getvalue()


@pytest.mark.parametrize("coder", ["max", "fast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_they_come_back_bit_for_bit_in_fewer_bytes(dtype: torch.dtype, coder: str) -> None:
    state = dict(sorted(average_beside_weights(dtype).items()))
    data = saved(state, effort=coder)
    assert all_equal(birdie.load(data), state)
    halves = [{name: w for name, w in state.items() if name.startswith(part)} for part in ("model", "ema")]
    assert len(data) < sum(len(saved(half, effort=coder)) for half in halves)
    turned = [Reader(one) for one in (data, saved(dict(reversed(state.items())), effort=coder))]
    assert [turned[0].read(name) for name in turned[0].entries] == [turned[1].read(name) for name in turned[1].entries]


def test_those_that_share_no_values_are_stored_alone() -> None:
    state = {f"{i}.weight": torch.randn(64, 128, generator=NUMBERS) for i in range(4)}
    assert not twins(state)
    assert not any(row.scheme == "delta" for row in birdie.save(state, io.BytesIO(), lossless=True).tensors)


def test_odd_values_stay_as_they_are() -> None:
    state = average_beside_weights()
    for name in ("ema.0.weight", "model.1.weight"):
        state[name][0, :4] = torch.tensor([torch.nan, torch.inf, -0.0, 1e-45])
    state["ema.2.weight"] = torch.zeros(64, 128)
    assert all_equal(birdie.load(saved(state)), state)


def test_a_part_of_a_file_is_loaded(tmp_path: Path) -> None:
    state, path = average_beside_weights(), tmp_path / "model.birdie"
    birdie.save(state, path, lossless=True)
    assert all_equal(birdie.load(path, names="ema.0.weight"), {"ema.0.weight": state["ema.0.weight"]})
    module = nn.ModuleDict(
        {part: nn.ModuleList(nn.Linear(128, 64, bias=False) for _ in range(3)) for part in ("model", "ema")}
    )
    birdie.load(path, into=module, lazy=True)
    inputs = torch.randn(2, 128, generator=NUMBERS)
    assert torch.equal(module["ema"][1](inputs), inputs @ state["ema.1.weight"].T)  # type: ignore[index]


def test_the_commands_need_no_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = average_beside_weights(torch.bfloat16)
    torch.save({"model": state, "step": 3}, tmp_path / "state.pt")
    file = tmp_path / "state.birdie"
    assert run(build_app, ["compress", str(tmp_path / "state.pt"), "--lossless", "-o", str(file)]) == 0
    assert "3 tensors are deltas to others in the file" in " ".join(capsys.readouterr().out.split())
    assert run(build_app, ["decompress", str(file), "-o", str(tmp_path / "again.pt")]) == 0
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    assert again["step"] == 3
    assert all_equal(again["model"], state)
    assert birdie.inspect(file).base is None


def test_another_base_is_refused(tmp_path: Path) -> None:
    state, path = average_beside_weights(), tmp_path / "model.birdie"
    birdie.save(state, path, lossless=True)
    with pytest.raises(ConfigError, match="between its own tensors; leave base="):
        birdie.load(path, base=state)


def with_names(data: bytes, names: dict[str, str]) -> bytes:
    """Return a file whose differences are to other tensors of it."""
    with Reader(data) as reader:
        entries = [reader.read(name) for name in reader.names]
        about = {**reader.fields, "base": {"of": "", "names": names, "inside": True}}
    return container.to_bytes(entries, json.dumps(about).encode())


@pytest.mark.parametrize(
    "names",
    [
        {"model.0.weight": "model.0.weight"},  # itself
        {"model.0.weight": "model.1.weight", "model.1.weight": "model.0.weight"},  # in a circle
        {"model.0.weight": "ema.1.weight"},  # another tensor
        {"model.0.weight": "nothing"},
        {},
    ],
)
def test_a_file_whose_names_lie_is_refused(names: dict[str, str]) -> None:
    data = saved(average_beside_weights())
    differences = {row.name for row in birdie.inspect(io.BytesIO(data)).tensors if row.scheme == "delta"}
    assert differences == {f"model.{i}.weight" for i in range(3)}
    with pytest.raises(ArtifactError, match=r"give another base|other values than the base"):
        birdie.load(with_names(data, names))


def test_a_field_that_is_no_flag_is_refused() -> None:
    for base in (b'{"inside":1}', b'["inside"]'):
        with pytest.raises(ArtifactError, match="'base'"):
            file_metadata.parse(b'{"base":' + base + b"}", "x.birdie", aliases=0)


@pytest.mark.parametrize("workers", [1, 4])
def test_each_base_is_decoded_once_however_they_alternate(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bases = {f"base{i}": torch.randn(64, 128, generator=NUMBERS) / 10 for i in range(8)}
    others = {f"other{i:02}": bases[f"base{i % 8}"] + 1e-3 * torch.randn(64, 128, generator=NUMBERS) for i in range(32)}
    data, decoded = saved(bases | others), list[str]()
    decode = File.decode
    monkeypatch.setattr(File, "decode", lambda file, name, *rest: (decoded.append(name), decode(file, name, *rest))[1])
    assert all_equal(birdie.load(data, workers=workers), bases | others)
    assert len(decoded) == len(set(decoded)) == 8
