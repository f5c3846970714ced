"""Laws of the decoder in C: the tensors of `birdie.load`, bit for bit, and no damaged file that birdie refuses."""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import birdie
from birdie.artifact import codes
from birdie.artifact.container import DELTA, Entry, Stream, to_bytes
from birdie.compress import registry
from birdie.errors import ArtifactError
from birdie.standalone import C_DECODER
from tests.reference.streams import FEATURES
from tests.standalone.c_decoder import Counted, Decoded, File, Options, RefusedError, compiler, decoded, load
from tests.standalone.test_web_decoder import (
    RELEASED,
    by_birdie,
    damaged,
    described,
    files_in_blocks,
    golden_files,
    lossless_files,
    quantized_files,
    saved,
)

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C compiler, cc")
GOLDEN = RELEASED.parents[1] / "golden"
FLOAT16, BFLOAT16, FLOAT32 = 9, 10, 11
GOLDEN = RELEASED.parents[1] / "golden"
HEADER = C_DECODER[1].read_text(encoding="utf-8")
ERRORS = {name: int(number) for name, number in re.findall(r"^    X\((\w+), (\d+),", HEADER, re.MULTILINE)}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The decoder, compiled without a warning."""
    return load(tmp_path_factory.mktemp("c"))


def error_of(answer: Decoded | RefusedError) -> int:
    assert isinstance(answer, RefusedError), answer
    return answer.number


def test_released_files_decode_to_the_same_bits(library: Any) -> None:
    base = (RELEASED / "base.birdie").read_bytes()
    for name, data in golden_files().items():
        expected = by_birdie(data)
        if isinstance(expected, str):  # deltas to another file
            assert error_of(decoded(library, data)) == ERRORS["BASE"]
            tensors = birdie.load(data, base=RELEASED / "base.birdie")
            assert decoded(library, data, base) == {name: described(tensor) for name, tensor in tensors.items()}, name
        else:
            assert decoded(library, data) == expected, name


@pytest.mark.parametrize("name", ["artifact", "container", "lossless", "spectral", "tucker"])
def test_golden_files_decode_to_the_same_bits(library: Any, name: str) -> None:
    data = bytes.fromhex(re.sub(r"\s", "", (GOLDEN / f"{name}.hex").read_text()))
    answer, expected = decoded(library, data), by_birdie(data)
    assert isinstance(answer, RefusedError) if isinstance(expected, str) else answer == expected


def test_golden_streams_of_every_coder_decode_to_their_values(library: Any) -> None:
    """Each in a tensor of its own: integers as they are, numbers on paths as those of a trellis."""
    golden = json.loads((GOLDEN / "streams.json").read_text())
    for name, feature in FEATURES.items():
        stream = Stream(feature.coder, bytes.fromhex(golden[name]["payload"]))
        shape = tuple(feature.values.shape)
        if feature.states == 1:
            data = to_bytes([Entry("w", 1, 6, shape, (2,), (stream,))])
        else:
            constant = Stream(0, b"")
            data = to_bytes([Entry("w", 4, 11, shape, (feature.states, 16, 0, 0, 0), (stream, constant))])
        values = torch.from_numpy(np.ascontiguousarray(feature.values).astype(np.int32))
        assert decoded(library, data) == ({"w": described(values)} if feature.states == 1 else by_birdie(data)), name


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("files", [lossless_files, quantized_files, files_in_blocks], ids=lambda make: make.__name__)
def test_files_decode_to_the_same_bits(library: Any, files: Callable[[], Iterator[bytes]]) -> None:
    for data in files():
        assert decoded(library, data) == by_birdie(data)


@pytest.mark.parametrize("word", [word for word, known in registry.words().items() if known.example])
def test_every_scheme_decodes_to_the_same_bits(library: Any, word: str) -> None:
    spec = registry.words()[word].example
    source = torch.Generator().manual_seed(5)
    shapes = {"a": (24, 20), "conv": (6, 5, 3, 3), "wide": (9, 70), "vector": (300,)}
    state = {name: torch.randn(shape, generator=source).cumsum(-1) for name, shape in shapes.items()}
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    state = {name: tensor.to(kinds[i]) for i, (name, tensor) in enumerate(state.items())}
    for effort in ("fast", "max"):
        data = saved(state, scheme=[("*", spec)], effort=effort)
        assert decoded(library, data) == by_birdie(data)


TRANSFORMS = (
    "dct,edge=5",
    "dct,edge=4,axes=kernel",
    "wavelet53,levels=3",
    "wavelet97,levels=2",
    "hadamard",
    "identity",
)


@pytest.mark.parametrize("scan", ["none", "planes", "planes-morton", "blocks", "blocks-morton"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_every_transform_in_every_scan_decodes_to_the_same_bits(library: Any, transform: str, scan: str) -> None:
    """Few coefficients: sums whose signs of zero depend on the cosine of a right angle are among them."""
    source = torch.Generator().manual_seed(6)
    shapes = {"a": (20, 15), "conv": (5, 10, 3, 3), "cube": (4, 5, 6, 7), "vector": (40,), "scalar": ()}
    state = {name: torch.randn(shape, generator=source) for name, shape in shapes.items()}
    if scan.startswith("blocks"):  # which divide every axis
        even = (20, 20, 5) if "edge=5" in transform else (8, 12, 4)
        state = {"even": torch.randn(even, generator=source)}
    for sigma in (0.3, 2.0):
        data = saved(state, scheme=f"spectral:{transform},scan={scan},sigma={sigma}", effort="fast")
        assert decoded(library, data) == by_birdie(data)


def test_deltas_inside_a_file_decode_to_the_same_bits(library: Any) -> None:
    source = torch.Generator().manual_seed(7)
    weights = {f"{i}.weight": torch.randn(64, 128, generator=source) / 10 for i in range(2)}
    kinds = (torch.bfloat16, torch.float32)
    state = {f"model.{name}": weight for name, weight in weights.items()}
    state |= {f"ema.{name}": weight + 1e-3 * torch.randn(64, 128, generator=source) for name, weight in weights.items()}
    for kind in kinds:
        data = saved({name: tensor.to(kind) for name, tensor in state.items()}, lossless=True)
        assert b'"inside":true' in File(library, data).metadata
        assert decoded(library, data) == by_birdie(data)


DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
]


@st.composite
def states(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Return a few tensors of any dtype whose elements repeat, rise, or are noise."""
    state = {}
    for index in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
        source = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        base = torch.randint(-7, draw(st.sampled_from([-5, 9, 100])), shape, generator=source)
        tensor = base.flatten().cumsum(0).reshape(shape) if draw(st.booleans()) else base
        state[draw(st.text(max_size=5)).replace("\0", "") + str(index)] = tensor.to(draw(st.sampled_from(DTYPES)))
    return state


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(states(), st.sampled_from(["fast", "max"]))
def test_any_state_dict_decodes_to_the_same_bits(library: Any, state: dict[str, torch.Tensor], effort: str) -> None:
    data = saved(state, lossless=True, effort=effort)
    assert decoded(library, data) == {name: described(tensor) for name, tensor in sorted(state.items(), key=_by_bytes)}


def _by_bytes(item: tuple[str, Any]) -> bytes:
    return item[0].encode()


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_real_tensors_are_had_in_other_floats_as_torch_converts_them(library: Any, kind: torch.dtype) -> None:
    source = torch.Generator().manual_seed(8)
    exponents = torch.randint(-150, 128, (4000,), generator=source)
    numbers = torch.randn(4000, generator=source, dtype=torch.float64) * 2.0**exponents
    numbers[:6] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 65519.99, 65520.0])
    data = saved({"w": numbers.to(kind)}, lossless=True)
    file = File(library, data)
    for number, to in ((FLOAT16, torch.float16), (BFLOAT16, torch.bfloat16), (FLOAT32, torch.float32)):
        expected = numbers.to(kind).float().to(to).view(torch.uint8).numpy().tobytes()
        assert file.decode(0, len(expected), number) == expected
    file.close()


def test_members_of_a_group_are_cut_out_of_one_array(library: Any) -> None:
    """Decoding each array once is linear in the members."""
    data = (RELEASED / "members.birdie").read_bytes()
    expected, file = by_birdie(data), File(library, data)
    assert isinstance(expected, dict)
    tensors = file.tensors()
    ends: dict[int, int] = {}
    for _, tensor in tensors.values():
        ends[tensor.array] = max(
            ends.get(tensor.array, 0), (tensor.first + tensor.elements) * tensor.bytes // tensor.elements
        )
    arrays = {array: file.decode(array, end, is_array=True) for array, end in ends.items()}
    for name, (_, tensor) in tensors.items():
        start = tensor.first * tensor.bytes // tensor.elements
        data = arrays[tensor.array][start : start + tensor.bytes]
        assert hashlib.sha256(data).hexdigest() == expected[name][2]
    assert 2 * len(arrays) < len(tensors)
    file.close()


def test_of_400_damaged_files_it_refuses_what_birdie_refuses(library: Any) -> None:
    refused = 0
    for data in damaged(400):
        answer, expected = decoded(library, data, max_bytes=1 << 20), by_birdie(data, 1 << 20)
        if isinstance(expected, str):
            assert isinstance(answer, RefusedError), expected
            refused += 1
        else:
            assert answer == expected
    assert 200 < refused < 400


CONSTANT = (Stream(0, b""),)
DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "NOT_BIRDIE": lambda data: b"x" + data,
    "TEXT_MODE": lambda data: data.replace(b"\r\n", b"\n", 1),
    "CUT": lambda data: data[:-1],
    "VERSION": lambda data: data[:8] + b"\0\2" + data[10:],
    "HEADER_CHECKSUM": lambda data: data[:22] + bytes([data[22] ^ 1]) + data[23:],
    "CHECKSUM": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "HEADER": lambda data: data[:10] + b"\xff" * 8 + data[18:],
    "METADATA": lambda _: to_bytes([], b'{"a":1,"\\u0061":2}'),
    "DTYPE": lambda _: to_bytes([Entry("w", 1, 40, (1,), (), CONSTANT)]),
    "SCHEME": lambda _: to_bytes([Entry("w", 64, 11, (1,), (), CONSTANT)], b'{"schemes":{"64":"squares"}}'),
    "BASE": lambda _: to_bytes([Entry("w", 0, 11, (3,), (5, 0), kind=DELTA)]),
    "PARAMETERS": lambda _: to_bytes([Entry("w", 1, 11, (3,), (1,), CONSTANT)]),
    "STREAMS": lambda _: to_bytes([Entry("w", 1, 11, (3,), (), CONSTANT)]),
    "CODER": lambda _: to_bytes([Entry("w", 1, 2, (1,), (), (Stream(9, b""),))]),
    "PAYLOAD": lambda _: to_bytes([Entry("w", 1, 2, (1,), (), (Stream(0, b"\0"),))]),
    "RANGE": lambda _: to_bytes([Entry("w", 1, 1, (1,), (), (Stream(0, b"\xff"),))]),
    "SIDE": lambda _: to_bytes([Entry("w", 1, 1, (2,), (), (Stream(4, b"\x02\0\0\0\0"),))]),
    "LEVELS": lambda _: to_bytes([Entry("w", 2, 11, (1, 1), (), (Stream(0, b"\1"), Stream(0, b"\0\x7f")))]),
    "TOO_MANY_BYTES": lambda _: to_bytes([Entry("w", 1, 1, (1 << 40,), (), CONSTANT)]),
    "TOO_MANY_OPERATIONS": lambda _: to_bytes([Entry("w", 2, 10, (1 << 28, 1), (1,), (*CONSTANT, *CONSTANT))]),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_each_error_has_its_number_and_sentence(library: Any, name: str) -> None:
    data = DAMAGED[name](saved({"w": torch.arange(7.0)}, lossless=True))
    with pytest.raises(ArtifactError):
        birdie.load(data)
    answer = decoded(library, data)
    assert error_of(answer) == ERRORS[name]
    assert re.fullmatch(r"[^\n]{10,200}", str(answer))


METADATA = (
    *(b'{"budget":1e400}', b'{"a":1.7976931348623159e308}', b'{"budget":-1}', b'{"budget":1.0}', b"[]", b"{} x"),
    *(
        b'{"a":1,"b":{"a":1,"a":2}}',
        b'{"a":01}',
        b'{"a":NaN}',
        b'{"a":"\t"}',
        b'{"\xff":1}',
        b"\xef\xbb\xbf{}",
        b'{"a"}',
    ),
    *(b'{"copies":[0]}', b'{"order":["123456789"]}', b'{"order":["",[1.5]]}', b'{"state":{"versions":{"":true}}}'),
    *(b'{"base":{"inside":1}}', b'{"files":{"a":281474976710657}}', b'{"tree":{}}', b'{"schemes":{"64":1}}'),
    *(
        b'{"a":' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"a":' + b"9" * 4301 + b"}",
        b'{"a":[1,]}',
        b'{"a":1,}',
        b'{"a":"\\u12"}',
    ),
)
SOUND = (
    *(b"{}", b' {"a" : [ ] , "b":[{},[1,{"a":2}]] }', b'{"a":1.7976931348623158e308,"b":1e-999}', b'{"budget":-0}'),
    *(b'{"\\ud800":1,"\\ud801":2}', b'{"a":' + b"[" * 499 + b"]" * 499 + b"}", b'{"a":' + b"9" * 4300 + b"}"),
    *(
        b'{"tree":["list",["view"]]}',
        b'{"order":["12345678",[],[-1]],"link":{}}',
        '{"größe 😀":"\\ud83d\\ude00"}'.encode(),
    ),
    *(b'{"a":0.00000001e316}', b'{"a":179769313486231580793e288,"b":-0.0e5}', b'{"state":{"versions":{"":[1],"a":3}}}'),
)


def test_metadata_is_checked_as_birdie_checks_it(library: Any) -> None:
    """Texts that JSON or the format forbids, and odd ones that both allow."""
    for text in METADATA:
        data = to_bytes([Entry("w", 1, 1, (2,), (), CONSTANT)], text)
        with pytest.raises(ArtifactError):
            birdie.load(data)
        assert error_of(decoded(library, data)) == ERRORS["METADATA"], text
    for text in SOUND:
        file = File(library, to_bytes([Entry("w", 1, 1, (2,), (), CONSTANT)], text))
        assert file.metadata == text
        assert file.has_views == (b'"view"' in text)
        file.close()


def test_what_is_allocated_is_counted_limited_and_given_back(library: Any) -> None:
    data = saved({"a": torch.randn(40, 50), "b": torch.arange(300)}, scheme=[("a", "int6"), ("*", "lossless")])
    memory = Counted()
    file = File(library, data, memory.options())
    opened = memory.held
    expected = file.decode_all()
    assert expected == by_birdie(data)
    assert memory.held == opened
    most = memory.peak - opened
    file.close()
    assert memory.held == 0
    small = Counted()
    limited = File(library, data, small.options(max_memory=most // 2))
    with pytest.raises(RefusedError, match="max_memory"):
        limited.decode_all()
    limited.close()
    assert small.peak <= opened + most // 2
    assert small.held == 0


def test_wherever_memory_runs_out_it_is_an_error_and_all_is_given_back(library: Any) -> None:
    data = saved({"a": torch.randn(40, 50), "b": torch.arange(300)}, scheme=[("a", "int6"), ("*", "lossless")])
    errors = []
    for left in range(400):
        memory = Counted(left=left)
        try:
            file = File(library, data, memory.options())
        except RefusedError as error:
            errors.append(error.number)
            assert not memory.held
            continue
        try:
            file.decode_all()
            break
        except RefusedError as error:
            errors.append(error.number)
        finally:
            file.close()
            assert not memory.held
    assert {*errors} == {ERRORS["MEMORY"]}
    assert len(errors) > 10


def test_limits_of_bytes_hold_for_one_tensor_and_for_all_together(library: Any) -> None:
    data = saved({"a": torch.zeros(100, 100), "b": torch.ones(100, 100)}, lossless=True)
    file = File(library, data, Options(max_bytes=40_000))
    assert len(file.decode(0, 40_000)) == 40_000
    with pytest.raises(RefusedError, match="max_bytes"):
        file.check()
    file.close()
    assert error_of(decoded(library, data, max_bytes=39_999)) == ERRORS["TOO_MANY_BYTES"]


def test_wrong_arguments_are_errors(library: Any) -> None:
    file = File(library, saved({"a": torch.arange(4)}, lossless=True))
    for index, size, dtype, name in (
        (1, 32, -1, "ARGUMENT"),
        (0, 31, -1, "SIZE"),
        (0, 16, 11, "CONVERSION"),
        (0, 32, 99, "CONVERSION"),
    ):
        with pytest.raises(RefusedError) as refused:
            file.decode(index, size, dtype)
        assert refused.value.number == ERRORS[name]
    file.close()


def test_threads_share_a_file(library: Any) -> None:
    source = torch.Generator().manual_seed(9)
    state = {f"{i}": torch.randn(60, 70, generator=source) for i in range(8)}
    data = saved(state, scheme="int6")
    file, answers = File(library, data), []
    expected = by_birdie(data)
    threads = [threading.Thread(target=lambda: answers.append(file.decode_all())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    assert answers == [expected] * 4


def test_the_numbers_of_dtypes_are_those_of_the_format(library: Any) -> None:
    names = codes.DTYPES
    assert [library.birdie_dtype_name(number).decode() for number in range(len(names))] == [*names]
    assert library.birdie_dtype_name(len(names)) is None
    assert len({*ERRORS.values()}) == len(ERRORS) > len(DAMAGED)


def test_files_of_nothing(library: Any) -> None:
    assert decoded(library, to_bytes([])) == {}
    assert error_of(decoded(library, b"")) == ERRORS["NOT_BIRDIE"]
    empty = saved({"a": torch.zeros(0, 3), "b": torch.zeros(3, 0, dtype=torch.int8)}, lossless=True)
    assert decoded(library, empty) == by_birdie(empty)
