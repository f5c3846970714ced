"""A recipe resolves default < file < environment < flag, is written to a file and read back, and names unknown keys."""

from pathlib import Path

import pytest

from birdie.compress.rate.target import parse_size
from birdie.errors import ConfigError
from birdie.gpt.run.recipe_loading import load_recipe
from birdie.gpt.run.recipe_registry import shipped_recipes
from birdie.gpt.run.recipe_settings import Recipe


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text('device = "cpu"\n[model]\nnum_layers = 4\nmodel_dim = 128\n[export]\nint4_layers = [1, 2]\n')
    return path


@pytest.mark.parametrize(
    "path", [entry.path for entry in shipped_recipes() if entry.about.runs is None], ids=lambda p: p.name
)
def test_every_shipped_recipe_is_valid(path: Path) -> None:
    assert (load_recipe(path) == Recipe()) == (path.stem == "baseline")


def test_defaults_are_the_baseline_of_the_challenge() -> None:
    recipe = load_recipe()
    assert recipe == Recipe()
    assert recipe.model.num_layers == 9
    assert recipe.train.train_batch_tokens == 524_288
    assert recipe.optimizer.matrix_lr == 0.04


def test_later_sources_override_earlier_ones(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_recipe(file).model.num_layers == 4
    monkeypatch.setenv("NUM_LAYERS", "5")
    assert load_recipe(file).model.num_layers == 5
    assert load_recipe(file, ["--model.num-layers", "6"]).model.num_layers == 6
    assert load_recipe(file).model.model_dim == 128
    assert load_recipe(file).export.int4_layers == (1, 2)


def test_variables_of_a_record_command_set_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "VOCAB_SIZE": "1024", "MAX_WALLCLOCK_SECONDS": "600", "VAL_LOSS_EVERY": "200", "TRAIN_LOG_EVERY": "50",
        "NUM_LAYERS": "10", "MATRIX_LR": "0.02", "SCALAR_LR": "0.02", "TIED_EMBED_LR": "0.03",
        "INT4_LAYERS": "3,4,5,6", "INT4_STEP": "4", "TIE_EMBEDDINGS": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    recipe = load_recipe()
    assert recipe.model.num_layers == 10
    assert (recipe.optimizer.matrix_lr, recipe.optimizer.scalar_lr, recipe.optimizer.tied_embed_lr) == (
        0.02,
        0.02,
        0.03,
    )
    assert recipe.export.int4_layers == (3, 4, 5, 6)
    assert (recipe.validation.every, recipe.run.log_every) == (200, 50)
    assert recipe.export.schemes()[0] == ("blocks.3.*", "int8:level_stride=4")


def test_a_written_recipe_reads_back(file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(file, ["--export.budget", "2MB", "--data.path", 'a "quoted" näme'])
    copy = tmp_path / "copy.toml"
    copy.write_text(recipe.to_toml())
    assert load_recipe(copy) == recipe
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_nested_tables_are_written_and_read_back(tmp_path: Path) -> None:
    """They hold a default that a mode changes, None, and a tuple."""
    flags = ["--evaluation.mode", "ttt-multi-phase", "--evaluation.ttt-multi-phase.phases", "2"]
    flags += ["--evaluation.ttt-lora.parts", "k", "--evaluation.ttt-lora.parts", "o", "--evaluation.ngram.orders", "3"]
    recipe = load_recipe(flags=flags)
    assert (recipe.evaluation.ttt_multi_phase.lr, recipe.evaluation.ttt_sgd.lr) == (0.001, 0.002)
    copy = tmp_path / "copy.toml"
    copy.write_text(recipe.to_toml())
    assert "[evaluation.ttt_lora]" in copy.read_text()
    assert load_recipe(copy) == recipe
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert Recipe.from_dict({"evaluation": {"ttt_multi_phase": {"phases": 2}}}).evaluation.ttt_multi_phase.epochs == 1


def test_the_digest_changes_with_any_setting() -> None:
    assert Recipe().digest == Recipe().digest
    assert load_recipe(flags=["--train.seed", "7"]).digest != Recipe().digest


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model.num-layer", "4"], "model.num-layers"),
        (["--model.num-layers", "four"], "four"),
        (["--model.num-layers", "0"], "num_layers is 0"),
        (["--export.int4-layers", "12"], "layer 12"),
        (["--export.budget", "lots"], "'lots' is not a size"),
        (["--export.scheme", "int9"], "int9"),
        (["--export.embedding", "fp17"], "'fp17' is unknown; did you mean 'fp16'"),
        (["--data.order", "random"], "random"),
        (["--run.log-every", "-1"], "log_every is -1"),
        (["--validation.every", "-1"], "every is -1"),
    ],
)
def test_a_wrong_flag_is_one_clear_sentence(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_recipe(flags=flags)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = 3", "[model]"),
        ("modle = 3", "model"),
        ("json = true", "json"),
        ("[tilt]\nenabled = true", "tilt"),
        ('[evaluation]\nadapt = "sgd"', "adapt"),
        ("[evaluation]\nchunk = 8", "chunk"),
        ("[evaluation.ttt_sgd]\nrate = 8", "Did you mean"),
    ],
)
def test_an_unknown_setting_in_a_file_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_recipe(path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [("16MB", 16_000_000), ("16MiB", 16_777_216), ("1.5 kB", 1500), ("250000", 250_000), ("16,000,000", 16_000_000)],
)
def test_sizes_are_decimal(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1", "1e6", "12 parsecs", "0", "0.1"])
def test_a_text_that_is_not_a_size_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


def test_packed_rows_and_a_rotary_base_that_depends_on_the_length_exclude_each_other() -> None:
    """A packed row is longer than any sequence, so training would use another rotary base than scoring."""
    packed = ["--data.order", "packed", "--model.isolate-documents"]
    assert load_recipe(flags=packed).data.order == "packed"
    with pytest.raises(ConfigError, match="rope_train_seq_len 2048 would rotate packed rows"):
        load_recipe(flags=[*packed, "--model.rope-train-seq-len", "2048"])


@pytest.mark.parametrize("content", [b"a = " + b"[" * 9000, b"\xff", b"\0", b"[train", b"a = " + b"9" * 5000])
def test_a_damaged_recipe_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"recipe\.toml is not a recipe") as caught:
        load_recipe(path)
    assert "\n" not in str(caught.value)
