"""Rivals are fair: every coder restores its input, lossy ones within their error; the record stack is the records'."""

import shutil
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import lossy_rivals, record_stack, rivals, symbols
from benchmarks.lossy_rivals import LossyCoder
from benchmarks.record_stack import Tuner
from benchmarks.subjects import tiny_subject
from birdie.golf import int8_zlib as baseline
from birdie.gpt.model.gpt import GPT

MIXED = {
    "a": torch.tensor([[-128, 127, 0], [5, -1, -128]], dtype=torch.int8),
    "b": torch.tensor([[300, -128, 127], [-129, -127, 128], [0, -32768, 32767]], dtype=torch.int16),
    "c": torch.arange(-5, 6, dtype=torch.int8),
}
"""Integer tensors with values that need the escape of byte strings."""


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def state() -> dict[str, Tensor]:
    """Return an embedding, a matrix with unequal rows and a row of zeros, a convolution, and a vector."""
    matrix = torch.randn(24, 40, generator=generator()) * torch.linspace(0.01, 0.2, 24)[:, None]
    matrix[3] = 0
    return {
        "tok_emb.weight": torch.randn(64, 16, generator=generator(1)),
        "fc.weight": matrix,
        "conv.weight": torch.randn(8, 4, 3, 3, generator=generator(2)) * 2,
        "bias": torch.randn(8, generator=generator(3)),
    }


# Symbols


# Lossless rivals


@pytest.mark.parametrize("order", rivals.ORDERS)
@pytest.mark.parametrize("name", ["mixed", "bf16", "fp32"])
def test_byte_strings_are_lossless(order: rivals.Order, name: str) -> None:
    tensors = MIXED if name == "mixed" else symbols.FLOAT_SETS[name](state()).tensors
    data = rivals.join(tensors, order)
    parts = rivals.separate(data, tensors, order)
    assert all(parts[key].dtype == tensor.dtype and torch.equal(parts[key], tensor) for key, tensor in tensors.items())
    escaped = sum(int(((t < -127) | (t > 127)).sum()) for t in tensors.values() if t.dtype == torch.int16)
    width = {"mixed": 1, "bf16": 2, "fp32": 4}[name]
    assert len(data) == width * sum(tensor.numel() for tensor in tensors.values()) + 2 * escaped


@pytest.mark.parametrize(
    "key",
    [pytest.param(k, marks=[pytest.mark.nightly] * (k in ("nncodec", "lrzip"))) for k in rivals.MEASURES],
)
@pytest.mark.parametrize("make", [symbols.resnet, symbols.bf16], ids=["symbols", "floats"])
def test_rivals_are_lossless(key: str, make: Callable[[dict[str, Tensor]], symbols.SymbolSet]) -> None:
    quantized = make(state())
    try:
        measured = rivals.MEASURES[key][1](quantized)
    except (rivals.NotInstalledError, rivals.NotApplicableError) as error:
        pytest.skip(f"{key}: {error}")
    assert measured.exact
    assert 0 < measured.bytes < 2 * quantized.bytes + 2000


# Lossy rivals

PARTS = {
    "conv.weight": torch.randn(40, 16, 3, 3, generator=generator()),
    "head.weight": torch.randn(10, 128, generator=generator(1)),
    "norm": torch.linspace(0.5, 2, 7),
    "steps": torch.tensor(12345),
    "empty": torch.zeros(0),
    "zeros": torch.zeros(32, 64),
}


@pytest.mark.parametrize(
    ("coder", "bits"),
    [
        *((lossy_rivals.naive(bits), bits) for bits in (8, 5, 4, 3)),
        *((lossy_rivals.row_maximum(bits, packer), bits) for bits, packer in ((6, "zstd"), (8, "zlib"))),
    ],
)
def test_a_naive_file_decodes_to_within_half_a_step(coder: LossyCoder, bits: int) -> None:
    data = coder.encode(PARTS)
    decoded = coder.decode(data)
    assert decoded.keys() == PARTS.keys()
    assert torch.equal(decoded["steps"], PARTS["steps"])
    assert torch.equal(decoded["norm"], PARTS["norm"].half().float())
    assert not decoded["zeros"].any()
    for name in ("conv.weight", "head.weight"):
        rows = PARTS[name].flatten(1)
        step = rows.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        assert bool(((decoded[name].reshape(rows.shape) - rows).abs() <= 0.51 * step).all())
    numbers = sum(PARTS[name].numel() for name in ("conv.weight", "head.weight"))
    assert len(data) < numbers * bits / 8 * 1.05 + 3500


def test_the_challenges_export_is_bit_identical() -> None:
    weights, coder = tiny_subject().state, lossy_rivals.challenge_int8()
    data = coder.encode(weights)
    assert data == baseline.pack(weights).blob
    assert coder.decode(data).keys() == weights.keys()


@pytest.mark.nightly  # processes that import torch
def test_a_coder_in_its_own_environment_decodes_in_a_process_that_gets_only_the_file() -> None:
    weights, errors, sizes = tiny_subject().state, list[float](), list[int]()
    try:
        coders = [lossy_rivals.nncodec(qp) for qp in (-20, -38)]
    except rivals.NotInstalledError as error:
        pytest.skip(str(error))
    for coder in coders:
        data = coder.encode(weights)
        decoded = coder.decode(data)
        assert {name: weight.shape for name, weight in decoded.items()} == {n: w.shape for n, w in weights.items()}
        sizes.append(len(data))
        errors.append(sum(float((decoded[name] - weight).square().sum()) for name, weight in weights.items()))
    assert sizes[0] < sizes[1]
    assert errors[1] < errors[0] / 16


# The record stack


def test_hessians_are_of_the_inputs_that_each_weight_multiplies() -> None:
    model = tiny_subject().module
    names = ["tok_emb.weight", "blocks.0.attn.c_q.weight", "blocks.0.attn.c_v.weight", "blocks.1.mlp.proj.weight"]
    ids = torch.randint(0, 256, (3, 9), generator=generator())
    hessians = record_stack.hessians(model, [(ids, ids), (ids[:1], ids[:1])], names)
    with torch.no_grad():
        assert isinstance(model, GPT)
        heads = [model._hidden(part).flatten(0, -2).double() for part in (ids, ids[:1])]
    expected = torch.stack([head.T @ head for head in heads]).sum(0)
    assert torch.allclose(hessians["tok_emb.weight"], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(hessians["blocks.0.attn.c_q.weight"], hessians["blocks.0.attn.c_v.weight"])  # one input
    assert F.linear(torch.ones(1, 2), torch.ones(1, 2)).item() == 2  # the patch of F.linear is removed


def test_gptq_equals_rounding_for_independent_inputs_and_is_better_for_correlated_ones() -> None:
    weight = torch.randn(24, 40, generator=generator())
    plain = record_stack.gptq(weight, 0.4, record_stack.factor(torch.eye(40, dtype=torch.float64)))
    scales = (0.4 * weight.double().std(1, correction=0)).half()
    assert torch.equal(plain.scales, scales)
    assert torch.equal(plain.symbols, (weight.double() / scales.double()[:, None]).round().to(torch.int8))
    x = torch.randn(400, 40, generator=generator(2), dtype=torch.float64)
    x = x @ torch.randn(40, 40, generator=generator(3), dtype=torch.float64)
    better = record_stack.gptq(weight, 0.4, record_stack.factor(x.T @ x))
    errors = [float((x @ (part.dequantized() - weight).double().T).square().sum()) for part in (better, plain)]
    assert errors[0] < 0.5 * errors[1]
    weight[2], hessian = 0, x.T @ x
    hessian[:, 7] = hessian[7] = 0
    quantized = record_stack.gptq(weight, 0.3, record_stack.factor(hessian))
    assert not quantized.symbols[:, 7].any()
    assert not quantized.symbols[2].any()


@pytest.mark.nightly  # runs lrzip a dozen times
def test_files_of_the_record_stack_decode_to_the_quantized_and_the_fp16_tensors() -> None:
    if shutil.which("lrzip") is None:
        pytest.skip("lrzip is not installed")
    model = tiny_subject()
    tuner = Tuner(model, record_stack.hessians(model.module, model.calibration, list(model.state)), lambda _: None)
    parts = tuner.parts(0.3, 0.3)
    rest = {name: weight for name, weight in model.state.items() if name not in parts}
    data = record_stack.pack(parts, rest, record_stack.layout_of(parts))
    decoded = record_stack.unpack(data)
    assert decoded.keys() == model.state.keys()
    for name, weight in model.state.items():
        assert torch.equal(decoded[name], parts[name].dequantized() if name in parts else weight.half().float())
    assert len(data) > record_stack.entropy_bytes(parts.values())
