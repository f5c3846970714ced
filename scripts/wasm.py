"""Compile birdie.c to WebAssembly, as birdie/standalone/javascript has it: `python -m scripts.wasm`.

    birdie.wasm   all of it, for speed
    page.wasm     what a page of `birdie page` needs, for size: half the bytes, nine tenths of the speed of "max"

The compiler is Zig's clang, from the wheel that the extra `wasm` names: `make wasm`. The same sources give the same
bytes on every machine.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from birdie.errors import ConfigError
from birdie.standalone import PAGE_PROGRAM, PROGRAM

SOURCES = PROGRAM.parents[1] / "c"
UNITS = "wasm.c", "lzma2.c"  # the first includes birdie.c
FLAGS = (
    *("-target", "wasm32-freestanding", "-mcpu=generic+simd128"),  # browsers have vectors since March 2023
    *("-std=c99", "-ffp-contract=off", "-DBIRDIE_NO_MALLOC", "-nostdlib", "-isystem", "freestanding"),
    *("-Wall", "-Wextra", "-Wpedantic", "-Werror"),
    *("-Wl,--no-entry", "-Wl,--strip-all", "-Wl,-z,stack-size=262144"),
)
FORMS = {PROGRAM: ("-O3",), PAGE_PROGRAM: ("-Os", "-mllvm", "-inline-threshold=25", "-DBIRDIE_SMALL")}
"""Program → its options."""


def is_installed() -> bool:
    """Return whether the compiler is installed."""
    return find_spec("ziglang") is not None


def build(target: Path, *options: str) -> None:
    """Compile the sources to a file.

    Args:
        target: the file.
        options: of the compiler, beside FLAGS.

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
    for program, options in FORMS.items():
        build(program, *options)
        sys.stdout.write(f"{program.stat().st_size:,} bytes: {program}\n")
