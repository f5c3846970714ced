"""One small file of cores and factors, held by every scheme that may; written today, it stays readable."""

import os
from pathlib import Path

import numpy as np
import torch

import birdie
from birdie.artifact import container
from birdie.artifact.writer import SCHEMES
from birdie.compress.scheme import Encoded
from birdie.compress.schemes.decode_tucker import INNER
from birdie.compress.schemes.decoders import DECODERS, decode
from tests.artifact.test_golden import fingerprint

GOLDEN = Path(__file__).parents[2] / "golden" / "tucker.hex"
GRID, TRELLIS, TERNARY, CODEBOOK = (2, 0), (4, 5, 8, 16, 0, -70, 1), (5, 1, 3), (6, 2, 5, 0)
SPECTRAL = (9, 6, 1, 4, 0, 0, 1, 1)  # a DCT in blocks of 4, planes by zig-zag
PARTS = [
    ((12, 20), torch.float32, (4, 5, *GRID, *GRID, *TRELLIS)),
    ((12, 10, 3, 3), torch.bfloat16, (6, 4, 3, 3, *SPECTRAL, *GRID, *TERNARY)),
    ((9, 8, 4), torch.float64, (9, 3, 4, *TRELLIS, *CODEBOOK)),
    ((6, 30), torch.float16, (2, 3, *CODEBOOK, *SPECTRAL, *GRID)),
    ((3, 4, 3, 4, 3), torch.float32, (2, 2, 2, 2, 2, *TERNARY, *GRID * 5)),
]


class Stored:
    """A scheme that gives what it is told: parts made of integers, the same on every machine."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, params: tuple[int, ...]) -> None:
        layout = DECODERS["tucker"].layout(shape, dtype, params)
        levels = [index + 1 for index, each in enumerate(layout) if (each.rows, each.columns) == (1, 5)]
        self.encoded = Encoded("tucker", shape, dtype, params, ())
        streams = []
        for index, each in enumerate(layout):
            noise = (np.arange(each.rows * each.columns) * 2654435761 % 4093).reshape(each.rows, each.columns)
            if index + 1 in levels:
                found = np.arange(-40, 40, 16)[None]
            elif each.hints.role == "scales":
                found = noise % 20 - 40
            elif index + 1 < len(layout) and index + 2 in levels:
                found = noise % 5
            else:
                found = noise % 3 - 1 if each.dtype == np.int8 else noise % 31 - 15
            streams.append(np.ascontiguousarray(found.astype(np.int32)))
        self.encoded = Encoded("tucker", shape, dtype, params, tuple(streams))

    def encode(self, name: str, weight: torch.Tensor, **_: object) -> Encoded:
        """What it was told, of whatever weight."""
        assert (name, self.encoded.shape) == (name, tuple(weight.shape))
        return self.encoded


def test_golden_tucker_file_loads_as_it_did_and_is_written_alike(tmp_path: Path) -> None:
    """GENERATE_EXPECTED=1 writes the file anew: a breaking change."""
    parts = {str(index): part for index, part in enumerate(PARTS)}
    fresh, path = tmp_path / "fresh.birdie", tmp_path / "golden.birdie"
    state = {name: torch.ones(part[0], dtype=part[1]) for name, part in parts.items()}
    birdie.save(state, fresh, scheme=[(name, Stored(*part)) for name, part in parts.items()])
    if os.environ.get("GENERATE_EXPECTED"):
        GOLDEN.write_text(f"{fingerprint(birdie.load(fresh))}\n{fresh.read_bytes().hex()}\n")
    pinned, data = GOLDEN.read_text().split()
    path.write_bytes(bytes.fromhex(data))
    tensors = birdie.load(path)
    assert fingerprint(tensors) == pinned
    for name, part in parts.items():
        assert torch.equal(tensors[name], decode(Stored(*part).encoded)), name
        assert bool(tensors[name].any())
    entries, written = ([container.Reader(each.read_bytes()).read(name) for name in tensors] for each in (path, fresh))
    assert written == entries
    assert {each.scheme for each in entries} == {SCHEMES["tucker"]}
    inside = {code for _, _, params in PARTS for code in INNER if code in params}
    assert inside == set(INNER)
