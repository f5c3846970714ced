"""Small files that ask for much, made by hand: opening or decoding one must stay within a bound of memory and time.

`python -m tests.hostile.bombs` opens and decodes them all under limits of address space and time.
"""

import math
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from birdie import artifact as artifacts
from birdie import container, cursor
from birdie.container import Entry, Reader, Stream
from birdie.entropy import coder
from birdie.entropy.numbers import Writer
from birdie.errors import ArtifactError

varint = cursor.varint


def header_file(header: bytes) -> bytes:
    """The file of a header without payloads."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9)
    packed = packer.compress(header) + packer.flush()
    head = struct.pack("<BBII", container.VERSION, 1, len(packed), len(header))
    return container.MAGIC + head + struct.pack("<I", zlib.crc32(packed, zlib.crc32(head))) + packed


def header_of(names: bytes, count: int, streams: int = 0, dims: int = 0) -> bytes:
    """`count` entries with so many empty streams and dimensions of 1 each."""
    out = varint(0) + varint(count) + names + bytes([1]) * count + bytes(count)
    out += (varint(dims) + b"\x01" * dims) * count + bytes(count)
    return out + (varint(streams) + bytes(streams)) * count + bytes(streams * count)


def counted(count: int) -> bytes:
    """The names 0000 … in hexadecimal, without shared prefixes."""
    return b"".join(b"\x00\x06%06x" % index for index in range(count))


def long_names(count: int) -> bytes:
    """Names of 4,096 bytes that share all but their last three with the one before."""
    first = b"a" * 4093
    rest = (b"%s\x03%c%c%c" % (varint(4093), 33 + i // 8100, 33 + i // 90 % 90, 33 + i % 90) for i in range(1, count))
    return b"\x00" + varint(4096) + first + b"!!!" + b"".join(rest)


def one_symbol(rows: int, columns: int, scan: int = 0, kind: int = 0) -> Stream:
    """A stream of coder 4 whose only symbol costs no bits, so that its words say nothing of its size.

    `scan` is that of the format (2: every row refers to the one before); `kind` 2 is a split alphabet.
    """
    writer = Writer()
    for context, number in ((0, kind), (1, 0), *(((3, 0), (2, 0)) if kind == 0 else ())):
        writer.put(context, number)
    for context, number in ((5, scan), (6, 0), (7, 0)):
        writer.put(context, number)
    size = 464 if kind == 2 else 1
    if scan & 2:
        writer.put_chain(20, np.minimum(np.arange(rows), 1), 1)
    for context, number in ((8, 0), (8, size - 1), (9, 0), (13, 2), (17, 0)):
        writer.put(context, number)
    chunks = -(-rows * columns // (1 << 20))
    writer.put_all(21, [8] * chunks)
    side = writer.finish()
    chunk = np.tile(np.array([0, 1], "<u2"), 4)
    return Stream(coder.STATIC, varint(side.size) + side.astype("<u2").tobytes() + chunk.tobytes() * chunks)


def artifact(scheme: int, dtype: int, rows: int, columns: int, *streams: Stream) -> bytes:
    """A file of one tensor."""
    return container.to_bytes([Entry("bomb", scheme, dtype, (rows, columns), (), streams)])


SIDE, ROWS = 1 << 12, 1 << 19
BOMBS: dict[str, Callable[[], bytes]] = {
    "long names": lambda: header_file(header_of(long_names(250_000), 250_000)),
    "long names within the count": lambda: header_file(header_of(long_names(100_000), 100_000)),
    "many entries": lambda: header_file(header_of(counted(1_000_000), 1_000_000)),
    "as many entries as may be": lambda: header_file(header_of(counted(1 << 17), 1 << 17, 4, 4)),
    "many streams": lambda: header_file(header_of(counted(100_000), 100_000, 64)),
    "unpacks to 64 MiB": lambda: header_file(bytes(1 << 26)),
    "constant float32": lambda: artifact(1, 11, SIDE, SIDE, *[Stream(0, b"\x01")] * 4),
    "constant grid": lambda: artifact(2, 11, SIDE, SIDE, Stream(0, b"\x01"), Stream(0, b"")),
    "grid of one symbol": lambda: artifact(2, 11, SIDE, SIDE, one_symbol(SIDE, SIDE), Stream(0, b"")),
    "bytes of one split token": lambda: artifact(1, 1, SIDE, SIDE, one_symbol(SIDE, SIDE, kind=2)),
    "float32 of one symbol": lambda: artifact(1, 11, SIDE, SIDE, *[one_symbol(SIDE, SIDE)] * 4),
    "short rows with references": lambda: artifact(1, 2, ROWS, 1, one_symbol(ROWS, 1, 2)),
    "rows with references": lambda: artifact(1, 2, ROWS, 8, one_symbol(ROWS, 8, 2)),
}


OPENED = 200  # MiB that reading a header may take
ROOM = 160  # MiB besides 2.5 times what is decoded: threads and libraries
SECONDS = 20  # a machine under load is slow; what these files once took was minutes


def decoded_mib(data: bytes) -> int:
    """What the file says it decodes to; 0 for one that cannot be opened or is not ours to decode."""
    try:
        entry = Reader(data).entry("bomb")
    except ArtifactError:
        return 0
    return max(1, math.prod(entry.shape) * {11: 4}.get(entry.dtype, 1) >> 20)


def attempt(data: bytes, folder: Path) -> str:
    """Open and decode the file under limits."""
    path = folder / "bomb.birdie"
    path.write_bytes(data)
    wanted = decoded_mib(data)
    room = int(2.5 * wanted) + ROOM if wanted else OPENED
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (room << 20), resource.RLIM_INFINITY))
    signal.alarm(SECONDS)
    try:
        if wanted:
            artifacts.load(path, workers=1)
        else:
            Reader(path).close()
    except ArtifactError as error:
        return f"refused: {error}"
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return "accepted"


def run() -> None:
    """Attempt every bomb in a process of its own; raises CalledProcessError when one passes its limits."""
    command, root = [sys.executable, "-m", "tests.hostile.bombs"], Path(__file__).resolve().parents[2]
    subprocess.run(command, check=True, timeout=100, cwd=root)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        for name, bomb in BOMBS.items():
            data = bomb()
            start = time.perf_counter()
            outcome = attempt(data, Path(place))
            sys.stdout.write(f"{name} ({len(data):,} bytes): {time.perf_counter() - start:.2f} s, {outcome}\n")
