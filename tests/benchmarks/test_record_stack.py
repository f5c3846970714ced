"""The record stack: Hessians, GPTQ and files are those of the records' method, so that the rival is fair."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import record_stack
from tests.benchmarks.small_gpt import generator, gpt, subject


def test_hessians_are_of_the_inputs_that_each_weight_multiplies() -> None:
    model = gpt()
    names = ["tok_emb.weight", "blocks.0.attn.c_q.weight", "blocks.0.attn.c_v.weight", "blocks.1.mlp.proj.weight"]
    ids = torch.randint(0, 256, (3, 9), generator=generator())
    hessians = record_stack.hessians(model, [(ids, ids), (ids[:1], ids[:1])], names)
    with torch.no_grad():
        heads = [model._hidden(part).reshape(-1, 32).double() for part in (ids, ids[:1])]
    expected = torch.stack([head.T @ head for head in heads]).sum(0)
    assert torch.allclose(hessians["tok_emb.weight"], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(hessians["blocks.0.attn.c_q.weight"], hessians["blocks.0.attn.c_v.weight"])  # one input
    assert hessians["blocks.1.mlp.proj.weight"].shape == (64, 64)
    assert F.linear(torch.ones(1, 2), torch.ones(1, 2)).item() == 2  # the patch of F.linear is removed


def test_a_convolutions_hessian_gives_the_energy_of_output_errors() -> None:
    layer = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
    images = torch.randn(2, 3, 8, 8, generator=generator())
    model = nn.Sequential(layer)
    hessian = record_stack.hessians(model, [(images, torch.zeros(2))], ["0.weight"])["0.weight"]
    error = torch.randn(4, 3, 3, 3, generator=generator(1))
    energy = F.conv2d(images, error, stride=2, padding=1).double().square().sum()
    rows = error.flatten(1).double()
    assert torch.allclose((rows @ hessian * rows).sum(), energy, rtol=1e-4)


def correlated_hessian(columns: int = 40) -> Tensor:
    """Return the Hessian of random inputs with correlated features."""
    x = torch.randn(400, columns, generator=generator(2), dtype=torch.float64)
    x = x @ torch.randn(columns, columns, generator=generator(3), dtype=torch.float64)
    return x.T @ x


def test_gptq_equals_rounding_for_independent_inputs_and_is_better_for_correlated_ones() -> None:
    weight = torch.randn(24, 40, generator=generator())
    plain = record_stack.gptq(weight, 0.4, record_stack.factor(torch.eye(40, dtype=torch.float64)))
    scales = (0.4 * weight.double().std(1, correction=0)).half()
    assert torch.equal(plain.scales, scales)
    assert torch.equal(plain.symbols, (weight.double() / scales.double()[:, None]).round().to(torch.int8))
    hessian = correlated_hessian()
    better = record_stack.gptq(weight, 0.4, record_stack.factor(hessian))

    def output_error(part: record_stack.Quantized) -> float:
        error = (part.dequantized() - weight).double()
        return float((error @ hessian * error).sum())

    assert output_error(better) < 0.5 * output_error(plain)


def test_unused_columns_become_zero_and_rows_of_zeros_stay_zero() -> None:
    weight = torch.randn(6, 40, generator=generator())
    weight[2] = 0
    hessian = correlated_hessian()
    hessian[:, 7] = hessian[7] = 0
    quantized = record_stack.gptq(weight, 0.3, record_stack.factor(hessian))
    assert (quantized.symbols[:, 7] == 0).all()
    assert (quantized.symbols[2] == 0).all()
    assert torch.isfinite(quantized.dequantized()).all()


def test_a_group_is_one_kind_of_matrix_in_all_layers() -> None:
    assert record_stack.group_of("blocks.0.attn.c_q.weight") == record_stack.group_of("blocks.11.attn.c_q.weight")
    assert record_stack.group_of("blocks.0.attn.c_q.weight") != record_stack.group_of("blocks.0.attn.c_k.weight")
    assert record_stack.group_of("layer1.0.conv1.weight") == record_stack.group_of("layer3.2.conv1.weight")


@pytest.mark.slow  # runs lrzip a dozen times
def test_files_decode_to_the_quantized_and_the_fp16_tensors() -> None:
    if shutil.which("lrzip") is None:
        pytest.skip("lrzip is not installed")
    model = subject()
    names = record_stack.quantized_names(model.state)
    hessians = record_stack.hessians(model.module, model.calibration, names)
    parts = {name: record_stack.gptq(model.state[name], 0.3, record_stack.factor(hessians[name])) for name in names}
    rest = {name: weight for name, weight in model.state.items() if name not in parts}
    assert {weight.ndim for weight in rest.values()} <= {1, 2}
    data = record_stack.pack(parts, rest, record_stack.layout_of(parts))
    decoded = record_stack.unpack(data)
    assert decoded.keys() == model.state.keys()
    for name, weight in model.state.items():
        expected = parts[name].dequantized() if name in parts else weight.half().float()
        assert torch.equal(decoded[name], expected)
    assert len(data) > record_stack.entropy_bytes(parts.values())
