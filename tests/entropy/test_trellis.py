"""The machines of trellis-coded quantization, and streams of numbers on their paths."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from birdie.compress.scheme import Encoded
from birdie.compress.schemes.decode_trellis import MOST
from birdie.compress.schemes.decoders import DECODERS, decode
from birdie.entropy import coder, mixed, static, trellis
from birdie.entropy.hints import Effort, Hints
from birdie.entropy.trellis import STATES, chunk_rows, machine
from birdie.errors import ArtifactError
from tests.reference import decoder as reference
from tests.reference import mixed as reference_mixed
from tests.reference import trellis as reference_trellis
from tests.reference.streams import on_paths
from tests.reference.trellis import after, decode_trellis

Integers = NDArray[np.integer]
PATHS = [sign * states for states in STATES for sign in (1, -1)]  # down columns, along rows


def encoded(numbers: Integers, params: tuple[int, ...], *scales: Integers, dtype: torch.dtype) -> Encoded:
    return Encoded("trellis", numbers.shape, dtype, params, (numbers, *(each[:, None] for each in scales)))


@pytest.mark.parametrize("states", STATES)
def test_a_machine_is_a_shift_register_that_any_number_of_a_parity_drives_alike(states: int) -> None:
    found = machine(states)
    assert found.odd.tolist() == [state % 2 for state in range(states)]
    assert found.following.tolist() == [[after(states, state, parity) for parity in (0, 1)] for state in range(states)]
    leading = np.bincount(found.following.ravel(), minlength=states)
    assert (leading == 2).all(), "each state has two predecessors"
    if states > 1:
        assert (found.following[:, 0] != found.following[:, 1]).all()
        reached = {0}
        for _ in range(states.bit_length() - 1):
            reached = {int(state) for each in reached for state in found.following[each]}
        assert len(reached) == states, "any state can be reached from any in as many steps as it has bits"


@settings(max_examples=60, deadline=None)  # the first example compiles
@given(
    states=st.sampled_from(PATHS),
    rows=st.integers(1, 9),
    columns=st.sampled_from([1, 3, 15, 16, 17]),
    resolutions=st.tuples(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([0, 1, 2, 4, 8, 16])),
    base=st.integers(-90, 90),
    chunk=st.sampled_from([1 << 20, 40]),
    deviation=st.sampled_from([0.3, 3.0, 1e5]),
    seed=st.integers(0, 1 << 30),
)
def test_decoding_is_a_plain_walk_down_each_column_or_along_the_rows(
    states: int,
    rows: int,
    columns: int,
    resolutions: tuple[int, int],
    base: int,
    chunk: int,
    deviation: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    numbers = np.rint(rng.normal(0, deviation, (rows, columns))).astype(np.int32)
    numbers[rng.integers(0, 3, rows) == 0] = 0
    scales = [
        rng.integers(-3 * each, 3 * each + 1, size) for each, size in zip(resolutions, numbers.shape, strict=True)
    ]
    params = (states, *resolutions, base, int(rng.integers(0, rows)))
    scales = scales if resolutions[1] else scales[:1]
    with pytest.MonkeyPatch.context() as patch:
        for module in (trellis, reference_trellis):
            patch.setattr(module, "CHUNK", chunk)
        found = decode(encoded(numbers, params, *scales, dtype=torch.float32))
        expected = decode_trellis(params, [numbers.tolist(), *(each[:, None].tolist() for each in scales)])
    assert found.tolist() == expected
    assert bool((found[(numbers == 0).all(1)] == 0).all()) or columns < 16


def test_paths_start_again_where_chunks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that rows below a chunk's first decode without those above."""
    monkeypatch.setattr(trellis, "CHUNK", 60)
    assert chunk_rows(20) == 3
    numbers = np.random.default_rng(0).integers(-4, 5, (9, 20)).astype(np.int32)
    scales = np.zeros(9, np.int32)
    whole = decode(encoded(numbers, (8, 16, 0, 0, 0), scales, dtype=torch.float32))
    parts = [
        decode(encoded(numbers[start : start + 3], (8, 16, 0, 0, 0), scales[:3], dtype=torch.float32))
        for start in (0, 3, 6)
    ]
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_numbers_beyond_a_dtype_become_its_largest(dtype: torch.dtype) -> None:
    numbers = np.array([[MOST], [-MOST], [2**31 - 1], [1]], np.int32)
    found = decode(encoded(numbers, (4, 16, 16, 2000, 0), np.zeros(4), np.full(1, 47), dtype=dtype))
    most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    held = torch.tensor([most, -most, most], dtype=torch.float64).to(dtype)
    assert torch.equal(found[:3, 0], held)
    assert bool(torch.isfinite(found).all())


@pytest.mark.parametrize(
    "params",
    [
        *((), (8,), (8, 16, 0, 0, 0, 0), (2, 16, 0, 0, 0), (0, 16, 0, 0, 0), (128, 16, 0, 0, 0), (-2, 16, 0, 0, 0)),
        *((8, 3, 0, 0, 0), (8, 0, 0, 0, 0), (8, 32, 0, 0, 0), (8, 16, 5, 0, 0), (8, 16, -1, 0, 0)),
        *((8, 16, 0, -2017, 0), (8, 16, 0, 2048, 0), (8, 16, 0, 0, 4), (8, 16, 0, 0, -1), (8, 16, 0, 1 << 40, 0)),
    ],
)
def test_impossible_parameters_are_refused(params: tuple[int, ...]) -> None:
    with pytest.raises(ArtifactError, match="scheme trellis"):
        DECODERS["trellis"].layout((4, 5), torch.float32, params)


def test_other_dtypes_and_empty_tensors_are_refused_and_so_are_steps_out_of_range() -> None:
    layout = DECODERS["trellis"].layout
    for shape, dtype in (((4, 5), torch.int32), ((0, 5), torch.float32), ((4, 0), torch.float32)):
        with pytest.raises(ArtifactError, match="cannot be quantized"):
            layout(shape, dtype, (8, 16, 0, 0, 0))
    assert [(each.rows, each.columns) for each in layout((4, 5), torch.half, (8, 1, 2, 0, 3))] == [
        (4, 5),
        (4, 1),
        (5, 1),
    ]
    good = encoded(
        np.ones((2, 3), np.int32), (4, 1, 1, 0, 0), np.zeros(2, np.int32), np.zeros(3, np.int32), dtype=torch.half
    )
    for place, size in ((1, 2), (2, 3)):
        for index in (2**31 - 1, -(2**31), 128):
            streams = list(good.streams)
            streams[place] = np.full((size, 1), index)
            with pytest.raises(ArtifactError, match="step index"):
                decode(replace(good, streams=tuple(streams)))


@st.composite
def walks(draw: st.DrawFn) -> tuple[Integers, int]:
    """Random walks, which keep to no trellis, and numbers that do; far ones now and then, or few of them."""
    rows, columns, states = draw(st.integers(1, 14)), draw(st.integers(1, 18)), draw(st.sampled_from(PATHS))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    spread = draw(st.sampled_from([0.4, 3, 60, 900]))
    form = draw(st.sampled_from(["walk", "paths", "even", "few", "far"]))
    values = np.rint(np.cumsum(rng.normal(0, spread, (rows, columns)), 0)).astype(np.int64)
    if form == "paths":
        values = on_paths(rows, columns, states, spread).astype(np.int64)
    elif form == "even":
        values *= 2
    elif form == "few":
        values = np.array([-70_000, -3, 0, 2**20 - 1])[values % 4]
    elif form == "far":
        values[0, 0] = 2**31 - 1
    return values, states


@settings(max_examples=30, deadline=None)
@given(walks(), st.sampled_from([1 << 20, 40]), st.sampled_from(["max", "fast"]))
def test_any_numbers_come_back_under_any_states(case: tuple[Integers, int], chunk: int, effort: Effort) -> None:
    values, states = case
    hints = Hints(states=states)
    with pytest.MonkeyPatch.context() as patch:
        for module in (trellis, reference, reference_mixed):
            patch.setattr(module, "CHUNK", chunk)
        coded = coder.encode(values, hints, effort)
        assert coder.encode(values, hints, effort) == coded
        for threads in (1, 2):
            found = coder.decode(coded.coder, coded.payload, *values.shape, hints, threads=threads)
            assert (found == values).all()
        if values.min() == values.max():
            return
        payload = static.encode(values, (1, 1), states)
        assert reference.decode(coder.STATIC, payload, *values.shape, states) == values.tolist()
        assert (static.decode(payload, *values.shape, np.dtype(np.int32), 2, states) == values).all()
        payload = mixed.encode(values, (1, 1), states)
        if payload is not None:
            assert reference.decode(coder.MIXED, payload, *values.shape, states) == values.tolist()
            assert (mixed.decode(payload, *values.shape, np.dtype(np.int32), 2, states) == values).all()


@pytest.mark.parametrize("effort", ["max", "fast"])
def test_one_state_is_no_hint_at_all(effort: Effort) -> None:
    values = on_paths(60, 50, 8, 3)
    assert coder.encode(values, Hints(states=1), effort) == coder.encode(values, None, effort)
    assert coder.encode(values, Hints(states=1), effort) == coder.encode(values, Hints(), effort)


@pytest.mark.parametrize("states", STATES[1:])
def test_numbers_on_paths_cost_less_when_the_coder_knows_the_paths(states: int) -> None:
    """In an odd state 0 and −1 are as likely; in an even one 0 is the likeliest, and 1 and −1 are alike."""
    values = on_paths(400, 60, states, 0.7)
    knowing, plain = (len(coder.encode(values, Hints(states=each)).payload) for each in (states, 1))
    assert knowing < 0.97 * plain


@pytest.mark.parametrize("states", PATHS[2:])
def test_tables_for_odd_states_save_what_the_state_tells(states: int) -> None:
    """The static coder too comes to 1 % and a little for its tables of an ideal coder that knows the state."""
    values = on_paths(300, 80, states, 0.7)
    odd = trellis.odd_states(values, states)
    bits = 0.0
    for band in np.array_split(np.arange(300), 12):  # rows differ in scale
        for side in (0, 1):
            counts = np.unique(values[band][odd[band] == side], return_counts=True)[1]
            bits += float((counts * np.log2(counts.sum() / counts)).sum())
    paired, plain = (len(static.encode(values, (1, 1), each)) for each in (states, 1))
    assert paired < 0.97 * plain
    assert 8 * paired < 1.02 * bits + 1200


def test_tables_for_odd_states_are_refused_where_there_are_none() -> None:
    values = on_paths(64, 60, 8, 0.6)
    payload = static.encode(values, (1, 1), 8)
    with pytest.raises(ArtifactError, match="number of classes"):
        static.decode(payload, 64, 60, np.dtype(np.int32), 1)


def test_knowing_paths_reaches_the_entropy_given_the_state() -> None:
    """Of a normal source, nearest on the grid that the state has: an ideal coder pays their entropy given it."""
    states, values = 8, on_paths(1200, 100, 8, 0.7)
    paths = machine(states)
    state, odd = np.zeros(100, np.int64), np.zeros(values.shape, np.int64)
    for r, row in enumerate(values):
        odd[r] = paths.odd[state]
        state = paths.following[state, row & 1].astype(np.int64)
    band = np.arange(1200) // 60  # rows differ in scale: the entropy of bands of them
    bits = 0.0
    for label in np.unique(band):
        for side in (0, 1):
            counts = np.unique(values[band == label][odd[band == label] == side], return_counts=True)[1]
            bits += float((counts * np.log2(counts.sum() / counts)).sum())
    assert 8 * len(coder.encode(values, Hints(states=states)).payload) < 1.02 * bits
