"""The sandbox: a script has no network, no files but its own, no way out, and what it says is checked.

Every test runs in each way to isolate a process that the machine has.
"""

import base64
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from birdie.golf.audit import isolation, limits, sandbox, seccomp
from birdie.golf.audit.sandbox import InterferedError, LimitError, RefusedError, Sandbox, SandboxError
from tests.golf.audit.attacks import ATTACKS, PRELUDE

pytestmark = pytest.mark.usefixtures("way")


def script(folder: Path, text: str) -> Path:
    path = folder / "train_gpt.py"
    path.write_text(text)
    return path


def answering(code: str) -> str:
    """Return a script that runs `code`, and whose `score` is the `answer` it leaves, or the error, as numbers."""
    body = "\n".join("    " + line for line in code.splitlines())
    handler = "except BaseException as e:\n    answer = type(e).__name__\n"
    return f"try:\n{body}\n{handler}def score(_):\n    return [ord(c) for c in answer]\n"


def text_of(box: Sandbox) -> str:
    """Return the text that a script of `answering` leaves."""
    return "".join(chr(int(number)) for number in array("d", base64.b64decode(box.ask("score", [0]))))


def answer_of(folder: Path, code: str, **limits: float) -> str:
    """Run `code` in the sandbox and return the `answer` it leaves."""
    with Sandbox(script(folder, answering(code)), **limits) as box:  # type: ignore[arg-type]
        box.ask("load")
        return text_of(box)


class Outside:
    """Files, sockets and a process outside that attacks look for."""

    def __init__(self, folder: Path, inside: Path) -> None:
        self.folder, self.inside = folder, inside
        self.marker = f"marker{os.getpid()}x{time.monotonic_ns()}"
        command = [sys.executable, "-c", "import time; time.sleep(120)", self.marker]
        self.process = subprocess.Popen(command, env={"NAME": self.marker})
        (folder / "secret").write_text("escaped")
        self.shared = Path("/dev/shm", self.marker)
        self.shared.write_text("escaped")
        self.servers, self.pipes = [], []
        for parent in (folder, inside):
            os.mkfifo(parent / "pipe")
            self.pipes.append(os.open(parent / "pipe", os.O_RDONLY | os.O_NONBLOCK))
        for address in (str(folder / "server"), str(inside / "server"), f"\0{self.marker}"):
            server = socket.socket(socket.AF_UNIX)
            server.bind(address)
            server.listen()
            server.setblocking(False)
            self.servers.append(server)
        self.datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.datagrams.bind(str(inside / "datagrams"))
        self.datagrams.setblocking(False)
        (inside / "link").symlink_to(folder / "secret")
        (inside / "folder").symlink_to(folder)
        (inside / "up").symlink_to(os.path.relpath(folder, inside))
        (inside / "model.bin").write_bytes(b"weights")

    def names(self) -> str:
        """Return the line that gives an attack its names."""
        values = (str(self.folder), self.marker, self.marker, self.process.pid)
        return f"OUTSIDE, ABSTRACT, MARKER, PID = {values!r}\n"

    def reached(self) -> bool:
        """Return whether something arrived, changed or ended outside."""
        for server in self.servers:
            with contextlib.suppress(BlockingIOError):
                server.accept()
                return True
        with contextlib.suppress(BlockingIOError):
            self.datagrams.recv(100)
            return True
        if any(os.read(pipe, 100) for pipe in self.pipes) or self.process.poll() is not None:
            return True
        return (self.inside / "model.bin").read_bytes() != b"weights" or (self.inside / "escaped").exists()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.shared.unlink()
        for server in (*self.servers, self.datagrams):
            server.close()
        for pipe in self.pipes:
            os.close(pipe)


@pytest.fixture
def outside(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Iterator[Outside]:
    world = Outside(tmp_path_factory.mktemp("outside"), tmp_path)
    yield world
    world.close()


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_works(tmp_path: Path, outside: Outside, attack: str) -> None:
    assert "escaped" not in answer_of(tmp_path, PRELUDE + outside.names() + ATTACKS[attack])
    assert not outside.reached()


def test_there_is_no_network_not_even_of_this_machine(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\nanswer = 'connected'"
        assert answer_of(tmp_path, code) == "PermissionError"


def test_the_scratch_folder_is_writable_and_temporary(tmp_path: Path) -> None:
    code = "import os\nopen('note', 'x').write('x' * 9)\nanswer = os.getcwd() + ' ' + open('note').read()"
    assert answer_of(tmp_path, code) == answer_of(tmp_path, code) == "/tmp xxxxxxxxx"


def test_the_script_has_its_folder(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("value = 'helped'")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "table.txt").write_text(" by a table")
    (tmp_path / "link").symlink_to("data/table.txt")
    code = "import helper, os\nanswer = helper.value + open(os.path.dirname(__file__) + '/link').read()"
    assert answer_of(tmp_path, code) == "helped by a table"


def test_a_script_may_lie_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Sandbox(script(tmp_path, "")) as box:
        assert (box.snapshot.files, box.snapshot.left) == ({}, 0)
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [box.snapshot.folder.parent.name]
    assert [path.name for path in tmp_path.iterdir()] == ["train_gpt.py"]


def test_python_and_its_packages_work(tmp_path: Path) -> None:
    code = "import birdie, numpy, subprocess, tempfile, threading, multiprocessing\n"
    code += "lock = multiprocessing.Lock()\ntempfile.TemporaryFile().write(b'x')\n"
    code += "threading.Thread(target=print).start()\nassert subprocess.run(['true']).returncode == 0\n"
    code += "answer = birdie.__name__ + ' works'"
    assert answer_of(tmp_path, code) == "birdie works"


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


@pytest.mark.parametrize("patient", [False, True])
def test_processes_have_a_limit_together(tmp_path: Path, patient: bool) -> None:
    code = "import os, time\nfor _ in range(1500):\n    try:\n        if os.fork() == 0:\n            time.sleep(60)\n"
    code += f"    except OSError:\n        {'pass' if patient else 'raise'}\nwhile True: time.sleep(1)"
    with Sandbox(script(tmp_path, code)) as box, pytest.raises(LimitError, match="512 processes"):
        box.ask("load")


def test_threads_count_as_processes(tmp_path: Path) -> None:
    code = "import threading, time\nthreading.stack_size(65536)\nfor _ in range(600):\n"
    code += "    threading.Thread(target=time.sleep, args=(60,)).start()\nwhile True: time.sleep(1)"
    with Sandbox(script(tmp_path, code)) as box, pytest.raises(LimitError, match="512 processes"):
        box.ask("load")


@pytest.mark.parametrize("megabytes", [50, pytest.param(768, marks=pytest.mark.nightly)])
def test_memory_has_a_limit_together(tmp_path: Path, megabytes: int) -> None:
    """Six processes, each of which keeps its own limit."""
    code = "import os, time\nfor _ in range(5):\n    if os.fork() == 0:\n        break\n"
    code += f"x = os.urandom(1) * ({megabytes} << 20)\n"
    path = script(tmp_path, code + "while True: time.sleep(1)")
    most = (megabytes << 20) * 16 // 3  # 4 GiB of 4.5
    with Sandbox(path, memory=most) as box, pytest.raises(LimitError, match=f"{most:,} bytes of memory"):
        box.ask("load")


def test_memory_that_processes_share_counts_once(tmp_path: Path) -> None:
    code = "import os, time\nx = bytes(200 << 20)\nx = b'x' * (100 << 20)\nfor _ in range(5):\n"
    code += "    if os.fork() == 0:\n        time.sleep(60)\ntime.sleep(0.5)\nanswer = 'shared'"
    assert answer_of(tmp_path, code, memory=500 << 20) == "shared"


def test_without_a_control_group_limits_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_possible", lambda: iter(()))
    test_processes_have_a_limit_together(tmp_path, patient=True)
    test_memory_has_a_limit_together(tmp_path, 50)


def test_a_sandbox_that_cannot_be_counted_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(_: limits.Watch) -> str:
        raise PermissionError("hidden")

    monkeypatch.setattr(limits.Watch, "_count", blind)
    with Sandbox(script(tmp_path, "while True: pass")) as box, pytest.raises(LimitError, match="hidden"):
        box.ask("load")


def test_the_number_of_files_has_a_limit(tmp_path: Path) -> None:
    code = "import time\nfor number in range(5000):\n    open(str(number), 'w').close()\nwhile True: time.sleep(1)"
    with Sandbox(script(tmp_path, code)) as box, pytest.raises(LimitError, match="4,096 files"):
        box.ask("load")


def test_time_has_a_limit_and_no_process_survives(tmp_path: Path) -> None:
    name = f"survivor{os.getpid()}"
    code = (
        "import subprocess, sys\nsleep = 'import time; time.sleep(60)'\n"
        f"subprocess.Popen([sys.executable, '-c', sleep, '{name}'], start_new_session=True)\nwhile True: pass"
    )
    with Sandbox(script(tmp_path, code), seconds=1) as box, pytest.raises(LimitError, match="1 s"):
        box.ask("load")
    assert soon(lambda: not running(name))


@pytest.mark.parametrize("killed", [False, True])
def test_a_process_that_detaches_does_not_survive(tmp_path: Path, killed: bool) -> None:
    """The script is not the first process of its namespace, with which all others end."""
    name = f"{60 + os.getpid() / 1e6:.6f}"
    code = "import ctypes, os\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\nos.setsid()\nassert os.getpid() > 1\n"
    code += f"os.execvp('sleep', ['sleep', '{name}'])"
    with Sandbox(script(tmp_path, code)) as box:
        box._write(b'{"id": "", "op": "load", "args": []}\n')  # without waiting for the answer
        assert soon(lambda: running(name))
        if killed:  # the process that the auditor started
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


def test_nothing_survives_a_killed_auditor(tmp_path: Path, way: str) -> None:
    name = f"{70 + os.getpid() / 1e6:.6f}"
    path = script(tmp_path, f"import os\nos.execvp('sleep', ['sleep', '{name}'])")
    code = "import sys\nfrom pathlib import Path\nfrom birdie.golf.audit.sandbox import Sandbox\n"
    code += f"with Sandbox(Path(sys.argv[1]), way={way!r}) as box:\n    box.ask('load')\n"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", code, str(path)]
    auditor = subprocess.Popen(command, cwd=isolation.PACKAGE.parent, env=environment)
    assert soon(lambda: running(name))
    assert list(tmp_path.glob(".birdie-sandbox-*/submission/train_gpt.py"))
    auditor.kill()
    auditor.wait()
    assert soon(lambda: not running(name))
    assert soon(lambda: not list(tmp_path.glob(".birdie-sandbox-*")))
    with Sandbox(None):  # which removes control groups that were left
        assert not any(limits.CGROUPS.rglob(f"birdie-{auditor.pid}-*"))


def test_answers_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "ANSWER_BYTES", 10_000)
    with Sandbox(script(tmp_path, "def score(_):\n    return [0.5] * 10**6\n")) as box:
        box.ask("load")
        with pytest.raises(SandboxError, match="10,000 bytes"):
            box.ask("score", [0])


@pytest.mark.parametrize("line", ["[1]\\n", "{\\n", "\\xff\\n", "[" * 5000 + "\\n"])
def test_answers_of_the_wrong_form_are_errors(tmp_path: Path, line: str) -> None:
    code = (
        "import os\nfor fd in range(3, 1024):\n    try:\n"
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


def test_an_answer_needs_a_request(tmp_path: Path) -> None:
    """Answers to come are not taken from the pipe, even those of the right form."""
    code = "import os\ndef score(_):\n    for fd in range(3, 1024):\n        try:\n"
    code += "            os.write(fd, b'{}\\n')\n        except OSError:\n            pass\n    return [1.0]\n"
    with Sandbox(script(tmp_path, code)) as box:
        box.ask("load")
        for _ in range(2):
            with pytest.raises(InterferedError):
                box.ask("score", [0])


def test_an_answer_between_requests_is_noticed(tmp_path: Path) -> None:
    code = (
        "import os, threading, time\ndef later():\n    time.sleep(0.3)\n    for fd in range(3, 1024):\n        try:\n"
    )
    code += "            os.write(fd, b'x')\n        except OSError:\n            pass\n"
    code += "def score(_):\n    threading.Thread(target=later).start()\n    return [1.0]\n"
    with Sandbox(script(tmp_path, code)) as box:
        box.ask("load")
        box.ask("score", [0])
        time.sleep(1)
        with pytest.raises(InterferedError):
            box.ask("score", [0])


def test_the_next_way_is_taken_where_one_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    def missing(*_: object) -> isolation.Launch:
        raise isolation.NotPossibleError("this way is missing")

    monkeypatch.setattr(isolation, "WAYS", {"missing": missing, **isolation.WAYS})
    with Sandbox(script(tmp_path, "")) as box:
        assert box.way == way
        assert box.description.startswith(way)
    monkeypatch.setattr(isolation, "WAYS", {"missing": missing})
    with pytest.raises(RefusedError, match="missing: this way is missing"), Sandbox(script(tmp_path, "")):
        pass


def test_without_a_filter_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(seccomp, "program", lambda: None)
    with pytest.raises(RefusedError, match="no filter"), Sandbox(script(tmp_path, ""), way=way):
        pass


def test_what_cannot_be_isolated_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """The reason is the last line of the program that failed."""
    table = isolation.mounts

    def broken(submission: Path, scratch: int) -> list[isolation.Mount]:
        return [*table(submission, scratch), ("bind", "/nothing/here", "/here")]

    monkeypatch.setattr(isolation, "mounts", broken)
    with pytest.raises(RefusedError, match="/nothing/here"), Sandbox(script(tmp_path, ""), way=way):
        pass


def test_a_home_folder_is_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(RefusedError, match="home folder"), Sandbox(None):
        pass


def test_no_control_group_stays_behind(tmp_path: Path) -> None:
    def groups() -> list[Path]:
        return list(limits.CGROUPS.rglob(f"birdie-{os.getpid()}-*"))  # sandboxes of other processes come and go

    assert not groups()
    with Sandbox(script(tmp_path, "import os, time\nwhile os.fork(): pass\ntime.sleep(60)")) as box:
        assert box.description.endswith("outside") or groups()
        with pytest.raises(LimitError):
            box.ask("load")
    assert not groups()


def test_an_ordinary_user_has_the_same_sandbox(way: str) -> None:
    """Root runs the tests again as nobody, with a Python that nobody may read."""
    python = next((path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if Path(path).exists()), "")
    if os.getuid() or not shutil.which("setpriv") or not python:
        pytest.skip("this is an ordinary user, or nothing is there to become one")
    code = f"""
import sys, types
from pathlib import Path
if sys.version_info < (3, 11):
    sys.exit(77)
package = sys.modules["birdie"] = types.ModuleType("birdie")  # without torch
package.__path__ = [{str(isolation.PACKAGE)!r}]
for name in ("golf", "golf.audit"):
    module = sys.modules["birdie." + name] = types.ModuleType("birdie." + name)
    module.__path__ = [{str(isolation.PACKAGE)!r} + "/" + name.replace(".", "/")]
from birdie.golf.audit.sandbox import LimitError, Sandbox
with Sandbox(Path(sys.argv[1]), way={way!r}) as box:
    try:
        box.ask("load")
        print(box.ask("score", [0]))
    except LimitError as error:
        print(error)
"""
    folder = Path("/tmp") / f"birdie-test-{os.getpid()}-{way}"
    folder.mkdir()
    try:
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-I", "-c", code]
        environment = {"HOME": "/nonexistent", "PATH": os.defpath}
        names = f"OUTSIDE, ABSTRACT, MARKER, PID = '/root', 'x', 'pytest', {os.getpid()}\n"
        tried = ("processes outside", "settings of the kernel", "namespaces of its own", "writing", "keyring")
        scripts = [answering(PRELUDE + names + ATTACKS[name]) for name in tried]
        for text in (*scripts, "import os, time\nwhile os.fork(): pass\ntime.sleep(60)\n"):
            path = script(folder, text)
            done = subprocess.run([*command, str(path)], capture_output=True, text=True, env=environment, timeout=60)
            if done.returncode == 77 or "Permission denied" in done.stderr:
                pytest.skip(f"{python} cannot be used by nobody: {done.stderr[-200:]}")
            assert done.returncode == 0, done.stderr
            if text in scripts:
                answer = "".join(chr(int(number)) for number in array("d", base64.b64decode(done.stdout)))
                assert "escaped" not in answer
            else:
                assert "512 processes" in done.stdout
    finally:
        shutil.rmtree(folder)


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
