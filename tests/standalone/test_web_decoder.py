"""Laws of the decoder for browsers: the tensors of `birdie.load`, bit for bit, and no damaged file that birdie refuses.

They hold for the module that `birdie script --language js` writes, in Node.
"""

import base64
import hashlib
import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import birdie
from birdie.artifact.container import DELTA, Entry, Reader, Stream, to_bytes
from birdie.artifact.file import DTYPES
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.compress import row_blocks
from birdie.errors import ArtifactError
from birdie.standalone import PROGRAM
from scripts import wasm
from tests.hostile import mutate, seeds
from tests.hostile.bombs import BOMBS

ROOT = Path(__file__).resolve().parents[2]
RELEASED = ROOT / "tests" / "released" / "1.0"
Decoded = dict[str, tuple[str, list[int], str]]  # name → dtype, shape, SHA-256 of the elements

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def by_node(module: Path, files: list[bytes], max_bytes: int | None = None) -> list[Decoded | str]:
    """Return the tensors of each file, or the sentence with which it is refused; any other error fails."""
    listed = [[base64.b64encode(data).decode(), {"maxBytes": max_bytes}] for data in files]
    command = ["node", str(Path(__file__).with_name("decode_all.mjs")), str(module)]
    done = subprocess.run(command, input=json.dumps(listed), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[tuple[str | None, Any]] = json.loads(done.stdout)
    return [
        {name: (dtype, shape, digest) for name, (dtype, shape, digest) in tensors} if error is None else error
        for error, tensors in answers
    ]


def evaluated(module: Path, expression: str, data: bytes = b"") -> Any:
    """Return the value of an expression of JavaScript in which `m` is a module and `data` are bytes."""
    program = (
        f"import * as m from {json.dumps(module.as_uri())};"
        f"const data = Buffer.from({json.dumps(base64.b64encode(data).decode())}, 'base64');"
        f"console.log(JSON.stringify(await ({expression})))"
    )
    command = ["node", "--input-type=module", "-"]
    return json.loads(subprocess.run(command, input=program, capture_output=True, text=True, check=True).stdout)


def by_birdie(data: bytes, max_bytes: int | None = None) -> Decoded | str:
    """Return the same as `birdie.load` has it."""
    try:
        tensors = birdie.load(data, max_bytes=max_bytes, workers=1)
    except ArtifactError as error:
        return str(error)
    return {name: described(tensor) for name, tensor in tensors.items()}


def described(tensor: Tensor) -> tuple[str, list[int], str]:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), hashlib.sha256(data).hexdigest()


def saved(state: dict[str, Tensor], **options: Any) -> bytes:
    """Return the file of a state dict."""
    file = BytesIO()
    birdie.save(state, file, workers=1, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The module that `birdie script` writes."""
    path = tmp_path_factory.mktemp("script") / "decode.mjs"
    assert run(build_app, ["script", "--kind", "decoder", "--language", "js", "-o", str(path)]) == 0
    return path


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--kind", "pair"], "pair"),
        (["baseline"], "train"),
        (["--kind", "decoder", "--requirements", "packages.txt"], "--requirements"),
        (["--kind", "decoder", "--paste"], "--paste"),
    ],
)
def test_only_a_decoder_is_written_in_javascript(
    arguments: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(build_app, ["script", *arguments, "--language", "js", "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "ConfigError"
    assert named in error["message"]
    assert not [*tmp_path.iterdir()]


def test_the_decoder_is_the_same_every_time_and_holds_the_program(module: Path, tmp_path: Path) -> None:
    path = tmp_path / "decode.js"
    assert run(build_app, ["script", "--kind", "decoder", "--language", "js", "-o", str(path)]) == 0
    assert path.read_bytes() == module.read_bytes()
    assert base64.b64encode(PROGRAM.read_bytes()) in path.read_bytes()
    assert b"import" not in path.read_bytes().replace(b"import { decode } from", b"")


@pytest.mark.skipif(
    not wasm.is_installed(), reason="the compiler is not installed: pip install 'birdie-compress[wasm]'"
)
@pytest.mark.parametrize("program", wasm.FORMS, ids=lambda program: program.name)
def test_the_program_is_what_its_sources_compile_to(program: Path, tmp_path: Path) -> None:
    wasm.build(tmp_path / program.name, *wasm.FORMS[program])
    assert (tmp_path / program.name).read_bytes() == program.read_bytes(), "make wasm"


@pytest.mark.parametrize("program", wasm.FORMS, ids=lambda program: program.name)
def test_the_program_needs_nothing_from_its_host(program: Path) -> None:
    """Its sections: no imports, no names."""
    data, at, sections = program.read_bytes(), 8, []
    while at < len(data):
        size = shift = 0
        for length in range(1, 6):
            size |= (data[at + length] & 127) << shift
            shift += 7
            if data[at + length] < 128:
                break
        sections.append(data[at])
        at += 1 + length + size
    assert data[:8] == b"\0asm\x01\0\0\0"
    assert not {0, 2} & {*sections}


def golden_files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(RELEASED.glob("*.birdie")) if path.is_file()}


def test_golden_files_decode_to_the_same_bits(module: Path) -> None:
    """All of them but deltas to another file, which has to be given."""
    files = golden_files()
    for name, decoded in zip(files, by_node(module, [*files.values()]), strict=True):
        expected = by_birdie(files[name])
        assert isinstance(decoded, str) if isinstance(expected, str) else decoded == expected, name
    assert sum(isinstance(by_birdie(data), dict) for data in files.values()) >= 12


SHAPES = (), (0,), (0, 3), (7,), (5, 1), (6, 2, 3, 3), (40, 33)


def bits_of(dtype: torch.dtype, rng: np.random.Generator) -> dict[str, Tensor]:
    """Return tensors of random words, NaN payloads among them, and one of zeros."""
    out = {}
    for shape in SHAPES:
        count = int(np.prod(shape)) * dtype.itemsize
        words = torch.from_numpy(rng.integers(0, 2 if dtype == torch.bool else 256, max(count, 16), np.uint8))
        out[f"{dtype}{shape}"] = words.view(dtype)[: count // dtype.itemsize].reshape(shape)
    out[f"{dtype} of one value"] = torch.zeros(90, 16, dtype=torch.uint8).view(dtype)
    return out


def lossless_files() -> Iterator[bytes]:
    rng = np.random.default_rng(0)
    random_bits = {name: tensor for dtype in DTYPES for name, tensor in bits_of(dtype, rng).items()}
    ramp = torch.arange(4096)
    table = (ramp * 2654435761 % 4093 % 31 - 15).reshape(64, 64)
    tensors = {
        "few magnitudes": table / 8,
        "few in sixteen bits": (table / 8).bfloat16(),
        "−0.0": torch.tensor([0.0, -0.0, float("inf"), float("nan")]),
        "half bytes": (table + 15 + (table.T + 15 << 3) & 255).to(torch.uint8),
        "positions": ramp.double(),
        "rising": ramp.cumsum(0) - 7,
        "beyond 32 bits": ramp.cumsum(0) * 2**40,
        "runs": (torch.arange(128)[:, None] >= torch.arange(128)).half(),
        "runs of pairs": torch.ones(300, 300, dtype=torch.int64).triu() * -(2**40),
        "signs": table.sign().to(torch.int8),
        "__proto__": torch.arange(3),
        "größe 😀": torch.arange(4, dtype=torch.int16),
    }
    index = torch.arange(64)
    circulant = table.reshape(-1)[(index[:, None] - index) % 64]
    scales = (torch.arange(1, 65) * 2654435761 % 4093)[:, None] / 1e5
    levels = torch.tensor([-1.0, -0.71, -0.3, 0.0, 0.13, 0.45, 1.0])[(table + 15) % 7]
    levels[:, ::16] = 1
    tensors |= {
        "circulant": circulant / 3,
        "Toeplitz of 64 bits": (table * 2**40 + 1).reshape(-1)[index[:, None] - index + 64],
        "Toeplitz of bytes": (table * 7 % 251).reshape(-1)[index[:, None] - index + 64].to(torch.uint8),
        "integers by row": table * scales,
        "integers by column": (table * scales).T.contiguous().half(),
        "integers by 16": (table * scales.reshape(16, 4).repeat_interleave(16, 1).repeat(4, 1)).bfloat16(),
        "signed zeros": table.clamp(-7, 7) * scales * -1.0,
        "levels by 16": levels * scales,
        "table by row": (table.remainder(5) - 2.2).exp2().repeat(1, 4) * (1 + scales.sqrt()),
    }
    tensors["tied"] = tensors["few magnitudes"]
    tensors["equal"] = tensors["few magnitudes"].clone()
    yield saved(random_bits | tensors, lossless=True, effort="fast")
    yield saved(tensors, lossless=True, effort="max")


SPECS = (
    *("fp16", "bf16", "int2", "int4:group_size=7", "int8", "sigma:0.3", "ternary:group_size=9", "codebook:k=9"),
    *("codebook:k=200,per_row", "rotation:bits=3", "lowrank:rank=2,base=int3:group_size=7"),
    *("lowrank:rank=1,base=codebook:k=4", "trellis:states=4,sigma=0.3", "trellis:states=256,sigma=0.5"),
)


def quantized_files() -> Iterator[bytes]:
    rng = torch.Generator().manual_seed(1)
    shapes = {"a": (48, 40), "b": (30, 33), "c": (12, 5, 3, 3), "d": (300,), "e": (9, 8)}
    large = torch.randn(128, 80, generator=rng) * torch.logspace(-1, 1, 128)[:, None]
    for index, spec in enumerate(SPECS):
        for coder in ("fast", "max") if "trellis" in spec else (("fast", "max")[index % 2],):
            state = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
            state["a"][5:9] = 0
            kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
            state = {name: tensor.to(kinds[i % 4]) for i, (name, tensor) in enumerate(state.items())}
            state |= {"tiny": state["e"].half() * 2**-13, "huge": state["e"].bfloat16() * 2.0**120}
            state |= {"large": large} if coder == "fast" else {}
            yield saved(state, scheme=[("*", spec)], effort=coder)


def files_in_blocks() -> Iterator[bytes]:
    """Yield files of tensors that are cut, complex ones into planes, vectors into rows, and that share an entry."""
    rng = torch.Generator().manual_seed(2)
    large = torch.randn(90, 20, generator=rng)
    state = {"large": large, "tied": large, "complex": torch.randn(40, 20, 2, generator=rng, dtype=torch.complex64)}
    with mock.patch.object(row_blocks, "LARGE", 300), mock.patch.object(row_blocks, "_BLOCK", 256):
        yield saved(state, lossless=True)
        yield saved({"large": large, "tied": large}, scheme="int6")
    flat = {"flat": torch.randn(4500, generator=rng), "pairs": torch.randn(4096, generator=rng, dtype=torch.complex64)}
    yield saved(flat, scheme="int4")
    yield saved(flat)
    norms = {f"layers.{i}.norm": torch.randn(16, generator=rng).bfloat16() for i in range(12)}
    yield saved(norms | {"norm": norms["layers.3.norm"]}, lossless=True)
    yield saved({f"experts.{i}": torch.randn(32, 16, generator=rng) for i in range(4)}, scheme="int4")


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("files", [lossless_files, quantized_files, files_in_blocks], ids=lambda make: make.__name__)
def test_files_decode_to_the_same_bits(files: Callable[[], Iterator[bytes]], module: Path) -> None:
    saved_files = [*files()]
    expected = [by_birdie(data) for data in saved_files]
    assert all(isinstance(one, dict) for one in expected)
    assert by_node(module, saved_files) == expected


def test_tied_names_share_one_tensor_and_copies_do_not(module: Path) -> None:
    weight = torch.arange(6.0)
    data = saved({"a": weight, "b": weight, "c": weight.clone()}, lossless=True)
    compared = "[t.a === t.b, t.a.data === t.c.data, t.a.data.constructor.name, [...t.a.data]]"
    answer = evaluated(module, f"m.decode(data).then((t) => {compared})", data)
    assert answer == [True, False, "Float32Array", weight.tolist()]


def test_named_tensors_alone_are_decoded_and_count(module: Path) -> None:
    state = {"norms.0": torch.ones(16), "norms.1": torch.full((16,), 2.0), "large": torch.arange(5000.0)}
    data = saved(state, lossless=True)
    shown = '(t) => [Object.keys(t), t["norms.1"].data[3]]'
    named = f'm.decode(data, {{names: new Set(["norms.1"]), maxBytes: 1000}}).then({shown})'
    assert evaluated(module, named, data) == [["norms.1"], 2.0]
    refused = 'm.decode(data, {names: ["large"], maxBytes: 1000}).catch((error) => error.message)'
    assert "maxBytes" in evaluated(module, refused, data)
    missing = 'm.decode(data, {names: ["larger"]}).catch((error) => error.message)'
    assert "'larger'" in evaluated(module, missing, data)


def test_progress_is_told_and_waited_for(module: Path) -> None:
    data = saved({"a": torch.arange(100.0), "b": torch.arange(50.0).half()}, lossless=True)
    calls = "(() => { const calls = []; const wait = (ms) => new Promise((done) => setTimeout(done, ms)); let busy = 0;"
    calls += "const onProgress = async (done, total) => { calls.push([done, total, busy++]); await wait(5); busy-- };"
    calls += "return m.decode(data, { onProgress }).then(() => calls) })()"
    assert evaluated(module, calls, data) == [[400, 500, 0], [500, 500, 0]]


def test_floats_become_float32(module: Path) -> None:
    words = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    state = {"a": words.view(torch.float16), "b": words.view(torch.bfloat16), "c": torch.tensor([1 / 3]).double()}
    data = saved(state, lossless=True)
    bits = "Object.values(t).map((one) => Buffer.from(m.toFloat32(one).buffer).toString('base64'))"
    answers = [base64.b64decode(one) for one in evaluated(module, f"m.decode(data).then((t) => {bits})", data)]
    for tensor, answer in zip(state.values(), answers, strict=True):
        got = torch.from_numpy(np.frombuffer(answer, np.float32).copy())
        assert torch.equal(got.nan_to_num(nan=12345.0), tensor.float().nan_to_num(nan=12345.0))


def damaged(count: int) -> list[bytes]:
    """Return damaged files: bytes anywhere; and payloads, side information and headers with checksums that agree."""
    known: dict[bytes, Any] = {}
    rng, source = random.Random(0), torch.Generator().manual_seed(3)
    matrix = torch.randn(24, 20, generator=source)
    state = {
        "a": matrix,
        "b": matrix.bfloat16(),
        "conv": torch.randn(6, 4, 3, 3, generator=source).cumsum(-1),
        "tied": matrix,
    }
    wide = {"a": torch.randn(40, 64, generator=source), "b": torch.arange(300) ** 2}
    sound = []
    with seeds.recorded(known):
        for tensors, options in (
            (state, {"lossless": True}),
            (state, {"scheme": [("[ab]", "int6"), ("*", "trellis:states=8,sigma=0.3")]}),
            (state, {"scheme": [("[ab]", "codebook:k=9"), ("*", "lowrank:rank=2,base=ternary")]}),
            (wide, {"scheme": [("a", "trellis:states=32,sigma=0.3"), ("b", "lossless")], "effort": "fast"}),
        ):
            data = saved(tensors, **options)
            entries = [Reader(data).read(name) for name in Reader(data).entries]
            sides = {
                (at, index): seeds.side_of(stream.coder, stream.payload, known)
                for at, entry in enumerate(entries)
                for index, stream in enumerate(entry.streams)
            }
            sound.append(seeds.Seed(data, {index: side for index, side in sides.items() if side is not None}))
    ways = [mutate.data, *mutate.REPAIRED.values()]
    return [ways[index % len(ways)](rng.choice(sound), rng) for index in range(count)]


def test_of_200_damaged_files_it_refuses_what_birdie_refuses(module: Path) -> None:
    files = damaged(200)
    refused = 0
    for data, decoded in zip(files, by_node(module, files, 1 << 20), strict=True):
        expected = by_birdie(data, 1 << 20)
        if isinstance(expected, str):
            assert isinstance(decoded, str), expected
            assert re.fullmatch(r"[^\n]{10,400}", decoded)
            refused += 1
        elif not (isinstance(decoded, str) and "load it with birdie" in decoded):
            assert decoded == expected
    assert 100 < refused < 200


def test_an_error_is_one_line_whatever_the_names_are(module: Path) -> None:
    """A line break in the name of a tensor once made two lines of an error."""
    names = ("a\nb", "a\r\n\u2028b", "\x1b[2K", "a" * 300)
    files = [to_bytes([Entry(name, 1, 11, (4, 4), (), (Stream(0, b""),))]) for name in names]
    for answer in by_node(module, files):
        assert isinstance(answer, str)
        assert re.fullmatch(r"[\x20-\x7e…−“”’]{10,500}", answer), answer


def test_small_files_that_ask_for_much_are_refused_before_it_is_allocated(module: Path) -> None:
    names = (
        *("unpacks to 64 MiB", "constant float32 of 4 GiB", "grid, groups of one", "low rank of rank 16,384"),
        *("trellis of 1 GiB", "mixed, rows of one from rows", "tiles without words"),
    )
    assert all(isinstance(decoded, str) for decoded in by_node(module, [BOMBS[name]() for name in names]))


def test_more_bytes_than_the_caller_allows_are_refused(module: Path) -> None:
    data = saved({"a": torch.zeros(100, 100)}, lossless=True)
    less, enough = by_node(module, [data], 39_999)[0], by_node(module, [data], 40_000)[0]
    assert "40000" in less
    assert enough == by_birdie(data)


def test_what_is_not_decoded_is_said_by_name(module: Path) -> None:
    constant = (Stream(0, b""),)
    files = {
        "delta": to_bytes([Entry("w", 0, 11, (3,), (5, 0), kind=DELTA)]),
        "scheme": to_bytes([Entry("w", 64, 11, (1,), (), constant)], b'{"schemes":{"64":"squares"}}'),
        "coder": to_bytes([Entry("w", 1, 2, (1,), (), (Stream(9, b""),))]),
    }
    for word, decoded in zip(files, by_node(module, [*files.values()]), strict=True):
        assert isinstance(decoded, str)
        assert word in decoded
        assert "'w'" in decoded
