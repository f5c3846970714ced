"""Golden files: what was written once stays readable, and is written alike today.

    artifact.hex    most schemes, every form of integers, a tie and a tree
    spectral.hex    spectral coefficients: each transform and each scan
    tucker.hex      cores and factors, held by every scheme that can hold them
    scheme_*.hex    matrices by the examples of a scheme that none of the others has
    lossless.hex    the lossless forms whose encoder chooses by prices: matches, levels with scales, tables of rows

A golden file is two lines: a hash of the decoded tensors, and the bytes. GENERATE_EXPECTED=1 writes them anew, which is
a breaking change.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

import birdie
from birdie.artifact import container
from birdie.artifact.codes import SCHEMES
from birdie.artifact.options import SaveOptions
from birdie.artifact.saving import write_model
from birdie.artifact.write import Beside
from birdie.checkpoints import pytree
from birdie.compress import registry
from birdie.compress.coding import code
from birdie.compress.registry import decode, decoder
from birdie.compress.repeats import steps
from birdie.compress.scheme import Encoded
from birdie.compress.schemes import lossless
from birdie.compress.schemes.lossless import DIFFERENCES, HALVES, LISTED, MATCHES, SCALED, TABLES, VALUES
from birdie.compress.schemes.spectral import LAYOUTS, ORDERS, Scan, params_of, transform_of
from birdie.compress.spectral.inverse import KINDS
from birdie.compress.spectral.transforms import Transform
from birdie.compress.state import EncodedState
from birdie.compress.tensors import rows_columns, to_bits
from tests.artifact.states import fingerprint
from tests.reference import decoder as reference
from tests.reference.lossless_forms import decode_form
from tests.reference.trellis import decode_trellis

FOLDER = Path(__file__).parents[1] / "golden"
CODES = {name: number for number, name in SCHEMES.items()}


def golden(name: str, fresh: bytes, folder: Path) -> tuple[container.Reader, dict[str, Tensor]]:
    """Return the golden file and its tensors, whose hash is the pinned one; `fresh` is the file as written today."""
    path, pinned_file = folder / f"{name}.birdie", FOLDER / f"{name}.hex"
    if os.environ.get("GENERATE_EXPECTED"):
        path.write_bytes(fresh)
        pinned_file.write_text(f"{fingerprint(birdie.load(path))}\n{fresh.hex()}\n")
    pinned, data = pinned_file.read_text().split()
    path.write_bytes(bytes.fromhex(data))
    tensors = birdie.load(path)
    assert fingerprint(tensors) == pinned
    return container.Reader(bytes.fromhex(data)), tensors


def write(encoded: Mapping[str, Encoded]) -> bytes:
    """Return the file of tensors that are encoded already."""
    coded = {name: code(tensor, "max") for name, tensor in encoded.items()}
    return container.to_bytes(*Beside().content(EncodedState(coded, {})))


# artifact.hex. Schemes that choose by float arithmetic may choose otherwise on another machine; they must only decode.
FITTED = {CODES[name] for name in ("grid", "trellis", "ternary", "codebook", "rotation", "lowrank")}
RULES = [
    ("*matrix", "int6"),
    ("*grouped", "int4:group_size=20"),
    ("*ternary", "ternary:group_size=12"),
    ("*table", "codebook:k=9"),
    ("*rotated", "rotation:bits=3"),
    ("*corrected", "lowrank:rank=2,base=codebook:k=4,per_row"),
    ("*paths", "trellis:states=8,sigma=0.4"),
    ("model/norm", "bf16"),  # float64: only a rule with its full name changes it
    ("*", "lossless"),
]


def scheme_of(spec: str) -> str:
    """Return the name of the scheme of a spec."""
    return registry.parse_spec(spec).decoder.name


def content() -> dict[str, Any]:
    """Return a checkpoint whose tensors take each way to store one.

    The values are computed from integers, so they are the same on every machine.
    """
    ramp = torch.arange(1536)
    noise = ramp * 2654435761 % 4093 % 127 - 63
    flags = ramp * 2654435761 % 4093 % 7 > 3
    rng = np.random.default_rng(0)
    halves = torch.from_numpy(rng.integers(0, 1 << 20, (2, 32, 160)) % rng.integers(1, 16, (2, 32, 1)))
    half = (noise.reshape(32, 48) / 64).bfloat16()
    model = {
        "embedding": half,
        "head": half,
        "matrix": noise.reshape(48, 32) / 32,
        "grouped": noise.reshape(32, 48) / 16,
        "ternary": noise.reshape(48, 32).bfloat16() / 8,
        "table": noise.reshape(32, 48).half() / 32,
        "rotated": noise.reshape(32, 6, 8) / 64,
        "corrected": noise.reshape(48, 32).double() / 32,
        "paths": torch.cat([noise.reshape(48, 32) / 32, torch.zeros(2, 32)]),
        "norm": (noise[:40] / 64).double(),
        "exact": noise.reshape(24, 64) / 3,
        "sixteen": (noise[:640] / 64).half().reshape(20, 32),
        "flags": flags.reshape(6, 256),
        "packed": (halves[0] | halves[1] << 4).to(torch.uint8),
        "values": noise.reshape(12, 128).int() * 1009,
        "empty": torch.zeros(0, 3),
    }
    return {"model": model, "optimizer": [{"positions": ramp.cumsum(0), "step": torch.tensor(7)}, (0.5, None, "adam")]}


def saved(path: Path) -> container.Reader:
    tensors, skeleton = pytree.flatten(content())
    # Its tensors are made of few numbers, and would take the forms of lossless.hex otherwise.
    with (
        mock.patch.object(lossless, "may_repeat", return_value=False),
        mock.patch.object(lossless, "search", return_value=None),
    ):
        write_model(tensors, path, SaveOptions(scheme=RULES, effort="max"), tree=skeleton)
    return container.Reader(path.read_bytes())


def test_the_golden_artifact_loads_and_entries_without_float_arithmetic_are_written_alike(tmp_path: Path) -> None:
    fresh = saved(tmp_path / "fresh.birdie")
    pinned, _ = golden("artifact", (tmp_path / "fresh.birdie").read_bytes(), tmp_path)
    assert pinned.fields == fresh.fields
    assert pinned.names == fresh.names
    entries = [pinned.read(name) for name in pinned.names]
    exact = [entry for entry in entries if entry.scheme not in FITTED]
    assert [fresh.read(entry.name) for entry in exact] == exact
    forms = {entry.params[:1] for entry in entries if entry.scheme == CODES["lossless"]}
    assert forms == {(), (HALVES,), (VALUES,), (DIFFERENCES,), (LISTED,)}
    other_files = {CODES["spectral"], CODES["tucker"]}
    assert {entry.kind for entry in entries} == {container.TENSOR, container.ALIAS}
    assert {entry.scheme for entry in entries if entry.kind == container.TENSOR} == {*CODES.values()} - other_files


def test_the_reference_decoder_reads_the_golden_trellis(tmp_path: Path) -> None:
    reader, tensors = pinned(tmp_path, "artifact")
    entry, matrix = reader.read("model/paths"), tensors["model/paths"]
    states, _, along = entry.params[:3]
    shapes = [tuple(matrix.shape), (matrix.shape[0], 1), (matrix.shape[1], 1)][: 3 if along else 2]
    coded = zip(entry.streams, shapes, [states, 1, 1], strict=False)
    streams = [
        reference.decode(stream.coder, stream.payload, rows, columns, paths) for stream, (rows, columns), paths in coded
    ]
    assert matrix.tolist() == decode_trellis(entry.params, streams)


def test_the_golden_tree_is_the_one_that_was_saved(tmp_path: Path) -> None:
    reader, tensors = pinned(tmp_path, "artifact")
    about = reader.fields
    checkpoint, expected = pytree.rebuild(about["tree"], tensors), content()
    assert [*checkpoint["model"]] == [*expected["model"]]
    assert checkpoint["model"]["head"] is checkpoint["model"]["embedding"]
    assert checkpoint["optimizer"][1] == expected["optimizer"][1]
    lossy = {"matrix", "grouped", "ternary", "table", "rotated", "corrected", "paths", "norm"}
    for name in set(expected["model"]) - lossy:
        assert torch.equal(checkpoint["model"][name], expected["model"][name]), name
    assert torch.equal(checkpoint["optimizer"][0]["positions"], expected["optimizer"][0]["positions"])


def pinned(folder: Path, name: str) -> tuple[container.Reader, dict[str, Tensor]]:
    data = bytes.fromhex((FOLDER / f"{name}.hex").read_text().split()[1])
    (folder / "golden.birdie").write_bytes(data)
    return container.Reader(data), birdie.load(folder / "golden.birdie")


SPECTRAL_PARTS = [
    (Transform("identity"), (12, 20), "none", torch.float32),
    (Transform("identity"), (3, 4, 2, 2), "planes-morton", torch.bfloat16),
    (Transform("dct"), (8, 24), "blocks-morton", torch.float32),
    (Transform("dct", 5), (7, 12, 3, 3), "planes-morton", torch.float32),
    (Transform("dct", 4, axes="kernel"), (6, 4, 3, 5), "planes-morton", torch.float64),
    (Transform("dct", 2), (6, 4, 2), "blocks-morton", torch.float16),
    (Transform("wavelet53", levels=2), (9, 17), "planes", torch.float32),
    (Transform("wavelet97", levels=4), (33,), "none", torch.float32),
    (Transform("hadamard"), (6, 24), "none", torch.float32),
]


def spectral(transform: Transform, shape: tuple[int, ...], scan: str, dtype: torch.dtype) -> Encoded:
    """Return coefficients computed from integers, the same on every machine."""
    counts = transform.plan.counts(shape)
    weights, classes = np.arange(int(np.prod(shape))), np.arange(int(np.prod(counts)))
    symbols = (weights * 2654435761 % 4093 % 31 - 15).reshape(shape)
    indices = (classes * 2654435761 % 4093 % 40 - 80).reshape(counts)
    layout, _, order = scan.partition("-")
    chosen, axes = Scan(layout, order or "raster"), transform.plan
    streams = (
        np.ascontiguousarray(chosen.arrange(symbols.astype(np.int32), axes)),
        indices.reshape(1, -1).astype(np.int32),
    )
    return Encoded("spectral", shape, dtype, params_of(axes, chosen), streams)


GRID, TRELLIS, TERNARY, CODEBOOK = (2, 0), (4, 5, 8, 16, 0, -70, 1), (5, 1, 3), (6, 2, 5, 0)
SPECTRAL = (9, 6, 1, 4, 0, 0, 1, 1)  # a DCT in blocks of 4, planes in Morton order
TUCKER_PARTS = [
    ((12, 20), torch.float32, (4, 5, *GRID, *GRID, *TRELLIS)),
    ((12, 10, 3, 3), torch.bfloat16, (6, 4, 3, 3, *SPECTRAL, *GRID, *TERNARY)),
    ((9, 8, 4), torch.float64, (9, 3, 4, *TRELLIS, *CODEBOOK)),
    ((6, 30), torch.float16, (2, 3, *CODEBOOK, *SPECTRAL, *GRID)),
    ((3, 4, 3, 4, 3), torch.float32, (2, 2, 2, 2, 2, *TERNARY, *GRID * 5)),
]


def tucker(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> Encoded:
    """Return a core and factors computed from integers, the same on every machine."""
    layout = decoder("tucker").layout(shape, dtype, params)
    books = [index for index, stream in enumerate(layout) if (stream.rows, stream.columns) == (1, 5)]
    streams = []
    for index, stream in enumerate(layout):
        noise = (np.arange(stream.rows * stream.columns) * 2654435761 % 4093).reshape(stream.rows, stream.columns)
        if index in books:
            values = np.arange(-40, 40, 16)[None]
        elif stream.hints.role == "scales":
            values = noise % 20 - 40
        elif index + 1 in books:
            values = noise % 5  # numbers of levels
        else:
            values = noise % 3 - 1 if stream.dtype == np.int8 else noise % 31 - 15
        streams.append(np.ascontiguousarray(values.astype(np.int32)))
    return Encoded("tucker", shape, dtype, params, tuple(streams))


LOSSLESS_PARTS = [
    ((9, 30), torch.float32, (MATCHES, 20, 31, 0)),
    ((12, 20), torch.int64, (MATCHES, 16, 25, 21, VALUES)),
    ((300,), torch.bool, (MATCHES, 8, 40, 13)),
    ((12, 40), torch.float32, (SCALED, 1, 40, 16, 0)),
    ((9, 50), torch.float16, (SCALED, 1, 16, 18, 1)),
    ((20, 14), torch.bfloat16, (SCALED, 8, 4, 9, 2)),
    ((20, 14), torch.float32, (SCALED, 20, 1, 300, 1)),
    ((10, 32), torch.float16, (SCALED, 2, 32, 16, 3)),
    ((7, 24), torch.bfloat16, (TABLES, 5)),
]


def lossless_form(shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> Encoded:
    """Return a lossless tensor computed from integers, the same on every machine."""
    layout = decoder("lossless").layout(shape, dtype, params)
    streams = [
        (np.arange(stream.rows * stream.columns) * 2654435761 % 4093).reshape(stream.rows, stream.columns)
        for stream in layout
    ]
    if params[0] == MATCHES:
        _, matches, literals, orders, *_ = params
        size = int(np.prod(shape)) - literals
        counts = np.arange(matches) % 2 + 1
        lengths = np.full(matches, size // matches)
        lengths[-1] += size - int(lengths.sum())
        for index, numbers in enumerate((counts, lengths, np.ones(matches, np.int64))):
            streams[index - 3] = steps(numbers.astype(np.int64), orders // 3**index % 3)[None]
        highest = 1 if dtype is torch.bool else 127
        streams[:-3] = [stream % (highest + 1) for stream in streams[:-3]]
    else:
        count = params[1] if params[0] == TABLES else params[3]
        streams[0] %= count
        first = 1
        if params[0] == SCALED and params[4] < 3:
            gaps = np.ones((1, count), np.int64)
            gaps[0, 0], gaps[0, 3] = -2, 0  # −2, −1, −0, 0, 1, …
            streams[1], first = gaps, 2
        for index in range(first, len(streams)):  # exponents of numbers below 1
            highest = layout[index].hints.role == "exponent"
            streams[index] = streams[index] % 16 + 110 if highest else streams[index] % 256
    return Encoded("lossless", shape, dtype, params, tuple(np.ascontiguousarray(stream) for stream in streams))


@pytest.mark.parametrize(
    ("scheme", "tensors"),
    [
        ("lossless", {str(i): lossless_form(*part) for i, part in enumerate(LOSSLESS_PARTS)}),
        ("spectral", {f"{i} {part[0].kind}": spectral(*part) for i, part in enumerate(SPECTRAL_PARTS)}),
        ("tucker", {str(i): tucker(*part) for i, part in enumerate(TUCKER_PARTS)}),
    ],
    ids=["lossless", "spectral", "tucker"],
)
def test_golden_coefficients_load_and_are_written_alike(
    scheme: str, tensors: dict[str, Encoded], tmp_path: Path
) -> None:
    fresh = write(tensors)
    known, loaded = golden(scheme, fresh, tmp_path)
    for name, encoded in tensors.items():
        assert torch.equal(loaded[name], decode(encoded)), name
        assert bool(loaded[name].any())
    entries, written = ([reader.read(name) for name in tensors] for reader in (known, container.Reader(fresh)))
    assert written == entries
    assert {entry.scheme for entry in entries} == {CODES[scheme]}


def test_the_reference_decoder_reads_the_golden_forms(tmp_path: Path) -> None:
    reader, tensors = pinned(tmp_path, "lossless")
    for index, (shape, dtype, params) in enumerate(LOSSLESS_PARTS):
        entry, layout = reader.read(str(index)), decoder("lossless").layout(shape, dtype, params)
        streams = [
            reference.decode(stream.coder, b"".join(stream.pieces()), kind.rows, kind.columns)
            for stream, kind in zip(entry.streams, layout, strict=True)
        ]
        name = str(dtype).removeprefix("torch.")
        words = decode_form(name, rows_columns(shape), params, streams)
        assert words == to_bits(tensors[str(index)]).reshape(-1).tolist(), params


def test_the_golden_files_hold_every_transform_and_scan() -> None:
    transforms = [transform_of(spectral(*part).params) for part in SPECTRAL_PARTS]
    assert {axes.kind for axes, _ in transforms} == set(KINDS)
    assert {scan.layout for _, scan in transforms} == set(LAYOUTS)
    assert {scan.order for _, scan in transforms} == set(ORDERS)


OWN_FILES = sorted(CODES.keys() - {scheme_of(spec) for _, spec in RULES} - {"spectral", "tucker"})


@pytest.mark.parametrize("name", OWN_FILES)
def test_the_golden_file_of_a_newer_scheme_decodes_to_what_it_had(name: str, tmp_path: Path) -> None:
    """A matrix by the example of each of its words."""
    specs = [word.example for word in registry.words().values() if word.scheme.decoder.name == name]
    matrix = content()["model"]["matrix"]
    fresh = write({spec: registry.parse_spec(spec).encode(spec, matrix) for spec in specs})
    pinned, tensors = golden(f"scheme_{name}", fresh, tmp_path)
    assert {pinned.read(spec).scheme for spec in tensors} == {CODES[name]}
