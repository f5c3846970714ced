"""A child process is followed line by line, and saves its work before it ends with its parent's call."""

from pathlib import Path

import pytest

from birdie.system.child import run_child, unwatched

SAVES = """
import pathlib, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print("begun", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("saving", flush=True)
    pathlib.Path("saved").touch()
"""


def test_code_and_lines_are_returned_and_errors_are_among_them_unless_they_have_a_file(tmp_path: Path) -> None:
    program = ["-c", "import sys; print('out'); sys.stdout.flush(); sys.stderr.write('err\\n'); sys.exit(3)"]
    seen: list[str] = []
    assert run_child(program, on_line=seen.append) == (3, ["out", "err"])
    assert seen == ["out", "err"]
    with (tmp_path / "errors").open("wb") as errors:
        assert run_child(program, errors=errors) == (3, ["out"])
    assert (tmp_path / "errors").read_text() == "err\n"


@pytest.mark.parametrize("where", ["on_line", "watch"])
def test_an_exception_interrupts_the_child_and_waits_until_it_has_saved(where: str, tmp_path: Path) -> None:
    seen: list[str] = []

    def interrupt() -> None:
        if seen:
            raise KeyboardInterrupt

    def follow(line: str) -> None:
        seen.append(line)
        if where == "on_line" and line == "begun":
            interrupt()

    watch = interrupt if where == "watch" else unwatched
    with pytest.raises(KeyboardInterrupt):
        run_child(["-c", SAVES], folder=tmp_path, watch=watch, on_line=follow)
    assert (tmp_path / "saved").is_file()
    assert seen[-1] == "saving"
