"""Messages name the command that installs an extra from where birdie came."""

import json
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from birdie.system.provenance import installation

WHEEL = "file:///a%20b/birdie_compress-0.1.0-py3-none-any.whl"


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'birdie-compress[lab]'"),
        ({"url": WHEEL, "archive_info": {}}, f"pip install 'birdie-compress[lab] @ {WHEEL}'"),
        ({"url": "file:///a%20b", "dir_info": {}}, "pip install 'birdie-compress[lab] @ file:///a%20b'"),
        ({"url": "file:///a%20b", "dir_info": {"editable": True}}, "pip install --editable '/a b[lab]'"),
    ],
)
def test_extras_come_from_where_birdie_came(
    monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None, command: str
) -> None:
    text = None if origin is None else json.dumps(origin)
    monkeypatch.setattr(metadata, "distribution", lambda _: SimpleNamespace(read_text=lambda _: text))
    assert installation("lab") == command
