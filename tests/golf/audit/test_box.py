"""The sandbox: a script loads or does not load, and reaches nothing of the machine.

Where there is no bubblewrap, all but the first three tests are skipped.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from birdie.errors import DataError
from birdie.golf.audit import box
from birdie.golf.audit.box import load
from birdie.golf.audit.rules import RUNS, Finding, Result


def _why_not() -> str:
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"bubblewrap cannot work here: {done.stderr.strip()}" if done.returncode else ""


needs_bubblewrap = pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "it is installed")


def loaded(folder: Path, text: str, **limits: float) -> Finding:
    path = folder / "train_gpt.py"
    path.write_text(text)
    return load(path, **limits)  # type: ignore[arg-type]


def test_without_bubblewrap_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = loaded(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert (finding.rule, finding.result) == (RUNS, "unknown")
    for remedy in ("apt install bubblewrap", "docker run --rm --network none", "/submission/train_gpt.py"):
        assert remedy in finding.evidence
    assert not (tmp_path / "ran").exists()


def test_bubblewrap_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "bwrap"
    program.write_text("#!/bin/sh\necho bwrap: no namespaces here >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    finding = loaded(tmp_path, "x = 1\n")
    assert (finding.result, finding.evidence) == ("unknown", "the script was not run: bwrap: no namespaces here")


@pytest.mark.parametrize("kind", ["named pipe", "folder", "device"])
def test_a_script_that_is_no_file_is_not_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "train_gpt.py"
    make = {"named pipe": os.mkfifo, "folder": os.mkdir, "device": lambda path: path.symlink_to("/dev/zero")}
    make[kind](path)
    with pytest.raises(DataError, match=f"train_gpt.py is a {kind}"):
        load(path)


@needs_bubblewrap
@pytest.mark.parametrize(
    ("text", "result", "evidence"),
    [
        ("import numpy, helper\nassert __name__ != '__main__'\n", "pass", "it loads in"),
        ("import birdie.errors, multiprocessing, tempfile\nmultiprocessing.Lock()\n", "pass", "it loads in"),
        ("import tempfile\ntempfile.TemporaryFile().write(b'x')\n", "pass", "it loads in"),
        ("1 / 0\n", "fail", "ZeroDivisionError"),
        ("(", "fail", "SyntaxError"),
        ("import a_module_nobody_has\n", "unknown", "a_module_nobody_has"),
        ("import sys\nsys.exit(1)\n", "unknown", "__main__"),
        ("import os\nos._exit(3)\n", "unknown", "code 3"),
        ("print('loaded')\nimport os\nos.kill(os.getpid(), 9)\n", "unknown", "killed by a limit"),
    ],
)
def test_a_script_loads_or_does_not(tmp_path: Path, text: str, result: Result, evidence: str) -> None:
    (tmp_path / "helper.py").touch()
    finding = loaded(tmp_path, text)
    assert (finding.result, evidence in finding.evidence) == (result, True), finding
    assert finding.path == str(tmp_path / "train_gpt.py")


@needs_bubblewrap
@pytest.mark.parametrize(
    ("text", "evidence"),
    [
        ("while True: pass\n", "within 1 s"),
        ("bytearray(2 * 10**9)\n", "1,000,000,000 bytes of memory"),
        (f"open('a', 'wb', 0).write(bytes({box.FILE_BYTES}))\nopen('a', 'ab', 0).write(b'x')\n", "File too large"),
    ],
)
def test_limits_end_a_script(tmp_path: Path, text: str, evidence: str) -> None:
    finding = loaded(tmp_path, text, seconds=1 if "while" in text else 60, memory=10**9)
    assert (finding.result, evidence in finding.evidence) == ("unknown", True), finding


@needs_bubblewrap
@pytest.mark.parametrize("end", ["while True: pass\n", "pass\n"])
def test_no_process_survives(tmp_path: Path, end: str) -> None:
    name = f"survivor{os.getpid()}"
    sleep = [sys.executable, "-c", "import time; time.sleep(60)", name]
    loaded(tmp_path, f"import subprocess\nsubprocess.Popen({sleep!r}, start_new_session=True)\n{end}", seconds=2)
    for _ in range(100):
        if not _running(name):
            return
        time.sleep(0.05)
    pytest.fail(f"{name} still runs")


def _running(name: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if name in path.read_text(errors="replace"):
                return True
    return False


@needs_bubblewrap
def test_a_pipe_in_the_folder_is_a_way_out_and_a_home_folder_is_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "was not run" in loaded(tmp_path, "x = 1\n").evidence
    (tmp_path / "pipe").unlink()
    assert loaded(tmp_path, "x = 1\n").result == "pass"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "home folder" in loaded(tmp_path, "x = 1\n").evidence


ATTACKS = {
    "file": "open(OUTSIDE + '/secret').read()",
    "link": "open(INSIDE + '/link').read()",
    "write": "open(INSIDE + '/model.bin', 'ab')",
    "package": "open(os.path.dirname(os.__file__) + '/os.py', 'ab')",
    "network": "socket.create_connection(('127.0.0.1', PORT), 2)",
    "abstract socket": "socket.socket(socket.AF_UNIX).connect(chr(0) + MARKER) is None",
    "processes": "any(MARKER in text_of(path) for path in glob.glob('/proc/[0-9]*/cmdline'))",
    "signal": "os.kill(PID, 0) is None",
    "environment": "os.environ['BIRDIE_SECRET']",
    "environment of others": "MARKER in text_of(f'/proc/{PID}/environ')",
    "shared memory": "open('/dev/shm/' + MARKER).read()",
    "files of the machine": "open('/etc/hostname').read()",
}
"""Expressions that are true, without an error, for a process that can do what they say."""

ATTACKER = """
import glob, os, socket
INSIDE, worked = os.path.dirname(os.path.abspath(__file__)), []
def text_of(path):
    try:
        return open(path, errors="replace").read()
    except OSError:  # the process has ended
        return ""
for name, attack in ATTACKS.items():
    try:
        if eval(attack):
            worked.append(name)
    except Exception:
        pass
if worked:
    raise RuntimeError("worked: " + ", ".join(worked))
"""


@pytest.fixture
def attacker(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A script that tries all attacks on files, sockets and a process outside, and raises what worked."""
    outside, marker = tmp_path_factory.mktemp("outside"), f"marker{os.getpid()}x{time.monotonic_ns()}"
    (outside / "secret").write_text("secret")
    (tmp_path / "link").symlink_to(outside / "secret")
    (tmp_path / "model.bin").write_bytes(b"weights")
    shared = Path("/dev/shm", marker)
    shared.write_text("secret")
    sleep = [sys.executable, "-c", "import time; time.sleep(120)", marker]
    process = subprocess.Popen(sleep, env={"BIRDIE_SECRET": marker})
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{marker}")
        abstract.listen()
        names = {"OUTSIDE": str(outside), "PORT": server.getsockname()[1], "MARKER": marker, "PID": process.pid}
        yield "\n".join(f"{name} = {value!r}" for name, value in {**names, "ATTACKS": ATTACKS}.items()) + ATTACKER
    process.kill()
    process.wait()
    shared.unlink()


@needs_bubblewrap
def test_no_attack_works_in_the_sandbox(tmp_path: Path, attacker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIRDIE_SECRET", "x")
    assert loaded(tmp_path, attacker).result == "pass"


def test_every_attack_works_outside_of_it(tmp_path: Path, attacker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would prove nothing."""
    monkeypatch.setenv("BIRDIE_SECRET", "x")
    path = tmp_path / "train_gpt.py"
    path.write_text(attacker)
    done = subprocess.run([sys.executable, "-I", str(path)], capture_output=True, text=True, check=False)
    worked = set(done.stderr.rpartition("worked: ")[2].strip().split(", "))
    assert set(ATTACKS) - worked <= {"package"}  # of a Python that this user may not change
