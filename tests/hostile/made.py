"""Streams made up from scratch, whose side information is in order and says anything it may, at and past its limits.

Mutations of sound streams seldom get past the checks of side information with more than one number changed; these put
the kernels behind them to work on any prediction, alphabet, table and scale, and on words of noise.
"""

import random

import numpy as np

from birdie.artifact import container
from birdie.artifact.container import Entry, Stream
from birdie.entropy import coder, context_mixing, frequency_tables, prediction, rans, rans_tiles
from birdie.entropy.alphabet import AFFINE, LISTED, Alphabet, Symbols
from birdie.entropy.prediction import RowPrediction, TapPrediction
from birdie.entropy.side_information import SideWriter, zigzag
from birdie.entropy.varint import varint
from birdie.errors import ArtifactError
from tests.hostile.seeds import CHUNK, Seed

_SIDES = (1, 1, 2, 3, 4, 7, 8, 9, 16, 33)
_WIDE = (31, 32, 32, 33, 33, 40, 70, 70)  # columns of tiles


def stream(seed: Seed, rng: random.Random) -> bytes:  # noqa: ARG001 (one of the interchangeable mutations)
    """A file of one stream of a coder from 4 on."""
    rows, columns = rng.choice((*_SIDES, 70)), rng.choice(_SIDES)
    code, swapped = rng.choice([coder.STATIC, coder.MIXED, coder.TILES]), rng.randrange(2)
    try:
        if code == coder.MIXED:
            data = _mixed(rows, columns, swapped, rng)
        elif code == coder.TILES:
            columns = rng.choice(_WIDE)
            data = _tiles(rows, columns, swapped, rng)
        else:
            data = _static(rows, columns, swapped, rng)
    except ArtifactError:  # no such tables: then another prediction or alphabet
        data = _mixed(rows, columns, swapped, rng)
        code = coder.MIXED
    shape = (columns, rows) if swapped else (rows, columns)
    return container.to_bytes([Entry("made", 1, 2, shape, (), (Stream(code, data),))])


def tiles(seed: Seed, rng: random.Random) -> bytes:
    """A file of one stream of tiles, for values on a grid or on the paths of a trellis."""
    rows, columns, swapped, states = rng.choice((*_SIDES, 70)), rng.choice(_WIDE), rng.randrange(2), 1
    if not swapped:
        states = rng.choice([1, 4, 8, 32, 256])
    try:
        data = _tiles(rows, columns, swapped, rng)
    except ArtifactError:  # no such tables
        return tiles(seed, rng)
    shape = (columns, rows) if swapped else (rows, columns)
    return container.to_bytes([Entry("made", 1, 2, shape, (states,), (Stream(coder.TILES, data),))])


def _alphabet(rng: random.Random) -> Alphabet:
    size = rng.choice([2, 3, 3, 5, 7, 16, 16, 40, 100, 256, 512, 513, 4000, 4096])
    low = rng.choice([0, -1, -size // 2, 1 << 20, -(1 << 31)])
    if rng.random() < 0.3:
        gaps = np.random.default_rng(rng.randrange(1 << 30)).choice([1, 2, 300_000], size)
        return Alphabet(LISTED, low + np.cumsum(gaps))
    return Alphabet(AFFINE, low + rng.choice([1, 4, 500_000]) * np.arange(size))


def _at_limits(low: int, high: int, rng: random.Random) -> int:
    """A number from `low` to `high`, often one of these, now and then one more."""
    return rng.choice(
        [low, high, *(rng.randint(low, high) for _ in range(6)), *([high + 1] if rng.random() < 0.1 else [])]
    )


def _prediction(rows: int, columns: int, rng: random.Random) -> prediction.Prediction | None:
    kind = rng.randrange(3)
    noise = np.random.default_rng(rng.randrange(1 << 30))
    most = rng.choice([1, 16, 127, 127])
    if kind == 1 and (columns >= prediction.MIN_COLUMNS or rng.random() < 0.1):
        distances = noise.integers(0, np.arange(rows)[:, None] + 1, (rows, prediction.REFERENCES))
        if rng.random() < 0.1:
            distances[rng.randrange(rows), 0] += rng.choice([1, rows, 1 << 20, 1 << 33])
        weights = noise.integers(-most, most + 1, (rows, prediction.REFERENCES + 1))
        weights[:, 1:][distances == 0] = 0
        return RowPrediction(distances, weights)
    if kind == 2:
        height = rng.choice([1, 1, 2, 3, 5, 7, 8])
        kernel = (height, rng.choice([1, 2, 3, 5, 64 // height, 64 // height, *([65] if rng.random() < 0.1 else [])]))
        weights = noise.integers(-most, most + 1, (kernel[0] * kernel[1], len(prediction.tap_offsets(kernel))))
        return TapPrediction(kernel, weights * (noise.random(weights.shape) < rng.random()))
    return None


def _mixed(rows: int, columns: int, swapped: int, rng: random.Random) -> bytes:
    alphabet, predicted = _alphabet(rng), _prediction(rows, columns, rng)
    low = max(0, (alphabet.size - 1).bit_length() - rng.choice([9, 9, 9, 8, 10, 3]))
    chunks = -(-rows // max(1, CHUNK // columns))
    words = [
        rng.choice([b"", rng.randbytes(4 * rng.randrange(12)), b"\xff" * 4 * rng.randrange(40)]) for _ in range(chunks)
    ]
    words = [part[:-1] + b"\x01" if part[-1:] == b"\0" else part for part in words]
    writer = SideWriter()
    alphabet.put(writer)
    writer.put(5, swapped)
    writer.put(23, _at_limits(0, alphabet.size - 1, rng))
    writer.put(8, low)
    writer.put(6, _at_limits(0, 383, rng))
    writer.put(7, _at_limits(0, 2, rng))
    writer.put_all(9, [_at_limits(0, context_mixing.MAX_LOG_PSEUDO_COUNT, rng) for _ in range(2)])
    prediction.put(writer, predicted)
    writer.put_all(21, [len(part) // 4 for part in words])
    tail = b""
    if low:
        bits = rng.choice([0, rng.getrandbits(low * rows * columns)])
        tail = bytes([low]) + bytes(4) + bits.to_bytes((low * rows * columns + 7) // 8, "little")
    return _joined(writer, words, tail)


def _static(rows: int, columns: int, swapped: int, rng: random.Random) -> bytes:
    alphabet, predicted = _alphabet(rng), _prediction(rows, columns, rng)
    noise = np.random.default_rng(rng.randrange(1 << 30))
    precision = rng.choice([15, 15, 14, 12, 8])
    count = rng.choice([1, 1, 2, 5, 32]) if columns >= 8 else 1
    classes = noise.integers(0, count, rows).astype(np.uint8)
    shapes = [_shape(alphabet.size, noise) for _ in range(count)]
    frequencies = np.stack([shape.frequencies(alphabet.size, precision) for shape in shapes])
    symbols: Symbols = np.empty((rows, columns), np.uint16)
    for row in range(rows):
        symbols[row] = noise.choice(np.flatnonzero(frequencies[classes[row]]), columns)
    if classes.any():
        high = max(1, CHUNK // columns)
        parts = [(symbols[at : at + high], classes[at : at + high]) for at in range(0, rows, high)]
    else:
        flat = symbols.reshape(1, -1)
        parts = [(flat[:, at : at + CHUNK], classes[:1]) for at in range(0, flat.size, CHUNK)]
    words, lengths = [], []
    for part, kinds in parts:
        coded = rans.encode(part, kinds, frequencies, precision)
        lengths.append(coded.size)
        words.append(coded.astype("<u2").tobytes())
    writer = SideWriter()
    alphabet.put(writer)
    writer.put(5, swapped)
    writer.put(6, precision - 8)
    writer.put(7, count - 1)
    prediction.put(writer, predicted)
    if predicted is not None:
        writer.put(23, _at_limits(0, alphabet.size - 1, rng))
    if count > 1:
        writer.put_chain(24, classes.astype(np.int64), 31)
    for shape in shapes:
        shape.put(writer, alphabet.size)
    writer.put_all(21, lengths)
    return _joined(writer, words, b"")


def _tiles(rows: int, columns: int, swapped: int, rng: random.Random) -> bytes:
    alphabet, raw = _alphabet(rng), 0
    while rng.random() < 0.95 and (alphabet.size > 256 or int(np.ptp(alphabet.values)) >= 1 << 20):
        alphabet = _alphabet(rng)
    if rng.random() < 0.3:
        alphabet, raw = Alphabet(AFFINE, np.arange(rng.choice([256, 512, 4096])) - rng.choice([0, 100, 1 << 20])), 4
        raw = rng.choice([raw, _at_limits(0, 4, rng)])
    size, noise = max(1, alphabet.size >> raw), np.random.default_rng(rng.randrange(1 << 30))
    count, left_out = (
        rng.choice([1, 1, 2, 5, 31]),
        int(rng.random() < 0.5 and (0 in alphabet.values or rng.random() < 0.1)),
    )
    kinds = noise.integers(0, count + left_out, rows).astype(np.uint8)
    shapes = [_shape(size, noise) for _ in range(count)]
    frequencies = np.stack([shape.frequencies(size, rans_tiles.PRECISION) for shape in shapes])
    symbols: Symbols = np.empty((rows, columns), np.uint16)
    for row in range(rows):
        symbols[row] = noise.choice(np.flatnonzero(frequencies[min(kinds[row], count - 1)]), columns)
    symbols = symbols << np.uint16(raw) | noise.integers(0, 1 << raw, symbols.shape).astype(np.uint16)
    words, tiles = rans_tiles.encode(symbols, kinds, frequencies, None, raw)
    lengths, tails, starts = tiles.lengths, tiles.tails.astype(np.int64), tiles.starts.astype(np.int64)
    if rng.random() < 0.2:  # tiles as long together, but not each
        i, j = rng.randrange(len(lengths)), rng.randrange(len(lengths))
        some = rng.randint(0, int(lengths[i]))
        lengths[i], lengths[j] = lengths[i] - some, lengths[j] + some * (i != j)
    if rng.random() < 0.2:
        tails[rng.randrange(len(lengths))] = _at_limits(0, rans_tiles.MOST_TAIL, rng)
    if rng.random() < 0.2:
        starts[rng.randrange(len(lengths))] = _at_limits(1, rans_tiles.MOST_START, rng)
    if rng.random() < 0.2:
        words = noise.integers(0, 1 << 16, words.size).astype(np.uint16)
    writer = SideWriter()
    alphabet.put(writer)
    writer.put(83, raw)
    writer.put(5, swapped)
    writer.put(7, count - 1)
    writer.put(80, left_out)
    if count + left_out > 1:
        writer.put_chain(24, kinds.astype(np.int64), 31)
    for shape in shapes:
        shape.put(writer, size)
    writer.put_all(21, lengths[:1])
    writer.put_all(57, zigzag(np.diff(lengths)))
    writer.put_all(81, tails)
    writer.put_all(82, starts)
    return _joined(writer, [words.astype("<u2").tobytes()], b"")


def _shape(size: int, noise: np.random.Generator) -> frequency_tables.Description:
    low = int(noise.integers(0, size))
    high = int(noise.integers(low, size))
    stride, coarseness = int(noise.integers(0, 9)), int(noise.integers(0, 5))
    count = -(-(high - low) >> stride) + 1
    knots = noise.integers(0, (frequency_tables.MAX_LOG >> coarseness) + 1, count)
    positions = np.sort(noise.integers(low, high + 1, noise.integers(0, 4)))
    spikes = [(int(position), int(noise.integers(-400, 100))) for position in positions]
    return frequency_tables.Description(low, high, stride, coarseness, tuple(knots.tolist()), tuple(spikes))


def _joined(writer: SideWriter, words: list[bytes], tail: bytes) -> bytes:
    side = writer.finish()
    return varint(side.size) + side.astype("<u2").tobytes() + b"".join(words) + tail
