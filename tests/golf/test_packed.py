"""A packed script runs a recipe without birdie, and its size is pinned."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from birdie.data.corpus import file_corpus
from birdie.data.prepare import prepare
from birdie.errors import ConfigError
from birdie.golf.features import features, require_same
from birdie.golf.packed import Packed, changed_settings, pack
from birdie.run.recipe import Recipe, to_toml
from birdie.run.recipe_file import read_recipe_file
from birdie.run.registry import find, shipped_recipes

LIMITS = {"baseline": 100_600, "sota": 110_500}
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def baseline() -> Packed:
    return pack(find("baseline").recipe())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    list(prepare(file_corpus([Path(__file__)]), tokenizer="bytes", root=root))
    return next((root / "datasets").iterdir())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache folder of all scripts: only the first unpacks the modules of a recipe and compiles their kernels."""
    return tmp_path_factory.mktemp("cache")


def started(script: bytes, data: Path, folder: Path, cache: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run a script at a very small size where another birdie is installed, whose import fails."""
    (folder / "other" / "birdie").mkdir(parents=True)
    (folder / "other" / "birdie" / "__init__.py").write_text("raise ImportError('this is not the packed birdie')")
    (folder / "train_gpt.py").write_bytes(script)
    settings = {
        "RUN_ID": "tiny", "DATA_PATH": str(data), "TOKENIZER_PATH": "bytes", "VOCAB_SIZE": "260", "MODEL_DIM": "32",
        "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "MAX_WALLCLOCK_SECONDS": "0", "ITERATIONS": "2", "WARMUP_STEPS": "1",
        "TRAIN_BATCH_TOKENS": "1024", "TRAIN_SEQ_LEN": "64", "VAL_MAX_TOKENS": "2048", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(folder / "other"), "XDG_CACHE_HOME": str(cache),
    }  # fmt: skip
    cache.mkdir(mode=0o700, exist_ok=True)
    environment = os.environ | settings | changes
    command = [sys.executable, "-P", "train_gpt.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["baseline", pytest.param("sota", marks=pytest.mark.nightly)])
def test_the_size_of_a_recipe(name: str) -> None:
    packed = pack(find(name).recipe())
    assert packed.minified
    assert len(packed.script) <= LIMITS[name]


@SLOW
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("baseline", {"NUM_LAYERS": "3"}),
        pytest.param(
            "sota",
            {"CALIBRATION_TOKENS": "512", "TRAIN_SEQ_LEN": "128", "TRAIN_BATCH_TOKENS": "4096"},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_script_trains_exports_and_scores(
    name: str, changes: dict[str, str], data: Path, cache: Path, tmp_path: Path
) -> None:
    packed = pack(find(name).recipe())
    done = started(packed.script, data, tmp_path, cache, **changes)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"Code size: {len(packed.script)} bytes" in done.stdout.splitlines()
    assert "final_birdie_roundtrip_exact" in done.stdout
    assert "int8_zlib" not in done.stdout
    assert (name == "sota") == ("ttt_phased_exact" in done.stdout)
    assert (tmp_path / "runs" / "tiny" / "model.birdie").is_file()
    log = (tmp_path / "logs" / "tiny.txt").read_text()
    assert "class GPT(nn.Module)" in log


@SLOW
def test_a_setting_that_the_script_has_no_code_for_ends_it_before_training(
    baseline: Packed, data: Path, cache: Path, tmp_path: Path
) -> None:
    done = started(baseline.script, data, tmp_path, cache, CALIBRATION_DATA="train")
    assert done.returncode == 1
    assert "calibration.data is 'train', but this script was packed for 'none'" in done.stderr
    assert "warmup_step" not in done.stdout


def test_a_feature_that_is_off_in_the_packed_recipe_is_refused() -> None:
    recipe = Recipe()
    require_same(recipe, recipe)
    other = Recipe.from_dict({**recipe.to_dict(), "bandit": {"every": 8}})
    assert features(other) != features(recipe)
    with pytest.raises(ConfigError, match=r"bandit\.every is True"):
        require_same(other, recipe)
    require_same(Recipe.from_dict({**recipe.to_dict(), "train": {"seed": 7}}), recipe)


@pytest.mark.nightly
def test_the_same_recipe_gives_the_same_bytes(
    baseline: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the modules that an earlier packing has left in the cache folder, or with damaged ones, too."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe = find("baseline").recipe()
    assert pack(recipe) == baseline
    assert pack(recipe) == baseline
    (kept,) = (tmp_path / "birdie" / "packed").iterdir()
    damaged = bytearray(kept.read_bytes())
    damaged[-1] ^= 1
    kept.write_bytes(damaged)
    assert pack(recipe) == baseline


def test_the_settings_in_a_script_are_those_of_the_recipe(tmp_path: Path) -> None:
    for known in shipped_recipes():
        if known.about.runs is None:
            recipe, file = known.recipe(), tmp_path / "recipe.toml"
            file.write_text(to_toml(changed_settings(recipe)))
            assert Recipe.from_dict(read_recipe_file(file)) == recipe


def test_the_script_is_python_and_names_what_it_needs(baseline: Packed) -> None:
    ast.parse(baseline.script)
    names = [line.partition("==")[0] for line in baseline.requirements]
    assert names == ["cyclopts", "numba", "numpy", "rich", "safetensors", "sentencepiece", "torch"]
    assert all("==" in line and "+" not in line for line in baseline.requirements)


def test_what_the_recipe_does_not_use_is_left_out(baseline: Packed) -> None:
    assert "birdie/score/modes.py" in baseline.sources  # settings of all modes are part of every recipe
    modes = ("score/streaming", "score/ttt/sgd", "score/ttt/lora", "score/ttt/multi_phase", "model/adapters")
    for name in (
        *modes,
        "compress/schemes/tucker",
        "compress/schemes/codebook",
        "model/cache",
        "golf/packed",
        "cli/train",
    ):
        assert f"birdie/{name}.py" not in baseline.sources
