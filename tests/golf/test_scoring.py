"""A script that only scores gives birdie's own scores, and refuses damaged files in words."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import birdie
from birdie.golf import script_score
from birdie.golf.packed_script import pack
from birdie.gpt.data.tokenizer import ByteTokenizer
from birdie.gpt.model.gpt import GPT
from birdie.gpt.run.evaluation import evaluate
from birdie.gpt.run.recipe_registry import find
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.score.request import EvaluationRequest
from birdie.gpt.score.settings import EvaluationSettings
from tests.golf.scripts import start, tiny


def saved(recipe: Recipe, path: Path) -> Path:
    torch.manual_seed(0)
    metadata = {
        "model": "gpt",
        "recipe": recipe.to_dict(),
        "tokenizer": {"kind": "bytes", "sha256": ByteTokenizer().digest},
    }
    birdie.save(GPT(recipe.model), path, effort="fast", metadata=metadata)
    return path


def lines_of(text: str) -> dict[str, str]:
    """Return name → exact loss and bits per byte of the log's last lines."""
    return dict(re.findall(r"^(\w+_exact)\S* (.*)$", text, re.MULTILINE))


def expected(path: Path, data: Path) -> list[str]:
    request = EvaluationRequest(data=str(data), tokenizer="bytes")
    scores = [evaluate(path, request).score]
    scores.insert(0, evaluate(path, EvaluationRequest(str(data), "bytes", settings=EvaluationSettings())).score)
    return [f"val_loss:{score.val_loss:.8f} val_bpb:{score.bpb:.8f}" for score in scores]


@pytest.mark.parametrize("name", ["baseline", pytest.param("sota", marks=pytest.mark.nightly)])
def test_the_entry_point_scores_as_birdie_does(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tiny(name), tmp_path / "model.birdie")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["score_gpt.py"])
    for variable, value in {"DATA_PATH": str(data), "TOKENIZER_PATH": "bytes", "RUN_ID": "tiny"}.items():
        monkeypatch.setenv(variable, value)
    script_score.main()
    lines = lines_of(capsys.readouterr().out)
    assert [*lines] == ["final_birdie_roundtrip_exact", "ttt_phased_exact"][: 1 + (name == "sota")]
    assert [*lines.values()] == expected(path, data)[: len(lines)]
    assert lines_of((tmp_path / "logs" / "tiny.txt").read_text()) == lines


def cut(recipe: Recipe, path: Path) -> None:
    path.write_bytes(saved(recipe, path).read_bytes()[:-9])


def of_another_tokenizer(recipe: Recipe, path: Path) -> None:
    about = {"model": "gpt", "recipe": recipe.to_dict(), "tokenizer": {"kind": "bpe", "sha256": "0" * 64}}
    birdie.save(GPT(recipe.model), path, effort="fast", metadata=about)


def of_another_model(recipe: Recipe, path: Path) -> None:
    about = {"model": "gpt", "recipe": {**recipe.to_dict(), "model": {"num_layers": 10**6}}}
    birdie.save(GPT(recipe.model), path, effort="fast", metadata=about)


@pytest.mark.parametrize(
    ("make", "message"),
    [(cut, "model.birdie"), (of_another_tokenizer, "trained with tokenizer bpe"), (of_another_model, "tensors of")],
)
def test_what_would_be_a_false_score_is_refused_in_one_sentence(
    make: Callable[[Recipe, Path], None], message: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tiny("baseline"), tmp_path / "model.birdie")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["score_gpt.py"])
    for variable, value in {"DATA_PATH": str(data), "TOKENIZER_PATH": "bytes"}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as end:
        script_score.main()
    error = str(end.value.code)
    assert error.startswith("error: ")
    assert message in error
    assert "\n" not in error


def test_the_script_has_the_schemes_that_a_budget_chooses() -> None:
    recipe = find("baseline").recipe()
    sources = pack("score", replace(recipe, export=replace(recipe.export, budget="1MB"))).sources
    assert {f"birdie/compress/schemes/{name}.py" for name in ("cast", "trellis", "lossless")} <= sources.keys()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["baseline", "sota"])
def test_the_script_scores_as_birdie_does(name: str, data: Path, tmp_path: Path) -> None:
    path = saved(tiny(name), tmp_path / "tiny.birdie")
    (tmp_path / "score_gpt.py").write_bytes(pack("score", find(name).recipe()).script)
    settings = {"DATA_PATH": str(data), "TOKENIZER_PATH": "bytes"}
    done = start(tmp_path, "score_gpt.py", "tiny.birdie", variables=settings)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [*lines_of(done.stdout).values()] == expected(path, data)[: 1 + (name == "sota")]
    (tmp_path / "cut.birdie").write_bytes(path.read_bytes()[:-9])
    done = start(tmp_path, "score_gpt.py", "cut.birdie", variables=settings)
    assert done.returncode == 1
    assert re.fullmatch(r"error: cut\.birdie .*\n", done.stderr)
