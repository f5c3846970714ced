"""A number is what was written: at every door where text becomes a setting, what is none is refused by its name."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from birdie.errors import ConfigError
from birdie.gpt.run.recipe_loading import load_recipe
from birdie.gpt.run.recipe_registry import find
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.run.values import is_plain, parsed
from birdie.lab.assignments import parse, with_settings
from birdie.lab.sweeping import read_sweep


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("3", int, 3), ("+3", int, 3), ("-3", int, -3), ("1_000", int, 1000), ("1e3", int, 1000), ("3.0", int, 3),
        (" 3 ", int, 3), ("9223372036854775807", int, 2**63 - 1), ("0.1", float, 0.1), ("1e-3", float, 0.001),
        (".5", float, 0.5), ("5.", float, 5.0), ("3", float, 3.0), ("inf", float, math.inf), ("0", float, 0.0),
        ("true", bool, True), ("1", bool, True), ("No", bool, False), ("none", float | None, None),
        ("none", str | None, None), ("none", str, "none"), (" a ", str, " a "), ("auto", int | Literal["auto"], "auto"),
        ("9,10", tuple[int, ...], (9, 10)), ("[9, 10]", tuple[int, ...], (9, 10)), ("", tuple[int, ...], ()),
        ("q,mlp", tuple[Literal["q", "mlp"], ...], ("q", "mlp")),
    ],
)  # fmt: skip
def test_a_text_is_the_value_that_it_says(text: str, hint: Any, value: object) -> None:
    result = parsed(text, hint)
    assert (result, type(result)) == (value, type(value))


@pytest.mark.parametrize(
    ("hint", "texts"),
    [
        (
            int,
            ["3.5", "2.0000000001", "1e-3", "1,000", "1 000", "", ".", "e5", "-", "nan", "inf", "0x10", "three", "٣"],
        ),
        (int, ["9223372036854775808", "1e400", "1e999999999999", "1__0", "_1"]),
        (float, ["nan", "1e999", "-1e999", "1e-999", "1e999999999999", "1,5", "", "half", "1.5.2", "none"]),
        (bool, ["2", "", "on", "maybe", "none"]),
        (Literal["ema", "swa"], ["EMA", "", "em", "none"]),
        (tuple[int, ...], ["1.5", "1,x", "[1.5]", "[1", '{"a": 1}', "[[1]]", "[" * 9999]),
    ],
)
def test_a_text_that_is_no_such_value_is_refused(hint: Any, texts: list[str]) -> None:
    for text in texts:
        with pytest.raises(ConfigError):
            parsed(text, hint)


@given(st.integers(-(2**62), 2**62).map(lambda thousandths: Decimal(thousandths).scaleb(-3)))
def test_an_integer_is_exactly_the_number_that_was_written(number: Decimal) -> None:
    try:
        assert parsed(str(number), int) == number
    except ConfigError:
        assert number != number.to_integral_value()


@given(st.floats(allow_nan=False), st.integers(-(2**63), 2**63 - 1))
def test_numbers_that_python_writes_are_read_back(real: float, integer: int) -> None:
    assert parsed(repr(real), float) == real
    assert parsed(str(integer), int) == integer


def hints(kind: Any = Recipe, path: str = "") -> Iterator[tuple[str, Any]]:
    fields = {field.name for field in dataclasses.fields(kind)}  # without the class's own variables
    for name, hint in get_type_hints(kind).items():
        if name not in fields:
            continue
        if dataclasses.is_dataclass(hint):
            yield from hints(hint, f"{path}{name}.")
        else:
            yield path + name, hint


def test_every_setting_with_a_number_is_read_so() -> None:
    """No integer of a recipe takes a fraction, whatever its annotation is."""
    integers = {name: hint for name, hint in hints() if "int" in str(hint)}
    assert len(integers) > 70
    for name, hint in hints():
        assert is_plain(hint) or "str" in str(hint), name
    for hint in integers.values():
        with pytest.raises(ConfigError):
            parsed("2.5", hint)


SWEEP = 'recipe = "laptop"\npruner = "none"\n[search]\n"optimizer.matrix_lr" = {{ low = 0.01, high = 0.02 }}\n{}\n'


def from_flag(setting: str, value: str, _folder: Path, _patch: pytest.MonkeyPatch) -> Recipe:
    return load_recipe(flags=[f"--{setting.replace('_', '-')}", value])


def from_variable(setting: str, value: str, _folder: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setenv(setting.partition(".")[2].upper(), value)
    return load_recipe()


def toml(setting: str, value: str, folder: Path) -> Path:
    table, _, name = setting.partition(".")
    path = folder / "recipe.toml"
    path.write_text(f"[{table}]\n{name} = {value}\n")
    return path


def from_file(setting: str, value: str, folder: Path, _patch: pytest.MonkeyPatch) -> Recipe:
    return load_recipe(toml(setting, value, folder))


def from_registry(setting: str, value: str, folder: Path, _patch: pytest.MonkeyPatch) -> Recipe:
    return find(str(toml(setting, value, folder))).recipe()


def from_set(setting: str, value: str, _folder: Path, _patch: pytest.MonkeyPatch) -> Recipe:
    return with_settings(Recipe(), parse([f"{setting}={value}"], Recipe()))


def from_sweep(setting: str, value: str, folder: Path, _patch: pytest.MonkeyPatch) -> Recipe:
    path = folder / "sweep.toml"
    path.write_text(SWEEP.format(f'[set]\n"{setting}" = {value}\n"train.accumulation" = 1'))
    return read_sweep(path).recipe


DOORS = [from_flag, from_variable, from_file, from_registry, from_set, from_sweep]
Door = Callable[[str, str, Path, pytest.MonkeyPatch], Recipe]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("setting", "value"), [("train.iterations", "2.5"), ("model.num_layers", "3.5")])
def test_no_door_rounds(door: Door, setting: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as error:
        door(setting, value, tmp_path, monkeypatch)
    sentence = str(error.value)
    assert value in sentence
    assert setting.partition(".")[2] in sentence.lower().replace("-", "_")
    assert "\n" not in sentence


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("text", ["2000", "2e3", "2000.0"])
def test_every_door_takes_an_integer_in_any_spelling(
    door: Door, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert door("train.iterations", text, tmp_path, monkeypatch).train.iterations == 2000


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("BITNET_GROUP_SIZE", "3.5"), ("SLIDING_EVAL_STRIDE", "63.7"), ("TTT_EPOCHS", "2.5"), ("VE_LAYERS", "1.5"),
        ("MATRIX_BITS", "6.5"), ("MLP_HIDDEN", "99.5"), ("GPTQ_CALIBRATION_BATCHES", "0.5"), ("EMA_DECAY", "nan"),
        ("MATRIX_LR", "nan"), ("MATRIX_LR", "1e999"), ("NUM_LAYERS", ""), ("TRAIN_SEQ_LEN", "1,024"),
    ],
)  # fmt: skip
def test_a_variable_that_is_no_number_is_named(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    if variable == "SLIDING_EVAL_STRIDE":
        monkeypatch.setenv("SLIDING_EVAL", "1")
    with pytest.raises(ConfigError, match=variable) as error:
        load_recipe()
    assert repr(value) in str(error.value)
