"""Child processes: each has a process group of its own, is followed line by line, and ends with its parent.

Ctrl-C in the terminal reaches only the parent, which passes it on and waits until the child has saved what it saves.
`python -m birdie.system.child ARGUMENTS…` is birdie's command line as such a child: the parent keeps the other end of
its stdin. However the parent ends, also by `kill -9`, the system closes that end; the command then gets SIGTERM, as
from a user, and training saves a checkpoint.
"""

import os
import queue
import runpy
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from birdie.system.callbacks import Notify, no_message
from birdie.system.platform import OWN_GROUP, end_this_process, interrupt, kill

SAVING_S = 120.0
"""Seconds that an interrupted child has to save its work before it is killed."""
_POLL_S = 0.5
_KEPT = 200  # last lines of stdout
Watch = Callable[[], None]


def unwatched() -> None:
    """Do nothing: the default of `watch`."""


def run_child(
    arguments: Sequence[str],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    errors: BinaryIO | None = None,
    watch: Watch = unwatched,
    on_line: Notify = no_message,
) -> tuple[int, list[str]]:
    """Run Python with `arguments`; return its exit code and its last lines.

    Args:
        folder: where it runs; None: here.
        environment: of the child; None: that of this process.
        errors: file that its stderr goes to; None: its stderr is part of the lines.
        watch: called about twice a second without lines; an exception of it, or of `on_line`, ends the child.
        on_line: called with each line.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,  # never written to: its end tells the child that this process has ended
        stdout=subprocess.PIPE,
        stderr=errors or subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        **OWN_GROUP,
    )
    received: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None after the last line
    lines: deque[str] = deque(maxlen=_KEPT)

    def read() -> None:
        for line in process.stdout or ():
            received.put(line.rstrip())
        received.put(None)

    def follow(end: float, watch: Watch) -> None:
        while time.monotonic() < end:
            try:
                line = received.get(timeout=_POLL_S)
            except queue.Empty:
                watch()
                continue
            if line is None:
                break
            lines.append(line)
            on_line(line)

    with process:
        threading.Thread(target=read, daemon=True).start()
        try:
            follow(float("inf"), watch)
            process.wait()
        except BaseException:
            try:
                interrupt(process)
                end = time.monotonic() + SAVING_S
                follow(end, unwatched)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
            finally:  # also if it is interrupted a second time
                if process.poll() is None:
                    kill(process)
            raise
    return process.returncode, list(lines)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    end_this_process()


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.argv[0] = "birdie"
    runpy.run_module("birdie", run_name="__main__")
