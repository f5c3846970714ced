"""The benchmark of fine-tuning to a size runs by its recipe, and the recipe describes its network."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import spectral_tune
from benchmarks.networks import ResNet
from benchmarks.subjects import Subject
from birdie.errors import ConfigError
from birdie.gpt.run.recipe_registry import find

RECIPE = find("resnet_spectral")


def test_a_recipe_sets_everything_that_no_flag_sets() -> None:
    options = spectral_tune.parse(["--steps", "3", "--recipe", str(RECIPE.path)])
    assert options.subject == "resnet32"
    assert (options.smaller, options.transform, options.batch, options.rate) == ([28.0], "auto", 50, 1e-3)
    assert (options.settled, options.start, options.seed, options.steps) == (0.5, 4.0, 0, 3)
    assert vars(spectral_tune.parse(["--recipe", "resnet_spectral"])) == vars(options) | {
        "recipe": "resnet_spectral",
        "steps": 6000,
    }


def test_a_recipe_of_another_program_or_with_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sota is a recipe of birdie train"):
        spectral_tune.parse(["--recipe", "sota"])
    (tmp_path / "x.toml").write_text(RECIPE.path.read_text().replace("steps", "step"))
    with pytest.raises(ConfigError, match=r"has no 'step'"):
        spectral_tune.parse(["--recipe", str(tmp_path / "x.toml")])


@pytest.mark.nightly  # fine-tunes and codes a ResNet
def test_a_short_run_by_the_recipe_ends_below_its_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A smaller network and images of noise take the same end-to-end pipeline."""
    torch.manual_seed(0)
    model = ResNet(1).eval()
    batch = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    subject = Subject("tiny", model, model.state_dict(), [batch], [batch], "key", lambda: ResNet(1))
    monkeypatch.setattr(spectral_tune, "load_subject", lambda *_: subject)
    monkeypatch.setenv("BIRDIE_DATA", str(tmp_path))
    flags = ["--recipe=resnet_spectral", "--rows=plain,spectral,trellis", "--json", "--steps=4", "--batch=8"]
    flags += ["--smaller=6", "--seeds=2"]
    spectral_tune.main([*flags, f"--runs={tmp_path}"])
    lines = json.loads(capsys.readouterr().out)["rows"]
    rows = {row["curve"]: row for row in lines if "curve" in row}
    assert [row["seed"] for row in lines if "curve" in row] == [0] * 4 + [1] * 4
    assert [row["scheme"] for row in lines if "mean" in row] == [row["scheme"] for row in lines[:4]]
    assert rows["spectral"]["bytes"] <= rows["float"]["bytes"] / 6
    assert rows["spectral"]["scheme"] == "spectral, auto"
