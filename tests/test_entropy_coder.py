"""Entropy coding is lossless, deterministic and bounded: round trips of any integers, equality with a second decoder
written in plain integers, pinned words, the same values from any number of threads, and errors instead of crashes."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from birdie.entropy import coder, static
from birdie.entropy.numbers import MAX_NUMBER, Reader, Writer
from birdie.entropy.stream import Hints
from birdie.errors import ArtifactError, ConfigError
from tests.reference import decoder as reference

GOLDEN = Path(__file__).parent / "golden" / "streams.json"

Integers = NDArray[np.integer]

SHAPES = arrays.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=40)
DTYPES = st.sampled_from([np.int8, np.uint8, np.int16, np.uint16, np.int32])
ANY = DTYPES.flatmap(lambda dtype: arrays.arrays(dtype, SHAPES))


def decoded(coded: coder.Coded, values: Integers, **options: object) -> Integers:
    return coder.decode(coded.coder, coded.payload, *values.shape, **options)  # type: ignore[arg-type]


def gaussian(rows: int, columns: int, low: float, high: float, seed: int = 0) -> Integers:
    """Symbols whose rows have scales from `low` to `high`."""
    rng = np.random.default_rng(seed)
    return np.rint(rng.normal(size=(rows, columns)) * np.geomspace(low, high, rows)[:, None]).astype(np.int32)


def near_copies() -> Integers:
    rng = np.random.default_rng(1)
    base = np.repeat(rng.normal(0, 40, (1, 24)), 64, 0) + rng.normal(0, 0.7, (64, 24))
    return np.rint(np.concatenate([base, rng.normal(0, 40, (32, 24))])).astype(np.int32)


FEATURES: dict[str, Integers] = {
    "constant": np.full((3, 4), -7),
    "bytes": np.arange(64).reshape(8, 8) * 37 % 256,
    "packed": np.arange(64).reshape(8, 8) * 2654435761 % 2**32 - 2**31,
    "numbers plain": gaussian(5, 6, 2, 2),
    "numbers running": np.cumsum(gaussian(60, 1, 2, 2), axis=0),
    "one class": gaussian(40, 30, 5, 5),
    "row classes": gaussian(96, 48, 1, 40),
    "column classes": np.ascontiguousarray(gaussian(96, 48, 1, 40).T),
    "references": near_copies(),
    "step": gaussian(40, 60, 3, 9) * 4,
    "listed": np.array([-900000, 3, 5, 1 << 30])[np.abs(gaussian(40, 60, 1, 1)).clip(0, 3)],
    "spikes": gaussian(64, 80, 40, 60).clip(-60, 60),
    "split": (np.random.default_rng(3).standard_cauchy((50, 40)) * 100).clip(-(2**31), 2**31 - 1).astype(np.int32),
}


@settings(max_examples=60, deadline=None)
@given(ANY, st.sampled_from(["max", "fast"]))
def test_any_integers_come_back(values: Integers, effort: str) -> None:
    before = values.copy()
    coded = coder.encode(values, Hints(), effort)  # type: ignore[arg-type]
    assert (values == before).all()
    assert (decoded(coded, values) == values.astype(np.int64)).all()
    assert decoded(coded, values, dtype=values.dtype).tobytes() == values.tobytes()


@settings(max_examples=30, deadline=None)
@given(arrays.arrays(np.int64, (6, 50), elements=st.integers(-(2**31), 2**31 - 1)))
def test_the_static_coder_takes_all_of_int32(values: Integers) -> None:
    if values.min() != values.max():
        payload = static.encode(values, "fast")
        assert (static.decode(payload, 6, 50, np.dtype(np.int32), 1) == values).all()


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_round_trips_in_both_efforts(feature: str) -> None:
    values = FEATURES[feature]
    for effort in ("max", "fast"):
        assert (decoded(coder.encode(values, effort=effort), values) == values).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("feature", FEATURES)
def test_the_reference_decoder_agrees(feature: str) -> None:
    values = FEATURES[feature]
    coded = coder.encode(values)
    if coded.coder == coder.STATIC:
        assert reference.decode_static(coded.payload, *values.shape) == values.tolist()
    if coded.coder == coder.NUMBERS:
        assert reference.decode_small(coded.payload, *values.shape) == values.tolist()


@settings(max_examples=20, deadline=None)
@given(arrays.arrays(np.int16, (17, 19), elements=st.integers(-9, 300)))
def test_the_reference_decoder_agrees_on_arbitrary_arrays(values: Integers) -> None:
    if values.min() != values.max():
        assert reference.decode_static(static.encode(values, "max"), 17, 19) == values.tolist()


def test_golden_streams_decode_to_what_they_did() -> None:
    """Old files stay readable, and their values give the same bytes.

    GENERATE_EXPECTED=1 writes the streams anew: a breaking change.
    """
    if os.environ.get("GENERATE_EXPECTED"):
        pinned = {name: coder.encode(values) for name, values in FEATURES.items()}
        rows = {name: {"coder": c.coder, "shape": FEATURES[name].shape, "payload": c.payload.hex(),
                       "sha256": digest(FEATURES[name])} for name, c in pinned.items()}  # fmt: skip
        GOLDEN.write_text(json.dumps(rows, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    assert golden.keys() == FEATURES.keys()
    for name, row in golden.items():
        payload = bytes.fromhex(row["payload"])
        assert digest(coder.decode(row["coder"], payload, *row["shape"])) == row["sha256"], name
        assert coder.encode(FEATURES[name]) == coder.Coded(row["coder"], payload), name


def digest(values: Integers) -> str:
    return hashlib.sha256(values.astype("<i4").tobytes()).hexdigest()


@pytest.mark.parametrize("feature", ["row classes", "references", "split"])
def test_same_values_same_bytes(feature: str) -> None:
    values = FEATURES[feature]
    assert coder.encode(values) == coder.encode(np.asfortranarray(values))


def test_chunks_decode_alike_on_one_thread_and_on_two() -> None:
    values = gaussian(1100, 1024, 1, 40).clip(-127, 127)
    coded = coder.encode(values, effort="fast")
    one, two = (decoded(coded, values, dtype=np.int8, threads=threads) for threads in (1, 2))
    assert (one == values).all()
    assert one.tobytes() == two.tobytes()


def test_what_costs_nothing_costs_nothing() -> None:
    assert coder.encode(np.zeros((1000, 1000), np.int8)).payload == b""
    assert coder.encode(np.zeros((0, 7), np.int8)).payload == b""
    noise = np.random.default_rng(0).integers(0, 256, (300, 300))
    assert len(coder.encode(noise, Hints("mantissa")).payload) == noise.size


def test_row_scales_and_near_copies_are_found() -> None:
    """Both must beat the entropy of the pooled histogram: by 5 % for mixed scales, by a third for copies."""
    for values, share in ((gaussian(512, 256, 1, 40), 0.95), (near_copies(), 0.66)):
        counts = np.unique(values, return_counts=True)[1]
        entropy = float((counts * np.log2(values.size / counts)).sum()) / 8
        assert len(coder.encode(values).payload) < share * entropy


@pytest.mark.parametrize("feature", FEATURES)
def test_every_truncation_is_an_artifact_error(feature: str) -> None:
    values = FEATURES[feature]
    coded = coder.encode(values)
    if coded.coder == coder.CONSTANT:
        return
    for length in range(0, len(coded.payload), max(1, len(coded.payload) // 50)):
        with pytest.raises(ArtifactError):
            coder.decode(coded.coder, coded.payload[:length], *values.shape)


@pytest.mark.parametrize(
    ("code", "payload"),
    [
        (coder.CONSTANT, b"\0"),
        (coder.CONSTANT, b"\1\0"),
        (coder.CONSTANT, b"\xff\xff"),
        (coder.CONSTANT, b"\1\0\0\0\0"),
        (coder.STATIC, b"\x84\0" + bytes(8)),
    ],
)
def test_needless_bytes_are_refused(code: int, payload: bytes) -> None:
    with pytest.raises(ArtifactError):
        coder.decode(code, payload, 16, 16)


def test_numbers_end_where_the_format_says() -> None:
    for number, sound in ((MAX_NUMBER, True), (MAX_NUMBER + 1, False)):
        writer = Writer()
        writer.put(0, number)
        reader = Reader(writer.finish())
        if sound:
            assert reader.take_all(0, 1).tolist() == [number]
        else:
            with pytest.raises(ArtifactError, match="above"):
                reader.take_all(0, 1)


def test_wrong_calls_say_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match="2-D"):
        coder.encode(np.zeros(3, np.int8))
    with pytest.raises(ConfigError, match="beyond 32 bits"):
        coder.encode(np.array([[0, 1 << 40]]))
    with pytest.raises(ConfigError, match="'slow'"):
        coder.encode(np.zeros((1, 1), np.int8), effort="slow")  # type: ignore[arg-type]
    with pytest.raises(ArtifactError, match="coder 99"):
        coder.decode(99, b"", 1, 1)
    with pytest.raises(ArtifactError, match="int8"):
        decoded(coder.encode(np.array([[1, 300]])), np.zeros((1, 2), np.int32), dtype=np.int8)
