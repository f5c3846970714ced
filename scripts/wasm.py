"""Compile birdie.c to WebAssembly, as birdie/standalone/javascript/birdie.wasm has it: `python -m scripts.wasm`.

The compiler is Zig's clang, from the wheel that the extra `wasm` names: `make wasm`. The same sources give the same
bytes on every machine.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from birdie.errors import ConfigError
from birdie.standalone import PROGRAM

SOURCES = PROGRAM.parents[1] / "c"
UNITS = "wasm.c", "lzma2.c"  # the first includes birdie.c
FLAGS = (
    *("-target", "wasm32-freestanding", "-mcpu=generic+simd128"),  # browsers have vectors since March 2023
    *("-std=c99", "-O3", "-ffp-contract=off", "-DBIRDIE_NO_MALLOC", "-nostdlib", "-isystem", "freestanding"),
    *("-Wall", "-Wextra", "-Wpedantic", "-Werror"),
    *("-Wl,--no-entry", "-Wl,--strip-all", "-Wl,-z,stack-size=262144"),
)


def is_installed() -> bool:
    """Return whether the compiler is installed."""
    return find_spec("ziglang") is not None


def build(target: Path, *options: str) -> None:
    """Compile the sources to a file, with further options of the compiler.

    Raises:
        ConfigError: the compiler is not installed, or it refuses the sources.
    """
    if not is_installed():
        raise ConfigError("the compiler is not installed; pip install 'birdie-compress[wasm]'")
    command = [sys.executable, "-m", "ziglang", "cc", *FLAGS, *options, "-o", str(target.resolve()), *UNITS]
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"the sources of the decoder do not compile:\n{done.stderr}")


if __name__ == "__main__":
    build(PROGRAM)
    sys.stdout.write(f"{PROGRAM.stat().st_size:,} bytes: {PROGRAM}\n")
