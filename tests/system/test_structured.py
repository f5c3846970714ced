"""Whatever a JSON, TOML or JSON-lines file holds, reading it ends in values or in one sentence."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from birdie.errors import DataError
from birdie.system.structured import read_json, read_steps, read_toml, rewrite_steps

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


def test_a_flipped_bit_never_ends_in_another_error(tmp_path: Path) -> None:
    path, rng = tmp_path / "log", random.Random(0)
    for _ in range(300):
        data = bytearray(SOUND)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        lines, damage = read_steps(path, ["loss"])
        assert len(lines) == 3 or damage or not data.endswith(b"\n")


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
