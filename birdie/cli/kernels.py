"""`birdie kernels`: compile all kernels now, for an image of a container or an installation of many users."""

import os
import time
from typing import Annotated

from cyclopts import Parameter

from birdie.cli.console import Json, print_json, print_line
from birdie.errors import ConfigError, OutputError

GROUP = "Install"


def command(
    *,
    portable: Annotated[
        bool,
        Parameter(
            negative=(),
            help="Compile for every processor of this architecture, not only for this one; a tenth slower.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Compile the coder's kernels that are missing, so that later processes need neither time nor a folder for it.

    They are kept in the folder of the environment variable NUMBA_CACHE_DIR, else beside birdie's modules, else in the
    cache folder of this user.
    """
    if portable:
        os.environ["NUMBA_CPU_NAME"], os.environ["NUMBA_CPU_FEATURES"] = "generic", ""  # read when numba is imported
    from birdie.gpt.run.warm_up import compile_kernels
    from birdie.system.kernels import PORTABLE, statistics

    start = time.perf_counter()
    compile_kernels()
    seconds = time.perf_counter() - start
    done = statistics()
    if portable and done.processor != PORTABLE[0]:
        raise ConfigError("numba runs already and compiles for this processor; run `birdie kernels --portable` alone")
    if done.lost:
        raise OutputError(f"{done.lost} kernels cannot be kept; set NUMBA_CACHE_DIR to a folder that can be written")
    folders = list(map(str, done.folders))
    if json:
        answer = {"compiled": done.compiled, "read": done.read, "folders": folders, "processor": done.processor}
        print_json(answer | {"seconds": round(seconds, 1)})
        return
    print_line(f"for {done.processor}: {done.compiled} kernels compiled in {seconds:.0f} s, {done.read} read from disk")
    for folder in folders:
        print_line(folder)
