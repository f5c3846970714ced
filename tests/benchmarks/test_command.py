"""The command line of benchmarks: lists are parsed, errors are one line, and the JSON has versions and rows."""

import argparse
import json

import pytest

from benchmarks import command
from birdie.errors import ConfigError


def test_lists_are_comma_separated_and_not_empty() -> None:
    assert command.comma_separated(int)("1, 2,3") == [1, 2, 3]
    for text in ("", " , "):
        with pytest.raises(argparse.ArgumentTypeError, match="empty"):
            command.comma_separated(int)(text)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    parse = command.one_of(("a", "b"), "letter")
    assert parse("b") == "b"
    with pytest.raises(argparse.ArgumentTypeError, match="c is no letter; choose from a, b"):
        parse("c")


def test_birdies_errors_end_the_command_with_their_message() -> None:
    with pytest.raises(SystemExit, match="wrong setting"), command.errors_as_exit():
        raise ConfigError("wrong setting")
    with pytest.raises(SystemExit, match="key"), command.errors_as_exit(KeyError):
        raise KeyError("key")
    with pytest.raises(KeyError), command.errors_as_exit():
        raise KeyError("key")


def test_rows_are_reported_as_json_or_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "one", "bytes": 12345, "share": 0.5, "missing": None, "exact": True}]
    command.report(rows, as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == {"versions", "machine", "commit", "rows"}
    assert answer["rows"] == rows
    command.report(rows, as_json=False)
    table = capsys.readouterr().out
    assert all(cell in table for cell in ("one", "12,345", "0.500", "–", "True"))
