"""Messages name extras that the distribution has, and how this installation gets them."""

import re
import tomllib
from pathlib import Path

import pytest

from birdie.system import extras

ROOT = Path(__file__).resolve().parents[2]


def test_every_extra_that_is_named_exists() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "birdie").rglob("*.py")]
    named = {extra for text in texts for extra in re.findall(r"install_line\([\"'](\w+)[\"']\)", text)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert named
    assert named <= project["optional-dependencies"].keys()


def test_a_checkout_is_installed_from_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert extras.install_line("lab") == f"pip install -e '{ROOT}[lab]'"
    monkeypatch.setattr(extras, "_CHECKOUT", tmp_path)
    assert extras.install_line("lab") == "pip install 'birdie-compress[lab]'"
