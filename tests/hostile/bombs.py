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

from birdie.artifact import container
from birdie.artifact.container import Entry, Reader, Stream
from birdie.artifact.decoding import DTYPES, MIN_DECODED_LIMIT
from birdie.artifact.load import load
from birdie.entropy import coder, prediction
from birdie.entropy import varint as cursor
from birdie.entropy.side_information import Writer
from birdie.errors import ArtifactError

varint = cursor.varint


def header_file(header: bytes) -> bytes:
    """The file of a header without payloads."""
    packer = zlib.compressobj(6, zlib.DEFLATED, -15, 9)
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


Numbers = tuple[int, int | np.ndarray]


def side(*parts: Numbers) -> bytes:
    """Side information of (context, number or numbers), with its length before it."""
    writer = Writer()
    for context, number in parts:
        writer.put_all(context, np.atleast_1d(np.asarray(number, np.int64)))
    words = writer.finish()
    return varint(words.size) + words.astype("<u2").tobytes()


def alphabet(size: int, *, listed: bool = False) -> list[Numbers]:
    """0 … size - 1."""
    shown: Numbers = (4, np.zeros(size - 1, int)) if listed else (2, 0)
    return [(0, int(listed)), (1, 0), (3, size - 1), shown]


def predicted_by_rows(rows: int) -> list[Numbers]:
    """Predict each row but the first from the one above, and none from the means."""
    above = np.minimum(np.arange(rows), 1)
    return [(22, 1), (58, above), (59, 0 * above), (61, 0 * above), (62, np.full(rows - 1, 16))]


def predicted_by_taps(height: int, width: int) -> list[Numbers]:
    """Predict each symbol of a kernel from all symbols that the format allows."""
    taps = len(prediction.tap_offsets((height, width)))
    return [
        (22, 2),
        (56, np.array([height, width]) - 1),
        *((64 + tap, np.full(height * width, 3)) for tap in range(taps)),
    ]


def one_symbol(
    rows: int,
    columns: int,
    predicted: list[Numbers] | None = None,
    split: bool = False,
    classes: int = 1,
    size: int = 1,
) -> Stream:
    """A stream of coder 4 that only ever uses symbol 0, which costs no bits, so that its words say nothing of its size.

    With more classes than one, the others have tables of all symbols.
    """
    parts = [(0, 2), (1, 0)] if split else alphabet(size)
    parts += [(5, 0), (6, 7), (7, classes - 1), *(predicted or [(22, 0)])]
    if predicted:
        parts += [(23, 0)]
    if classes > 1:
        parts += [(24, 0) for _ in range(rows)]
    parts += [(8, 0), (8, (464 if split else size) - 1), (9, 0), (13, 2), (17, 0)]
    parts += [
        (8, np.zeros(2, int)),
        (9, 5),
        (10, 1),
        (11, 0),
        (12, np.zeros(max(0, -(-(size - 1) // 2) - 1), int)),
        (17, 0),
    ] * (classes - 1)
    chunks = -(-rows * columns // (1 << 20))
    chunk = np.tile(np.array([0, 1], "<u2"), 4)
    return Stream(coder.STATIC, side(*parts, (21, np.full(chunks, 8))) + chunk.tobytes() * chunks)


def no_words(
    rows: int,
    columns: int,
    predicted: list[Numbers] | None = None,
    size: int = 8,
    low: int = 0,
    listed: bool = False,
) -> Stream:
    """A stream of coder 5 without any words, which is all that a run of the likeliest symbols takes."""
    chunks = -(-rows // max(1, (1 << 20) // columns))
    model: list[Numbers] = [(5, 0), (23, 0), (8, low), (6, 96), (7, 0), (9, np.array([3, 3]))]
    data = side(*alphabet(size, listed=listed), *model, *(predicted or [(22, 0)]), (21, np.zeros(chunks, int)))
    tail = bytes([low]) + bytes(4 + (low * rows * columns + 7) // 8) if low else b""
    return Stream(coder.MIXED, data + tail)


def artifact(scheme: int, dtype: int, rows: int, columns: int, *streams: Stream) -> bytes:
    """A file of one tensor."""
    return container.to_bytes([Entry("bomb", scheme, dtype, (rows, columns), (), streams)])


BYTE, SIGNED, SHORT, FLOAT = 1, 2, 4, 11  # dtypes
SIDE, LONG, ROWS, HUGE = 1 << 12, 1 << 22, 1 << 19, 1 << 15
BOMBS: dict[str, Callable[[], bytes]] = {
    "long names": lambda: header_file(header_of(long_names(250_000), 250_000)),
    "long names within the count": lambda: header_file(header_of(long_names(100_000), 100_000)),
    "many entries": lambda: header_file(header_of(counted(1_000_000), 1_000_000)),
    "as many entries as may be": lambda: header_file(header_of(counted(1 << 17), 1 << 17, 4, 4)),
    "many streams": lambda: header_file(header_of(counted(100_000), 100_000, 64)),
    "unpacks to 64 MiB": lambda: header_file(bytes(1 << 26)),
    "constant float32": lambda: artifact(1, FLOAT, SIDE, SIDE, *[Stream(0, b"\x01")] * 4),
    "constant float32 of 4 GiB": lambda: artifact(1, FLOAT, HUGE, HUGE, *[Stream(0, b"\x01")] * 4),
    "constant grid": lambda: artifact(2, FLOAT, SIDE, SIDE, Stream(0, b"\x01"), Stream(0, b"")),
    "grid of one symbol": lambda: artifact(2, FLOAT, SIDE, SIDE, one_symbol(SIDE, SIDE), Stream(0, b"")),
    "bytes of one split token": lambda: artifact(1, BYTE, SIDE, SIDE, one_symbol(SIDE, SIDE, split=True)),
    "float32 of one symbol": lambda: artifact(1, FLOAT, SIDE, SIDE, *[one_symbol(SIDE, SIDE)] * 4),
    "float32 of one symbol, 4 GiB": lambda: artifact(1, FLOAT, HUGE, HUGE, *[one_symbol(HUGE, HUGE)] * 4),
    "tables of 4,096 symbols": lambda: artifact(1, SHORT, 64, SIDE, one_symbol(64, SIDE, classes=32, size=4096)),
    "rows from rows": lambda: artifact(1, SIGNED, ROWS, 8, one_symbol(ROWS, 8, predicted_by_rows(ROWS))),
    "rows of one from rows": lambda: artifact(1, SIGNED, ROWS, 1, one_symbol(ROWS, 1, predicted_by_rows(ROWS))),
    "kernels of 64": lambda: artifact(1, SIGNED, SIDE, SIDE, one_symbol(SIDE, SIDE, predicted_by_taps(8, 8))),
    "mixed": lambda: artifact(1, SIGNED, SIDE, 1 << 9, no_words(SIDE, 1 << 9)),
    "mixed float32 of 4 GiB": lambda: artifact(1, FLOAT, HUGE, HUGE, *[no_words(HUGE, HUGE)] * 4),
    "mixed, one row": lambda: artifact(1, SIGNED, 1, LONG, no_words(1, LONG)),
    "mixed, one column": lambda: artifact(1, SIGNED, LONG, 1, no_words(LONG, 1)),
    "mixed, rows from rows": lambda: artifact(1, SIGNED, ROWS, 8, no_words(ROWS, 8, predicted_by_rows(ROWS))),
    "mixed, rows of one from rows": lambda: artifact(1, SIGNED, ROWS, 1, no_words(ROWS, 1, predicted_by_rows(ROWS))),
    "mixed, kernels of 64": lambda: artifact(1, SIGNED, SIDE, 1 << 9, no_words(SIDE, 1 << 9, predicted_by_taps(1, 64))),
    "mixed, 4,096 listed": lambda: artifact(1, SHORT, 99, SIDE, no_words(99, SIDE, size=4096, low=3, listed=True)),
}


OPENED = 200  # MiB that reading a header may take
ROOM = 160  # MiB besides 2.5 times what is decoded: threads and libraries
SECONDS = 12  # of processors; what these files once took was minutes


def decoded_mib(data: bytes) -> int:
    """Return the MiB that the file says it decodes to, at least 1; 0 for one that cannot be opened."""
    try:
        entry = Reader(data).entry("bomb")
    except ArtifactError:
        return 0
    return max(1, math.prod(entry.shape) * DTYPES[entry.dtype].itemsize >> 20)


def attempt(data: bytes, folder: Path) -> str:
    """Open and decode the file under limits; one beyond the limit of decoded bytes has to be refused by its header."""
    path = folder / "bomb.birdie"
    path.write_bytes(data)
    wanted = decoded_mib(data)
    refused = wanted << 20 > MIN_DECODED_LIMIT
    room = OPENED if refused or not wanted else int(2.5 * wanted) + ROOM
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (room << 20), resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        if wanted:
            load(path, workers=1)
        else:
            Reader(path).close()
    except ArtifactError as error:
        return f"refused: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if refused:
        raise RuntimeError(f"{wanted:,} MiB were decoded, beyond the limit")
    return "accepted"


def run() -> None:
    """Attempt every bomb in a process of its own; raises CalledProcessError when one passes its limits."""
    command, root = [sys.executable, "-m", "tests.hostile.bombs"], Path(__file__).resolve().parents[2]
    subprocess.run(command, check=True, timeout=280, cwd=root)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, bomb in BOMBS.items():
            data = bomb()
            start = time.perf_counter()
            outcome = attempt(data, Path(folder))
            sys.stdout.write(f"{name} ({len(data):,} bytes): {time.perf_counter() - start:.2f} s, {outcome}\n")
