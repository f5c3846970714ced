"""The documentation is true: its Python runs, its commands parse, its links and names exist, its tables are current."""

import contextlib
import importlib
import io
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from birdie.cli import build_app, commands
from birdie.cli.console import run
from birdie.compress import registry
from birdie.gpt.model import attention_functions
from birdie.gpt.run.recipe_file import HELP_ALL, TABLES
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.score.settings import MODES
from scripts import docs
from tests.coders import fast_coder  # noqa: F401  no page names its sizes
from tests.forked import run_python

ROOT = Path(__file__).resolve().parents[1]
FRONT = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
PAGES = (*FRONT, *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")))
RUNNABLE = (
    "README.md",
    "docs/index.md",
    "docs/checkpoints.md",
    "docs/compress.md",
    "docs/extend.md",
    "docs/load.md",
    "docs/scoring.md",
    "docs/techniques.md",
    "docs/train-small.md",
)
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("own_*.py"))
CODE_FOLDERS = "birdie|benchmarks|docs|examples|recipes|scripts|tests"
MAX_EXAMPLE_LINES = 50

TINY = [
    "--model.vocab-size", "300", "--model.num-layers", "2", "--model.model-dim", "32", "--model.num-heads", "2",
    "--model.num-kv-heads", "1", "--train.train-batch-tokens", "512", "--train.train-seq-len", "64",
    "--train.accumulation", "2", "--train.warmup-steps", "1", "--train.iterations", "4",
    "--train.max-wallclock-seconds", "0", "--validation.every", "0", "--validation.max-tokens", "500",
    "--json",
]  # fmt: skip


def read(page: str) -> str:
    """Return the text of a page with its `--8<--` snippets inserted."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.sub(r'^--8<-- "(.+)"$', lambda match: (ROOT / match[1]).read_text(encoding="utf-8"), text, flags=re.M)


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", read(page), re.DOTALL | re.MULTILINE)


def command_lines(page: str) -> list[str]:
    """Return what follows `birdie` in the shell blocks of a page; an example is birdie's command line as well."""
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    matches = (re.search(r"(?:^birdie|-m birdie|^python examples/own_\w+\.py) (.+)", line) for line in lines)
    return [match[1] for match in matches if match]


@pytest.fixture
def fresh_registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A function that empties the registries of schemes, modes and attention functions of all but birdie's own."""
    modes, functions = dict(MODES), dict(attention_functions._FUNCTIONS)

    def reset() -> None:
        monkeypatch.setattr(registry, "_foreign", {})
        monkeypatch.setattr(attention_functions, "_FUNCTIONS", dict(functions))
        registry.words.cache_clear()
        MODES.clear()
        MODES.update(modes)

    reset()
    yield reset
    reset()
    monkeypatch.undo()
    registry.words.cache_clear()


@pytest.fixture
def run_example(fresh_registries: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`run_example("own_scheme.py", *arguments)` runs a file as `python examples/own_scheme.py` does; → its stdout."""

    def call(name: str, *arguments: object) -> str:
        fresh_registries()
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return out.getvalue()

    return call


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Compute on one thread: the models of these pages are so small that threads mostly wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("fresh_registries", "_one_thread")
@pytest.mark.parametrize("page", RUNNABLE)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    sources = blocks(page, "python")
    assert sources
    for source in sources:
        exec(compile(source, page, "exec"), names)


def test_the_readme_shows_eleven_commands() -> None:
    assert len({line.split()[0] for line in command_lines("README.md")}) == 11


@pytest.mark.parametrize("page", [page for page in PAGES if command_lines(page)])
def test_commands_of_a_page_parse(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_example: Callable[..., str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_bytes((ROOT / "recipes" / "laptop.toml").read_bytes())
    if "own_scoring_mode.py" in read(page):
        run_example("own_scoring_mode.py", "--version")  # registers its mode
    for line in command_lines(page):
        tokens = shlex.split(line, comments=True)
        assert tokens[0] in commands(), line
        app, arguments = build_app(tokens)
        if not {"--help", HELP_ALL} & set(tokens) and "…" not in line:
            app.parse_args(arguments, exit_on_error=False, print_error=False)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_and_modules_of_a_page_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
        if not link.startswith(("http://", "https://")):
            assert (ROOT / page).parent.joinpath(link).exists(), link
    for path in re.findall(rf"`((?:{CODE_FOLDERS})/[\w./-]*\w/?)`", prose):
        assert (ROOT / path).exists() or "NAME" in path, path
    for name in re.findall(r"python -m (benchmarks\.[a-z]\w*)", text):
        assert (ROOT / f"{name.replace('.', '/')}.py").exists(), name
    for name in re.findall(r"(?:`|::: )(birdie(?:\.\w+)+)", prose):
        assert importable(name), name


GLOSSARY = re.findall(r"^### (.+)$", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
NO_PROSE = re.compile(r"^```.*?^```|`[^`]*`|^[#|].*?$|<!--.*?-->|\]\([^)]*\)", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if "(glossary.md#" in read(page)])
def test_the_first_use_of_a_word_of_the_glossary_is_a_link(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    prose = NO_PROSE.sub(lambda match: " " * len(match[0]), text)
    for word in GLOSSARY:
        if first := re.search(r"\b" + word.replace(" ", r"\s+") + r"\b", prose, re.IGNORECASE):
            link = f"{text[first.start() : first.end()]}](glossary.md#{word.lower().replace(' ', '-')})"
            assert text[first.start() :].startswith(link), word


@pytest.mark.parametrize("page", PAGES)
def test_settings_that_a_page_names_exist(page: str) -> None:
    tables = "|".join(TABLES)
    for name in re.findall(rf"`((?:{tables})(?:\.\w+)+)`", read(page)):
        assert is_setting(name) or name.endswith((".birdie", ".safetensors", ".json")), name


def is_setting(name: str) -> bool:
    """Return whether `train.seed` or the like is a setting of a recipe, or a table of settings."""
    kinds: list[Any] = [Recipe]
    for part in name.split("."):
        hints = [get_type_hints(kind) for kind in kinds if is_dataclass(kind)]
        kinds = [kind for hint in hints if part in hint for kind in (hint[part], *get_args(hint[part]))]
    return bool(kinds)


def importable(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one."""
    module, _, attributes = name.partition(".")
    target: Any = importlib.import_module(module)
    for part in attributes.split("."):
        module += f".{part}"
        try:
            target = getattr(target, part)
        except AttributeError:
            try:
                target = importlib.import_module(module)
            except ModuleNotFoundError:
                return False
    return True


def test_an_example_has_few_lines() -> None:
    assert EXAMPLES == ["own_scheme.py", "own_scoring_mode.py", "own_technique.py"]
    for name in EXAMPLES:
        lines = (ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()
        assert len([line for line in lines if line.strip()]) <= MAX_EXAMPLE_LINES, name
        assert f'--8<-- "examples/{name}"' in (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")


def test_the_example_of_a_scheme_meets_a_budget(
    run_example: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "bits per weight" in run_example("own_scheme.py")
    assert 29_900 <= (tmp_path / "squares.birdie").stat().st_size <= 30_000


@pytest.mark.usefixtures("_one_thread")
def test_the_example_of_a_technique_trains_and_scores(
    run_example: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = ROOT / "birdie" / "gpt" / "data" / "*.py"
    assert run(build_app, ["prepare", str(sources), "--tokenizer", "bytes", "-o", str(tmp_path), "--json"]) == 0
    (shards,) = (tmp_path / "datasets").iterdir()
    data = ["--data.path", str(shards), "--data.tokenizer", "bytes"]
    folder, attention = tmp_path / "run", "softmax-off-by-one"
    answer = run_example("own_technique.py", "train", "--folder", folder, "--model.attention", attention, *TINY, *data)
    assert "bpb" in answer
    assert f"attention function: {attention} in 2 layers" in capsys.readouterr().err
    assert "bpb" in run_example("own_technique.py", "evaluate", folder / "model.birdie", "--json")


def test_the_example_of_a_mode_adds_flags_to_the_command_line() -> None:
    shown = run_python(
        "examples/own_scoring_mode.py", "evaluate", "--help-all", folder=ROOT
    ).stdout  # flags are read once
    assert "--online-temperature.spread" in shown


def test_the_example_of_a_technique_is_its_formula(run_example: Callable[..., str]) -> None:
    run_example("own_technique.py", "--version")
    function = attention_functions.attention_function("softmax-off-by-one")
    q, k, v = (torch.randn(2, heads, 7, 4, dtype=torch.float64) for heads in (4, 2, 2))
    scores = (q @ k.repeat_interleave(2, 1).mT / 2).masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -torch.inf)
    weights = scores.exp() / (1 + scores.exp().sum(-1, keepdim=True))
    torch.testing.assert_close(function(q, k, v, None), weights @ v.repeat_interleave(2, 1))
    torch.testing.assert_close(function(q[:, :, -2:], k, v, None), function(q, k, v, None)[:, :, -2:])


@pytest.mark.usefixtures("fresh_registries")
@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- table:" in read(page)])
def test_the_tables_of_a_page_are_those_of_the_code(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert docs.with_tables(text) == text, "run scripts/docs.py"


def test_every_table_has_a_page() -> None:
    markers = [name for page in docs.pages() for _, name, *_ in docs.MARKER.findall(page.read_text(encoding="utf-8"))]
    assert sorted(markers) == sorted(docs.TABLES)


def test_the_page_of_settings_has_every_setting_of_a_recipe() -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8").partition("## Settings")[2]
    rows = re.findall(r"^- \*\*`\[(.+?)\]`\*\* (.+?)(?=^- |^$)", page, re.MULTILINE | re.DOTALL)
    listed = {f"{name}.{setting}" for name, row in rows for setting in re.findall(r"`([a-z]\w*)`", row)}
    assert listed == set(settings(Recipe().to_dict())) - {"device"}


def settings(values: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the names of all settings in nested tables, such as `evaluation.ngram.beta`."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from settings(value, f"{path}{name}.")
        else:
            yield path + name
