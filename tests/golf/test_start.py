"""First stage of a packed script: modules are written once, changes and other users are noticed."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from birdie.golf.start import keep, own_folder, start

PARTS = ["birdie/__init__.py", "", "birdie/a.py", "VALUE = 1\n", "birdie/b/__init__.py", ""]
PARTS += ["birdie/b/c.py", "from ..a import VALUE\ndef absent():\n    from ..d import x\n"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's cache folder of its own; what imports change is restored."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    paths, finders, modules = list(sys.path), list(sys.meta_path), set(sys.modules)
    yield tmp_path
    sys.path[:], sys.meta_path[:] = paths, finders
    for name in sys.modules.keys() - modules:
        del sys.modules[name]


def test_modules_are_imported_from_a_folder_of_this_user(home: Path) -> None:
    entry, folder = start(PARTS, "b.c", "torch numpy")
    assert folder.is_relative_to(home)
    assert entry.VALUE == 1
    assert Path(str(entry.__file__)).is_relative_to(folder)
    assert start(PARTS, "b.c", "") == (entry, folder)
    assert start([*PARTS[:3], "VALUE = 2\n", *PARTS[4:]], "b.c", "")[0].VALUE == 2


def test_an_installed_birdie_is_neither_imported_nor_hidden() -> None:
    entry, _ = start(PARTS, "b.c", "")
    assert entry.__name__.startswith("birdie_")
    assert "birdie.a" not in sys.modules


def test_a_file_that_somebody_changed_is_written_again() -> None:
    entry, folder = start(PARTS, "b.c", "")
    changed = folder / entry.__name__.partition(".")[0] / "a.py"
    changed.write_text("VALUE = 3\n")
    start(PARTS, "b.c", "")
    assert changed.read_text() == "VALUE = 1\n"


def test_a_link_is_replaced_and_its_file_stays(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("x")
    (tmp_path / "a.py").symlink_to(tmp_path / "theirs")
    assert keep(tmp_path / "a.py", "x").is_symlink() is False
    assert (tmp_path / "theirs").read_text() == "x"


def test_a_folder_that_others_can_write_is_not_used(home: Path) -> None:
    folder = own_folder("name")
    assert folder.is_relative_to(home)
    folder.chmod(0o777)
    assert not own_folder("name").is_relative_to(home)


def test_ranks_may_start_at_once(home: Path) -> None:
    program = (
        f"from birdie.golf.start import start\nentry, _ = start({PARTS!r}, 'b.c', '')\n"
        "print(entry.VALUE, entry.__file__)"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    lines = {rank.communicate()[0] for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0] * 4
    assert len(lines) == 1
    assert lines.pop().startswith(f"1 {home}")
