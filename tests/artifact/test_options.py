"""Options of `birdie.save`, `birdie.load` and `birdie compress`: every pair of them works or is refused."""

import inspect
import io
import itertools
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import birdie
from birdie.artifact.options import Limits, LoadOptions, ObjectOptions, QuantizeOptions, SaveOptions
from birdie.cli import build_app
from birdie.cli.compress_flags import CompressFlags, flag_of
from birdie.cli.console import run
from birdie.errors import ConfigError
from birdie.system.keywords import help_of, options_of

DOORS: dict[Callable[..., Any], type] = {
    birdie.save: SaveOptions,
    birdie.save_object: ObjectOptions,
    birdie.quantize_: QuantizeOptions,
    birdie.load: LoadOptions,
    birdie.load_object: Limits,
}
OWN = {"model", "content", "path", "into", "strict"}


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_signature_and_docstring_come_from_the_options(door: Callable[..., Any]) -> None:
    options = {option.name: option.default for option in fields(DOORS[door])}
    parameters = inspect.signature(door).parameters
    assert {name: parameters[name].default for name in options} == options
    assert parameters.keys() - options.keys() <= OWN
    lines = (door.__doc__ or "").splitlines()
    for option, _, metadata in options_of(DOORS[door]):
        assert any(line.strip().startswith(f"{option.name}: {help_of(metadata)[:40]}") for line in lines), option.name


class Small(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 12))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def test_every_pair_of_options_works_or_is_refused_by_name() -> None:
    torch.manual_seed(0)
    model, base = Small(), Small()
    batches = [(torch.randn(16, 24), torch.randint(12, (16,))) for _ in range(4)]
    values: dict[str, Any] = {
        "scheme": "sigma:0.3",
        "budget": 2500,
        "bits": 8.0,
        "quality": 0.01,
        "calibration": birdie.calibrate(model, batches, loss),
        "tune": 0.01,
        "base": base,
        "metadata": {"a": 1},
        "effort": "fast",
        "progress": lambda _done, _total: None,
        "workers": 1,
        "lossless": True,
    }
    assert values.keys() == {option.name for option in fields(SaveOptions)}

    def problem(*names: str) -> str:
        try:
            SaveOptions(**{name: values[name] for name in names})
        except ConfigError as error:
            return str(error)
        return ""

    check_pairs(list(values), problem, lambda name: name)
    for names in itertools.combinations(values, 2):
        if not problem(*names):
            assert birdie.save(model, io.BytesIO(), **{name: values[name] for name in names}).bytes, names


def check_pairs(names: list[str], problem: Callable[..., str], spelled: Callable[[str], str]) -> None:
    """Check that what two options do alone they do together, or that an error names both."""
    alone = {name: problem(name) for name in names}
    assert all(spelled(name) in text for name, text in alone.items() if text)
    for pair in itertools.combinations(names, 2):
        text = problem(*pair)
        if not any(alone[name] for name in pair):
            assert not text or all(spelled(name) in text for name in pair), (pair, text)
        elif text:
            assert any(spelled(name) in text for name in pair if alone[name]), (pair, text)


def test_every_pair_of_flags_works_or_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, other = tmp_path / "w.safetensors", tmp_path / "base.safetensors"
    for number, path in enumerate((weights, other)):
        torch.manual_seed(number)
        save_file(Small().state_dict(), path)
    values: dict[str, Any] = {
        "scheme": "sigma:0.3",
        "budget": "2500",
        "bits": "8",
        "quality": "0.01",
        "tune": "1s",
        "base": str(other),
        "effort": "fast",
        "lossless": "",
        "overwrite": "",
        "full_every": "3",
        "weights_only": "",
        "key": "0.",
        "include": "*weight",
        "exclude": "*bias",
        "keep": "*.txt",
        "skip": "*.bin",
        "calibrate": "none",
        "model": "net.py:make",
        "own_data": "inputs.npz",
        "loss": "data.py:loss",
        "image_size": "32",
        "metric": "eval.py:accuracy",
        "at_least": "0.9",
        "folder": "measured",
        "calibration_data": "own",
        "calibration_tokens": "100",
        "offload": "",
        "device": "cpu",
        "dry_run": "",
    }
    parsed = {option.name for option in fields(CompressFlags)} - {"calibration", "metadata", "progress", "workers"}
    assert values.keys() == parsed - {"output", "json"}

    def problem(*names: str) -> str:
        flags = [word for name in names for word in (flag_of(name), values[name]) if word]
        code = run(build_app, ["compress", str(weights), "-o", str(tmp_path / "x.birdie"), *flags, "--json"])
        answer = json.loads(capsys.readouterr().out)
        if code:
            assert answer["error"]["type"] == "ConfigError", (names, answer)
        return answer["error"]["message"] if code else ""

    check_pairs(list(values), problem, flag_of)


def test_sizes_numbers_and_times_are_what_the_command_line_takes(tmp_path: Path) -> None:
    weights = {"w": torch.randn(64, 64)}
    sizes = {birdie.save(weights, tmp_path / "x.birdie", budget=budget).bytes for budget in (1_500, "1500", "1.5kB")}
    assert len(sizes) == 1
    assert len({birdie.save(weights, tmp_path / "x.birdie", bits=bits).bytes for bits in (4, 4.0, "4")}) == 1
    assert SaveOptions(tune="1.5min", calibration="synthetic").tuning == 90
    wrong: dict[str, Any] = {"budget": "1.5 apples", "bits": "four", "tune": "soon", "quality": "good"}
    for option, value in wrong.items():
        with pytest.raises(ConfigError, match=value):
            SaveOptions(**{option: value})


@pytest.mark.parametrize(
    "options",
    [{"lossless": "no"}, {"progress": 3}, {"quality": 90}, {"quality": "90", "calibration": "synthetic"}],
    ids=str,
)
def test_a_value_of_another_kind_is_refused_by_save(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        birdie.save({"w": torch.ones(4, 4)}, io.BytesIO(), **options)


@pytest.mark.parametrize("options", [{"names": 3}, {"names": [3]}, {"strict": "no"}, {"lazy": 1}], ids=str)
def test_a_value_of_another_kind_is_refused_by_load(options: dict[str, Any]) -> None:
    birdie.save({"w": torch.ones(4, 4)}, file := io.BytesIO())
    with pytest.raises(ConfigError, match=next(iter(options))):
        birdie.load(file, **options)
    with pytest.raises(ConfigError, match="int8"):
        birdie.load(file, dtype=torch.int8)
