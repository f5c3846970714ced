"""The sandbox: a script has no network, no files to write but its own, no way out, and its answers are checked."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from birdie.golf.audit import sandbox
from birdie.golf.audit.sandbox import OvertimeError, Sandbox, SandboxError

ESCAPE = """
import ctypes, os
libc = ctypes.CDLL(None)
writable = (ctypes.c_uint64 * 4)(0, 7, 0, 0)
successes = []
def escape(where):
    calls = {{
        "mount_setattr": lambda: libc.syscall(442, -100, b"/", 0, ctypes.byref(writable), 32),
        "mount_setattr, all": lambda: libc.syscall(442, -100, b"/", 0x8000, ctypes.byref(writable), 32),
        "remount": lambda: libc.mount(None, b"/", None, 32 | 4096, None),
        "umount /run": lambda: libc.umount2(b"/run", 2),
        "umount": lambda: libc.umount2(os.getcwd().encode(), 2),
        "disk": lambda: libc.mknod(b"disk", 0o60600, os.makedev(7, 0)),
        "setns": lambda: libc.setns(os.open("/proc/self/ns/mnt", 0), 0) - bool(where),
    }}
    successes.extend(where + name for name, call in calls.items() if call() == 0)
    for path in ("{outside}/mine", "{outside}/new", "/proc/sys/kernel/core_pattern", "/proc/self/oom_score_adj"):
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
            successes.append(where + "writes to " + path)
        except OSError:
            pass
escape("")
alone = libc.unshare(0x10000000 | 0x20000)
escape("in another namespace: ")
answer = (", ".join(successes) or "nothing worked") + chr(10) + str(alone)
"""


@pytest.fixture(autouse=True)
def _sandbox() -> None:
    if (reason := sandbox.unavailable()) is not None:
        pytest.skip(f"no sandbox: {reason}")


def script(folder: Path, text: str) -> Path:
    path = folder / "train_gpt.py"
    path.write_text(text)
    return path


def answering(code: str) -> str:
    """Return a script that runs `code`, and whose `score` is the `answer` it leaves, or the error, as numbers."""
    body = "\n".join("    " + line for line in code.splitlines())
    handler = "except BaseException as e:\n    answer = type(e).__name__\n"
    return f"try:\n{body}\n{handler}def score(_):\n    return [ord(c) for c in answer]\n"


def answer_of(folder: Path, code: str, **limits: float) -> str:
    """Run `code` in the sandbox and return the `answer` it leaves."""
    with Sandbox(script(folder, answering(code)), **limits) as box:  # type: ignore[arg-type]
        box.ask("load")
        return "".join(chr(int(number)) for number in box.ask("score", [0]))


def test_there_is_no_network_not_even_of_this_machine(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\nanswer = 'connected'"
        with Sandbox(script(tmp_path, answering(code))) as box:
            box.ask("load")
            assert "connected" not in "".join(chr(int(number)) for number in box.ask("score", [0]))
            assert any(attempt.startswith("socket.connect") for attempt in box.log().network)


def test_nothing_is_written_outside(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    assert answer_of(tmp_path, f"open({str(tmp_path / 'mine')!r}, 'w')\nanswer = 'wrote'") == "OSError"
    assert answer_of(tmp_path, f"import os\nos.unlink({str(tmp_path / 'mine')!r})\nanswer = 'gone'") == "OSError"
    assert (tmp_path / "mine").read_text() == "mine"


def test_the_scratch_folder_is_writable_and_temporary(tmp_path: Path) -> None:
    folder = Path(answer_of(tmp_path, "import os\nopen('note', 'w').write('x' * 9)\nanswer = os.getcwd()"))
    assert folder.name.startswith("birdie-sandbox-")
    assert not folder.exists()


def test_a_file_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "FILE_BYTES", 1000)
    code = (
        "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "assert open('a', 'wb', 0).write(b'x' * 2000) == 1000\nopen('a', 'ab', 0).write(b'x')"
    )
    assert answer_of(tmp_path, code) == "OSError"


def test_all_files_together_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SCRATCH_BYTES", 2**20)
    code = "for i in range({}):\n    assert open(str(i), 'wb', 0).write(b'x' * 2**18) == 2**18\nanswer = 'wrote'"
    assert answer_of(tmp_path, code.format(3)) == "wrote"
    assert answer_of(tmp_path, code.format(9)) in ("AssertionError", "OSError")


def test_memory_has_a_limit(tmp_path: Path) -> None:
    assert answer_of(tmp_path, "bytearray(2 * 10**9)\nanswer = 'allocated'", memory=10**9) == "MemoryError"


def test_the_environment_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    assert answer_of(tmp_path, "import os\nanswer = str('A_SECRET' in os.environ)") == "False"


def test_time_has_a_limit_and_no_process_survives(tmp_path: Path) -> None:
    name = f"survivor{os.getpid()}"
    code = (
        "import subprocess, sys\nsleep = 'import time; time.sleep(60)'\n"
        f"subprocess.Popen([sys.executable, '-c', sleep, '{name}'], start_new_session=True)\nwhile True: pass"
    )
    with Sandbox(script(tmp_path, code), seconds=1) as box, pytest.raises(OvertimeError, match="1 s"):
        box.ask("load")
    assert soon(lambda: not running(name))


def test_no_way_out_works(tmp_path: Path) -> None:
    """Everything that could make mounts writable again is tried, then again in a namespace of the script's own."""
    (tmp_path / "mine").write_text("mine")
    answer = answer_of(tmp_path, ESCAPE.format(outside=str(tmp_path)))
    assert answer.splitlines()[0] == "nothing worked"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "train_gpt.py"]
    assert (tmp_path / "mine").read_text() == "mine"
    assert "writes to" not in answer


def test_disks_cannot_be_opened(tmp_path: Path) -> None:
    """A device can be written to on a read-only mount, by root its disks."""
    disks = [path for path in Path("/dev").iterdir() if path.is_block_device() and os.access(path, os.R_OK)]
    if not disks:
        pytest.skip("no disk that this user may open")
    assert answer_of(tmp_path, f"open({str(disks[0])!r}, 'rb')\nanswer = 'opened'") == "PermissionError"
    code = "open('/dev/null', 'wb').write(b'x')\nanswer = str(len(open('/dev/urandom', 'rb').read(9)))"
    assert answer_of(tmp_path, code) == "9"


@pytest.mark.parametrize("killed", [False, True])
def test_a_process_that_detaches_does_not_survive(tmp_path: Path, killed: bool) -> None:
    """The script is not the first process of its namespace, with which all others end."""
    name = f"{60 + os.getpid() / 1e6:.6f}"
    code = "import ctypes, os\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\nos.setsid()\nassert os.getpid() > 1\n"
    code += f"os.execvp('sleep', ['sleep', '{name}'])"
    with Sandbox(script(tmp_path, code)) as box:
        box._write(b'{"op": "load"}\n')  # without waiting for the answer
        assert soon(lambda: running(name))
        if killed:  # as when the auditor is killed
            assert box._process is not None
            os.kill(box._process.pid, signal.SIGKILL)
            assert soon(lambda: not running(name))
    assert soon(lambda: not running(name))


def test_the_first_process_is_out_of_reach(tmp_path: Path) -> None:
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nfor sent in (9, 15, 19):\n    os.kill(1, sent)\n"
        "answer = str(libc.ptrace(16, 1, None, None))"
    )
    assert answer_of(tmp_path, code) == "-1"


def test_answers_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "ANSWER_BYTES", 10_000)
    with Sandbox(script(tmp_path, "def score(_):\n    return [0.5] * 10**6\n")) as box:
        box.ask("load")
        with pytest.raises(SandboxError, match="10,000 bytes"):
            box.ask("score", [0])


@pytest.mark.parametrize("line", ["[1]\\n", "{\\n", "\\xff\\n", "[" * 5000 + "\\n"])
def test_answers_of_the_wrong_form_are_errors(tmp_path: Path, line: str) -> None:
    code = (
        "import os\nfor fd in range(3, 20):\n    try:\n"
        f"        os.write(fd, b'{line}')\n    except OSError:\n        pass\n"
    )
    with Sandbox(script(tmp_path, code)) as box, pytest.raises(SandboxError, match="interfered"):
        box.ask("load")


def test_a_process_that_ends_is_an_error(tmp_path: Path) -> None:
    with Sandbox(script(tmp_path, "import os\nos._exit(3)")) as box, pytest.raises(SandboxError, match="code 3"):
        box.ask("load")


def test_exceptions_come_back_with_their_kind(tmp_path: Path) -> None:
    with (
        Sandbox(script(tmp_path, "raise KeyError('spoon')")) as box,
        pytest.raises(SandboxError, match="spoon") as info,
    ):
        box.ask("load")
    assert info.value.kind == "KeyError"


def running(name: str) -> bool:
    """Return whether a process has `name` in its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if name in path.read_text(errors="replace"):
                return True
        except OSError:  # it has ended
            continue
    return False


def soon(condition: Callable[[], bool]) -> bool:
    """Return whether a condition holds within ten seconds."""
    for _ in range(200):
        if condition():
            return True
        time.sleep(0.05)
    return False
