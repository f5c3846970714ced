"""One small artifact with every scheme, every form of integers, a tie and a tree: files written today stay readable."""

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import birdie
from birdie.artifact import container, metadata
from birdie.artifact import pytree as tree
from birdie.artifact.save import SCHEMES
from birdie.compress.schemes.lossless import DIFFERENCES, HALVES, LISTED, VALUES
from tests.reference.decoder import decode
from tests.reference.trellis import decode_trellis

GOLDEN = Path(__file__).parents[1] / "golden" / "artifact.hex"
LOSSLESS = SCHEMES["lossless"]
FITTED = {
    SCHEMES[name] for name in ("grid", "trellis", "ternary", "codebook", "rotation", "lowrank")
}  # by floats: may differ
RULES = [
    *(
        ("*matrix", "int6"),
        ("*grouped", "int4:group_size=20"),
        ("*ternary", "ternary:group_size=12"),
        ("*table", "codebook:k=9"),
    ),
    *(("*rotated", "rotation:bits=3,residual"), ("*corrected", "lowrank:rank=2,base=codebook:k=4,per_row")),
    *(("*paths", "trellis:states=8,sigma=0.4"), ("*norm", "bf16"), ("*", "lossless")),
]


def content() -> dict[str, Any]:
    """A checkpoint whose tensors take each way to store one. Values are made of integers: the same on every machine."""
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
    tensors, skeleton = tree.flatten(content())
    birdie.save(tensors, path, scheme=RULES, tree=skeleton)
    return container.Reader(path.read_bytes())


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """A hash of names, dtypes, shapes and bits."""
    hashed = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        hashed.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def test_golden_artifact_loads_as_it_did_and_is_written_alike(tmp_path: Path) -> None:
    """The tensors are pinned by a hash; entries that no float arithmetic chose are written alike too.

    GENERATE_EXPECTED=1 writes the file anew: a breaking change.
    """
    path = tmp_path / "golden.birdie"
    fresh = saved(tmp_path / "fresh.birdie")
    if os.environ.get("GENERATE_EXPECTED"):
        tensors = birdie.load(tmp_path / "fresh.birdie")
        GOLDEN.write_text(f"{fingerprint(tensors)}\n{(tmp_path / 'fresh.birdie').read_bytes().hex()}\n")
    pinned, data = GOLDEN.read_text().split()
    path.write_bytes(bytes.fromhex(data))
    golden, tensors = container.Reader(bytes.fromhex(data)), birdie.load(path)
    assert fingerprint(tensors) == pinned
    assert golden.metadata == fresh.metadata
    assert golden.names == fresh.names
    entries = [golden.read(name) for name in golden.names]
    sure = [each for each in entries if each.scheme not in FITTED]
    assert [fresh.read(each.name) for each in sure] == sure
    forms = {each.params[:1] for each in entries if each.scheme == LOSSLESS}
    assert forms == {(), (HALVES,), (VALUES,), (DIFFERENCES,), (LISTED,)}
    later = {SCHEMES["spectral"], SCHEMES["tucker"]}  # have golden files of their own
    assert {each.scheme for each in entries} == {container.ALIAS, *SCHEMES.values()} - later


def test_the_second_decoder_reads_the_golden_trellis(tmp_path: Path) -> None:
    path = tmp_path / "golden.birdie"
    data, name = bytes.fromhex(GOLDEN.read_text().split()[1]), "model/paths"
    path.write_bytes(data)
    entry, found = container.Reader(data).read(name), birdie.load(path)[name]
    states, _, along = entry.params[:3]
    shapes = [tuple(found.shape), (found.shape[0], 1), (found.shape[1], 1)][: 3 if along else 2]
    coded = zip(entry.streams, shapes, [states, 1, 1], strict=False)
    streams = [decode(stream.coder, stream.payload, *shape, paths) for stream, shape, paths in coded]
    assert found.tolist() == decode_trellis(entry.params, streams)


def test_the_golden_tree_is_the_one_that_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "golden.birdie"
    data = bytes.fromhex(GOLDEN.read_text().split()[1])
    path.write_bytes(data)
    about = metadata.parse(container.Reader(data).metadata, "the golden artifact")
    checkpoint, expected = tree.rebuild(about["tree"], birdie.load(path)), content()
    assert [*checkpoint["model"]] == [*expected["model"]]
    assert checkpoint["model"]["head"] is checkpoint["model"]["embedding"]
    assert checkpoint["optimizer"][1] == expected["optimizer"][1]
    fitted = {"matrix", "grouped", "ternary", "table", "rotated", "corrected", "paths", "norm"}
    for name in set(expected["model"]) - fitted:
        assert torch.equal(checkpoint["model"][name], expected["model"][name]), name
    assert torch.equal(checkpoint["optimizer"][0]["positions"], expected["optimizer"][0]["positions"])
