"""Text of strangers: objects, logs and values are read, or one sentence says why not."""

import ast
import contextlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import birdie
from birdie.errors import DataError
from birdie.system.parsing import parse_object, to_json
from birdie.system.structured import read_json, read_steps, read_toml, rewrite_steps

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4), st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]))
def test_objects_come_back(content: dict[str, object], encoding: str) -> None:
    assert parse_object(json.dumps(content)) == content
    assert parse_object(json.dumps(content, ensure_ascii=True).encode(encoding)) == content


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[1]", "not an object"),
        (b"null", "not an object"),
        (b"", "line 1 column 1"),
        (b'{"a": 1', "line 1 column 8"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "an integer of 5,000 digits"),
    ],
)
def test_what_is_wrong_is_said_in_words(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_object(data)


@given(st.binary(max_size=40) | st.text(alphabet='{}[]":,0123456789.eE-+ \\ntrufalsNI', max_size=40))
def test_nothing_but_a_value_error_leaves(data: bytes | str) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(parse_object(data), dict)


SOUND = b'{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.5}\n{"step": 4, "loss": 2.0, "more": -1e3}\n'

NO_STEP = {
    "no JSON": b"garbage",
    "no UTF-8": b'{"step": 3, "loss": 1, "\xff": 1}',
    "NUL": bytes(40),
    "nothing": b"",
    "a list": b"[3]",
    "a number": b"3",
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "many digits": b'{"step": ' + b"9" * 5000 + b', "loss": 1}',
    "a step beyond all": b'{"step": 1' + b"0" * 40 + b', "loss": 1}',
    "a step again": b'{"step": 2, "loss": 1}',
    "an earlier step": b'{"step": 1, "loss": 1}',
    "a negative step": b'{"step": -3, "loss": 1}',
    "half a step": b'{"step": 2.5, "loss": 1}',
    "a step that is true": b'{"step": true, "loss": 1}',
    "no step": b'{"loss": 1}',
    "no loss": b'{"step": 3}',
    "a loss of text": b'{"step": 3, "loss": "1"}',
    "a loss of nothing": b'{"step": 3, "loss": null}',
    "a loss of NaN": b'{"step": 3, "loss": NaN}',
    "an infinite loss": b'{"step": 3, "loss": 1e999}',
    "a loss beyond float64": b'{"step": 3, "loss": 1' + b"0" * 400 + b"}",
}


@pytest.mark.parametrize("case", NO_STEP)
def test_a_log_is_read_up_to_the_first_damaged_line(case: str, tmp_path: Path) -> None:
    path, (first, second, third) = tmp_path / "log", SOUND.splitlines(keepends=True)
    path.write_bytes(first + second + NO_STEP[case] + b"\n" + third)
    lines, damage = read_steps(path, ["loss"])
    assert [line["step"] for line in lines] == [1, 2]
    assert damage.startswith(f"{path} is damaged from line 3 on (")
    assert "\n" not in damage
    assert len(damage) < len(str(path)) + 300


def test_a_sound_log_is_read_and_a_line_that_a_kill_left_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert read_steps(path, ["loss"]) == ([], "")
    path.write_bytes(SOUND)
    assert [line["step"] for line in read_steps(path, ["loss"]).lines] == [1, 2, 4]
    for size in range(len(SOUND)):
        path.write_bytes(SOUND[:size])
        lines, damage = read_steps(path, ["loss"])
        assert damage == ""
        assert len(lines) in (SOUND[:size].count(b"\n"), SOUND[:size].count(b"\n") + 1)


def test_what_is_damaged_is_kept_before_it_is_replaced(tmp_path: Path) -> None:
    path, warnings = tmp_path / "log", list[str]()
    for name in ("log.damaged", "log.damaged-1"):
        path.write_bytes(SOUND + name.encode() + b"\n")
        rewrite_steps(path, ["loss"], 2, warnings.append, [{"step": 9, "loss": 1.0}])
        assert [line["step"] for line in read_steps(path, ["loss"]).lines] == [1, 2, 9]
        assert (tmp_path / name).read_bytes() == SOUND + name.encode() + b"\n"
        assert warnings.pop().endswith(f"is kept as {name}")
    rewrite_steps(path, ["loss"], 1, warnings.append)
    assert warnings == []
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("read", [read_json, read_toml])
@pytest.mark.parametrize("content", [b"", b"[" * 9000, b"\xff", b"\0", b'"a"', b"a = " + b"[" * 9000, b"a =", b"{}}"])
def test_objects_are_read_or_one_sentence_says_why_not(
    read: Callable[[Path], dict[str, Any]], content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    if read is read_toml and not content:
        assert read(path) == {}
        return
    with pytest.raises(DataError, match=r"file is damaged \(") as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", [read_json, read_toml, lambda path: read_steps(path, [])])
def test_what_is_no_regular_file_is_not_opened(read: Callable[[Path], Any], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/zero")
    for name, kind in (("pipe", "a named pipe"), ("folder", "a folder"), ("link", "a device")):
        try:
            problem = read(tmp_path / name).damage
        except DataError as error:
            problem = str(error)
        assert f"{name} is {kind}" in problem


def _none_for_infinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _none_for_infinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_none_for_infinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@given(st.recursive(st.floats() | st.text() | st.none(), lambda inner: st.lists(inner) | st.tuples(inner, inner)))
def test_json_for_others_has_null_where_a_number_is_not_finite(value: object) -> None:
    text = to_json({"a": value, "b": {"c": math.inf}}, indent=1)
    content = json.loads(text, parse_constant=lambda constant: pytest.fail(constant))
    assert content == {"a": _none_for_infinite(value), "b": {"c": None}}


def test_no_file_of_json_has_what_json_lacks() -> None:
    """Each `json.dumps` whose text is written says whether NaN is allowed: in configurations of others alone."""
    for path in sorted(Path(birdie.__file__).parent.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2].startswith("write")):
                continue
            for inner in ast.walk(call):
                if isinstance(inner, ast.Call) and ast.unparse(inner.func).endswith("dumps"):
                    assert any(keyword.arg == "allow_nan" for keyword in inner.keywords), f"{path}:{inner.lineno}"
