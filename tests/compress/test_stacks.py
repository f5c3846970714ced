"""Stacks of matrices, such as the experts of a layer: each matrix is stored as well as in a tensor of its own."""

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import birdie
from birdie.artifact.container import BLOCKS, Reader
from birdie.compress.row_blocks import as_matrix, encoded_blocks, is_stack
from birdie.small.qat.fake_quantization import quantized
from birdie.small.qat.settings import Qat
from tests.nightly import mostly_nightly

NAME = "layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    "shape",
    [
        (8, 28672, 4096),  # Mixtral
        (256, 4096, 7168),  # DeepSeek-V3
        (512, 1024, 2048),  # Qwen3-Next
        (128, 2880, 5760),  # gpt-oss, (experts, in, out)
        (1, 197, 768),  # position embeddings of a ViT
        (1, 16, 64),
    ],
)
def test_stacks_are_told_by_their_sizes(shape: tuple[int, ...]) -> None:
    assert is_stack(shape)


@pytest.mark.parametrize(
    "shape",
    [
        (768, 48, 128),  # positional convolution of HuBERT
        (1024, 64, 128),  # the same, of wav2vec 2.0 large
        (384, 80, 3),  # Whisper
        (1536, 1, 4),  # Mamba
        (258, 1, 256),  # short-time Fourier transform
        (1, 1, 768),  # class token
        (64, 64, 64),
        (64, 128),
        (8, 128, 128, 1),
        (),
    ],
)
def test_convolutions_are_not_stacks(shape: tuple[int, ...]) -> None:
    assert not is_stack(shape)


def experts(*, count: int = 4, rows: int = 256, columns: int = 128, seed: int = 0) -> Tensor:
    """Return matrices whose rows, columns and sizes differ from one another."""
    generator = torch.Generator().manual_seed(seed)

    def scales(*shape: int) -> Tensor:
        return torch.exp(0.5 * torch.randn(shape, generator=generator))

    matrices = torch.randn(count, rows, columns, generator=generator)
    return 0.02 * matrices * scales(count, rows, 1) * scales(count, 1, columns) * scales(count, 1, 1)


def saved(state: dict[str, Tensor], **settings: Any) -> tuple[bytes, dict[str, Tensor]]:
    """Return a file and what it decodes to."""
    file = BytesIO()
    birdie.save(state, file, **settings)
    return file.getvalue(), birdie.load(file.getvalue())


def error(decoded: Tensor, weight: Tensor) -> float:
    """Return the root of the mean relative squared error of the matrices."""
    squares = (decoded.double() - weight.double()).square().sum((1, 2)) / weight.double().square().sum((1, 2))
    return float(squares.mean().sqrt())


@pytest.mark.parametrize(
    "settings",
    [
        *({"bits": 3.0}, {"lossless": True}),
        *(
            pytest.param(settings, marks=pytest.mark.nightly)
            for settings in ({}, {"scheme": "int4"}, {"bits": 3.0, "effort": "max"})
        ),
    ],
    ids=str,
)
def test_a_stack_is_stored_as_well_as_its_matrices_apart(settings: dict[str, Any]) -> None:
    weight = experts()
    file, decoded = saved({NAME: weight}, **settings)
    apart, matrices = saved({f"{NAME}.{i}": matrix for i, matrix in enumerate(weight)}, **settings)
    assert len(file) <= 1.002 * len(apart)
    assert decoded[NAME].shape == weight.shape
    assert error(decoded[NAME], weight) <= 1.03 * error(torch.stack([*matrices.values()]), weight)
    if "bits" in settings:
        assert 0.995 * settings["bits"] * weight.numel() / 8 < len(file) <= settings["bits"] * weight.numel() / 8


SPECS = [
    "int6",
    "feedback:bits=4",
    "codebook:k=16",
    "lowrank:rank=4,base=int4",
    "rotation:base=int4",
    "bf16",
    "ternary",
]


@pytest.mark.parametrize(
    "spec",
    mostly_nightly(
        [*SPECS, "tucker:energy=0.9", "spectral:identity,sigma=0.3", "lossless"],
        ("int6", "codebook:k=16", "tucker:energy=0.9", "lossless"),
    ),
)
def test_every_scheme_stores_stacks_under_one_name(spec: str, tmp_path: Path) -> None:
    weight, path = experts(rows=128, columns=64), tmp_path / "x.birdie"
    summary = birdie.save({NAME: weight, "other": weight[0]}, path, scheme={"*.experts.*": spec})
    row = {row.name: row for row in summary.tensors}[NAME]
    assert (row.shape, len(summary.tensors)) == (tuple(weight.shape), 2)
    assert row.scheme != "blocks"
    with Reader(path) as reader:
        assert (reader.entry(NAME).kind == BLOCKS) != spec.startswith(("tucker", "spectral"))
        assert sum(reader.table().values()) + reader.header_bytes == reader.size
    loaded = birdie.load(path)[NAME]
    assert loaded.shape == weight.shape
    assert error(loaded, weight) < 0.7


@pytest.mark.parametrize(
    "shape", [*(pytest.param(shape, marks=pytest.mark.nightly) for shape in ((4, 64, 128), (5, 401, 64))), (3, 70, 65)]
)
def test_any_stack_decodes_to_its_shape_from_the_same_bytes(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    for settings in ({"lossless": True}, {"scheme": "int4"}):
        (file, decoded), (again, _) = (saved({"w": weight}, workers=n, **settings) for n in (1, 2))
        assert file == again
        assert decoded["w"].shape == shape
        assert torch.equal(decoded["w"], weight) == ("lossless" in settings)


def test_small_matrices_share_a_block_and_large_ones_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = torch.ones(20, 64, 64), torch.ones(2, 600, 4096)
    blocks = encoded_blocks(as_matrix(small), tuple(small.shape), by_rows=True)
    assert blocks == [slice(0, 512), slice(512, 1024), slice(1024, 1280)]
    monkeypatch.setattr("birdie.compress.row_blocks.LARGE", 256 * 4096)
    monkeypatch.setattr("birdie.compress.row_blocks._BLOCK", 256 * 4096)
    cut = encoded_blocks(as_matrix(large), tuple(large.shape), by_rows=True)
    assert cut == [slice(*ends) for ends in [(0, 256), (256, 600), (600, 856), (856, 1200)]]
    assert encoded_blocks(as_matrix(large), tuple(large.shape), by_rows=False) == [slice(0, 600), slice(600, 1200)]


class Experts(nn.Module):
    """Two experts, each for half of the inputs, and a layer after them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(experts(count=2, columns=64))
        self.down = nn.Parameter(experts(count=2, rows=64, columns=256, seed=1))
        self.head = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        parts = [F.linear(F.relu(F.linear(part, self.up[i])), self.down[i]) for i, part in enumerate(x.chunk(2))]
        out: Tensor = self.head(torch.cat(parts))
        return out


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(32, 64, generator=generator) for _ in range(6)]


def loss(module: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(module(batch), torch.zeros(len(batch), dtype=torch.long), reduction="sum")


def test_stacks_in_a_calibrated_module_are_calibrated() -> None:
    module = Experts()
    file, decoded = saved(module, bits=5.0, calibration=birdie.calibrate(module, batches(), loss), tune=0.1)  # type: ignore[arg-type]
    assert 8 * len(file) <= 5 * sum(weight.numel() for weight in module.parameters())
    for name, weight in module.state_dict().items():
        assert decoded[name].shape == weight.shape
    assert error(decoded["up"], module.up.detach()) < 0.2
    table = birdie.sensitivity(module, batches(), loss)
    assert {row.name for row in table.rows} == {"head.weight", "up", "down"}


def test_what_calibration_knows_as_a_convolution_is_none() -> None:
    convolution = nn.Conv1d(8, 1, 64)
    module, weight = nn.Sequential(convolution, nn.Flatten(), nn.Linear(37, 8)), convolution.weight
    assert is_stack(tuple(weight.shape))
    data = [torch.randn(4, 8, 100, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    file, decoded = saved(module, quality=0.001, calibration=(module, data, loss))  # type: ignore[arg-type]
    with Reader(file) as reader:
        assert reader.entry("0.weight").kind != BLOCKS
    assert decoded["0.weight"].shape == weight.shape


@pytest.mark.parametrize("qat", [Qat(bits=4), Qat(sigma=0.3), Qat(levels="ternary"), Qat(scheme="codebook:k=8")])
def test_training_quantizes_matrices_as_if_they_were_apart(qat: Qat) -> None:
    weight = experts()
    assert torch.equal(quantized(qat, weight), torch.stack([quantized(qat, matrix) for matrix in weight]))


@pytest.mark.parametrize("spec", ["codebook:k=8", "tucker:energy=0.9"])
def test_training_sees_what_a_file_stores(spec: str) -> None:
    weight = experts()
    _, decoded = saved({"w": weight}, scheme=spec)
    assert torch.allclose(quantized(Qat(scheme=spec), weight), decoded["w"], atol=1e-7)
