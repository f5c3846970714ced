"""Messages name extras that the distribution has, and the command that installs them from where birdie came."""

import json
import re
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from birdie.system.extras import install_line

ROOT = Path(__file__).resolve().parents[2]
WHEEL = "file:///a%20b/birdie_compress-0.1.0-py3-none-any.whl"


def test_every_extra_that_is_named_exists() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "birdie").rglob("*.py")]
    named = {extra for text in texts for extra in re.findall(r"install_line\([\"'](\w+)[\"']\)", text)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert named
    assert named <= project["optional-dependencies"].keys()


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'birdie-compress[lab]'"),
        ({"url": WHEEL, "archive_info": {}}, f"pip install 'birdie-compress[lab] @ {WHEEL}'"),
        ({"url": "file:///a%20b", "dir_info": {}}, "pip install 'birdie-compress[lab] @ file:///a%20b'"),
        ({"url": "file:///a%20b", "dir_info": {"editable": True}}, "pip install -e '/a b[lab]'"),
    ],
)
def test_an_extra_comes_from_where_birdie_came(
    monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None, command: str
) -> None:
    text = None if origin is None else json.dumps(origin)
    monkeypatch.setattr(metadata, "distribution", lambda _: SimpleNamespace(read_text=lambda _: text))
    assert install_line("lab") == command
