"""Source files: read within limits, without comments for comparison, and unpacked."""

import pytest

from birdie.golf.audit import source
from birdie.golf.audit.source import parse_source


def test_a_program_has_no_comments_and_no_docstrings() -> None:
    parsed = parse_source(b'"""A module."""\n\n\ndef f(x):\n    """Double."""\n    return 2 * x  # two\n')
    assert parsed.program == "def f(x):\n    return 2 * x"
    assert parsed.tree is not None
    assert len(parsed.tree.body) == 2  # the tree itself keeps them
    assert parse_source(b"def f(:").program is None


def test_limits_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "500,001 bytes" in parse_source(b"#" * 500_001).problem
    monkeypatch.setattr(source, "MAX_NODES", 1000)
    assert "limit is 1,000" in parse_source(b"a\n" * 1000).problem


def test_many_calls_of_exec_are_examined_once() -> None:
    """All strings of the script would be searched for each of them otherwise."""
    inner = "import os\ndef f():\n    return 1\n" * 20
    assert parse_source(("exec(a)\n" * 5_000 + f"x = {inner!r}").encode()).unpacked == inner.encode()
    assert parse_source(b"exec(a)\n" * 5_000).unpacked is None
