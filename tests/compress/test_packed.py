"""Floats beside codes are scales and codebooks, whatever the method; floats beside masks and tables are weights."""

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
    "GPTQ, 2 bits by groups of 16": {
        "qweight": codes(COLUMNS // 16, ROWS, dtype=torch.int32), "scales": gaussian(COLUMNS // 16, ROWS, dtype=HALF),
    },
    "GPTQ, bias": {
        "qweight": codes(COLUMNS // 8, ROWS, dtype=torch.int32), "scales": gaussian(8, ROWS), "bias": gaussian(ROWS),
    },
    "AWQ": {
        "qweight": codes(COLUMNS, ROWS // 8, dtype=torch.int32), "qzeros": codes(2, ROWS // 8, dtype=torch.int32),
        "scales": gaussian(2, ROWS, dtype=HALF),
    },
    "Marlin": {"B": codes(COLUMNS // 16, 2 * ROWS, dtype=torch.int32), "s": gaussian(2, ROWS, dtype=HALF)},
    "MLX": {
        "weight": codes(ROWS, COLUMNS // 8, dtype=torch.uint32), "scales": gaussian(ROWS, 4, dtype=BRAIN),
        "biases": gaussian(ROWS, 4, dtype=BRAIN),
    },
    "MLX, 2 bits by 32": {
        "weight": codes(ROWS, COLUMNS // 16, dtype=torch.uint32), "scales": gaussian(ROWS, COLUMNS // 32),
        "biases": gaussian(ROWS, COLUMNS // 32),
    },
    "HQQ": {
        "W_q": codes(ROWS * COLUMNS // 128, 64), "meta.scale": gaussian(1, ROWS * COLUMNS // 64),
        "meta.zero": gaussian(1, ROWS * COLUMNS // 64), "bias": gaussian(ROWS),
    },
    "HQQ, columns": {
        "W_q": codes(ROWS * COLUMNS // 64, 32), "meta.scale": gaussian(ROWS * COLUMNS // 64, 1),
        "meta.zero": gaussian(ROWS * COLUMNS // 64, 1),
    },
    "HQQ, 3 bits in int32": {
        "W_q": codes(ROWS * COLUMNS // 640, 64, dtype=torch.int32), "scale": gaussian(ROWS * COLUMNS // 64, 1),
        "zero": gaussian(ROWS * COLUMNS // 64, 1),
    },
    "AQLM, 16 bits": {
        "codes": codes(ROWS, COLUMNS // 8, 1, dtype=torch.int16), "codebooks": gaussian(1, 1 << 16, 1, 8, dtype=HALF),
        "scales": gaussian(ROWS, 1, 1, 1, dtype=HALF),
    },
    "AQLM, two of 8 bits": {
        "codes": codes(ROWS, COLUMNS // 8, 2, dtype=torch.int8), "codebooks": gaussian(2, 256, 1, 8, dtype=HALF),
        "scales": gaussian(ROWS, 1, 1, 1, dtype=HALF),
    },
    "VPTQ": {
        "indices": codes(1, COLUMNS // 8, ROWS // 2, dtype=torch.int32), "weight_scale": gaussian(COLUMNS),
        "centroids.weight": gaussian(1, (1 << 12) * 8, dtype=HALF), "weight_bias": gaussian(COLUMNS),
        "res_centroids.weight": gaussian(1, 256 * 8, dtype=HALF),
    },
    "VPTQ, uint16": {
        "indices": codes(1, COLUMNS // 8, ROWS, dtype=torch.uint16), "perm": codes(COLUMNS, dtype=torch.uint16),
        "centroids.weight": gaussian(1 << 16, 8, dtype=HALF),
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
    "FP8 e5m2": {"weight": gaussian(ROWS, COLUMNS).to(torch.float8_e5m2fnuz), "input_scale": gaussian(1)},
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
    "SmoothQuant": {"weight": normal_codes(8), "weight_scale": gaussian(ROWS, 1), "smooth": gaussian(COLUMNS)},
    "integers of 4 bits in bytes": {"codes": normal_codes(4), "scales": gaussian(ROWS, COLUMNS // 32)},
    "integers of 4 bits in int32": {"codes": normal_codes(4, torch.int32), "scales": gaussian(ROWS, COLUMNS // 64)},
    "ternary": {"weight": normal_codes(2), "scale": gaussian(ROWS)},
    "signs": {"weight": codes(ROWS, COLUMNS, values=2).to(torch.int8) * 2 - 1, "scale": gaussian(ROWS)},
    "BitNet, packed": {"weight": codes(ROWS // 4, COLUMNS), "weight_scale": gaussian(ROWS)},
    "vector quantization, int64": {
        "indices": codes(ROWS, COLUMNS // 4, dtype=torch.int64, values=256), "codebook": gaussian(256, 4),
    },
    "residual vector quantization": {
        "indices": codes(4, ROWS, COLUMNS // 8, dtype=torch.int64, values=256), "books.0.weight": gaussian(256, 8),
        "books.1.weight": gaussian(256, 8), "books.2.weight": gaussian(256, 8),
    },
    "SpinQuant": {"weight": codes(ROWS, COLUMNS // 2), "weight_scales": gaussian(ROWS, 8), "R": gaussian(ROWS)},
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
    "mask in int32": codes(64, 64, values=2, dtype=torch.int32),
    "mask in int64": codes(64, 64, values=2, dtype=torch.int64),
    "causal mask": torch.ones(1, 1, 256, 256, dtype=torch.uint8).tril(),
    "causal mask with its diagonal": torch.ones(256, 256, dtype=torch.int32).tril() + torch.eye(256).int(),
    "positions": torch.arange(4096)[None],
    "bytes in order": torch.arange(4096).to(torch.uint8).reshape(64, 64),
    "relative positions": (torch.arange(64)[:, None] - torch.arange(64) + 63),
    "edges": codes(2, 3000, values=700, dtype=torch.int64),
    "metadata of sparse weights": codes(64, 64),
    "edges between nodes": codes(2, 9000, values=64, dtype=torch.int64),
    "rows to look up": codes(5000, values=64, dtype=torch.int64),
    "permutation": torch.randperm(2048, generator=generator()),
    "neighbors": codes(256, 8, values=256, dtype=torch.int32),
    "classes": codes(64, 32, values=10, dtype=torch.int64),
    "constant": torch.full((64, 64), 7, dtype=torch.uint8),
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


def test_weights_below_a_large_table_of_noise_are_weights() -> None:
    network: State = {"net.0.weight": gaussian(64, 48), "net.0.bias": gaussian(64), "net.2.weight": gaussian(10, 64)}
    for prefix in ("", "field."):
        state = {prefix + "images": codes(20, 64, 64, 3), **{prefix + name: weight for name, weight in network.items()}}
        assert not packed_names(state)


def test_low_rank_pairs_beside_codes_are_weights() -> None:
    for base in ("GPTQ, 4 bits", "HQQ", "bitsandbytes NF4"):
        state = {f"q.{name}": tensor for name, tensor in QUANTIZED[base].items()}
        pair: State = {"q.lora_A.default.weight": gaussian(16, COLUMNS), "q.lora_B.default.weight": gaussian(ROWS, 16)}
        assert packed_names(state | pair) == floats(state)


class Frozen(nn.Module):
    """Codes and a scale of which one may be trained."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.register_buffer("codes", normal_codes(8))
        self.scale = nn.Parameter(gaussian(ROWS, 1), requires_grad=trained)


@pytest.mark.parametrize("trained", [False, True])
def test_a_parameter_that_requires_a_gradient_is_a_weight(trained: bool) -> None:
    assert packed_names(Frozen(trained).state_dict(), {"scale"} if trained else ()) == (set() if trained else {"scale"})


@pytest.mark.parametrize("masks", [1, 4])
@pytest.mark.parametrize("settings", [{"bits": 4}, {"budget": 14_000}, {}], ids=str)
def test_a_model_with_masks_is_compressed(masks: int, settings: dict[str, Any]) -> None:
    state: State = {f"{index}.weight": gaussian(96, 80) for index in range(4)}
    state |= {f"{index}.mask": codes(96, 80, values=2) for index in range(masks)}
    size = birdie.save(state, io.BytesIO(), **settings).bytes
    assert size < 5 * 96 * 80 * 2 + 1000 * masks


Change = Callable[[Tensor], Tensor]


@pytest.mark.parametrize("change", [torch.clone, lambda codes: codes.T, lambda codes: codes[:, ::2]], ids=range(3))
def test_views_of_codes_are_codes(change: Change) -> None:
    assert packed_names({"q.codes": change(normal_codes(8)), "q.scale": gaussian(ROWS)}) == {"q.scale"}
