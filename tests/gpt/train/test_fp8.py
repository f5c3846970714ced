"""Training in fp8: products are those of the reference, weights stay float32 parameters, scoring uses floats."""

import dataclasses
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from birdie.errors import ConfigError
from birdie.gpt.data.corpus import file_corpus
from birdie.gpt.data.prepare import prepare
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.model.layers import Linear
from birdie.gpt.run.events import Validated
from birdie.gpt.run.loading import load_recipe
from birdie.gpt.run.pipeline import Run
from birdie.gpt.run.recipe import DataSettings, Recipe
from birdie.gpt.score.settings import ValidationSettings
from birdie.gpt.train import fp8 as fp8_module
from birdie.gpt.train.fp8 import Float8, prepare_fp8, remove_fp8
from birdie.gpt.train.training import Training
from birdie.small.qat.fake_quantization import quantized
from birdie.small.qat.settings import Qat
from birdie.system.context import Context
from tests.gpt.model.technique_table import blocks_of
from tests.tiny_run import (
    CHUNK_TOKENS,
    TinyBatches,
    tiny_model,
    tiny_settings,
    tiny_training,
    trained_model,
)

CPU = torch.device("cpu")
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed (extra gpu)")


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale the largest value of x to the largest of `dtype`, round, and scale back, in float32."""
    scale = (torch.finfo(dtype).max / x.abs().max().double().clamp_min(1e-12)).float()
    return (x.float() * scale).to(dtype).float() / scale


class Layer(nn.Module):
    """A model of one layer in a block."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Linear(inputs, outputs)])

    @property
    def weight(self) -> Tensor:
        """Return the matrix of the layer."""
        weight = self.blocks[0].weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks[0](x)
        return out


def emulate(model: nn.Module, lines: list[str] | None = None) -> Float8:
    float8 = prepare_fp8(
        model, "emulate", torch.float32, Context(CPU, notify=(lines if lines is not None else []).append)
    )
    assert float8 is not None
    return float8


@needs_torchao
@given(st.integers(0, 2**31), st.sampled_from([torch.float32, torch.bfloat16]), st.floats(-12, 4))
@settings(max_examples=20, deadline=None)
def test_products_and_gradients_are_those_of_rounded_tensors(seed: int, dtype: torch.dtype, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = Layer(16, 32)
    weight = layer.weight
    with torch.no_grad():
        weight.copy_(torch.randn(32, 16, generator=generator))
    x = (torch.randn(3, 16, 16, generator=generator) * 10**size).to(dtype).requires_grad_()
    gradient = torch.randn(3, 16, 32, generator=generator).to(dtype)
    emulate(layer)
    y = layer(x)
    y.backward(gradient)
    x8, w8 = (rounded(tensor.detach(), torch.float8_e4m3fn) for tensor in (x, weight))
    g8 = rounded(gradient, torch.float8_e5m2)
    assert y.dtype is dtype
    assert weight.grad is not None
    assert x.grad is not None
    assert weight.grad.dtype is torch.float32
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6 * 10**size}
    if dtype is torch.bfloat16:
        close["rtol"] = 2**-7
    torch.testing.assert_close(y.float(), x8 @ w8.T, **close)
    torch.testing.assert_close(x.grad.float(), g8 @ w8, rtol=close["rtol"], atol=1e-5)
    torch.testing.assert_close(
        weight.grad, g8.flatten(0, 1).T @ x8.flatten(0, 1), rtol=close["rtol"], atol=1e-4 * 10**size
    )


@needs_torchao
def test_weights_stay_the_same_objects_under_the_same_names() -> None:
    model = tiny_model()
    parameters, classes = dict(model.named_parameters()), {name: type(part) for name, part in model.named_modules()}
    float8 = emulate(model)
    prepared = dict(model.named_parameters())
    assert list(prepared) == list(parameters)
    assert all(prepared[name] is p for name, p in parameters.items())
    assert set(float8.names) == {
        name for name, p in parameters.items() if name.startswith("blocks.") and p.ndim == 2 and "mix" not in name
    }
    assert type(blocks_of(model)[0].attn.c_q) is not classes["blocks.0.attn.c_q"]
    remove_fp8(model)
    assert {name: type(part) for name, part in model.named_modules()} == classes
    assert "linear_mm_config" not in vars(blocks_of(model)[0].attn.c_q)


@needs_torchao
def test_scoring_uses_the_float_model() -> None:
    model, twin = tiny_model(), tiny_model()
    with torch.no_grad():
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.copy_(p.normal_(std=0.2))
    emulate(model)
    ids = TinyBatches().next()[0]
    assert torch.equal(model.eval()(ids), twin.eval()(ids))
    assert not torch.equal(model.train()(ids), twin.train()(ids))


@needs_torchao
def test_fp8_reads_the_quantized_weights_of_quantization_aware_training() -> None:
    layer, qat = Layer(64, 64), Qat(bits=2)
    parent, weight = type(layer.blocks[0]), layer.weight
    preparation = qat.prepare(layer)
    emulate(layer)
    preparation.switch(True)
    grid = rounded(quantized(qat, weight), torch.float8_e4m3fn)
    torch.testing.assert_close(layer(torch.eye(64)).detach().T, grid)
    remove_fp8(layer)
    preparation.remove()
    assert type(layer.blocks[0]) is parent


@needs_torchao
def test_a_later_preparation_must_be_undone_first() -> None:
    layer = Layer(64, 64)
    emulate(layer)
    Qat(bits=2).prepare(layer)
    with pytest.raises(ConfigError, match="fp8 already"):
        emulate(layer)


def start(lines: list[str] | None = None, **changes: Any) -> Training:
    model = tiny_model(num_layers=1, num_heads=2, num_kv_heads=1)
    short: dict[str, Any] = {"accumulation": 1, "train_batch_tokens": CHUNK_TOKENS}
    notify = (lines if lines is not None else []).append
    return tiny_training(model, TinyBatches(), tiny_settings(**(short | changes)), notify=notify)


def losses(run: Training) -> list[float]:
    return [step.loss for step in run]


@needs_torchao
def test_it_learns_nearly_what_full_precision_learns() -> None:
    plain, fp8 = (losses(start(fp8=mode, iterations=30)) for mode in ("off", "emulate"))
    assert plain != fp8
    assert sum(fp8[-5:]) < 4.5 * fp8[0]
    assert sum(fp8[-10:]) == pytest.approx(sum(plain[-10:]), rel=0.01)


@needs_torchao
def test_resuming_in_another_precision_is_reported() -> None:
    part, lines = start(fp8="emulate"), list[str]()
    next(iter(part))
    model, settings = trained_model(part), dataclasses.replace(part.plan.settings, fp8="off")
    remove_fp8(model)
    assert all(type(layer) is Linear for layer in model.modules() if isinstance(layer, nn.Linear))
    tiny_training(model, TinyBatches(), settings, saved=part.checkpoint(), notify=lines.append)
    assert lines == ["resuming with fp8 = off; the checkpoint was trained with emulate"]


@pytest.mark.nightly
@needs_torchao
def test_the_compiler_traces_one_graph() -> None:
    layer, x = Layer(16, 16), torch.randn(16, 16)
    emulate(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    assert not torch.equal(compiled(x), x @ layer.weight.T)


@needs_torchao
def test_the_log_has_the_matrices_and_the_rounding_errors() -> None:
    lines: list[str] = []
    model = GPT(GPTConfig(vocab_size=32, num_layers=2, model_dim=32, num_heads=4, num_kv_heads=1))  # kv_dim 8
    float8 = emulate(model, lines)
    assert len(lines) == 1
    assert lines[0].startswith("fp8: 8 matrices of the blocks, 12,288 weights, torchao ")
    assert lines[0].endswith("emulated; 4 with dimensions that are not multiples of 16 are excluded")
    ids, targets = TinyBatches().next()
    with torch.no_grad():
        weight = blocks_of(model)[0].attn.c_q.weight
        weight.fill_(1e-9)
        weight[0, 0] = 7.0
    line = float8.diagnostics(lambda: model.loss(ids, targets))
    assert "weights 7 and 17 %" in line  # 1,023 of the 6,144 that do not start at zero
    assert "gradients" in line
    assert all(p.grad is None for p in model.parameters())


def test_where_it_is_not_supported_training_continues_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_module, "find_spec", lambda _: object())
    lines: list[str] = []
    run = start(fp8="on", lines=lines, iterations=2)
    assert lines == [
        "fp8 is not supported (the device is cpu; fp8 needs a GPU of compute capability 8.9 or newer, or "
        "--train.fp8 emulate); training in float32"
    ]
    assert run.in_effect["fp8"] == "off"
    assert losses(run) == losses(start(iterations=2))


def test_an_old_gpu_and_a_missing_library_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    cuda = Context(torch.device("cuda"), notify=lines.append)
    monkeypatch.setattr(fp8_module, "find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    assert prepare_fp8(tiny_model(), "on", torch.bfloat16, cuda) is None
    monkeypatch.setattr(fp8_module, "find_spec", lambda _: None)
    assert prepare_fp8(tiny_model(), "on", torch.bfloat16, cuda) is None
    assert "this GPU has 8.6" in lines[0]
    assert lines[0].endswith("training in bfloat16")
    assert "torchao is not installed; pip install 'birdie-compress[gpu]'" in lines[1]
    with pytest.raises(ConfigError, match="torchao"):
        prepare_fp8(tiny_model(), "emulate", torch.float32, Context(CPU, notify=lines.append))


@needs_torchao
def test_a_model_without_a_matrix_that_fits_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiples of 16"):
        emulate(Layer(24, 32))


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"fp8": "yes"}, "fp8 is 'yes'"),
        (
            {"fp8": "on", "train_batch_tokens": 160, "train_seq_len": 40},
            "multiple of 16 tokens, not 40",
        ),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], values: str) -> None:
    with pytest.raises(ConfigError, match=values):
        tiny_settings(**change)


def test_the_variable_of_the_challenge_turns_it_on_and_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('[train]\nfp8 = "emulate"\n')
    assert load_recipe(tmp_path / "recipe.toml").train.fp8 == "emulate"
    for value, mode in (("1", "on"), ("0", "off")):
        monkeypatch.setenv("USE_FP8", value)
        assert load_recipe(tmp_path / "recipe.toml").train.fp8 == mode


@needs_torchao
def test_a_run_reports_that_it_is_active_and_leaves_a_plain_model(tmp_path: Path) -> None:
    list(prepare(file_corpus([Path(__file__)]), tokenizer="bytes", root=tmp_path))
    recipe = Recipe(
        data=DataSettings(path=str(next((tmp_path / "datasets").iterdir())), tokenizer="bytes"),
        model=GPTConfig(vocab_size=260, num_layers=1, model_dim=64, num_heads=2, num_kv_heads=1),
        train=tiny_settings(fp8="emulate", iterations=2, accumulation=1, train_batch_tokens=32),
        qat=Qat(bits=4, tensors=("blocks.*.mlp.*",)),
        validation=ValidationSettings(every=0, max_tokens=500),
        device="cpu",
    )
    lines: list[str] = []
    run = Run(recipe, tmp_path / "run", Context(CPU, notify=lines.append))
    assert [event.step for event in run.train() if isinstance(event, Validated)] == [2]
    assert any(line.startswith("fp8: 6 matrices of the blocks, ") for line in lines)
    assert any(line.startswith("active: fp8: 6 matrices, ") for line in lines)
    classes = {type(part) for part in run.model.modules() if isinstance(part, nn.Linear)}
    assert classes == {Linear}
