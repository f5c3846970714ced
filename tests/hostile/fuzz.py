"""Mutated files and streams against the decoders: `python -m tests.hostile.fuzz --count 100000 --seed 0`.

The law: sound tensors of the declared shape, or `ArtifactError`; never another exception, a crash, a hang or memory
beyond the limit. Each batch runs in a subprocess of its own with a memory limit, killed when it takes too long. Half of
the mutations get their checksums repaired, so that the decoders behind them are really reached. Another target is
another function `(data) -> None` in `TARGETS`, with the files it starts from; it raises ArtifactError or returns.
"""

import argparse
import dataclasses
import random
import resource
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from birdie import artifact as artifacts
from birdie import container
from birdie.entropy import coder
from birdie.errors import ArtifactError

MEMORY = 4 << 30
MAX_VALUES = 1 << 16
BATCH = 2000
SECONDS_PER_BATCH = 300
PREFIX = 22


def seeds() -> list[bytes]:
    """Small sound files that reach every coder and feature."""
    rng = np.random.default_rng(7)
    rows = np.repeat(rng.normal(0, 40, (1, 16)), 48, 0).round().astype(int) + rng.integers(0, 2, (48, 16))
    arrays = {
        "constant": np.full((3, 5), -4),
        "bytes": rng.integers(0, 256, (9, 9)),
        "packed": rng.integers(-(1 << 31), 1 << 31, (7, 7)),
        "small": rng.normal(0, 3, (20, 4)).round().astype(int),
        "classes": (rng.normal(0, 1, (64, 48)) * np.geomspace(2, 40, 64)[:, None]).round().astype(int),
        "references": np.concatenate([rows, rng.normal(0, 40, (16, 16)).round().astype(int)]),
        "split": np.clip(rng.standard_cauchy((40, 60)) * 50, -(2**30), 2**30).astype(int),
    }
    out = []
    for name, values in arrays.items():
        coded = coder.encode(values)
        stream = container.Stream(coded.coder, coded.payload)
        entries = [
            container.Entry(name, 1, 2, values.shape, (3,), (stream,)),
            container.Entry("tied", container.ALIAS, 2, values.shape, target=name),
        ]
        out.append(container.to_bytes(entries, b"{}"))
    return out


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to four edits: a flipped bit, a changed byte, a cut, a repeated or removed or random run."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, kind, size = rng.randrange(len(out)), rng.randrange(6), rng.randint(1, 8)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        elif kind == 2:
            del out[max(at, 1) :]
        elif kind == 3:
            out[at:at] = out[at : at + size]
        elif kind == 4 and len(out) > size + 1:
            del out[at : at + size]
        elif kind == 5:
            out[at : at + size] = rng.randbytes(size)
        if not out:
            out += b"\0"
    return bytes(out)


def mutate_inside(data: bytes, rng: random.Random) -> bytes:
    """Mutate the header's contents or a payload, and make every length and checksum agree again."""
    reader = container.Reader(data)
    if rng.random() < 0.5:
        entries = [reader.read(name) for name in reader.names]
        at = rng.choice([index for index, entry in enumerate(entries) if entry.streams])
        streams = list(entries[at].streams)
        place = rng.randrange(len(streams))
        code = rng.choice([streams[place].coder] * 6 + [rng.randrange(8)])
        streams[place] = container.Stream(code, mutate(streams[place].payload or b"\0", rng))
        entries[at] = dataclasses.replace(entries[at], streams=tuple(streams))
        return container.to_bytes(entries, reader.metadata)
    flags, packed = data[9], data[PREFIX : reader.header_bytes]
    header = mutate(zlib.decompress(packed, -15) if flags else packed, rng)
    head = struct.pack("<BBII", container.VERSION, 0, len(header), len(header))
    crc = struct.pack("<I", zlib.crc32(header, zlib.crc32(head)))
    return container.MAGIC + head + crc + header + data[reader.header_bytes :]


def decode_all(data: bytes) -> None:
    """The target: open, and decode every stream as its entry's shape, which must be what comes out."""
    reader = container.Reader(data)
    for name in reader.names:
        entry = reader.read(name)
        rows, columns = (*entry.shape, 1, 1)[:2]
        if rows * columns > MAX_VALUES:
            raise ArtifactError("refused by the bound of the test")
        for stream in entry.streams:
            values = coder.decode(stream.coder, stream.payload, rows, columns)
            if values.shape != (rows, columns):
                raise RuntimeError(f"{name}: decoded to {values.shape}, not {(rows, columns)}")


def artifact_seeds() -> list[bytes]:
    """Whole small artifacts: every scheme, several dtypes, tied names."""
    random_numbers = torch.Generator().manual_seed(3)
    matrix = torch.randn(48, 40, generator=random_numbers)
    state = {"a": matrix, "b": matrix.bfloat16(), "bool": matrix > 0, "c": matrix[:8].half(), "n": torch.arange(9)}
    state["tied"] = state["a"]
    out = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seed.birdie"
        for options in ({"scheme": "int6"}, {"lossless": True}, {"scheme": "bf16"}):
            artifacts.save(state, path, coder="fast", workers=1, **options)
            out.append(path.read_bytes())
    return out


def load_all(data: bytes) -> None:
    """The target: load the artifact as a user would."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutated.birdie"
        path.write_bytes(data)
        for name, tensor in artifacts.load(path, max_bytes=1 << 20, workers=1).items():
            if tensor.numel() * tensor.itemsize > 1 << 20:
                raise RuntimeError(f"{name}: decoded to {tuple(tensor.shape)}, beyond the limit")


Target = Callable[[bytes], None]
TARGETS: dict[str, tuple[Target, Callable[[], list[bytes]]]] = {
    "streams": (decode_all, seeds),
    "artifact": (load_all, artifact_seeds),
}


def run(count: int, seed: int, name: str = "streams") -> dict[str, int]:
    """Mutate and decode `count` times in this process; how many were accepted and refused.

    Anything but ArtifactError comes out as it is, after the seed that leads to it.
    """
    target, sound_files = TARGETS[name]
    sound = sound_files()
    tally = {"accepted": 0, "refused": 0}
    for index in range(seed, seed + count):
        rng = random.Random(index)
        data = (mutate if index % 2 else mutate_inside)(rng.choice(sound), rng)
        try:
            target(data)
            tally["accepted"] += 1
        except ArtifactError:
            tally["refused"] += 1
        except BaseException as error:
            error.add_note(f"found with --seed {index} --count 1")
            raise
    return tally


def main() -> None:
    """Run batches in subprocesses, or one batch with --inside."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=TARGETS, default="streams")
    parser.add_argument("--inside", action="store_true", help="run in this process, under the memory limit")
    options = parser.parse_args()
    if options.inside:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        sys.stdout.write(f"{options.seed}: {run(options.count, options.seed, options.target)}\n")
        return
    fuzz(options.count, options.seed, options.target)


def fuzz(count: int, seed: int, target: str) -> None:
    """Run `count` mutations in killable subprocesses under the memory limit."""
    for start in range(seed, seed + count, BATCH):
        size = min(BATCH, seed + count - start)
        command = [sys.executable, "-m", "tests.hostile.fuzz", "--inside", "--target", target]
        command += ["--count", str(size), "--seed", str(start)]
        subprocess.run(command, check=True, timeout=SECONDS_PER_BATCH, cwd=Path(__file__).resolve().parents[2])


if __name__ == "__main__":
    main()
