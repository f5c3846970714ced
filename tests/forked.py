"""Python programs as processes of their own, as `subprocess` starts them, but without seconds of imports for each.

They are forked from the server of tests/ranks.py. Use `subprocess` where starting Python or importing is tested.
"""

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Self

import torch

import tests.ranks  # noqa: F401  it says what the server imports


class Program:
    """A running `python ARGUMENTS`, with files for its stdout and stderr; it is killed when its block ends.

    Attributes:
        pid: of the process.
    """

    def __init__(self, *arguments: str, folder: Path | None = None, variables: Mapping[str, str] | None = None) -> None:
        self.arguments = arguments
        self._folder = tempfile.TemporaryDirectory(prefix="birdie-test-")
        environment = {**os.environ, **(variables or {})}
        # not a daemon, because programs start processes
        self._process = get_context("forkserver").Process(
            target=_run, args=(arguments, folder or Path.cwd(), environment, Path(self._folder.name)), daemon=False
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._folder.cleanup()

    @property
    def stdout(self) -> str:
        """Text that the program has written so far."""
        return self._read("stdout")

    @property
    def stderr(self) -> str:
        """Errors and log that the program has written so far."""
        return self._read("stderr")

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        os.kill(self.pid, number)

    def wait(self, seconds: float | None = None) -> int | None:
        """Return the exit code once the program has ended, negative for a signal; None after so many seconds."""
        self._process.join(seconds)
        return self._process.exitcode

    def wait_for(self, text: str) -> None:
        """Wait until stderr has this text, or the program has ended."""
        while text not in self.stderr and self._process.is_alive():
            time.sleep(0.01)

    def _read(self, name: str) -> str:
        path = Path(self._folder.name, name)
        return path.read_text(errors="replace") if path.exists() else ""


def run_python(
    *arguments: str, folder: Path | None = None, variables: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Return the result of `python ARGUMENTS`, for example `-m birdie inspect FILE`, once it has ended.

    Args:
        folder: working folder; by default that of this process.
        variables: environment variables, in addition to those of this process.
    """
    with Program(*arguments, folder=folder, variables=variables) as program:
        code = program.wait()
        assert code is not None
        return subprocess.CompletedProcess(arguments, code, program.stdout, program.stderr)


def _run(arguments: tuple[str, ...], folder: Path, variables: Mapping[str, str], output: Path) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(output / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(int(variables.get("OMP_NUM_THREADS", "1")))
    kind, *rest = arguments
    sys.argv = [kind, *rest]
    with suppress(KeyError):
        sys.modules.pop("__mp_main__")  # a program does not see that of the tests
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")
