"""Mutants for the decoder in C: `python -m tests.hostile.native --count 1000000 --seed 0`.

The decoder is compiled with AddressSanitizer and UndefinedBehaviorSanitizer (native.c), so whatever it reads or writes
out of bounds, and whatever C leaves undefined, ends it with a report. Each sound file of `tests.hostile.seeds`, and
mutants of it that Python makes (checksums and side information agree again), get mutants of their own in C: bytes of
payloads and headers, parameters, coders, dtypes and schemes. A process takes the files of one batch; the law is that it
ends well and gives back all memory.
"""

import argparse
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from torch import Tensor

import birdie
from tests.hostile import difference_seeds, mutate, seeds
from tests.hostile.seeds import Seed

SOURCE = Path(__file__).with_suffix(".c")
DECODER = Path(birdie.__file__).parent / "standalone" / "c"
FLAGS = (
    *("-std=gnu11", "-g", "-O1", "-ffp-contract=off", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    f"-I{DECODER}",
)
SHORT = f"-DBIRDIE_CHUNK={seeds.CHUNK}", f"-DBIRDIE_TILE={seeds.TILE}"
EACH = 100
"""Mutants that C makes of a file."""
BATCH = 500
"""Files of a process."""


def compiler() -> str | None:
    """Return the C compiler, if there is one with the sanitizers."""
    path = shutil.which("cc")
    if path is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "empty.c"
        program.write_text("int main(void) { return 0; }\n", encoding="utf-8")
        command = [path, "-fsanitize=address,undefined", str(program), "-o", str(Path(folder) / "empty")]
        done = subprocess.run(command, capture_output=True, check=False)
        return path if done.returncode == 0 and subprocess.run(command[-1:], check=False).returncode == 0 else None


def build(cc: str, folder: Path, *, short: bool = True) -> Path:
    """Compile the decoder and its mutations, with chunks as of `seeds.short_chunks` if `short`; return the program."""
    program = folder / "native"
    subprocess.run([cc, *FLAGS, *(SHORT if short else ()), str(SOURCE), "-o", str(program)], check=True)
    return program


def sound() -> list[tuple[Seed, bytes]]:
    """Return sound files in short chunks, each with the file of the base that its deltas need, or nothing."""
    with seeds.short_chunks():
        plain = [*seeds.artifacts(), *seeds.trees(), *seeds.streams()]
        differences = difference_seeds.differences()
        bases = [b"" if seed.base is None else _saved(seed.base) for seed in differences]
    files = [(seed, b"") for seed in plain if seed.data[1:4] == b"BRD"]
    return files + list(zip(differences, bases, strict=True))


def _saved(base: dict[str, Tensor]) -> bytes:
    file = BytesIO()
    birdie.save(base, file, lossless=True, workers=1)
    return file.getvalue()


def attack(program: Path, seed: int, base: bytes, files: list[bytes], count: int = EACH) -> Counter[str]:
    """Decode files and the mutants that C makes of them, `count` of a file; return what became of them.

    Raises:
        RuntimeError: the decoder ended with a report of a sanitizer, which the message has.
    """
    data = struct.pack("<II", seed, count) + b"".join(struct.pack("<I", len(one)) + one for one in (base, *files))
    done = subprocess.run([str(program)], input=data, capture_output=True, check=False)
    lines = [tuple(map(int, line.split())) for line in done.stdout.decode().splitlines()]
    if done.returncode or len(lines) != len(files):
        raise RuntimeError(f"file {len(lines)} of the batch of seed {seed}:\n{done.stderr.decode()[:4000]}")
    refused = sum(error != 0 for error, _, _ in lines) + sum(some for _, _, some in lines)
    return Counter(mutants=sum(1 + count for _, count, _ in lines), refused=refused)


def batches(seed: int) -> Iterator[tuple[int, bytes, list[bytes]]]:
    """Yield the number of a batch, a base, and files: the sound ones, then mutants of them without end."""
    known = sound()
    ways = [mutate.data, *(way for name, way in mutate.REPAIRED.items() if name != "links")]
    for base in {base for _, base in known}:
        yield seed, base, [one.data for one, other in known if other == base]
    while True:
        seed += 1
        rng = random.Random(seed)
        base = rng.choice(known)[1]
        some = [one for one, other in known if other == base]
        with seeds.short_chunks():
            yield seed, base, [rng.choice(ways)(rng.choice(some), rng) for _ in range(BATCH)]


def main() -> None:
    """Attack until there were enough mutants; print what became of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000, help="of mutants (default: 100,000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first batch (default: 0)")
    options = parser.parse_args()
    cc = compiler()
    if cc is None:
        sys.exit("this campaign needs cc with AddressSanitizer; install gcc or clang")
    total = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        program = build(cc, Path(folder))
        for seed, base, files in batches(options.seed):
            total += attack(program, seed, base, files)
            sys.stdout.write(f"{total['mutants']:,} mutants, {total['refused']:,} refused, no report\n")
            sys.stdout.flush()
            if total["mutants"] >= options.count:
                break


if __name__ == "__main__":
    main()
