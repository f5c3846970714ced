"""First stage of a packed script: modules are written once, damage and other users are noticed."""

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from birdie.golf.first_stage import own_folder, unpack

DATA = b"\0".join([b"a.py", b"VALUE = 1\n", b"b/__init__.py", b"", b"b/c.py", b"VALUE = 2\n"])
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's cache folder of its own; `sys.path` is restored."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths = list(sys.path)
    yield tmp_path
    sys.path[:] = paths


def once(data: bytes = DATA) -> Callable[[], bytes]:
    """Return a decoder that fails when it is called again."""
    left = [data]
    return left.pop


def test_modules_are_written_once_and_come_first(home: Path) -> None:
    decode = once()
    folder, recipe = unpack(DIGEST, decode, b"[train]\n")
    assert folder.is_relative_to(home)
    assert sys.path[0] == str(folder)
    assert {name: (folder / name).read_bytes() for name in ("a.py", "b/__init__.py", "b/c.py")} == {
        "a.py": b"VALUE = 1\n",
        "b/__init__.py": b"",
        "b/c.py": b"VALUE = 2\n",
    }
    assert recipe.read_bytes() == b"[train]\n"
    assert unpack(DIGEST, decode, b"[train]\n") == (folder, recipe)


def test_a_file_that_somebody_changed_is_written_again() -> None:
    decode = once()
    folder, _ = unpack(DIGEST, decode, b"")
    (folder / "a.py").write_text("VALUE = 3\n")
    (folder / "b" / "c.py").unlink()
    unpack(DIGEST, decode, b"")
    assert (folder / "a.py").read_text() == "VALUE = 1\n"
    assert (folder / "b" / "c.py").is_file()


def test_a_damaged_copy_is_decoded_again() -> None:
    folder, _ = unpack(DIGEST, once(), b"")
    (folder / "modules").write_bytes(DATA[:-1])
    unpack(DIGEST, once(), b"")
    assert (folder / "modules").read_bytes() == DATA


def test_a_damaged_script_says_so(home: Path) -> None:
    with pytest.raises(SystemExit, match="damaged"):
        unpack(DIGEST, once(DATA + b"x"), b"")
    assert not list(home.rglob("*.py"))


def test_a_folder_that_others_can_write_is_not_used(home: Path) -> None:
    folder = own_folder("name")
    assert folder.is_relative_to(home)
    folder.chmod(0o777)
    assert not own_folder("name").is_relative_to(home)


def test_ranks_may_start_at_once(home: Path) -> None:
    program = (
        "from birdie.golf.first_stage import unpack\n"
        f"folder, _ = unpack({DIGEST!r}, lambda: {DATA!r}, b'')\n"
        "import a, b.c\nprint(a.VALUE, b.c.VALUE, a.__file__)"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    lines = {rank.communicate()[0] for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0] * 4
    assert len(lines) == 1
    assert lines.pop().startswith(f"1 2 {home}")
