"""Decoders under attack, and the files and mutations with which `tests.hostile.fuzz` attacks them.

    file ──► birdie ─────────┐
         ──► one-file decoder ├──► the same tensors, or all refuse it
         ──► WebAssembly ─────┘

What the decoder in WebAssembly does not decode it refuses in so many words, an outcome of its own (`OUTCOMES`).
"""

import contextlib
import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from birdie.artifact import container, kept_files, repack
from birdie.artifact.container import DELTA
from birdie.artifact.file import DTYPES
from birdie.artifact.loading import load
from birdie.artifact.options import Limits
from birdie.artifact.safetensors_export import to_safetensors
from birdie.chain.link_content import restore
from birdie.checkpoints import pytree as tree
from birdie.entropy import coder
from birdie.entropy.hints import Hints
from birdie.entropy.trellis_states import STATES
from birdie.errors import ArtifactError, WeightsError
from birdie.standalone import decoder
from tests.hostile import difference_seeds, made, mutate, odd_metadata, seeds, tile_streams
from tests.hostile.seeds import Seed
from tests.hostile.webassembly import NOT_DECODED, Decoder, is_compiler_installed, is_installed

MAX_BYTES = 1 << 20  # that a mutant may decode to
AGREEMENT = "WebAssembly, "
_LIMITS = "to decode, more than"  # limits of memory and time, which decoders count in their own ways
_BEYOND = "the order of tensors"  # names in order, which the decoder in C does not restore
Content = Any
OUTCOMES = Counter[str]()
"""Outcomes of the mutants in WebAssembly: AGREEMENT and the outcome → number."""
_node: Decoder | None = None


class BrokenError(Exception):
    """A decoder did what it never should."""


@contextlib.contextmanager
def webassembly(*, short: bool = False) -> Iterator[None]:
    """Have WebAssembly decode as well, in short chunks if asked, if what that needs is installed."""
    global _node
    if not (is_compiler_installed() if short else is_installed()):
        yield
        return
    with Decoder(short=short) as _node:
        try:
            yield
        finally:
            _node = None


def _agree(expected: Content | ArtifactError, decode: Callable[[Decoder], Content]) -> None:
    """Raise BrokenError unless WebAssembly decodes what birdie does, or refuses what birdie refuses.

    Args:
        expected: what birdie decoded, as that decoder describes it, or its refusal.
        decode: asks the decoder.
    """
    if _node is None:
        return
    try:
        decoded = decode(_node)
    except ArtifactError as error:
        is_foreign = NOT_DECODED in str(error)
        if not isinstance(expected, ArtifactError) and not is_foreign:
            raise BrokenError(f"WebAssembly refuses what birdie accepts: {error}") from None
        OUTCOMES[f"{AGREEMENT}{_reason(error) if is_foreign else 'refused'}"] += 1
        return
    if isinstance(expected, ArtifactError):
        if _LIMITS not in str(expected) and _BEYOND not in str(expected):
            raise BrokenError(f"WebAssembly accepts what birdie refuses: {expected}")
        OUTCOMES[f"{AGREEMENT}decoded beyond birdie's limits, or out of order"] += 1
        return
    if decoded != expected:
        raise BrokenError("WebAssembly decodes something else")
    OUTCOMES[f"{AGREEMENT}the same"] += 1


def _reason(error: ArtifactError) -> str:
    """Return what is not decoded, without names and numbers."""
    return re.sub(r"\d+", "N", str(error).rpartition("': ")[2].partition(";")[0])[:80]


def decode_tiles(_: Seed, data: bytes, path: Path) -> Content:
    """Every stream of tiles as numbers, and the weights made of them."""
    return tile_streams.decode(data, path)


def decode_streams(_: Seed, data: bytes, __: Path) -> Content:
    """Every stream as the shape of its entry, and what that gives."""
    return _streams(data)


def _streams(data: bytes) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Return (name of the entry, shape, values as int32) of every stream."""
    reader, out = container.Reader(data), list[tuple[str, tuple[int, ...], bytes]]()
    if reader.fields is None:
        raise BrokenError("metadata are no dict")
    for name in reader.names:
        entry = reader.read(name)
        rows, columns = (*entry.shape, 1, 1)[:2]
        if rows * columns > MAX_BYTES:
            raise ArtifactError("refused by the bound of the test")
        for stream in entry.streams:
            hints = Hints(states=next((number for number in entry.params if abs(number) in STATES), 1))
            values = coder.decode(stream.coder, stream.payload, rows, columns, hints, threads=1)
            if values.shape != (rows, columns) or values.dtype not in ("i1", "i2", "i4"):
                raise BrokenError(f"{name} decoded to {values.dtype} {values.shape}, not {(rows, columns)}")
            out.append((name, values.shape, values.astype("<i4").tobytes()))
    return out


def decode_artifact(seed: Seed, data: bytes, path: Path) -> Content:
    """The file as a user loads it; the one-file decoder and WebAssembly say the same of it."""
    path.write_bytes(data)
    alone = _outcome(lambda: decoder.load(data, max_bytes=MAX_BYTES))
    expected = alone if isinstance(alone, ArtifactError) else {name: _described(one) for name, one in alone.items()}
    _agree(expected, lambda node: node.tensors(data, MAX_BYTES))
    loaded = _outcome(lambda: load(path, base=seed.base, max_bytes=MAX_BYTES, workers=1))
    reader = container.Reader(data) if not isinstance(loaded, ArtifactError) else None
    if reader is None or DELTA in reader.kinds:
        if not isinstance(alone, ArtifactError) and not _is_of_modules(data):
            raise BrokenError(f"the one-file decoder accepts what birdie refuses: {loaded}")
    elif loaded != alone:
        raise BrokenError(f"the one-file decoder decodes something else, or refuses: {alone}")
    if isinstance(loaded, ArtifactError):
        raise loaded
    assert reader is not None
    if tuple(sorted(loaded)) != tuple(sorted(reader.names)):
        raise BrokenError(f"loaded {list(loaded)}, not {reader.names}")
    for name, (dtype, shape, _) in loaded.items():
        entry = reader.entry(name)
        if shape != entry.shape or dtype != str(DTYPES[entry.dtype]):
            raise BrokenError(f"{name} loaded as {dtype} {shape}, not {entry.shape}")
    if seed.base is None:
        _convert(path)
    return loaded, kept_files.read(reader, MAX_BYTES)


def _is_of_modules(data: bytes) -> bool:
    """Return whether a file has versions or extra states of modules, of which readers of tensors alone know nothing."""
    return "state" in container.Reader(data).fields


def _convert(path: Path) -> None:
    """Write the file as safetensors, if it can be."""
    converted = path.with_suffix(".safetensors")
    with contextlib.suppress(ArtifactError, WeightsError):
        to_safetensors(path, converted, Limits(max_bytes=MAX_BYTES, workers=1))
        with converted.open("rb") as file:
            header = 8 + int.from_bytes(file.read(8), "little")
        if (written := converted.stat().st_size - header) > MAX_BYTES:
            raise BrokenError(f"{written:,} bytes of tensors were written, more than allowed")


def _outcome(decode: Callable[[], dict[str, torch.Tensor]]) -> Content | ArtifactError:
    """Return the tensors as bits, or the refusal."""
    try:
        return {name: _bits(tensor) for name, tensor in decode().items() if isinstance(tensor, torch.Tensor)}
    except ArtifactError as error:
        return error


def decode_tree(_: Seed, data: bytes, path: Path) -> Content:
    """The file as a whole checkpoint, taken apart again."""
    path.write_bytes(data)
    tensors, skeleton = tree.flatten(repack.load_object(path, max_bytes=MAX_BYTES, workers=1))
    return json.dumps(skeleton), {name: _bits(tensor) for name, tensor in tensors.items()}


def decode_chain(seed: Seed, data: bytes, path: Path) -> Content:
    """The last link of a chain in which the mutant is one: its tensors, and the files of its checkpoint."""
    folder = path.with_suffix(".chain")
    folder.mkdir(exist_ok=True)
    for name, content in {**seed.beside, seed.name: data}.items():
        (folder / name).write_bytes(content)
    last, target = folder / max((*seed.beside, seed.name)), path.with_suffix(".restored")
    loaded = {name: _bits(one) for name, one in load(last, max_bytes=MAX_BYTES, workers=1).items()}
    restore(last, target)
    files = {file.relative_to(target).as_posix(): file.read_bytes() for file in target.rglob("*") if file.is_file()}
    for file in sorted(target.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    target.rmdir()
    return loaded, files


def _described(bits: tuple[str, tuple[int, ...], bytes]) -> tuple[str, list[int], str]:
    """Return the bits of a tensor as that decoder describes them."""
    dtype, shape, data = bits
    return dtype.removeprefix("torch."), list(shape), hashlib.sha256(data).hexdigest()


def _bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    flat = tensor.detach().contiguous().reshape(-1)
    return str(tensor.dtype), tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


Mutate = Callable[[Seed, random.Random], bytes]


@dataclass(frozen=True)
class Target:
    """A decoder under test, and how its files are damaged.

    Attributes:
        decode: (seed, file, a path it may use) → what it holds, comparable.
        sound: the files it starts from.
        repaired: the mutations that leave checksums right.
        share: of all mutants, against the other targets.
    """

    decode: Callable[[Seed, bytes, Path], Content]
    sound: Callable[[], list[Seed]]
    repaired: dict[str, Mutate]
    share: int


def _odd(seed: Seed, rng: random.Random) -> bytes:
    """Return the file with odd metadata."""
    fields = json.loads(bytes(seed.reader.metadata) or b"{}")
    return container.to_bytes(seed.entries, odd_metadata.odd(fields, rng))


_OF_METADATA: dict[str, Mutate] = {"tree": mutate.tree, "odd": _odd}
TARGETS = {
    "streams": Target(decode_streams, seeds.streams, {**mutate.REPAIRED, "made": made.stream}, 30),
    "artifact": Target(decode_artifact, seeds.artifacts, {**mutate.REPAIRED, "odd": _odd}, 4),
    "tree": Target(decode_tree, seeds.trees, {**mutate.REPAIRED, "tree": mutate.tree}, 1),
    "difference": Target(decode_artifact, difference_seeds.differences, {**mutate.REPAIRED, **_OF_METADATA}, 2),
    "chain": Target(decode_chain, difference_seeds.links, {**mutate.REPAIRED, **_OF_METADATA}, 1),
    "tiles": Target(decode_tiles, tile_streams.sound, {**mutate.REPAIRED, "made": made.tiles}, 4),
}
