"""Small files that ask for much, made by hand: opening or decoding one must stay within a bound of memory and time.

`python -m tests.hostile.bombs` opens and decodes them all under limits of address space and time, and prints a table;
with `--one-file` by the one-file decoder.
"""

import argparse
import importlib.util
import resource
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.processes import reset_peak, resident
from birdie.artifact import container
from birdie.artifact.codes import SCHEMES
from birdie.artifact.container import Entry, Reader, Stream
from birdie.artifact.file import DTYPES, MIN_DECODED_LIMIT, decoded_bytes
from birdie.artifact.loading import load as load_file
from birdie.compress import registry
from birdie.entropy import coder, numbers, prediction, raw
from birdie.entropy import varint as cursor
from birdie.entropy.side_information import SideWriter
from birdie.errors import ArtifactError
from birdie.golf.packed_script import pack
from tests.forked import run_python

varint = cursor.varint


def header_file(header: bytes) -> bytes:
    """The file of a header without payloads."""
    packer = zlib.compressobj(6, zlib.DEFLATED, -15, 9)
    packed = packer.compress(header) + packer.flush()
    return container.with_prefix(packed, len(header))


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
    writer = SideWriter()
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


def tiles(rows: int, columns: int, tails: int = 255, starts: int = 16, left_out: bool = True) -> Stream:
    """A stream of coder 6 whose tiles have no words but the states that they begin with.

    All rows are left out, or stand for symbol 1 without taking bits.
    """
    chunk = max(1, (1 << 20) // columns)
    down, across = -(-rows // (chunk * max(1, round(1024 / chunk)))), -(-columns // 32)
    parts = [*alphabet(2), (83, 0), (5, 0), (7, 0), (80, int(left_out))]
    if left_out:
        parts += [(24, 1), (25, np.ones(rows - 1, int))]
    parts += [(8, 1), (8, 0), (9, 0), (13, 2), (17, 0)]
    widths = np.tile(np.minimum(32, columns - 32 * np.arange(across)), down)
    more = 2 * np.diff(widths)
    parts += [(21, 2 * widths[:1]), (57, np.where(more < 0, -2 * more - 1, 2 * more))]
    parts += [(81, np.full(widths.size, tails)), (82, np.full(widths.size, starts))]
    state = (1 << starts).to_bytes(4, "little")
    return Stream(coder.TILES, side(*parts) + (state[2:] + state[:2]) * int(widths.sum()))


def tiles_without_words(rows: int, columns: int) -> Stream:
    """A stream of coder 6 of more tiles than its bytes can hold."""
    parts = [*alphabet(2), (83, 0), (5, 0), (7, 0), (80, 0), (8, 1), (8, 0), (9, 0), (13, 2), (17, 0)]
    more = rows * columns // 32 - 1
    return Stream(coder.TILES, side(*parts, (21, 0), (57, np.zeros(more, int)), (81, np.zeros(more + 1, int))))


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


Shape = tuple[int, ...]


def file_of(scheme: int, dtype: int, shape: Shape, params: tuple[int, ...], *streams: Stream) -> bytes:
    """A file of one tensor."""
    return container.to_bytes([Entry("bomb", scheme, dtype, shape, params, streams)])


def artifact(scheme: int, dtype: int, rows: int, columns: int, *streams: Stream) -> bytes:
    """A file of one matrix, of a scheme without parameters."""
    return file_of(scheme, dtype, (rows, columns), (), *streams)


def constants(scheme: int, dtype: int, shape: Shape, params: tuple[int, ...] = (), *values: int) -> bytes:
    """A file of one tensor whose streams are constants, 0 but for the first `values`: some forty bytes."""
    count = len(DECODERS[scheme].layout(shape, DTYPES[dtype], params))
    padded = (*values, *[0] * count)[:count]
    return file_of(scheme, dtype, shape, params, *(Stream(coder.CONSTANT, raw.encode_constant(v)) for v in padded))


def like_example(scheme: int) -> bytes:
    """A file of one large matrix of a scheme, with the parameters that its example has for a small one."""
    kind = next(kind for kind in registry.builtin() if kind.decoder.number == scheme)
    small = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    encoded = registry.parse_spec(next(spec.example or spec.word for spec in kind.specs)).encode("bomb", small)
    number = registry.decoder(encoded.scheme).number
    return constants(number, BRAIN, GIB16, encoded.params, 1)


def tiny(count: int, payload: bytes) -> bytes:
    """A file of so many tensors of one byte."""
    return container.to_bytes(Entry(f"{i:05x}", 1, BYTE, (1,), (), (Stream(0, payload),)) for i in range(count))


def numbers_of_zero(tensors: int) -> bytes:
    """A file of tensors of 2^20 zeros each, by adaptive models."""
    stream = Stream(coder.NUMBERS, numbers.encode(np.zeros((1, 1 << 20), np.int64)))
    return container.to_bytes(Entry(f"{i:05x}", 1, SIGNED, (1, 1 << 20), (), (stream,)) for i in range(tensors))


def plain(coder_code: int, dtype: int, payload: bytes, rows: int, columns: int) -> bytes:
    """A grid whose symbols take no model: every value costs bits of the file."""
    return artifact(2, dtype, rows, columns, Stream(coder_code, payload), Stream(0, b""))


DECODERS = {scheme.decoder.number: scheme.decoder for scheme in registry.builtin()}
BYTE, SIGNED, SHORT, INT, LONG_INT, HALF, BRAIN, FLOAT, DOUBLE = 1, 2, 4, 6, 8, 9, 10, 11, 12  # dtypes
SIDE, LONG, ROWS, HUGE = 1 << 12, 1 << 22, 1 << 19, 1 << 15
GIB = (1 << 14, 1 << 14)  # shapes that are 1 GiB in float32, and in 16 bits
GIB16 = (1 << 15, 1 << 14)
GRID = (2, 0)  # an inner tensor: a grid without parameters

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
    "tiles of zeros": lambda: artifact(2, FLOAT, SIDE, SIDE, tiles(SIDE, SIDE), Stream(0, b"")),
    "tiles of ones": lambda: artifact(2, FLOAT, SIDE, SIDE, tiles(SIDE, SIDE, left_out=False), Stream(0, b"")),
    "tiles of zeros, 1 GiB": lambda: artifact(2, BRAIN, *GIB16, tiles(*GIB16), Stream(0, b"")),
    "tiles, narrow": lambda: artifact(2, BRAIN, ROWS, 32, tiles(ROWS, 32), Stream(0, b"")),
    "tiles, one row": lambda: artifact(2, FLOAT, 1, 1 << 22, tiles(1, 1 << 22, 0), Stream(0, b"")),
    "tiles without words": lambda: artifact(1, SIGNED, 1, 1 << 24, tiles_without_words(1, 1 << 24)),
    "tiles, integers of 1 GiB": lambda: artifact(1, SIGNED, HUGE, HUGE, tiles(HUGE, HUGE, left_out=False)),
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
    "constants by every dtype: float64": lambda: constants(1, DOUBLE, (1 << 13, 1 << 14)),
    "constant float32 of 1 GiB": lambda: constants(1, FLOAT, GIB),
    "constant bfloat16 of 1 GiB": lambda: constants(1, BRAIN, GIB16),
    "constant bytes of 1 GiB": lambda: constants(1, BYTE, (1 << 15, 1 << 15)),
    "half bytes of 1 GiB": lambda: constants(1, BYTE, (1 << 15, 1 << 15), (1,)),
    "values of 1 GiB": lambda: constants(1, INT, GIB, (2,), 7),
    "differences of 1 GiB": lambda: constants(1, LONG_INT, (1 << 13, 1 << 14), (3,), 1),
    "listed float32 of 1 GiB": lambda: constants(1, FLOAT, GIB, (4, 1 << 28), 0, 1),
    "listed bfloat16 of 1 GiB": lambda: file_of(1, BRAIN, GIB16, (4, 1 << 29), Stream(0, b""), Stream(0, b"\1")),
    "listed bfloat16, all magnitudes": lambda: constants(1, BRAIN, GIB16, (4, 1 << 15), 5, 0),
    "grid of 1 GiB": lambda: constants(2, FLOAT, GIB, (), 1),
    "grid bfloat16 of 1 GiB": lambda: constants(2, BRAIN, GIB16, (), 1),
    "grid float16 of 1 GiB": lambda: constants(2, HALF, GIB16, (), 1),
    "grid, one row of 1 GiB": lambda: constants(2, FLOAT, (1 << 28,), (), 1),
    "grid, one row of 1 GiB in float16": lambda: constants(2, HALF, (1 << 29,), (), 1),
    "grid, rows of one": lambda: constants(2, BRAIN, (1 << 29, 1), (), 1),
    "grid, rows of one, 512 MiB": lambda: constants(2, FLOAT, (1 << 27, 1), (), 1),
    "grid, groups of one": lambda: constants(2, BRAIN, GIB16, (1,), 1),
    "grid, groups of one, 256 MiB": lambda: constants(2, BRAIN, (1 << 13, 1 << 14), (1,), 1),
    "cast to float32 of 1 GiB": lambda: constants(3, FLOAT, GIB, (0,), 1, 1),
    "cast to float64 of 1 GiB": lambda: constants(3, DOUBLE, (1 << 13, 1 << 14), (1,), 1, 1),
    "trellis of 1 GiB": lambda: constants(4, FLOAT, GIB, (32, 16, 0, 0, 0), 1),
    "trellis bfloat16 of 1 GiB": lambda: constants(4, BRAIN, GIB16, (-8, 16, 16, 0, 0), 1),
    "trellis bfloat16 of 512 MiB": lambda: constants(4, BRAIN, GIB, (-8, 16, 16, 0, 0), 1),
    "trellis, one row": lambda: constants(4, BRAIN, (1 << 28,), (-32, 16, 16, 0, 0), 1),
    "trellis, rows of one": lambda: constants(4, FLOAT, (1 << 27, 1), (32, 16, 16, 0, 0), 1),
    "ternary of 1 GiB": lambda: constants(5, FLOAT, GIB, (128,), 1),
    "ternary, groups of one": lambda: constants(5, BRAIN, GIB16, (1,), 1),
    "codebook, rows of one": lambda: constants(6, BRAIN, (1 << 29, 1), (1, 1)),
    "codebook, rows of one, 256 MiB": lambda: constants(6, BRAIN, (1 << 27, 1), (1, 1)),
    "codebook, one row": lambda: constants(6, HALF, (1 << 29,), (1, 0)),
    "codebook, one row of 256 MiB": lambda: constants(6, HALF, (1 << 27,), (1, 0)),
    "rotation of 1 GiB": lambda: constants(7, FLOAT, GIB, (0, *GRID), 1),
    "rotation of 48 MiB": lambda: constants(7, BRAIN, (1536, 1 << 14), (0, *GRID, *GRID), 1),
    "rotation, one row": lambda: constants(7, FLOAT, (1 << 24,), (0, *GRID), 1),
    "low rank of rank 16,384": lambda: constants(8, FLOAT, GIB, (1 << 14, *GRID), 1),
    "low rank of rank 1": lambda: constants(8, BRAIN, GIB16, (1, *GRID), 1),
    "low rank of rank 1, 192 MiB": lambda: constants(8, BRAIN, (6144, 1 << 14), (1, *GRID), 1),
    "DCT of 1 GiB": lambda: constants(9, FLOAT, GIB, (1, 64, 0, 0, 0, 0), 1),
    "DCT of 64 MiB, blocks": lambda: constants(9, BRAIN, (1 << 11, 1 << 14), (1, 4, 0, 0, 2, 1), 1),
    "wavelet of 1 GiB": lambda: constants(9, FLOAT, GIB, (3, 0, 16, 0, 0, 0), 1),
    "wavelet of 32 MiB": lambda: constants(9, BRAIN, (1 << 10, 1 << 14), (2, 0, 16, 0, 0, 0), 1),
    "Hadamard of 1 GiB": lambda: constants(9, FLOAT, GIB, (4, 0, 0, 0, 0, 0), 1),
    "identity of 256 MiB": lambda: constants(9, FLOAT, (1 << 12, 1 << 14), (0, 0, 0, 0, 0, 0), 1),
    "Tucker of 1 GiB": lambda: constants(10, FLOAT, GIB, (6000, 6000, *GRID * 3), 1),
    "Tucker of rank 1": lambda: constants(10, BRAIN, GIB16, (1, 1, *GRID * 3), 1),
    "Tucker of rank 1, 192 MiB": lambda: constants(10, BRAIN, (6144, 1 << 14), (1, 1, *GRID * 3), 1),
    "Tucker, one axis cut": lambda: constants(10, FLOAT, (3, 1 << 24), (2, 1 << 24, *GRID * 2), 1),
    "131,072 empty tensors": lambda: tiny(1 << 17, b""),
    "131,072 tiny tensors": lambda: tiny(1 << 17, b"\x01"),
    "10,000 empty tensors": lambda: tiny(10_000, b""),
    "bytes": lambda: plain(coder.BYTES, BRAIN, bytes(SIDE * SIDE), SIDE, SIDE),
    "packed": lambda: plain(coder.PACKED, BRAIN, b"\1" + bytes(4 + SIDE * SIDE // 8), SIDE, SIDE),
    "numbers": lambda: numbers_of_zero(1),
    "512 streams of numbers": lambda: numbers_of_zero(512),
    "grid of one symbol, 1 GiB": lambda: artifact(2, FLOAT, *GIB, one_symbol(*GIB), Stream(0, b"")),
    "mixed grid of 1 GiB": lambda: artifact(2, FLOAT, *GIB, no_words(*GIB), Stream(0, b"")),
    **{f"{name} as its example": partial(like_example, number) for number, name in SCHEMES.items()},
}


OPENED = 200  # MiB that reading a header may take
ROOM = 160  # MiB besides 2.5 times what is decoded: threads and libraries
SECONDS = 30  # of processors, kernels to compile included; what these files once took was minutes
Load = Callable[[Path], object]


def decoded_mib(data: bytes) -> int:
    """Return the MiB that the file says it decodes to, at least 1; 0 for one that cannot be opened."""
    try:
        with Reader(data) as reader:
            return max(1, sum(decoded_bytes(reader.entry(name)) for name in reader.names) >> 20)
    except ArtifactError:
        return 0


def attempt(path: Path, load: Load, mib: int) -> str:
    """Decode a file that declares so many MiB under limits; beyond the limit of decoded bytes it has to be refused."""
    refused = mib << 20 > MIN_DECODED_LIMIT
    room = OPENED if refused or not mib else int(2.5 * mib) + ROOM
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (room << 20), resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        load(path)
    except ArtifactError as error:
        return f"refused: {error}"
    except Exception as error:
        if type(error).__name__ == ArtifactError.__name__:  # that of the one-file decoder
            return f"refused: {error}"
        raise
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if refused:
        raise RuntimeError(f"{mib:,} MiB were decoded, beyond the limit")
    return "accepted"


def one_file_decoder(folder: Path) -> Load:
    """Return the `load` of the decoder in one file."""
    source = folder / "one_file_decoder.py"
    source.write_bytes(pack("decoder").script)
    spec = importlib.util.spec_from_file_location(source.stem, source)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{source} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    decode_file: Load = module.load
    return decode_file


def run(*options: str) -> None:
    """Attempt every bomb in a process of its own; raises CalledProcessError when one passes its limits."""
    run_python("-m", "tests.hostile.bombs", *options, folder=Path(__file__).resolve().parents[2]).check_returncode()


def main() -> None:
    """Attempt the bombs and print a row for each: bytes, CPU seconds, peak memory over decoded bytes, outcome."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--one-file", action="store_true", help="through the one-file decoder")
    parser.add_argument("--only", default="", help="bombs with this in their name")
    parser.add_argument("--every", type=int, default=1, help="only every N-th bomb")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bomb.birdie"
        load = one_file_decoder(Path(folder)) if options.one_file else partial(load_file, workers=1)
        sys.stdout.write(f"{'bomb':<36} {'bytes':>10} {'MiB':>6} {'seconds':>7} {'× MiB':>6}  outcome\n")
        for name, bomb in list(BOMBS.items())[:: options.every]:
            if options.only not in name:
                continue
            path.write_bytes(bomb())
            mib = decoded_mib(path.read_bytes())
            durations: list[float] = []
            while not durations or (len(durations) < 2 and durations[0] > 0.2):  # the second time, kernels are compiled
                reset_peak()
                resting, start = resident(), time.process_time()
                outcome = attempt(path, load, mib)
                durations.append(time.process_time() - start)
                peak = (resident("VmHWM") - resting) / 1.048576
            ratio = f"{peak / mib:>6.1f}" if outcome == "accepted" and mib > 1 else " " * 6
            row = f"{name:<36} {path.stat().st_size:>10,} {mib:>6,} {min(durations):>7.2f} {ratio}  {outcome}\n"
            sys.stdout.write(row)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
