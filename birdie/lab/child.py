"""`python -m birdie.lab.child ARGUMENTS…`: birdie's command line, which stops when the process that started it ends.

The parent keeps the other end of stdin. However the parent ends, also by `kill -9`, the system closes that end; the
command then gets SIGTERM, as from a user, and training saves a checkpoint.
"""

import os
import runpy
import sys
import threading

from birdie.runtime.platform import end_this_process


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    end_this_process()


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.argv[0] = "birdie"
    runpy.run_module("birdie", run_name="__main__")
