"""birdie as one file: what is in it, its size, and a training script that runs a recipe without birdie."""

import ast
import dataclasses
import json
import os
import re
import subprocess
import sys
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import pytest

import birdie
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.errors import DataError
from birdie.golf import packed_script as packing
from birdie.golf import script_main
from birdie.golf.packed_script import (
    FIRST,
    MAX_SOURCES,
    Kind,
    PackedScript,
    changed_settings,
    fixed_variables,
    is_packed,
    pack,
    sources_of,
)
from birdie.gpt.run.pipeline import Run
from birdie.gpt.run.recipe_registry import shipped_recipes
from birdie.gpt.run.recipe_settings import DataSettings, Recipe
from birdie.gpt.score.settings import EvaluationSettings
from birdie.standalone.code_size import PACKAGE, source_files
from tests.golf.scripts import INTERPRETED, script, script_of, start, start_in_a_fork, tiny

STATED: dict[Kind, str] = {  # in the docs, of `sota`
    "train": r"count as code: (\d+) kB for `sota`",
    "score": r"with `--kind score` (\d+) kB",
    "pair": r"birdie_pair.py +# (\d+) kB",
    "decoder": r"`birdie script --kind decoder -o decode.py` \((\d+) kB\)",
}
CORE = {"numba", "numpy", "torch"}
SCORE = CORE | {"sentencepiece"}
NEEDED = {"train": SCORE | {"safetensors", "threadpoolctl"}, "score": SCORE, "pair": CORE, "decoder": CORE}
SHELL = ("birdie.cli", "birdie.golf", "birdie.lab")
SLOW = pytest.mark.slow


@pytest.fixture(params=["train", pytest.param("score", marks=pytest.mark.nightly), "pair", "decoder"])
def kind(request: pytest.FixtureRequest) -> Kind:
    """A kind of script; the modules of one that scores are among those of one that trains."""
    chosen: Kind = request.param
    return chosen


@pytest.fixture
def packed(kind: Kind) -> PackedScript:
    return script(kind)


def test_the_size(packed: PackedScript, kind: Kind) -> None:
    assert packed.minified
    docs = Path(__file__).resolve().parents[2] / "docs"
    pages = "".join((docs / page).read_text(encoding="utf-8") for page in ("golf.md", "load.md"))
    (stated,) = re.findall(STATED[kind], pages)
    assert len(packed.script) / 1000 == pytest.approx(int(stated), abs=1)


def test_the_file_is_python_and_names_what_it_needs(packed: PackedScript, kind: Kind) -> None:
    ast.parse(packed.script)
    assert packed.script.startswith(f"#birdie {birdie.__version__} ".encode())
    assert not {b"\r", b"\0"} & {bytes([byte]) for byte in packed.script}  # survives text-mode transfers
    names = {line.partition("==")[0] for line in packed.requirements}
    assert names == NEEDED[kind]
    assert all("==" in line and "+" not in line for line in packed.requirements)


def imports(name: str, text: str) -> set[tuple[str, bool]]:
    """Return (dotted name, whether it is inside a function) of each import in a packed module."""
    package = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    package = package if name.endswith("__init__.py") else package.rpartition(".")[0]
    names: set[tuple[str, bool]] = set()
    queue: list[tuple[ast.AST, bool]] = [(ast.parse(text), False)]
    while queue:
        node, late = queue.pop()
        if isinstance(node, ast.Import):
            names |= {(alias.name, late) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((resolve_name("." * node.level + (node.module or ""), package), late))
        late = late or isinstance(node, ast.FunctionDef)
        queue += [(child, late) for child in ast.iter_child_nodes(node)]
    return names


def test_every_module_that_is_imported_is_in_the_file(packed: PackedScript, kind: Kind) -> None:
    """Inside functions all but those of the packages that talk to people, or what the recipe asks for."""
    has = {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in packed.sources}
    for path, text in packed.sources.items():
        for name, late in imports(path, text):
            is_left_out = late and (kind in ("train", "score") or name.startswith(SHELL))
            assert name.partition(".")[0] != "birdie" or name in has or is_left_out, (path, name)
        assert "import birdie" not in text
        assert ast.get_docstring(ast.parse(text)) is None


def test_the_sources_are_read_without_running_anything(packed: PackedScript) -> None:
    assert is_packed(packed.script)
    sources = sources_of(packed.script)
    assert "def start(" in sources.pop(FIRST)
    assert sources == packed.sources


@pytest.mark.nightly
def test_the_same_birdie_gives_the_same_bytes(packed: PackedScript, kind: Kind, tmp_path: Path) -> None:
    """Without the modules that an earlier packing has left in the cache folder, or with damaged ones, too."""
    tmp_path.chmod(0o700)
    code = (
        "import sys; from birdie.golf.packed_script import pack; from birdie.gpt.run.recipe_registry import find\n"
        f"sys.stdout.buffer.write(pack({kind!r}, find('sota').recipe()).script)"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7", "XDG_CACHE_HOME": str(tmp_path)}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment)
        assert done.stdout == packed.script
        (kept,) = (tmp_path / "birdie" / "packed").iterdir()
        kept.write_bytes(kept.read_bytes()[:-3] + b'x"]')


@pytest.mark.parametrize(
    ("tables", "module"),
    [
        ({"train": {"fp8": True}}, "birdie/gpt/train/fp8.py"),
        ({"train": {"micro_batch_tokens": "auto"}}, "birdie/gpt/train/measured_batches.py"),
        ({"qat": {"bits": 6}}, "birdie/small/qat/fake_quantization.py"),
        (
            {"qat": {"budget": True}, "export": {"budget": "1MB"}, "calibration": {"data": "train"}},
            "birdie/small/stored_training.py",
        ),
    ],
)
def test_a_script_has_the_module_of_a_feature_that_the_recipe_asks_for(
    tables: dict[str, dict[str, Any]], module: str
) -> None:
    values = Recipe().to_dict()
    changed = Recipe.from_dict(values | {name: values[name] | table for name, table in tables.items()})
    path = PACKAGE / "golf" / "script_main.py"
    sources = [
        source_files(path, follow={*packing._optional_modules(recipe)}.__contains__) for recipe in (Recipe(), changed)
    ]
    plain, more = ({file.relative_to(PACKAGE.parent).as_posix() for file in files} for files in sources)
    assert module in more - plain


def test_the_settings_in_a_script_are_those_of_the_recipe() -> None:
    for known in shipped_recipes():
        if known.about.runs is None:
            recipe = known.recipe()
            assert Recipe.from_dict(changed_settings(recipe)) == recipe


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        (b"#birdie 0\nprint(1)\n", "cannot be unpacked"),
        (b"#birdie 0\nPARTS='x'\n", "cannot be unpacked"),
        (b"#birdie 0\n(\n", "cannot be unpacked"),
        (script_of(["pass", "a.py", "x = 1"], cut=3), "damaged"),
        (script_of(["pass", "a.py"]), "cannot be unpacked"),
        (script_of(["pass", "a.py", "#" * MAX_SOURCES]), "more than 2,000,000"),
        (b"#birdie 0\n" + b"#" * 500_000, "500,010 bytes"),
    ],
)
def test_damaged_and_oversized_scripts_are_refused(damaged: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        sources_of(damaged)


def test_a_damaged_file_and_a_missing_package_are_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback prints the line of the modules: what runs first is numbered below all lines of the file."""
    packed = script("decoder")
    path, middle = str(tmp_path / "file.py"), len(packed.script) // 2
    damaged = packed.script[:middle] + b"birdie" + packed.script[middle + 6 :]
    with pytest.raises(ImportError, match=r"this file is damaged .*; pack it again"):
        exec(compile(damaged, path, "exec"), {"__file__": path, "__name__": "file"})
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ImportError, match="torch not installed; pip install -r") as error:
        exec(compile(packed.script, path, "exec"), {"__file__": path, "__name__": "file"})
    assert error.traceback[-1].lineno > packed.script.count(b"\n")


@SLOW
@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        ("baseline", False),
        pytest.param("baseline", True, marks=pytest.mark.nightly),
        pytest.param("sota", True, marks=pytest.mark.nightly),
    ],
)
def test_a_script_trains_exports_and_scores(name: str, compiled: bool, data: Path, tmp_path: Path) -> None:
    recipe = tiny(name, **({} if compiled else {"num_layers": 2, "model_dim": 16, "num_heads": 1}))
    if not compiled:
        recipe = dataclasses.replace(recipe, export=dataclasses.replace(recipe.export, effort="fast"))
    packed = pack("train", recipe)
    (tmp_path / "train_gpt.py").write_bytes(packed.script)
    settings = {"RUN_ID": "tiny", "DATA_PATH": str(data), "TOKENIZER_PATH": "bytes"} | ({} if compiled else INTERPRETED)
    done = start(tmp_path, "train_gpt.py", variables=settings) if compiled else start_in_a_fork(tmp_path, settings)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"Code size: {len(packed.script)} bytes" in done.stdout.splitlines()
    assert "final_birdie_roundtrip_exact" in done.stdout
    assert (name == "sota") == ("ttt_phased_exact" in done.stdout)
    assert "class GPT(nn.Module)" in (tmp_path / "logs" / "tiny.txt").read_text()
    if compiled:
        model = tmp_path / "runs" / "tiny" / "model.birdie"
        again = settings | {"EVAL_ONLY_PATH": str(model), "RUN_ID": "again"}
        scored = start(tmp_path, "train_gpt.py", variables=again)
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("final_birdie_roundtrip_exact")]
        assert line in scored.stdout.splitlines(), scored.stderr[-2000:]


def test_a_script_exports_the_run_of_birdie_train(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RESTORE=1 takes the weights of any run folder, and writes the file that the run writes."""
    monkeypatch.chdir(tmp_path)
    recipe = tiny("baseline")
    settings = DataSettings(path=str(data), tokenizer="bytes", order=recipe.data.order)
    recipe = dataclasses.replace(recipe, data=settings, export=dataclasses.replace(recipe.export, effort="fast"))
    run = Run(recipe, tmp_path / "runs" / "again")
    list(run.train())
    expected = run.export().path
    (tmp_path / "train_gpt.py").write_bytes(b"x")
    written = Path(expected).rename(tmp_path / "model.birdie").read_bytes()
    monkeypatch.setenv("RUN_ID", "again")
    monkeypatch.setenv("RESTORE", "1")
    script_main.main(tmp_path / "train_gpt.py", tmp_path / "none", changed_settings(recipe), "")
    assert (tmp_path / "runs" / "again" / "model.birdie").read_bytes() == written


def test_a_variable_of_a_setting_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of a script are those it was packed with: a variable that did nothing would be a silent error."""
    monkeypatch.setenv("MODEL_DIM", "31")
    with pytest.raises(SystemExit, match=r"^error: MODEL_DIM is set, and this script has its settings; unset it"):
        script_main.main(tmp_path / "train_gpt.py", tmp_path, {}, " ".join(fixed_variables()))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without python-minifier the file is larger, and stderr says so."""
    minified = len(script("decoder").script)  # before the package is hidden: scripts are cached
    monkeypatch.setattr(packing, "find_spec", lambda _: None)
    output, needed = tmp_path / "golf.py", tmp_path / "requirements.txt"
    tokens = ["script", "--kind", "decoder", "-o", str(output), "--requirements", str(needed), "--json"]
    assert run(build_app, tokens) == 0
    shown = capsys.readouterr()
    assert len(shown.err.splitlines()) == 1
    assert needed.read_text().startswith("numba==")
    answer = json.loads(shown.out)
    assert answer["bytes"] == output.stat().st_size > minified
    assert not answer["minified"]
    assert "birdie/entropy/coder.py" in answer["modules"]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["script"], "name it: birdie script RECIPE --kind train"),
        (["script", "--kind", "score"], "name it: birdie script RECIPE --kind score"),
        (["script", "baseline", "--kind", "decoder"], "a decoder has no recipe"),
        (["script", "baseline", "--paste"], "--paste is for --kind pair"),
        (["script", "baseline", "--kind", "all"], "kind"),
    ],
)
def test_the_command_refuses_in_one_sentence(
    tokens: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(build_app, tokens) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("mode", "trains"), [("windows", False), pytest.param("ttt-sgd", True, marks=pytest.mark.nightly)]
)
def test_what_a_mode_does_is_in_scripts_of_that_mode_alone(mode: str, trains: bool) -> None:
    sources = packing.pack("score", Recipe(evaluation=EvaluationSettings(mode=mode))).sources
    assert ("birdie/gpt/score/sgd.py" in sources) == trains
    source = sources["birdie/gpt/score/modes/ttt_sgd.py"]  # its settings are in every script
    assert "score.sgd import" in source
    assert (".restore()" in source) == trains
