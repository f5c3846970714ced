"""The coder "tiles" gives back any integers, costs little, and sees damage."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from birdie.artifact import container
from birdie.artifact.container import Entry
from birdie.entropy import coder, payload, rans_tiles, static, tiles
from birdie.entropy import coding_plan as plan
from birdie.entropy import trellis_states as trellis
from birdie.entropy.hints import Hints
from birdie.errors import ArtifactError
from tests.hostile import seeds
from tests.nightly import mostly_nightly
from tests.reference import decoder as reference
from tests.reference import tiles as reference_tiles
from tests.reference.streams import FEATURES, gaussian, near_copies, on_paths, smooth_kernels, stream

Integers = NDArray[np.integer]
TILED = [name for name in FEATURES if FEATURES[name].coder == coder.TILES]
INT32 = np.dtype(np.int32)


def coded(values: Integers, states: int = 1) -> bytes | None:
    """Return the payload, None where the array cannot be in tiles."""
    return tiles.encode(plan.search(values, (1, 1), states), states)


def decoded(
    data: bytes, values: Integers, states: int = 1, *, dtype: np.dtype[np.integer] = INT32, threads: int = 1
) -> Integers:
    """Decode to an array of the shape of `values`."""
    return tiles.decode(data, values.shape[0], values.shape[1], dtype, threads, states)


@st.composite
def arrays(draw: st.DrawFn) -> Integers:
    """Arrays of a few tiles: coarse and fine, with rows of zeros, a step, few values that lie apart, scales of rows."""
    rows, columns = draw(st.integers(1, 40)), draw(st.integers(32, 70))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.1, 0.7, 4, 60, 900]))
    floats = (
        rng.normal(size=(rows, columns)) * spread * np.exp(draw(st.sampled_from([0, 1])) * rng.normal(size=(rows, 1)))
    )
    values = np.rint(floats).clip(-2000, 2000).astype(np.int32)
    form = draw(st.sampled_from(["plain", "rows of zeros", "step", "no zero", "far", "few"]))
    if form == "rows of zeros":
        values[rng.random(rows) < 0.5] = 0
    elif form == "step":
        values = values // 8 * 3
    elif form == "no zero":
        values += 1 + np.abs(values).max()
    elif form == "far":
        values += draw(st.sampled_from([-(2**31), 2**31 - 1])) // 2
    elif form == "few":
        values = np.array([-(2**19), 0, 7, 2**19 - 1], np.int32)[values % 4]
    values[0, :2] = 3, 4  # no constant
    return values


@settings(max_examples=30, deadline=None)
@given(arrays(), st.sampled_from([1, 4, 32]), st.sampled_from([1 << 20, 400, 40]), st.sampled_from([1024, 9]))
def test_any_values_come_back_from_both_decoders(values: Integers, states: int, chunk: int, height: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (trellis, reference_tiles):
            patch.setattr(module, "CHUNK", chunk)
        patch.setattr(rans_tiles, "_ROWS", height)
        patch.setattr(reference_tiles, "ROWS", height)
        data = coded(values, states)
        if data is None:
            return
        for threads in (1, 2):
            assert (decoded(data, values, states, threads=threads) == values).all()
        assert reference.decode(coder.TILES, data, values.shape[0], values.shape[1], states) == values.tolist()


@pytest.mark.parametrize(
    ("states", "deviation", "most"),
    mostly_nightly([(1, 3.9, 1.005), (32, 3.9, 1.005), (1, 1.9, 1.01), (32, 1.9, 1.01)], [(1, 3.9, 1.005)]),
)
def test_tiles_cost_a_two_hundredth_at_four_bits_and_a_hundredth_at_three(
    states: int, deviation: float, most: float
) -> None:
    values = on_paths(1024, 256, states, deviation)
    fast = coder.encode(values, Hints(states=states), "fast")
    assert fast.coder == coder.TILES
    assert len(fast.payload) <= most * len(static.encode(values, (1, 1), states))


@pytest.mark.parametrize(
    ("values", "states", "kernel"),
    [
        (gaussian(100, 600, 3, 3), 1, (1, 1)),
        (gaussian(9000, 31, 3, 3), 1, (1, 1)),
        (on_paths(100, 800, -8, 2), -8, (1, 1)),
        (near_copies(4000, 32), 1, (1, 1)),
        (smooth_kernels(256, 64), 1, (3, 3)),
        (np.random.default_rng(0).integers(-(2**31), 2**31, (300, 300)), 1, (1, 1)),
    ],
    ids=["few values", "few columns", "along rows", "rows from rows", "kernels", "split"],
)
def test_the_coder_static_is_kept_where_tiles_do_not_pay(
    values: Integers, states: int, kernel: tuple[int, int]
) -> None:
    described = plan.search(values, kernel, states)
    assert not tiles.pay(described) or tiles.encode(described, states) is None
    fast = coder.encode(values, Hints(kernel=kernel, states=states), "fast")
    assert fast.coder != coder.TILES


@pytest.mark.parametrize("lowest", [-32768, -1, 0, 9, 32768 - 301])
def test_numbers_with_raw_bits_fit_the_dtype_that_the_values_fit(lowest: int) -> None:
    """Symbols stand for several numbers, so that there are a few numbers more than values."""
    values = np.random.default_rng(0).integers(0, 301, (60, 40)) + lowest
    values[0, :2] = lowest, lowest + 300
    dtype: np.dtype[np.integer] = np.dtype(np.uint16) if lowest == 0 else np.dtype(np.int16)
    data = coded(values.astype(np.int32))
    assert data is not None
    assert (decoded(data, values, dtype=dtype) == values).all()


def flipped(data: bytes, bit: int) -> bytes:
    """Return the bytes with one bit changed."""
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


def words_at(data: bytes) -> int:
    """Return where the words of a payload begin."""
    return len(data) - len(payload.split(data)[1])


@pytest.mark.parametrize(
    "name", [name for name in TILED if name not in ("tiles of raw bits", "tiles below each other")]
)
def test_nearly_every_flipped_bit_of_the_words_is_noticed(name: str) -> None:
    """A wrong state ends elsewhere. One of the last rows can end alike, as raw bits do: the file has a checksum."""
    feature, sound = FEATURES[name], stream(name).payload
    unnoticed = 0
    for bit in np.random.default_rng(0).integers(8 * words_at(sound), 8 * len(sound), 200).tolist():
        try:
            values = decoded(flipped(sound, bit), feature.values, feature.states)
        except ArtifactError:
            continue
        assert values.shape == feature.values.shape
        unnoticed += 1
    assert unnoticed < 12


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(TILED), st.data())
def test_a_flipped_bit_never_goes_unnoticed_in_a_file(name: str, data: st.DataObject) -> None:
    coded = stream(name)
    file = container.to_bytes([Entry("w", 1, 2, FEATURES[name].values.shape, (), (coded,))])
    bit = data.draw(st.integers(8 * (len(file) - len(coded.payload)), 8 * len(file) - 1))
    with pytest.raises(ArtifactError):
        container.Reader(flipped(file, bit)).read("w")


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(TILED), st.data())
def test_damaged_side_information_is_an_error_or_other_values(name: str, data: st.DataObject) -> None:
    feature, sound = FEATURES[name], stream(name).payload
    damaged = flipped(sound, data.draw(st.integers(0, 8 * words_at(sound) - 1)))
    try:
        values = decoded(damaged, feature.values, feature.states)
    except ArtifactError:
        return
    assert values.shape == feature.values.shape


@pytest.mark.parametrize(
    ("name", "context", "number"),
    [
        ("tiles plain", 81, 256),  # a longer tail, a start that is none, no words, and some for all others
        *(("tiles plain", 82, start) for start in (0, 17, 1 << 33)),
        *(("tiles plain", 21, words) for words in (0, 63, 1 << 33)),
        ("tiles below each other", 57, 1 << 34),
        *(("tiles plain", 83, raw) for raw in (1, 4, 5)),  # raw bits that do not divide the alphabet
        ("tiles step", 83, 2),
        ("tiles of raw bits", 83, 3),  # more than 256 symbols
        ("tiles plain", 3, 4095),
        ("tiles step", 2, 1 << 20),  # values that lie too far apart
        ("tiles plain", 0, 2),
        ("tiles plain", 7, 31),  # classes without number, and pairs of tables without a trellis
        ("tiles plain", 7, 32),
        ("tiles 32 states", 5, 1),
        ("tiles without rows of zeros", 1, 99),  # rows of zeros that no value is, or that are not left out
        ("tiles without rows of zeros", 80, 0),
    ],
)
def test_an_impossible_description_is_refused(name: str, context: int, number: int) -> None:
    feature = FEATURES[name]
    known: dict[bytes, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
    with seeds.recorded(known):
        payload_of = feature.coded().payload
    side = seeds.side_of(coder.TILES, payload_of, known)
    assert side is not None
    numbers = side.numbers.copy()
    numbers[np.flatnonzero(side.contexts == context)[0]] = number
    damaged = replace(side, numbers=numbers).payload(coder.TILES)
    with pytest.raises(ArtifactError):
        decoded(damaged, feature.values, feature.states)


def test_needless_bytes_are_refused() -> None:
    feature, sound = FEATURES["tiles plain"], stream("tiles plain").payload
    for extra in b"\0", b"\0\0":
        with pytest.raises(ArtifactError):
            decoded(sound + extra, feature.values)


@pytest.mark.nightly
def test_threads_do_not_forget_what_others_have_seen() -> None:
    """A row whose only value lies in one thread's part is no row of zeros, whenever the others are done with it."""
    values = np.zeros((512, 2048), np.int8)
    values[np.arange(512), 992 + np.arange(512) % 32] = 1
    values[0] = np.arange(2048) % 3
    stream = tiles.open_stream(coded(values.astype(np.int32)) or b"", 512, 2048)
    for _ in range(300):
        rans_tiles.decode(stream.data, stream.tiles, stream.tables, np.empty(values.shape, np.int8), 2)


@pytest.mark.parametrize("name", ["tiles row classes", "tiles 32 states"])
def test_exchanged_tiles_are_refused(name: str) -> None:
    feature, sound = FEATURES[name], stream(name).payload
    at = words_at(sound)
    middle = at + (len(sound) - at) // 4 * 2
    with pytest.raises(ArtifactError):
        decoded(sound[:at] + sound[middle:] + sound[at:middle], feature.values, feature.states)
