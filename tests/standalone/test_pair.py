"""The pair: `export` and `load` in one file, for training scripts of other people, without birdie."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import birdie
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.errors import BudgetError, ConfigError, OutputError, WeightsError
from birdie.golf.packed_script import PackedScript
from birdie.standalone import pair as entry
from tests.golf.scripts import INTERPRETED, script, start

BUDGET, SMALL = 900, 270
"""Bytes of a model alone: of `state`, and of the model of SCRIPT."""

# A training script as people write them; the first line of its body gets `export` and `load`.
SCRIPT = '''"""Trains a little, exports, and scores what it has loaded: → no ASCII."""
from __future__ import annotations
{pair}
import os
import torch
from torch import nn

A, B, i, np = 1, 2, 3, 4  # short names that nobody may change
model = nn.Sequential(nn.Embedding(5, 5), nn.Linear(5, 5))
tokens = torch.arange(64) * 7 % 5
for _ in range(2):
    loss = nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:])
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
torch.save(model.state_dict(), "final_model.pt")
budget = int(os.environ["BUDGET"])
written = export(model.state_dict(), budget, "model.birdie")
model.load_state_dict(load("model.birdie"))
code = {{os.path.realpath(path) for path in (__file__, {file})}}
assert written == os.path.getsize("model.birdie")
assert written + sum(map(os.path.getsize, code)) <= budget
assert (A, B, i, np) == (1, 2, 3, 4)
with open("model.birdie", "rb") as file:
    damaged = bytearray(file.read())
damaged[-5] ^= 1
try:
    load(bytes(damaged))
except ValueError as error:
    print(type(error).__name__, error)
torch.save(load("model.birdie"), "loaded.pt")
'''


@pytest.fixture
def pair() -> PackedScript:
    return script("pair")


def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embedding.weight": (32, 40), "block.0.weight": (40, 40), "norm.weight": (40,)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return weights | {"head.weight": weights["embedding.weight"]}


@pytest.mark.nightly
@pytest.mark.parametrize("pasted", [False, True])
def test_a_script_without_birdie_exports_under_a_budget_and_loads(
    pair: PackedScript, pasted: bool, tmp_path: Path
) -> None:
    (tmp_path / "birdie_pair.py").write_bytes(pair.script)
    lines = pair.text if pasted else "from birdie_pair import export, load"
    file = "__file__" if pasted else "'birdie_pair.py'"
    (tmp_path / "train_gpt.py").write_text(SCRIPT.format(pair=lines, file=file), encoding="utf-8")
    code = (tmp_path / "train_gpt.py").stat().st_size + (0 if pasted else len(pair.script))
    variables = {**INTERPRETED, "BUDGET": str(code + SMALL)}
    variables["PYTHONPATH"] = os.pathsep.join((str(tmp_path / "other"), str(tmp_path)))
    done = start(tmp_path, "train_gpt.py", variables=variables)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("ArtifactError ")
    assert "checksum" in done.stdout
    loaded, reference = torch.load(tmp_path / "loaded.pt"), birdie.load(tmp_path / "model.birdie")
    assert loaded.keys() == reference.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in reference.items())
    birdie.save(torch.load(tmp_path / "final_model.pt"), tmp_path / "ours.birdie", budget=SMALL)
    assert (tmp_path / "ours.birdie").read_bytes() == (tmp_path / "model.birdie").read_bytes()


def test_the_file_is_the_one_that_save_writes(tmp_path: Path) -> None:
    weights = state()
    code = tmp_path / "train.py"
    code.write_bytes(bytes(500))
    written = entry.export(weights, BUDGET + 500, tmp_path / "pair.birdie", code=[code, str(code)])
    birdie.save(weights, tmp_path / "ours.birdie", budget=BUDGET)
    assert (tmp_path / "pair.birdie").read_bytes() == (tmp_path / "ours.birdie").read_bytes()
    assert written == (tmp_path / "pair.birdie").stat().st_size <= BUDGET
    loaded = entry.load(tmp_path / "pair.birdie")
    assert loaded["head.weight"] is loaded["embedding.weight"]


def test_with_calibration_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(16, 24), nn.Linear(24, 16))
    batches = [torch.randint(0, 16, (4, 9)) for _ in range(5)]

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(module(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    calibration = module, batches, loss
    written = entry.export(module.state_dict(), 800, tmp_path / "pair.birdie", code=[], calibration=calibration)
    known = birdie.calibrate(*calibration, symmetries=False)
    birdie.save(module.state_dict(), tmp_path / "ours.birdie", budget=800, calibration=known)
    assert written <= 800
    assert (tmp_path / "pair.birdie").read_bytes() == (tmp_path / "ours.birdie").read_bytes()


def test_bad_input_is_refused_in_words(tmp_path: Path) -> None:
    path, weights = tmp_path / "model.birdie", state()
    with pytest.raises(BudgetError, match=f"the code alone takes {Path(__file__).stat().st_size:,} bytes"):
        entry.export(weights, 1000, path, code=[__file__])
    with pytest.raises(BudgetError, match="of a budget of 100 bytes the code takes 0"):
        entry.export(weights, 100, path, code=[])
    with pytest.raises(ConfigError, match="budget is None"):
        entry.export(weights, None, path)  # type: ignore[arg-type]
    with pytest.raises(OutputError, match="missing"):
        entry.export(weights, 1000, path, code=[tmp_path / "missing.py"])
    with pytest.raises(WeightsError, match="list"):
        entry.export([1], 1000, path, code=[])  # type: ignore[arg-type]
    weights["norm.weight"][3] = torch.nan
    with pytest.raises(WeightsError, match=r"norm\.weight"):
        entry.export(weights, 1000, path, code=[])
    assert not [*tmp_path.iterdir()]


def test_the_text_brings_a_script_five_names(pair: PackedScript, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f'"""Docstring."""\nfrom __future__ import annotations\n{pair.text}A = 1\n', "ascii")
    names: dict[str, Any] = {"__file__": str(script)}
    exec(compile(script.read_bytes(), script, "exec"), names)
    added = names.keys() - {"__builtins__", "__doc__", "__file__", "annotations", "A"}
    assert added == {"base64", "lzma", "birdie_pair", "export", "load"}
    with pytest.raises(names["birdie_pair"]["ArtifactError"], match="missing"):
        names["load"](tmp_path / "missing.birdie")
    with pytest.raises(names["birdie_pair"]["BudgetError"], match=f"{script.stat().st_size:,} bytes"):
        names["export"](state(), 10, code=[script])


def test_the_command(
    pair: PackedScript, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "golf.py"
    monkeypatch.setattr("birdie.golf.packed_script.pack", lambda *_: pair)
    assert run(build_app, ["script", "--kind", "pair", "-o", str(output)]) == 0
    assert output.read_bytes() == pair.script
    assert "from golf import export, load" in capsys.readouterr().out
    assert run(build_app, ["script", "--kind", "pair", "-o", str(output), "--paste"]) == 0
    assert output.read_text("ascii") == pair.text
