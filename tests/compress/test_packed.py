"""Floats beside codes are scales and codebooks, whatever the method; floats beside masks and tables are weights."""

import io
import math

import pytest
import torch
from torch import Tensor

import birdie
from birdie.compress.packed import packed_names
from tests.nightly import mostly_nightly

State = dict[str, Tensor]
ROWS, COLUMNS = 128, 256


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def gaussian(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator()).to(dtype)


def codes(*shape: int, dtype: torch.dtype = torch.uint8, values: int | None = None, low: int = 0) -> Tensor:
    """Return integers, (shape), evenly distributed over the values of the dtype or over low … low + values − 1."""
    if values is None:
        size = math.prod(shape) * dtype.itemsize
        data: Tensor = torch.randint(256, (size,), generator=generator(), dtype=torch.uint8)
        typed: Tensor = data.view(dtype).reshape(shape)
        return typed
    return torch.randint(low, low + values, shape, generator=generator(), dtype=torch.int64).to(dtype)


def normal_codes(bits: int, dtype: torch.dtype = torch.int8) -> Tensor:
    """Return Gaussian weights rounded to integers, as symmetric quantizers give them."""
    most = 2 ** (bits - 1) - 1
    rounded: Tensor = (gaussian(ROWS, COLUMNS) * most / 3).round().clamp(-most - 1, most).to(dtype)
    return rounded


HALF, BRAIN, FNUZ = torch.float16, torch.bfloat16, torch.float8_e4m3fnuz
QUANTIZED: dict[str, State] = {
    "GPTQ, 4 bits": {
        "qweight": codes(COLUMNS // 8, ROWS, dtype=torch.int32), "qzeros": codes(2, ROWS // 8, dtype=torch.int32),
        "scales": gaussian(2, ROWS, dtype=HALF), "g_idx": torch.arange(COLUMNS, dtype=torch.int32) // 128,
    },
    "AWQ": {
        "qweight": codes(COLUMNS, ROWS // 8, dtype=torch.int32), "qzeros": codes(2, ROWS // 8, dtype=torch.int32),
        "scales": gaussian(2, ROWS, dtype=HALF),
    },
    "MLX": {
        "weight": codes(ROWS, COLUMNS // 8, dtype=torch.uint32), "scales": gaussian(ROWS, 4, dtype=BRAIN),
        "biases": gaussian(ROWS, 4, dtype=BRAIN),
    },
    "HQQ": {
        "W_q": codes(ROWS * COLUMNS // 128, 64), "meta.scale": gaussian(1, ROWS * COLUMNS // 64),
        "meta.zero": gaussian(1, ROWS * COLUMNS // 64), "bias": gaussian(ROWS),
    },
    "HQQ, 3 bits in int32": {
        "W_q": codes(ROWS * COLUMNS // 640, 64, dtype=torch.int32), "scale": gaussian(ROWS * COLUMNS // 64, 1),
        "zero": gaussian(ROWS * COLUMNS // 64, 1),
    },
    "AQLM, 16 bits": {
        "codes": codes(ROWS, COLUMNS // 8, 1, dtype=torch.int16), "codebooks": gaussian(1, 1 << 16, 1, 8, dtype=HALF),
        "scales": gaussian(ROWS, 1, 1, 1, dtype=HALF),
    },
    "VPTQ": {
        "indices": codes(1, COLUMNS // 8, ROWS // 2, dtype=torch.int32), "weight_scale": gaussian(COLUMNS),
        "centroids.weight": gaussian(1, (1 << 12) * 8, dtype=HALF), "weight_bias": gaussian(COLUMNS),
        "res_centroids.weight": gaussian(1, 256 * 8, dtype=HALF),
    },
    "QuIP#": {
        "Qidxs": codes(ROWS, COLUMNS // 32, dtype=torch.int64), "SU": gaussian(COLUMNS, dtype=HALF),
        "SV": gaussian(ROWS, dtype=HALF), "Wscale": torch.tensor(0.01),
    },
    "bitsandbytes NF4": {
        "weight": codes(ROWS * COLUMNS // 2, 1), "weight.absmax": gaussian(ROWS * COLUMNS // 64),
        "weight.quant_map": gaussian(16), "weight.quant_state.bitsandbytes__nf4": codes(80),
    },
    "bitsandbytes, nested": {
        "weight": codes(ROWS * COLUMNS // 2, 1), "weight.absmax": codes(ROWS * COLUMNS // 64),
        "weight.nested_absmax": gaussian(2), "weight.nested_quant_map": gaussian(256), "weight.quant_map": gaussian(16),
    },
    "bitsandbytes int8": {"weight": normal_codes(8), "SCB": gaussian(ROWS)},
    "FP8 by tiles": {
        "weight": gaussian(ROWS, COLUMNS).to(torch.float8_e4m3fn), "weight_scale_inv": gaussian(8, 16),
    },
    "FP8 fnuz": {"weight": gaussian(ROWS, COLUMNS).to(FNUZ), "weight_scale": gaussian(ROWS, 1), "bias": gaussian(ROWS)},
    "NVFP4": {
        "weight": codes(ROWS, COLUMNS // 2), "weight_scale": gaussian(ROWS, COLUMNS // 16).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.3), "pre_quant_scale": gaussian(COLUMNS),
    },
    "MXFP4 pairs": {
        "weight": codes(ROWS, COLUMNS // 2).view(torch.float4_e2m1fn_x2), "weight_scale": gaussian(ROWS, COLUMNS // 32),
    },
    "compressed-tensors": {
        "weight_packed": codes(ROWS, COLUMNS // 8, dtype=torch.int32),
        "weight_scale": gaussian(ROWS, COLUMNS // 32, dtype=BRAIN),
        "weight_shape": torch.tensor([ROWS, COLUMNS]),
    },
    "integers of 4 bits in bytes": {"codes": normal_codes(4), "scales": gaussian(ROWS, COLUMNS // 32)},
    "ternary": {"weight": normal_codes(2), "scale": gaussian(ROWS)},
    "vector quantization, int64": {
        "indices": codes(ROWS, COLUMNS // 4, dtype=torch.int64, values=256), "codebook": gaussian(256, 4),
    },
    "residual vector quantization": {
        "indices": codes(4, ROWS, COLUMNS // 8, dtype=torch.int64, values=256), "books.0.weight": gaussian(256, 8),
        "books.1.weight": gaussian(256, 8), "books.2.weight": gaussian(256, 8),
    },
}  # fmt: skip


def floats(state: State) -> set[str]:
    return {name for name, tensor in state.items() if tensor.dtype in (torch.float32, HALF, BRAIN)}


@pytest.mark.parametrize("prefix", ["layers.0.q_proj.", "q.", ""])
@pytest.mark.parametrize("method", QUANTIZED)
def test_a_quantized_module_has_no_weights(method: str, prefix: str) -> None:
    state = {prefix + name: tensor for name, tensor in QUANTIZED[method].items()}
    if not prefix and any("." in name for name in state):
        prefix, state = "q.", {f"q.{name}": tensor for name, tensor in state.items()}
    others: State = {"model.head.weight": gaussian(96, 64), "model.norm.weight": gaussian(64)}
    assert packed_names(state | others) == floats(state)


@pytest.mark.parametrize("method", QUANTIZED)
@pytest.mark.parametrize("broken", mostly_nightly([math.nan, math.inf], [math.nan]))
def test_its_scales_come_back_bit_for_bit_finite_or_not(method: str, broken: float) -> None:
    state = {f"q.{name}": tensor.clone() for name, tensor in QUANTIZED[method].items()}
    first = sorted(floats(state))[0]
    state[first].view(-1)[0] = broken
    file = io.BytesIO()
    birdie.save(state | {"head.weight": gaussian(96, 64)}, file, effort="fast")
    decoded = birdie.load(file.getvalue())
    for name, tensor in state.items():
        assert decoded[name].dtype == tensor.dtype
        assert (
            decoded[name].view(-1).contiguous().view(torch.uint8).tolist() == tensor.view(-1).view(torch.uint8).tolist()
        )
    assert not torch.equal(decoded["head.weight"], gaussian(96, 64))


TABLES: dict[str, Tensor] = {
    "mask of zeros and ones": codes(64, 64, values=2),
    "causal mask": torch.ones(1, 1, 256, 256, dtype=torch.uint8).tril(),
    "positions": torch.arange(4096)[None],
    "relative positions": (torch.arange(64)[:, None] - torch.arange(64) + 63),
    "edges": codes(2, 3000, values=700, dtype=torch.int64),
    "metadata of sparse weights": codes(64, 64),
    "rows to look up": codes(5000, values=64, dtype=torch.int64),
    "permutation": torch.randperm(2048, generator=generator()),
    "segments": (torch.arange(4096) // 100).int().reshape(64, 64),
}


@pytest.mark.parametrize("where", ["", "block.", "block.table."])
@pytest.mark.parametrize("table", TABLES)
def test_weights_beside_a_table_are_weights(table: str, where: str) -> None:
    weights: State = {
        "block.weight": gaussian(64, 64),
        "block.other": gaussian(48, 64),
        "block.mlp.weight": gaussian(96, 64),
    }
    assert not packed_names({where + "table": TABLES[table], **weights}) & weights.keys()
