"""Run a command, and print its duration and its peak memory as one JSON object on stdout.

    python -I -S peak.py COMMAND ARGUMENT…    →    {"seconds": 1.25, "peak_mb": 112.4, "code": 0, "error": ""}

It is a separate program that imports the standard library only: the kernel keeps a process's peak when the process
executes another program, so a command that a large process starts would inherit the peak of its parent.
"""

import json
import os
import subprocess
import sys
import tempfile
import time


def main() -> None:
    """Run the command, wait for it, and print the result."""
    with tempfile.TemporaryFile() as messages:
        start = time.perf_counter()
        child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=messages, stderr=messages)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        messages.seek(0)
        error = messages.read()[-400:].decode(errors="replace") if child.returncode else ""
    unit = 1e6 if sys.platform == "darwin" else 1e6 / 1024  # Linux counts in KiB
    print(json.dumps({"seconds": seconds, "peak_mb": usage.ru_maxrss / unit, "code": child.returncode, "error": error}))


if __name__ == "__main__":
    main()
