"""Small sound files for the fuzzer, which together reach every coder, scheme and feature of the formats."""

import tempfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from birdie.artifact import container, repack
from birdie.artifact.container import ALIAS, Entry, Stream
from birdie.artifact.options import SaveOptions
from birdie.artifact.saving import save as save_file
from birdie.artifact.saving import write_model
from birdie.compress import registry, row_blocks
from birdie.entropy import coder, mixed, numbers, rans_tiles, raw, side_information, static, tiles
from birdie.entropy import coding_plan as plan
from birdie.entropy import payload as payloads
from birdie.entropy import trellis_states as trellis
from birdie.entropy.varint import varint

_SPECS = (  # features that the examples of the registry lack
    *(
        "trellis:states=8,sigma=0.3",
        "ternary:group_size=7",
        "int4:group_size=6",
        "codebook:k=9,per_row",
        "rotation:bits=3",
    ),
    *(
        "lowrank:rank=2,base=int3:group_size=7",
        "spectral:dct,edge=4,sigma=0.3",
        "spectral:wavelet53,sigma=0.3,scan=none",
    ),
    *("tucker:energy=0.4", "tucker:energy=0.3,base=spectral:dct,edge=4", "tucker:energy=0.5,base=trellis:states=8"),
)
Values = NDArray[np.integer]
CHUNK = 256  # symbols, so that small arrays have several chunks
TILE = 16  # rows


@dataclass(frozen=True)
class Side:
    """The side information of a stream as numbers and their contexts, and the bytes that follow it."""

    contexts: NDArray[np.int64]
    numbers: NDArray[np.int64]
    rest: bytes

    def payload(self, code: int) -> bytes:
        """The stream of coder `code` (numbers, static or mixed) with this side information."""
        writer = side_information.SideWriter()
        writer._contexts, writer._numbers = [self.contexts], [self.numbers]
        words = writer.finish()
        return (b"" if code == coder.NUMBERS else varint(words.size)) + words.astype("<u2").tobytes() + self.rest


@dataclass(frozen=True)
class Seed:
    """A sound file.

    Attributes:
        data: its bytes.
        sides: what the side information of its streams says, by entry and stream.
        base: tensors that it holds deltas to, for a reader to give.
        name: of the file, where it is a link of a chain.
        beside: name → bytes of the other links.
    """

    data: bytes
    sides: dict[tuple[int, int], Side]
    base: dict[str, torch.Tensor] | None = None
    name: str = "mutant.birdie"
    beside: dict[str, bytes] = field(default_factory=dict)

    @cached_property
    def reader(self) -> container.Reader:
        """The file, opened."""
        return container.Reader(self.data)

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Everything in it, blocks and kept files included."""
        return tuple(self.reader.read(name) for name in self.reader._index)


@contextmanager
def short_chunks() -> Iterator[None]:
    """Coders that cut short tiles, and chunks of CHUNK symbols, not a million: the same code, quicker to reach."""
    with mock.patch.object(trellis, "CHUNK", CHUNK), mock.patch.object(rans_tiles, "_ROWS", TILE):
        yield


@contextmanager
def recorded(known: dict[bytes, tuple[NDArray[np.int64], NDArray[np.int64]]]) -> Iterator[None]:
    """Remember in `known` what numbers the words of every finished writer stand for."""
    finish = side_information.SideWriter.finish

    def record(writer: side_information.SideWriter) -> side_information.Words:
        words = finish(writer)
        if writer._numbers:
            known[words.tobytes()] = np.concatenate(writer._contexts), np.concatenate(writer._numbers)
        return words

    with mock.patch.object(side_information.SideWriter, "finish", record):
        yield


def arrays() -> dict[str, tuple[Values, tuple[int, int]]]:
    """Arrays by the feature they are for, with the kernel of a convolution."""
    rng = np.random.default_rng(7)
    wide = rng.normal(0, 1, (128, 32)) * np.geomspace(0.5, 60, 128)[rng.permutation(128), None]
    base = rng.normal(0, 40, (8, 32))
    near = np.concatenate([base, base[rng.integers(0, 8, 64)] + rng.normal(0, 1, (64, 32))]) + 20 * np.sin(
        np.arange(32)
    )
    smooth = np.cumsum(rng.normal(0, 2, (16, 16, 9)), -1).reshape(16, 144)
    numbers_far = np.concatenate([np.arange(6), [900, 70_000, 2**30, -(2**31)]])
    numbers = {
        "plain": (rng.normal(0, 3, (20, 40)), (1, 1)),
        "classes": (wide, (1, 1)),
        "columns first": (wide.T, (1, 1)),
        "rows": (near, (1, 1)),
        "taps": (smooth, (3, 3)),
        "listed": (rng.choice(numbers_far, (40, 30)), (1, 1)),
        "low bits": (rng.normal(0, 300, (24, 40)), (1, 1)),
        "split": (np.clip(rng.standard_cauchy((40, 30)) * 2000, -(2**30), 2**30), (1, 1)),
        "vector": (rng.normal(0, 20, (1, 700)), (1, 1)),
    }
    return {name: (np.rint(values).astype(np.int64), kernel) for name, (values, kernel) in numbers.items()}


def _coded() -> Iterator[tuple[str, Values, int, bytes, int]]:
    """Name, array, coder, payload, states of the trellis whose paths it holds."""
    rng = np.random.default_rng(3)
    plain = rng.normal(0, 3, (9, 9)).round().astype(int)
    yield "constant", np.full((3, 5), -4), coder.CONSTANT, raw.encode_constant(-4), 1
    yield "bytes", plain & 255, coder.BYTES, (plain & 255).astype(np.uint8).tobytes(), 1
    yield "packed", plain, coder.PACKED, raw.encode_packed(plain, int(plain.min()), int(plain.max())), 1
    yield "numbers", plain, coder.NUMBERS, numbers.encode(plain), 1
    rising = np.arange(90).reshape(90, 1) // 3
    yield "running", rising, coder.NUMBERS, numbers.encode(rising), 1
    for name, (values, kernel) in arrays().items():
        yield f"static {name}", values, coder.STATIC, static.encode(values, kernel), 1
        some = values[: max(1, 600 // values.shape[1])] if name != "columns first" else values[:, :20]
        payload = mixed.encode(some, kernel)
        if payload is not None:
            yield f"mixed {name}", some, coder.MIXED, payload, 1
    for states, name in (4, "plain"), (256, "listed"), (8, "low bits"), (32, "vector"), (-8, "plain"):
        some = arrays()[name][0][:15]
        payload = mixed.encode(some, (1, 1), states)
        assert payload is not None
        yield f"mixed {name}, {states} states", some, coder.MIXED, payload, states
    sparse = np.where(np.arange(40)[:, None] % 3 == 1, 0, arrays()["plain"][0][np.arange(40) % 20])
    near = np.where(abs(arrays()["listed"][0]) < 1000, arrays()["listed"][0], 70_000).reshape(30, 40)
    for name, values, states in (
        ("plain", arrays()["plain"][0], 1),
        ("classes", arrays()["classes"][0], 1),
        ("columns first", arrays()["columns first"][0], 1),
        ("sparse", sparse, 1),
        ("listed", near, 1),
        ("raw bits", arrays()["low bits"][0], 1),
        ("sparse, 4 states", sparse, 4),
        ("32 states", some, 32),
    ):
        payload = tiles.encode(plan.search(values, (1, 1), states), states)
        assert payload is not None
        yield f"tiles {name}", values, coder.TILES, payload, states
    for states in 8, -32:
        some = np.random.default_rng(5).normal(0, 1, (128, 64)).round().astype(np.int64)
        yield f"static, {states} states", some, coder.STATIC, static.encode(some, (1, 1), states), states


def streams() -> list[Seed]:
    """One file for each coder and feature, an entry of one stream and an alias of it."""
    known: dict[bytes, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
    out = []
    with recorded(known):
        coded = list(_coded())
    for name, values, code, payload, states in coded:
        entry = Entry(name, 1, 2, values.shape, (states,), (Stream(code, payload),))
        alias = Entry("~", 0, 2, values.shape, target=name, kind=ALIAS)
        side = side_of(code, payload, known)
        data = container.to_bytes([entry, alias], b"{}")
        out.append(Seed(data, {} if side is None else {(0, 0): side}))
    return out


def side_of(code: int, payload: bytes, known: dict[bytes, tuple[NDArray[np.int64], NDArray[np.int64]]]) -> Side | None:
    """Return the side information of a stream that was `recorded`; None for a coder without."""
    if code == coder.NUMBERS:
        return Side(*known[payload], b"")
    if code not in (coder.STATIC, coder.MIXED, coder.TILES):
        return None
    words, rest = payloads.split(payload)
    return Side(*known[words.astype("<u2").tobytes()], bytes(rest))


def written(save: Callable[[Path], object]) -> Seed:
    known: dict[bytes, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
    with tempfile.TemporaryDirectory() as folder, recorded(known):
        path = Path(folder) / "seed.birdie"
        save(path)
        reader = container.Reader(path.read_bytes())
        sides = {}
        for at, name in enumerate(reader._index):
            for index, stream in enumerate(reader.read(name).streams):
                side = side_of(stream.coder, stream.payload, known)
                if side is not None:
                    sides[at, index] = side
        return Seed(path.read_bytes(), sides)


def state() -> dict[str, torch.Tensor]:
    """Tensors of many dtypes, with a tied pair, a convolution, packed integers and indices that rise."""
    source = torch.Generator().manual_seed(3)
    matrix = torch.randn(24, 20, generator=source)
    nibbles = torch.tensor([0, 3, 8, 15])[torch.multinomial(torch.tensor([1.0, 4, 9, 1]), 4096, True, generator=source)]
    return {
        "a": matrix,
        "b": matrix.bfloat16(),
        "bool": matrix > 0,
        "c": matrix[:8].half(),
        "complex": torch.randn(4, 3, generator=source, dtype=torch.complex64),
        "conv": torch.randn(6, 4, 3, 3, generator=source).cumsum(-1).bfloat16(),
        "empty": torch.zeros(0, 3),
        "int8": (matrix * 20).round().to(torch.int8),
        "packed": (nibbles.view(32, 16, 8) << 4 * torch.arange(8)).sum(-1).to(torch.int32),
        "rising": torch.arange(300) ** 2 // 7,
        "small": torch.tensor([3, -100_000, 12, 9], dtype=torch.int32).repeat(30),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "tied": matrix,
    }


def artifacts() -> list[Seed]:
    """Whole files: lossless in all forms, every scheme of the registry, casts, aliases, blocks, kept files."""
    tensors = state()
    real = {name: tensor for name, tensor in tensors.items() if tensor.dtype in (torch.float32, torch.bfloat16)}
    options: list[tuple[dict[str, torch.Tensor], dict[str, Any]]] = [
        (tensors, {"lossless": True}),
        (tensors, {"lossless": True, "effort": "fast"}),
        (real, {"scheme": [("[abct]*", "int6"), ("*", "fp16")]}),
        (real, {"scheme": "bf16"}),
        *((real, {"scheme": [("[abct]*", spec), ("*", "fp16")]}) for spec in (*_SPECS, *_examples())),
    ]
    saved = [written(partial(save_file, some, workers=1, **how)) for some, how in options]
    return [*saved, *in_blocks()]


def _examples() -> Iterator[str]:
    """Yield a spec of every word of the registry, so that a new scheme has a seed."""
    for word in registry.words().values():
        yield word.example


def in_blocks() -> list[Seed]:
    """Files of tensors in blocks of 12 rows (in short chunks), one of them under two names, beside kept files."""
    large = torch.randn(30, 20, generator=torch.Generator().manual_seed(4))
    tensors = {"large": large, "small": large[:3], "stack": large.reshape(3, 10, 20).int(), "tied": large}
    files = {"config.json": b'{"a": 1}', "tokenizer/vocab.txt": b"a b c " * 20}
    with mock.patch.object(row_blocks, "LARGE", 300), mock.patch.object(row_blocks, "_BLOCK", CHUNK):
        return [
            written(partial(write_model, tensors, options=options, files=files))
            for options in (SaveOptions(lossless=True, workers=1), SaveOptions(scheme="int6", effort="fast", workers=1))
        ]


def trees() -> list[Seed]:
    """Repacked checkpoints: every kind of node that stands around tensors."""
    weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    held = OrderedDict(w=weight, b=torch.ones(3))
    vars(held)["_metadata"] = OrderedDict({"": {"version": 1}})
    content = {
        "model": held,
        "optimizer": {
            "state": {0: {"step": torch.tensor(4.0), "m": torch.zeros(3, 4)}, 1: {"step": torch.tensor(4.0)}},
            "groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
        },
        "list": [torch.arange(3), (None, True, "text", 1 << 80, float("nan"), 2j, b"\0\1", bytearray(b"x"))],
        "kinds": {torch.float32, torch.device("cpu"), torch.Size([2, 3])},
        "counts": Counter({"a": 3, ("b", 1): 2}),
        "7": torch.arange(2),
        7: torch.arange(3),
        "a/b~": torch.arange(4),
    }
    plain = {
        "z": torch.arange(5),
        "a": {"y": torch.ones(2), "x": torch.zeros(2)},
        "b": {"y": torch.ones(2), "x": torch.ones(3)},
    }
    contents = content, plain, torch.arange(6), [torch.ones(2), torch.ones(3)]
    return [written(partial(repack.save_object, held, workers=1)) for held in contents]
