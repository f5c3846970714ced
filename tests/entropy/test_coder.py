"""Entropy coding is lossless, deterministic and bounded: round trips of any integers, equality with the reference
decoder, pinned bytes, the same values from any number of threads, and errors instead of crashes."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from birdie.entropy import coder, mixed, numbers, static
from birdie.entropy import trellis_states as trellis
from birdie.entropy.hints import Effort, Hints, Stream
from birdie.errors import ArtifactError, ConfigError
from tests.nightly import mostly_nightly
from tests.reference import decoder as reference
from tests.reference import mixed as reference_mixed
from tests.reference.streams import FEATURES, GOLDEN, facts, gaussian, near_copies, stream

Integers = NDArray[np.integer]

SHAPES = arrays.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=40)
DTYPES = st.sampled_from([np.int8, np.uint8, np.int16, np.uint16, np.int32])
ANY = DTYPES.flatmap(lambda dtype: arrays.arrays(dtype, SHAPES))
KERNELS = st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 3)])
EFFORTS: tuple[Effort, ...] = ("max", "fast")
SMALL = [name for name in FEATURES if FEATURES[name].values.size < 1 << 16]  # for the reference decoder


def decoded(coded: Stream, values: Integers, **options: object) -> Integers:
    """Decode to an array of the shape of `values`."""
    return coder.decode(coded.coder, coded.payload, *values.shape, **options)  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(ANY, st.sampled_from(EFFORTS), KERNELS)
def test_any_integers_come_back(values: Integers, effort: Effort, kernel: tuple[int, int]) -> None:
    original = values.copy()
    values.setflags(write=False)
    coded = coder.encode(values, Hints(kernel=kernel), effort)
    assert (values == original).all()
    assert coder.encode(original, Hints(kernel=kernel), effort) == coded
    assert (decoded(coded, values) == values.astype(np.int64)).all()
    again = decoded(coded, values, dtype=values.dtype)
    assert again.dtype == values.dtype or values.dtype == np.int32, "int32 may be narrowed"
    assert again.astype(values.dtype).tobytes() == values.tobytes()
    if values.size:
        width = (int(values.max()) - int(values.min())).bit_length()
        assert len(coded.payload) <= 5 + -(-values.size * width // 8), "coding costs more than packing"


@pytest.mark.parametrize(
    "feature",
    mostly_nightly(SMALL, [name for name in SMALL if "mixed" not in name or name in ("mixed plain", "mixed rows")]),
)
def test_the_reference_decoder_reads_every_golden_stream(feature: str) -> None:
    row = json.loads(GOLDEN.read_text())[feature]
    payload = bytes.fromhex(row["payload"])
    rows, columns = row["shape"]
    values = reference.decode(row["coder"], payload, rows, columns, FEATURES[feature].states)
    assert values == FEATURES[feature].values.tolist()


@pytest.mark.parametrize("feature", SMALL)
def test_every_feature_round_trips_in_both_efforts(feature: str) -> None:
    values, hints = FEATURES[feature].values, FEATURES[feature].hints
    for effort in EFFORTS:
        coded = coder.encode(values, hints, effort)
        assert (decoded(coded, values, hints=hints) == values).all()


@st.composite
def structured(draw: st.DrawFn) -> tuple[Integers, tuple[int, int]]:
    """Arrays with the structure that coders look for: scales of rows and columns, copied rows, kernels, far values."""
    rows, columns = draw(st.integers(2, 14)), draw(st.integers(1, 18))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.4, 3, 60, 900]))
    scales = np.exp(draw(st.sampled_from([0, 1])) * rng.normal(size=(rows, 1)))
    floats = rng.normal(size=(rows, columns)) * spread * scales
    kernel = draw(KERNELS)
    form = draw(st.sampled_from(["plain", "copies", "equal rows", "zero rows", "smooth", "far", "few", "columns"]))
    if form == "copies":
        floats = floats[:1] + rng.normal(size=(rows, columns)) * spread / 50
    elif form == "equal rows":
        floats[rows // 2 :] = floats[0]
    elif form == "zero rows":
        floats[rng.integers(0, 2, rows) == 0] = 0
    elif form == "smooth":
        floats = np.cumsum(floats, 1) / 2
    elif form == "columns":
        floats = floats * np.exp(rng.normal(size=columns))
    values = np.rint(floats).astype(np.int64)
    if form == "far":
        values[0, 0], values[-1, -1] = -(2**31), 2**31 - 1
    elif form == "few":
        values = np.array([-70_000, -3, 0, 2**31 - 1])[values % 4]
    return values, kernel


@settings(max_examples=25, deadline=None)
@given(structured(), st.sampled_from([1 << 20, 40, 7]))
def test_the_reference_decoder_agrees_on_any_array(case: tuple[Integers, tuple[int, int]], chunk: int) -> None:
    values, kernel = case
    rows, columns = values.shape
    if values.min() == values.max():
        return
    with pytest.MonkeyPatch.context() as patch:
        for module in (trellis, reference, reference_mixed):
            patch.setattr(module, "CHUNK", chunk)
        streams = {coder.STATIC: static.encode(values, kernel), coder.MIXED: mixed.encode(values, kernel)}
        streams |= {coder.NUMBERS: numbers.encode(values)}
        for code, payload in streams.items():
            if payload is not None:
                assert reference.decode(code, payload, rows, columns) == values.tolist(), coder.NAMES[code]
                assert (coder.decode(code, payload, rows, columns, threads=2) == values).all(), coder.NAMES[code]


def test_weights_that_were_quantized_before_are_coded_in_the_fewest_bytes() -> None:
    """Each row is on a coarser grid of its own, which context mixing does not learn."""
    rng = np.random.default_rng(0)
    steps = rng.integers(2, 9, (512, 1))
    values = (np.rint(rng.normal(0, 30, (512, 256)) / steps) * steps).astype(np.int32)
    small, fast = (coder.encode(values, Hints(), effort) for effort in ("max", "fast"))
    assert len(small.payload) < 1.01 * len(fast.payload)
    assert (coder.decode(small.coder, small.payload, 512, 256) == values).all()


def test_golden_streams_keep_their_values_and_their_bytes() -> None:
    """Old files stay readable, and the same values give the same bytes.

    GENERATE_EXPECTED=1 writes the golden file again, which is a breaking change of the bitstream.
    """
    if os.environ.get("GENERATE_EXPECTED"):
        pinned = {name: stream(name) for name in FEATURES}
        rows = {name: {"coder": c.coder, "shape": FEATURES[name].values.shape, "payload": c.payload.hex(),
                       "sha256": digest(FEATURES[name].values)} for name, c in pinned.items()}  # fmt: skip
        GOLDEN.write_text(json.dumps(rows, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    assert golden.keys() == FEATURES.keys()
    for name, row in golden.items():
        coded, (height, width) = Stream(row["coder"], bytes.fromhex(row["payload"])), row["shape"]
        values = coder.decode(coded.coder, coded.payload, height, width, FEATURES[name].hints)
        assert digest(values) == row["sha256"], name
        assert stream(name) == coded, name
        assert facts(coded, height, width).items() >= FEATURES[name].facts.items(), name


def digest(values: Integers) -> str:
    return hashlib.sha256(values.astype("<i4").tobytes()).hexdigest()


@pytest.mark.parametrize("effort", EFFORTS)
def test_the_order_in_memory_does_not_matter(effort: Effort) -> None:
    for name in ("static row classes", "mixed rows", "static split"):
        values = FEATURES[name].values
        assert coder.encode(values, effort=effort) == coder.encode(np.asfortranarray(values), effort=effort)


def hash_of_encoded() -> str:
    hashed = hashlib.sha256(mixed.encode(near_copies(900, 300), (1, 1)) or b"")
    for feature in FEATURES:
        hashed.update(stream(feature).payload)
    return hashed.hexdigest()


@pytest.mark.nightly
@pytest.mark.slow
def test_encoding_does_not_depend_on_how_many_threads_multiply() -> None:
    """Another process has four, because the libraries read their number when they are loaded; this one has 1 or 2."""
    program = "from tests.entropy.test_coder import hash_of_encoded; print(hash_of_encoded())"
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    environment = {**os.environ, **dict.fromkeys(names, "4")}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == hash_of_encoded()


@pytest.mark.parametrize("effort", EFFORTS)
def test_chunks_decode_alike_on_one_thread_and_on_two(effort: Effort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trellis, "CHUNK", 1 << 12)
    values = gaussian(110, 256, 1, 40).clip(-127, 127)
    coded = coder.encode(values, effort=effort)
    assert coder.encode(values, effort=effort) == coded
    one, two = (decoded(coded, values, dtype=np.int8, threads=threads) for threads in (1, 2))
    assert (one == values).all()
    assert one.tobytes() == two.tobytes()


def test_constants_take_no_bytes_and_noise_no_more_than_its_own() -> None:
    assert coder.encode(np.zeros((1000, 1000), np.int8)).payload == b""
    assert coder.encode(np.zeros((0, 7), np.int8)).payload == b""
    noise = np.random.default_rng(0).integers(0, 256, (300, 300))
    assert len(coder.encode(noise, Hints("mantissa")).payload) == noise.size


@pytest.mark.parametrize("effort", EFFORTS)
def test_row_scales_and_near_copies_are_found(effort: Effort) -> None:
    """Both beat the entropy of the pooled histogram: by 5 % for mixed scales, by a third for copies."""
    for values, share in ((gaussian(512, 256, 1, 40), 0.95), (near_copies(), 0.66)):
        counts = np.unique(values, return_counts=True)[1]
        entropy = float((counts * np.log2(values.size / counts)).sum()) / 8
        assert len(coder.encode(values, effort=effort).payload) < share * entropy


@pytest.mark.parametrize("feature", FEATURES)
def test_every_truncation_is_an_artifact_error(feature: str) -> None:
    values, coded = FEATURES[feature].values, stream(feature)
    if coded.coder == coder.CONSTANT:
        return
    for length in range(0, len(coded.payload), max(1, len(coded.payload) // 50)):
        with pytest.raises(ArtifactError):
            coder.decode(coded.coder, coded.payload[:length], *values.shape)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(SMALL), st.data())
def test_a_damaged_stream_is_an_error_or_an_array_of_the_right_shape(feature: str, data: st.DataObject) -> None:
    values, coded = FEATURES[feature].values, stream(feature)
    payload = bytearray(coded.payload)
    for _ in range(data.draw(st.integers(1, 3))):
        # Half of the damage is in the side information, which is short.
        bits = 8 * data.draw(st.sampled_from([min(40, len(payload)), len(payload)]))
        bit = data.draw(st.integers(0, bits - 1))
        payload[bit // 8] ^= 1 << bit % 8
    try:
        result = coder.decode(coded.coder, bytes(payload), *values.shape)
    except ArtifactError:
        return
    assert result.shape == values.shape
    assert result.dtype in (np.int8, np.int16, np.int32)


@pytest.mark.parametrize(
    ("code", "payload"),
    [
        (coder.CONSTANT, b"\0"),
        (coder.CONSTANT, b"\1\0"),
        (coder.CONSTANT, b"\xff\xff"),
        (coder.CONSTANT, b"\1\0\0\0\0"),
        (coder.STATIC, b"\x84\0" + bytes(8)),
        (coder.MIXED, b"\x84\0" + bytes(8)),
    ],
)
def test_needless_bytes_are_refused(code: int, payload: bytes) -> None:
    with pytest.raises(ArtifactError):
        coder.decode(code, payload, 16, 16)


def test_errors_name_the_wrong_argument() -> None:
    with pytest.raises(ConfigError, match="1-D"):
        coder.encode(np.zeros(3, np.int8))
    with pytest.raises(ConfigError, match=str(1 << 40)):
        coder.encode(np.array([[0, 1 << 40]]))
    with pytest.raises(ConfigError, match="'slow'"):
        coder.encode(np.zeros((1, 1), np.int8), effort="slow")  # type: ignore[arg-type]
    with pytest.raises(ArtifactError, match="99"):
        coder.decode(99, b"", 1, 1)
    with pytest.raises(ArtifactError, match="int8"):
        decoded(coder.encode(np.array([[1, 300]])), np.zeros((1, 2), np.int32), dtype=np.int8)


def test_the_example_of_the_readme_runs() -> None:
    text = (Path(coder.__file__).parent / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
