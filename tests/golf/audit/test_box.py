"""The sandbox: a script loads or does not load, and reaches nothing of the machine.

Where there is no bubblewrap, most of these tests are skipped.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from birdie.cli import build_app
from birdie.cli.console import run
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


@pytest.mark.parametrize(
    "answer",
    ["begun\\nRuntimeError \\033]0;title\\007\\033[2J\\r", "begun\\nloaded\\033[2J", "begun\\n\\033[31m", "\\033[2J"],
)
def test_what_a_script_writes_for_its_answer_does_not_steer_a_terminal(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It finds the descriptor on which the loader answers, and can write there whatever it likes."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "bwrap"
    program.write_text(f"#!/bin/sh\nprintf '{answer}'\nprintf '{answer}' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    script = tmp_path / "train_gpt.py"
    script.write_text("x = 1\n")
    run(build_app, ["audit", str(script), "--run"])
    shown = capsys.readouterr()
    assert "\033" not in shown.out + shown.err
    assert "\r" not in shown.out


@needs_bubblewrap
@pytest.mark.parametrize("end", ["while True: pass\n", "pass\n"])
def test_no_process_survives(tmp_path: Path, end: str) -> None:
    name = f"survivor{os.getpid()}"
    sleep = [sys.executable, "-c", "import time; time.sleep(60)", name]
    loaded(tmp_path, f"import subprocess\nsubprocess.Popen({sleep!r}, start_new_session=True)\n{end}", seconds=2)
    deadline = time.monotonic() + 5
    while (
        subprocess.run(["pgrep", "-f", name], capture_output=True, check=False).stdout and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert time.monotonic() < deadline, f"{name} still runs"


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
    "link": "open(os.path.dirname(__file__) + '/link').read()",
    "write": "open(__file__, 'ab')",
    "package": "open(os.path.dirname(os.__file__) + '/os.py', 'ab')",
    "network": "socket.create_connection(('127.0.0.1', PORT), 2)",
    "abstract socket": "socket.socket(socket.AF_UNIX).connect(chr(0) + MARKER) is None",
    "processes": "MARKER in open(f'/proc/{PID}/cmdline').read()",
    "signal": "os.kill(PID, 0) is None",
    "environment": "os.environ['BIRDIE_SECRET']",
    "shared memory": "open('/dev/shm/' + MARKER).read()",
    "files of the machine": "open('/etc/hostname').read()",
    "root of a process": "open(f'/proc/{PID}/root{OUTSIDE}/secret').read()",
    "folder of a process": "os.listdir(f'/proc/{PID}/cwd')",
    "memory of a process": "open(f'/proc/{PID}/mem', 'rb')",
    "trace": "ctypes.CDLL(None).ptrace(0x4206, PID, 0, 0) == 0",
    "inherited file": "os.pread(DESCRIPTOR, 6, 0) == b'secret'",
    "hard link": "os.link(__file__, os.path.dirname(__file__) + '/hard') is None",
    "symbolic link": "os.symlink('x', os.path.dirname(__file__) + '/soft') is None",
    "permissions": "os.chmod(__file__, 0o600) is None",
    "setting of the kernel": "open('/proc/sys/kernel/hostname', 'a')",
    "priority of a process": "os.setpriority(os.PRIO_PROCESS, PID, 19) is None",
}
"""Expressions that are true, without an error, for a process that can do what they say."""

OF_ROOT = {"package", "memory of a process", "trace", "setting of the kernel"}
"""Attacks that only root can do on some machines, or only on processes of its own."""

ATTACKER = """
import ctypes, os, socket
worked = []
for name, attack in ATTACKS.items():
    try:
        if eval(attack):
            worked.append(name)
    except Exception:
        pass
if worked:
    raise RuntimeError("worked: " + ", ".join(worked))
"""


@pytest.mark.parametrize("inside", [pytest.param(True, marks=needs_bubblewrap), False])
def test_attacks_work_outside_of_the_sandbox_alone(
    inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On files, sockets and a process; if none worked outside, those that fail inside would prove nothing."""
    marker, folder = f"marker{os.getpid()}x{time.monotonic_ns()}", tmp_path / "inside"
    folder.mkdir()
    (tmp_path / "secret").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    monkeypatch.setenv("BIRDIE_SECRET", marker)
    shared = Path("/dev/shm", marker)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0{marker}")
        abstract.listen()
        shared.write_text("secret")
        stack.callback(shared.unlink)
        process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)", marker]))
        stack.callback(process.kill)
        secret = stack.enter_context((tmp_path / "secret").open("rb"))
        os.set_inheritable(secret.fileno(), True)
        names = {"OUTSIDE": str(tmp_path), "PORT": server.getsockname()[1], "MARKER": marker, "PID": process.pid}
        names["DESCRIPTOR"] = secret.fileno()
        text = "\n".join(f"{name} = {value!r}" for name, value in {**names, "ATTACKS": ATTACKS}.items()) + ATTACKER
        if inside:
            assert loaded(folder, text).result == "pass"
            return
        (folder / "train_gpt.py").write_text(text)
        command = [sys.executable, "-I", str(folder / "train_gpt.py")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, close_fds=False)
    worked = done.stderr.rpartition("worked: ")[2].strip().split(", ")
    assert ATTACKS.keys() - set(worked) <= OF_ROOT
