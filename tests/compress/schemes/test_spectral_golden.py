"""One small file of spectral coefficients: each transform and each scan; written today, it stays readable."""

import os
from pathlib import Path

import numpy as np
import torch
from birdie.compress.schemes.decode_spectral import described
from birdie.compress.schemes.decode_transform import KINDS, cosines

import birdie
from birdie.artifact import container
from birdie.artifact.writer import SCHEMES
from birdie.compress.log_scales import scales_of
from birdie.compress.registry import decode
from birdie.compress.scheme import Encoded
from birdie.compress.schemes.spectral import encoded
from birdie.compress.spectral.scan import LAYOUTS, ORDERS
from birdie.compress.spectral.transforms import Transform
from tests.artifact.test_golden import fingerprint

GOLDEN = Path(__file__).parents[2] / "golden" / "spectral.hex"
PARTS = [
    (Transform("identity"), (12, 20), "none", torch.float32),
    (Transform("identity"), (3, 4, 2, 2), "planes-morton", torch.bfloat16),
    (Transform("dct"), (8, 24), "blocks-zigzag", torch.float32),
    (Transform("dct", 5), (7, 12, 3, 3), "planes-zigzag", torch.float32),
    (Transform("dct", 4, axes="kernel"), (6, 4, 3, 5), "planes-morton", torch.float64),
    (Transform("dct", 2), (6, 4, 2), "blocks-morton", torch.float16),
    (Transform("wavelet53", levels=2), (9, 17), "planes", torch.float32),
    (Transform("wavelet97", levels=4), (33,), "none", torch.float32),
    (Transform("hadamard"), (6, 24), "none", torch.float32),
]


class Stored:
    """A scheme that gives what it is told: coefficients made of integers, the same on every machine."""

    def __init__(self, transform: Transform, shape: tuple[int, ...], scan: str, dtype: torch.dtype) -> None:
        counts = transform.plan.counts(shape)
        places, cells = np.arange(int(np.prod(shape))), np.arange(int(np.prod(counts)))
        symbols = (places * 2654435761 % 4093 % 31 - 15).reshape(shape)
        indices = (cells * 2654435761 % 4093 % 40 - 80).reshape(counts)
        self.encoded = encoded(shape, dtype, symbols, indices, transform, scan)

    def encode(self, name: str, weight: torch.Tensor, **_: object) -> Encoded:
        """What it was told, of whatever weight."""
        assert (name, self.encoded.shape) == (name, tuple(weight.shape))
        return self.encoded


def test_golden_spectral_file_loads_as_it_did_and_is_written_alike(tmp_path: Path) -> None:
    """GENERATE_EXPECTED=1 writes the file anew: a breaking change."""
    parts = {f"{index} {part[0].kind}": part for index, part in enumerate(PARTS)}
    fresh, path = tmp_path / "fresh.birdie", tmp_path / "golden.birdie"
    state = {name: torch.ones(part[1], dtype=part[3]) for name, part in parts.items()}
    birdie.save(state, fresh, scheme=[(name, Stored(*part)) for name, part in parts.items()])
    if os.environ.get("GENERATE_EXPECTED"):
        GOLDEN.write_text(f"{fingerprint(birdie.load(fresh))}\n{fresh.read_bytes().hex()}\n")
    pinned, data = GOLDEN.read_text().split()
    path.write_bytes(bytes.fromhex(data))
    tensors = birdie.load(path)
    assert fingerprint(tensors) == pinned
    for name, part in parts.items():
        assert torch.equal(tensors[name], decode(Stored(*part).encoded)), name
    entries, written = ([container.Reader(each.read_bytes()).read(name) for name in tensors] for each in (path, fresh))
    assert written == entries
    assert {each.scheme for each in entries} == {SCHEMES["spectral"]}
    described_by = [described(each.params) for each in entries]
    assert {axes.kind for axes, _ in described_by} == set(KINDS)
    assert {scan.layout for _, scan in described_by} == set(LAYOUTS)
    assert {scan.order for _, scan in described_by} == set(ORDERS)


def test_a_block_is_the_sum_that_the_format_describes() -> None:
    """Frequencies rise, axes run from the last to the first, in plain Python's float64."""
    transform, shape = Transform("dct", 3), (3, 3)
    symbols = np.array([[5, -2, 1], [3, 0, -1], [1, 2, 4]])
    found = decode(encoded(shape, torch.float64, symbols, np.full((), -33), transform, "none")).numpy()
    basis, step = cosines(3).tolist(), float(scales_of(np.array(-33)))
    block = [[float(symbol) * step for symbol in row] for row in symbols.tolist()]
    for axis in (1, 0):
        lines = block if axis == 1 else [list(line) for line in zip(*block, strict=True)]
        turned = []
        for line in lines:
            total = [basis[0][place] * line[0] for place in range(3)]
            for k in (1, 2):
                total = [total[place] + basis[k][place] * line[k] for place in range(3)]
            turned.append(total)
        block = turned if axis == 1 else [list(line) for line in zip(*turned, strict=True)]
    np.testing.assert_array_equal(found, np.array(block).astype(np.float32).astype(np.float64))
