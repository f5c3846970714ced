"""The README is true: its Python runs, its commands exist, and their flags are known."""

import re
from pathlib import Path

import pytest

from birdie.cli import build_app, commands
from birdie.cli.console import run

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


@pytest.mark.parametrize("page", ["spectral", "techniques", "scoring"])
def test_a_page_runs_from_top_to_bottom(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, f"docs/{page}.md", "exec"), names)


def test_commands_and_flags_exist(capsys: pytest.CaptureFixture[str]) -> None:
    shell = "".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
    used = re.findall(r"^birdie (\w+)(.*)$", shell, re.MULTILINE)
    assert {name for name, _ in used} == set(commands()) - {"demo"}
    for name, rest in used:
        assert name in commands()
        assert run(build_app, [name, "--help"]) == 0
        known = capsys.readouterr().out
        for flag in re.findall(r"\s(--?[a-z][\w.-]*)", rest.partition("#")[0]):
            assert flag in known, f"README uses {flag}, which birdie {name} does not know"


def test_paths_exist() -> None:
    root = Path(__file__).resolve().parents[1]
    for path in re.findall(r"`?((?:recipes|docs|tests|benchmarks)/[\w./]+\.\w+)`?", README):
        assert (root / path).exists(), path
