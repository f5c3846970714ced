"""Training in fp8: which layers torchao takes, what stays the float model's, and what the log says."""

import re
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from birdie.errors import ConfigError
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.model.layers import Linear
from birdie.gpt.train.fp8 import fits_fp8, fp8_supported, train_in_fp8
from birdie.gpt.train.training import Training
from birdie.small.qat.settings import Qat
from birdie.system.extras import install_line
from tests.gpt.model.technique_table import blocks_of
from tests.tiny_run import (
    CHUNK_TOKENS,
    TinyBatches,
    tiny_model,
    tiny_settings,
    tiny_training,
)

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed (extra gpu)")


class Layer(nn.Module):
    """A model of one layer in a block."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Linear(inputs, outputs)])


def emulate(model: nn.Module) -> list[str]:
    lines: list[str] = []
    train_in_fp8(model, lines.append, emulate=True)
    return lines


def test_matrices_of_blocks_whose_sizes_kernels_take_are_chosen() -> None:
    model = GPT(GPTConfig(vocab_size=32, num_layers=2, model_dim=64, num_heads=8, num_kv_heads=1))  # kv_dim 8
    Qat(bits=4, tensors=("blocks.1.mlp.*",)).prepare(model)
    chosen = {name for name, layer in model.named_modules() if fits_fp8(layer, name)}
    names = ("attn.c_q", "attn.proj", "mlp.fc", "mlp.proj")
    fitting = {f"blocks.{number}.{name}" for number in (0, 1) for name in names}
    assert chosen == fitting - {"blocks.1.mlp.fc", "blocks.1.mlp.proj"}  # quantization-aware training reads these


@needs_torchao
def test_parameters_stay_the_same_objects_under_the_same_names() -> None:
    model = tiny_model()
    parameters = dict(model.named_parameters())
    assert emulate(model)[0].startswith("fp8: 18 matrices of the blocks, ")
    assert list(dict(model.named_parameters())) == list(parameters)
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert type(blocks_of(model)[0].attn.c_q) is not Linear


@needs_torchao
def test_scores_are_those_of_the_float_model() -> None:
    model, twin = tiny_model(), tiny_model()
    with torch.no_grad():
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.copy_(p.normal_(std=0.2))
    emulate(model)
    ids = TinyBatches().next()[0]
    assert torch.equal(model.eval()(ids), twin.eval()(ids))
    assert not torch.equal(model.train()(ids), twin.train()(ids))


@needs_torchao
def test_it_learns_nearly_what_full_precision_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("birdie.gpt.train.fp8.fp8_supported", lambda *_: True)
    monkeypatch.setattr("birdie.gpt.train.fp8.train_in_fp8", lambda model, _: emulate(model))
    plain, fp8 = ([step.loss for step in start(fp8=on, iterations=30)] for on in (False, True))
    assert plain != fp8
    assert sum(fp8[-10:]) == pytest.approx(sum(plain[-10:]), rel=0.01)


@needs_torchao
@pytest.mark.parametrize("qat", [False, True])
def test_a_model_without_a_matrix_that_fits_is_refused(qat: bool) -> None:
    layer = Layer(64, 64) if qat else Layer(24, 32)
    if qat:
        Qat(bits=2).prepare(layer)
    with pytest.raises(ConfigError, match="multiples of 16"):
        emulate(layer)


def test_without_torchao_an_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match=re.escape(install_line("gpu"))):
        emulate(Layer(16, 16))


def start(lines: list[str] | None = None, **changes: Any) -> Training:
    model = tiny_model(num_layers=1, num_heads=2, num_kv_heads=1)
    short: dict[str, Any] = {"accumulation": 1, "train_batch_tokens": CHUNK_TOKENS}
    notify = (lines if lines is not None else []).append
    return tiny_training(model, TinyBatches(), tiny_settings(**(short | changes)), notify=notify)


def test_where_it_is_not_supported_training_continues_without(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    run = start(lines, fp8=True, iterations=2)
    assert lines == ["fp8 needs a GPU of compute capability 8.9 or newer; training without it"]
    assert run.in_effect["fp8"] is False
    assert [step.loss for step in run] == [step.loss for step in start(iterations=2)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    assert not fp8_supported(torch.device("cuda"), lines.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert fp8_supported(torch.device("cuda"), lines.append)


def test_cuda_graphs_need_a_compiled_model_on_a_gpu() -> None:
    lines: list[str] = []
    run = start(lines, compile_mode="reduce-overhead")
    assert lines == ["compile_mode reduce-overhead is not used: it needs torch.compile on CUDA"]
    assert run.in_effect["compile_mode"] == "default"


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"compile_mode": "fast"}, "compile_mode is 'fast'"),
        ({"fp8": True, "train_batch_tokens": 160, "train_seq_len": 40}, "multiple of 16 tokens, not 40"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], values: str) -> None:
    with pytest.raises(ConfigError, match=values):
        tiny_settings(**change)
