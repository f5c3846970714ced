"""The benchmark of fine-tuned networks runs by its recipe, and the recipe is of the network it says."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import spectral_tune
from benchmarks.quality import Subject
from benchmarks.resnet import ResNet, load_resnet
from birdie.errors import ConfigError
from birdie.run.registry import find

RECIPE = find("resnet_spectral")


def test_a_recipe_sets_what_no_flag_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIRDIE_DATA", "data")
    options = spectral_tune.parse(["--steps", "3", "--recipe", str(RECIPE.path)])
    assert options.weights == Path("data") / RECIPE.settings()["program"]["weights"]
    assert (options.smaller, options.transform, options.batch, options.rate) == ([20.0], "auto", 50, 2e-4)
    assert (options.settled, options.start, options.seed, options.steps) == (0.4, 4.0, 0, 3)
    assert vars(spectral_tune.parse(["--recipe", "resnet_spectral"])) == vars(options) | {
        "recipe": "resnet_spectral",
        "steps": 800,
    }


def test_a_recipe_names_every_setting() -> None:
    assert set(RECIPE.settings()["program"]) == set(spectral_tune.SETTINGS)
    assert RECIPE.about.runs == spectral_tune.PROGRAM


def test_a_recipe_that_is_none_of_its_own_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sota is a recipe of birdie train, not of python -m"):
        spectral_tune.parse(["--recipe", "sota"])
    (tmp_path / "x.toml").write_text(RECIPE.path.read_text().replace("steps", "step"))
    with pytest.raises(ConfigError, match=r"\[program\] has no 'step'; it has weights, smaller"):
        spectral_tune.parse(["--recipe", str(tmp_path / "x.toml")])


def test_parameters_are_those_of_the_network() -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in ResNet(5).parameters()) == RECIPE.about.parameters


@pytest.mark.skipif(not os.environ.get("BIRDIE_DATA"), reason="BIRDIE_DATA is unset")
def test_the_weights_are_of_that_network() -> None:
    model, state = load_resnet(Path(os.environ["BIRDIE_DATA"]) / RECIPE.settings()["program"]["weights"])
    assert sum(p.numel() for p in model.parameters()) == RECIPE.about.parameters
    whole = 4 * sum(weight.numel() for weight in state.values())
    assert RECIPE.about.bytes is not None
    assert whole / 20.5 < RECIPE.about.bytes <= whole / 20


def test_a_short_run_by_the_recipe_ends_under_its_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A narrow stand-in for the network, some images of noise: the road is the same."""
    torch.manual_seed(0)
    model = ResNet(1).eval()
    batch = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    subject = Subject("tiny", model, model.state_dict(), [batch], [batch], "key", lambda: ResNet(1))
    monkeypatch.setattr(spectral_tune, "subject_of", lambda _: subject)
    flags = ["--recipe", "resnet_spectral", "--alone", "--json", "--steps=4", "--batch=8", "--smaller=6"]
    monkeypatch.setattr(sys, "argv", ["spectral_tune", *flags, f"--runs={tmp_path}"])
    spectral_tune.main()
    rows = {row["curve"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["spectral"]["bytes"] <= rows["float"]["bytes"] / 6
    assert rows["spectral"]["scheme"] == "spectral, auto"
