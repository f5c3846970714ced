"""Foreign code runs shut in: what it may not do it cannot, and what it did is told."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from birdie.golf.audit import sandbox
from birdie.golf.audit.foreign import run_script
from birdie.golf.audit.rules import RUNS, Finding, worst
from birdie.golf.audit.sandbox import OvertimeError, RefusedError, Sandbox, SandboxError
from tests.golf.audit.scripts import ILLEGAL, LEGAL, Script

HONEST = "import math\nVOCABULARY = 4\ndef score(tokens):\n    return [math.log(4.0)] * (len(tokens) - 1)\n"


LEAVING = """
import ctypes, os
libc = ctypes.CDLL(None)
writable = (ctypes.c_uint64 * 4)(0, 7, 0, 0)
found = []
def leave(where):
    calls = {{
        "mount_setattr": lambda: libc.syscall(442, -100, b"/", 0, ctypes.byref(writable), 32),
        "mount_setattr, all": lambda: libc.syscall(442, -100, b"/", 0x8000, ctypes.byref(writable), 32),
        "remount": lambda: libc.mount(None, b"/", None, 32 | 4096, None),
        "umount /run": lambda: libc.umount2(b"/run", 2),
        "umount": lambda: libc.umount2(os.getcwd().encode(), 2),
        "disk": lambda: libc.mknod(b"disk", 0o60600, os.makedev(7, 0)),
        "setns": lambda: libc.setns(os.open("/proc/self/ns/mnt", 0), 0) - bool(where),
    }}
    found.extend(where + name for name, call in calls.items() if call() == 0)
    for path in ("{outside}/mine", "{outside}/new", "/proc/sys/kernel/core_pattern", "/proc/self/oom_score_adj"):
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
            found.append(where + "writes to " + path)
        except OSError:
            pass
leave("")
alone = libc.unshare(0x10000000 | 0x20000)
leave("in another namespace: ")
told = (", ".join(found) or "nothing worked") + chr(10) + str(alone)
"""


@pytest.fixture
def _boxed() -> None:
    why = sandbox.available()
    if why is not None:
        pytest.skip(f"no sandbox: {why}")


def script(folder: Path, text: str) -> Path:
    path = folder / "train_gpt.py"
    path.write_text(text)
    return path


def verdicts(findings: tuple[Finding, ...]) -> dict[str, str]:
    names = {each.rule.name for each in findings}
    return {name: worst(each.verdict for each in findings if each.rule.name == name) for name in names}


def loads(path: Path, **limits: float) -> str:
    """What the script's own `told` is after it was loaded, through a score of it."""
    with Sandbox(path, **limits) as box:  # type: ignore[arg-type]
        box.ask("load")
        return "".join(chr(int(each)) for each in box.ask("score", [0]))


def telling(code: str) -> str:
    """A script that runs `code`, and gives what it left in `told`, or the error, as numbers."""
    body = "\n".join("    " + line for line in code.splitlines())
    caught = "except BaseException as e:\n    told = type(e).__name__\n"
    return f"try:\n{body}\n{caught}def score(_):\n    return [ord(c) for c in told]\n"


@pytest.mark.usefixtures("_boxed")
class TestFences:
    def test_no_network_not_even_this_machine(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\ntold = 'connected'"
            with Sandbox(script(tmp_path, telling(code))) as box:
                box.ask("load")
                assert "connected" not in "".join(chr(int(c)) for c in box.ask("score", [0]))
                assert any(each.startswith("socket.connect") for each in box.log().tried)

    def test_nothing_is_written_outside(self, tmp_path: Path) -> None:
        (tmp_path / "mine").write_text("mine")
        assert loads(script(tmp_path, telling(f"open({str(tmp_path / 'mine')!r}, 'w')\ntold = 'wrote'"))) == "OSError"
        code = f"import os\nos.unlink({str(tmp_path / 'mine')!r})\ntold = 'gone'"
        assert loads(script(tmp_path, telling(code))) == "OSError"
        assert (tmp_path / "mine").read_text() == "mine"

    def test_there_is_a_scratch_folder_and_it_goes(self, tmp_path: Path) -> None:
        code = "import os\nopen('note', 'w').write('x' * 9)\ntold = os.getcwd()"
        folder = Path(loads(script(tmp_path, telling(code))))
        assert folder.name.startswith("birdie-sandbox-")
        assert not folder.exists()

    def test_files_are_small(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sandbox, "FILE_BYTES", 1000)
        code = (
            "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "assert open('a', 'wb', 0).write(b'x' * 2000) == 1000\nopen('a', 'ab', 0).write(b'x')"
        )
        assert loads(script(tmp_path, telling(code))) == "OSError"

    def test_memory_is_limited(self, tmp_path: Path) -> None:
        assert loads(script(tmp_path, telling("bytearray(2 * 10**9)\ntold = 'had'")), memory=10**9) == "MemoryError"

    def test_the_environment_is_empty(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("A_SECRET", "x")
        assert loads(script(tmp_path, telling("import os\ntold = str('A_SECRET' in os.environ)"))) == "False"

    def test_time_is_limited_and_nobody_stays(self, tmp_path: Path) -> None:
        name = f"stays{os.getpid()}"
        code = (
            "import subprocess, sys\n"
            "sleep = 'import time; time.sleep(60)'\n"
            f"subprocess.Popen([sys.executable, '-c', sleep, '{name}'], start_new_session=True)\n"
            "while True: pass"
        )
        with Sandbox(script(tmp_path, code), seconds=1) as box, pytest.raises(OvertimeError, match="1 s"):
            box.ask("load")
        assert _soon(lambda: not _running(name))

    def test_the_fences_cannot_be_taken_down(self, tmp_path: Path) -> None:
        """All that would make mounts writable again is tried, then in a namespace of the script's own."""
        (tmp_path / "mine").write_text("mine")
        told = loads(script(tmp_path, telling(LEAVING.format(outside=str(tmp_path)))))
        assert told.splitlines()[0] == "nothing worked"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "train_gpt.py"]
        assert (tmp_path / "mine").read_text() == "mine"
        assert "writes to" not in told

    def test_disks_are_not_there(self, tmp_path: Path) -> None:
        """A device can be written to on a read-only mount, by root its disks."""
        disks = [path for path in Path("/dev").iterdir() if path.is_block_device() and os.access(path, os.R_OK)]
        if not disks:
            pytest.skip("no disk that this user may open")
        assert loads(script(tmp_path, telling(f"open({str(disks[0])!r}, 'rb')\ntold = 'had'"))) == "PermissionError"
        code = "open('/dev/null', 'wb').write(b'x')\ntold = str(len(open('/dev/urandom', 'rb').read(9)))"
        assert loads(script(tmp_path, telling(code))) == "9"

    def test_all_files_together_are_small(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sandbox, "SCRATCH_BYTES", 2**20)
        code = "for i in range({}):\n    assert open(str(i), 'wb', 0).write(b'x' * 2**18) == 2**18\ntold = 'had all'"
        assert loads(script(tmp_path, telling(code.format(3)))) == "had all"
        assert loads(script(tmp_path, telling(code.format(9)))) in ("AssertionError", "OSError")

    @pytest.mark.parametrize("killed", [False, True])
    def test_who_lets_go_of_the_parent_does_not_stay(self, tmp_path: Path, killed: bool) -> None:
        """The script is not the first process of its namespace, with which alone everything ends."""
        name = f"{60 + os.getpid() / 1e6:.6f}"
        code = "import ctypes, os\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\nos.setsid()\nassert os.getpid() > 1\n"
        code += f"os.execvp('sleep', ['sleep', '{name}'])"
        with Sandbox(script(tmp_path, code)) as box:
            box._write(b'{"op": "load"}\n')  # and wait for no answer
            assert _soon(lambda: _running(name))
            if killed:  # as when the auditor itself is
                assert box._process is not None
                os.kill(box._process.pid, signal.SIGKILL)
                assert _soon(lambda: not _running(name))
        assert _soon(lambda: not _running(name))

    def test_the_first_process_is_out_of_reach(self, tmp_path: Path) -> None:
        code = (
            "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
            "for sent in (9, 15, 19):\n    os.kill(1, sent)\n"
            "told = str(libc.ptrace(16, 1, None, None))"
        )
        assert loads(script(tmp_path, telling(code))) == "-1"

    def test_answers_are_limited(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sandbox, "ANSWER_BYTES", 10_000)
        with Sandbox(script(tmp_path, "def score(_):\n    return [0.5] * 10**6\n")) as box:
            box.ask("load")
            with pytest.raises(SandboxError, match="larger than 10,000 bytes"):
                box.ask("score", [0])

    @pytest.mark.parametrize("said", ["[1]\\n", "{\\n", "\\xff\\n", "[" * 5000 + "\\n"])
    def test_answers_that_are_none(self, tmp_path: Path, said: str) -> None:
        code = (
            "import os\nfor fd in range(3, 20):\n    try:\n"
            f"        os.write(fd, b'{said}')\n    except OSError:\n        pass\n"
        )
        with Sandbox(script(tmp_path, code)) as box, pytest.raises(SandboxError, match="spoke out of turn"):
            box.ask("load")

    def test_a_process_that_ends(self, tmp_path: Path) -> None:
        with Sandbox(script(tmp_path, "import os\nos._exit(3)")) as box, pytest.raises(SandboxError, match="code 3"):
            box.ask("load")

    def test_errors_come_back_as_sentences(self, tmp_path: Path) -> None:
        with Sandbox(script(tmp_path, "raise KeyError('spoon')")) as box, pytest.raises(SandboxError) as caught:
            box.ask("load")
        assert caught.value.kind == "KeyError"
        assert "spoon" in str(caught.value)


def _running(name: str) -> bool:
    return any(name in _text(path) for path in Path("/proc").glob("[0-9]*/cmdline"))


def _soon(holds: Callable[[], bool]) -> bool:
    """Whether something holds in a while."""
    for _ in range(200):
        if holds():
            return True
        time.sleep(0.05)
    return False


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.usefixtures("_boxed")
class TestScripts:
    def test_an_honest_one(self, tmp_path: Path) -> None:
        found = run_script(script(tmp_path, HONEST))
        assert verdicts(found) == dict.fromkeys(
            ("runs", "one-pass", "causal", "normalised", "self-contained", "size"), "pass"
        )
        assert {each.path for each in found} == {str(tmp_path / "train_gpt.py")}

    def test_what_it_reads_counts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "model.bin").write_bytes(b"x" * 5000)
        reading = f"open({str(tmp_path / 'model.bin')!r}, 'rb').read()\n" + HONEST
        (size,) = [each for each in run_script(script(tmp_path, reading)) if each.rule.name == "size"]
        assert f"5,000 of files it opened make {5000 + len(reading):,}" in size.evidence
        assert size.verdict == "pass"
        monkeypatch.setattr("birdie.golf.audit.foreign.CAP_BYTES", 5000)
        assert verdicts(run_script(script(tmp_path, reading)))["size"] == "fail"

    def test_training_data_opened(self, tmp_path: Path) -> None:
        shard = tmp_path / "fineweb_train_000000.bin"
        shard.write_bytes(b"x" * 10)
        reading = f"def score(tokens):\n    open({str(shard)!r}, 'rb').read()\n    return [1.0] * (len(tokens) - 1)\n"
        assert verdicts(run_script(script(tmp_path, reading + "VOCABULARY = 4\n")))["self-contained"] == "fail"

    def test_time_is_doubt(self, tmp_path: Path) -> None:
        slow = "import time\n" + HONEST.replace("    return", "    time.sleep(9)\n    return")
        found = run_script(script(tmp_path, slow), seconds=1)
        assert not [each for each in found if each.verdict == "fail"]
        assert "1 s" in found[-1].evidence

    @pytest.mark.parametrize(
        ("text", "verdict"),
        [("import a_module_nobody_has\n", "unknown"), ("1 / 0\n", "fail"), ("x = 1\n", "unknown"), ("(", "fail")],
    )
    def test_scripts_that_do_not_run(self, tmp_path: Path, text: str, verdict: str) -> None:
        assert verdicts(run_script(script(tmp_path, text)))["runs"] == verdict

    def test_numbers_that_are_none(self, tmp_path: Path) -> None:
        liar = HONEST.replace("[math.log(4.0)]", "[math.nan]")
        assert verdicts(run_script(script(tmp_path, liar)))["one-pass"] == "fail"

    @pytest.mark.parametrize(
        "value", ["[]", "1", "{}", '{"seconds": []}', '{"opened": [["a", 1e999]], "tried": []}', "1" + "0" * 400]
    )
    def test_forged_answers_are_findings(self, tmp_path: Path, value: str) -> None:
        """What is forged before the script has loaded answers every question that is put to it."""
        line = f'{{"value": {value}}}\n'.encode()
        code = f"import os\nfor fd in range(3, 20):\n    try:\n        os.write(fd, {line!r} * 9)\n"
        found = run_script(script(tmp_path, code + "    except OSError:\n        pass\n" + HONEST))
        assert any("spoke out of turn" in each.evidence for each in found)
        assert not {"pass"} & {each.verdict for each in found}

    @pytest.mark.parametrize(("said", "why"), [("2**80", "more than 4,194,304"), ("[]", "says no VOCABULARY")])
    def test_vocabularies_that_are_none(self, tmp_path: Path, said: str, why: str) -> None:
        found = run_script(script(tmp_path, HONEST.replace("VOCABULARY = 4", f"VOCABULARY = {said}")))
        assert any(each.verdict == "unknown" and why in each.evidence for each in found)
        assert not [each for each in found if each.verdict == "fail"]
        assert [each.rule.name for each in found if each.verdict == "pass"] == ["runs"]  # nothing was scored

    @pytest.mark.slow
    def test_a_model_is_built_small(self) -> None:
        windows = next(each for each in LEGAL if each.path.stem == "windows")
        found = run_script(windows.path)
        assert verdicts(found)["runs"] == "pass"
        assert any("(1, 64, 16), finite" in each.evidence for each in found)

    @pytest.mark.slow
    @pytest.mark.parametrize("one", [s for s in ILLEGAL if s.callable and s.probed], ids=lambda each: each.path.stem)
    def test_illegal_ones_are_caught(self, one: Script) -> None:
        found = verdicts(run_script(one.path))
        assert {rule for rule, verdict in found.items() if verdict == "fail"} >= set(one.probed)

    @pytest.mark.slow
    @pytest.mark.parametrize("one", [s for s in LEGAL if s.callable], ids=lambda each: each.path.stem)
    def test_legal_ones_pass(self, one: Script) -> None:
        assert set(verdicts(run_script(one.path)).values()) == {"pass"}


def test_without_a_sandbox_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: Sandbox) -> Sandbox:
        raise RefusedError("no namespace can be made here")

    monkeypatch.setattr(Sandbox, "__enter__", refuse)
    marker = tmp_path / "ran"
    found = run_script(script(tmp_path, f"open({str(marker)!r}, 'w')\n"))
    assert [(each.rule.name, each.verdict) for each in found] == [("runs", "unknown")]
    assert not marker.exists()


@pytest.mark.usefixtures("_boxed")
def test_a_script_that_ends_when_it_is_loaded_could_not_be_told(tmp_path: Path) -> None:
    script = tmp_path / "train_gpt.py"
    script.write_text("import sys\n\nsys.exit(1)\n")
    found = [each for each in run_script(script) if each.rule == RUNS]
    assert [each.verdict for each in found] == ["unknown"]
    assert "when it is loaded" in found[0].evidence
