"""A sweep file names a recipe and ranges of its settings; what fits no setting is refused with the file's name."""

from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FixedTrial

from birdie.errors import ConfigError
from birdie.gpt.run.registry import find
from birdie.lab.space import Sweep, read_sweep

HEAD = 'recipe = "laptop"\n'
RATE = '"optimizer.matrix_lr" = { low = 0.01, high = 0.1, log = true }\n'


def sweep_of(folder: Path, text: str) -> Sweep:
    path = folder / "sweep.toml"
    path.write_text(text)
    return read_sweep(path)


def test_ranges_become_distributions_of_the_settings_type(tmp_path: Path) -> None:
    text = (
        HEAD + f"[search]\n{RATE}num_layers = {{ low = 2, high = 8, step = 2 }}\ntrain.seed = {{ choices = [1, 2] }}\n"
    )
    assert dict(sweep_of(tmp_path, text).space) == {
        "optimizer.matrix_lr": FloatDistribution(0.01, 0.1, log=True),
        "model.num_layers": IntDistribution(2, 8, step=2),
        "train.seed": CategoricalDistribution([1, 2]),
    }


def test_a_trial_has_the_recipe_the_changes_and_its_values(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, HEAD + f'[set]\n"train.iterations" = 300\n[search]\n{RATE}')
    recipe = sweep.suggest(FixedTrial({"optimizer.matrix_lr": 0.02}))
    laptop = find("laptop").recipe()
    assert (recipe.optimizer.matrix_lr, recipe.train.iterations) == (0.02, 300)
    assert recipe.model == laptop.model


def test_lists_are_texts(tmp_path: Path) -> None:
    sweep = sweep_of(
        tmp_path, HEAD + 'pruner = "none"\n[search]\n"value_embed_layers" = { choices = ["1,2", "0,3"] }\n'
    )
    assert sweep.suggest(FixedTrial({"model.value_embed_layers": "1,2"})).model.value_embed_layers == (1, 2)


def test_a_grid_has_every_combination_once(tmp_path: Path) -> None:
    search = "[search]\nnum_layers = { choices = [1, 2, 3] }\nmatrix_lr = { low = 0.1, high = 0.3, step = 0.1 }\n"
    sweep = sweep_of(tmp_path, HEAD + 'sampler = "grid"\ntrials = 100\n' + search)
    rows = [tuple(row.values()) for row in sweep.grid()]
    assert sweep.trials == len(rows) == len(set(rows)) == 9
    assert sorted({round(rate, 6) for _, rate in rows}) == [0.1, 0.2, 0.3]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("recipe = [", "cannot be read"),
        ("[search]\n" + RATE, "name the recipe"),
        ('recipe = "laptup"\n[search]\n' + RATE, "did you mean laptop"),
        (HEAD, "searches nothing"),
        (HEAD + "trails = 3\n[search]\n" + RATE, "'trails' is no setting of a sweep"),
        (HEAD + "trials = 0\n[search]\n" + RATE, "0 trials"),
        (HEAD + 'trials = "many"\n[search]\n' + RATE, "integers"),
        (HEAD + 'sampler = "bayes"\n[search]\n' + RATE, "tpe, random, grid"),
        (HEAD + "[search]\nmatrix_rl = { low = 1, high = 2 }\n", "no setting 'matrix_rl'"),
        (HEAD + "[search]\nmatrix_lr = 0.1\n", "is no range"),
        (HEAD + "[search]\nmatrix_lr = { low = 0.1 }\n", "is no range"),
        (HEAD + '[search]\nmatrix_lr = { low = "a", high = 1 }\n', "matrix_lr is 'a'"),
        (HEAD + "[search]\nmatrix_lr = { low = 0.2, high = 0.1 }\n", "matrix_lr: "),
        (HEAD + "[search]\nmatrix_lr = { low = 0, high = 0.1, log = true }\n", "matrix_lr: "),
        (HEAD + "[search]\nvalue_embed_layers = { choices = [[1, 2]] }\n", "write a list as a text"),
        (HEAD + "[search]\ntie_embeddings = { low = 0, high = 1 }\n", "tie_embeddings is 0"),
        (HEAD + 'sampler = "grid"\n[search]\n' + RATE, "a grid needs the values"),
        (HEAD + "[set]\n'validation.every' = 0\n[search]\n" + RATE, "compares validations during training"),
    ],
)
def test_a_bad_file_gets_one_sentence(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        sweep_of(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "sweep.toml"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        read_sweep(tmp_path / "none.toml")
