"""Quantization-aware training: what layers see, what gradients see, and that the switch works under the compiler."""

import copy
import pickle
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from birdie.compress.registry import decode, parse_spec
from birdie.compress.schemes.grid import Grid
from birdie.compress.small_tensors import is_matrix
from birdie.errors import ConfigError
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.run.recipe_loading import load_recipe
from birdie.gpt.run.recipe_settings import Recipe
from birdie.gpt.train.settings import OptimizerSettings
from birdie.gpt.train.training import Training
from birdie.small.qat.fake_quantization import quantized, storage_rules
from birdie.small.qat.settings import Qat
from tests.tiny_run import VOCAB, TinyBatches, tiny_settings, tiny_training

pytestmark = pytest.mark.usefixtures("squares", "one_thread")


def small_gpt(seed: int = 0) -> GPT:
    """As small as matrices can be that take a grid."""
    torch.manual_seed(seed)
    return GPT(GPTConfig(vocab_size=VOCAB, num_layers=1, model_dim=64, num_heads=4, num_kv_heads=4))


class TwoLayers(nn.Sequential):
    """Two layers, the same weights each time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))


def two_layers() -> nn.Module:
    return TwoLayers()


def parameter_of(layer: nn.Module) -> nn.Parameter:
    """Return the weight that the optimizer sees, not the quantized one that `layer.weight` returns."""
    parameter = layer._parameters["weight"]
    assert parameter is not None
    return parameter


STORED_AS: dict[str, dict[str, Any]] = {  # the scheme that stores what layers see
    "int4": {"bits": 4},
    "sigma:0.4": {"sigma": 0.4},
    "ternary:group_size=32": {"levels": "ternary", "group_size": 32},
    "binary:group_size=64": {"levels": "binary", "group_size": 64},
    **{spec: {"scheme": spec} for spec in ("int3", "codebook:k=16", "rotation:bits=4", "squares")},
    "trellis:states=8,sigma=0.4": {"scheme": "trellis:states=8,sigma=0.4"},
}


@pytest.mark.parametrize("spec", STORED_AS)
@pytest.mark.parametrize("shape", [(64, 96), (48, 100), (16, 8, 3, 3)])
def test_layers_see_what_the_scheme_will_store(spec: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight, qat = torch.randn(shape), Qat(**STORED_AS[spec])
    weight *= torch.logspace(-3, 1, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    weight[3] = 0
    stored = decode(parse_spec(spec).encode("w", weight))
    assert not torch.equal(stored, weight)
    torch.testing.assert_close(quantized(qat, weight), stored, rtol=1e-6, atol=1e-7 if qat.scheme else 0)
    if qat.levels:  # levels stay what they are
        torch.testing.assert_close(quantized(qat, stored), stored, rtol=1e-6, atol=0)


@pytest.mark.parametrize("settings", STORED_AS.values(), ids=str)
def test_gradients_pass_straight_through_and_evaluation_sees_the_float_model(settings: dict[str, Any]) -> None:
    """The gradient at the parameter is the one at the quantized weight, element by element."""
    layer, x, coefficients = nn.Linear(64, 96, bias=False), torch.randn(5, 64), torch.randn(96, 64)
    plain = layer(x)
    prepared = Qat(**settings).prepare(layer)
    prepared.switch(False)
    assert torch.equal(layer(x), plain)
    prepared.switch(True)
    (layer.weight * coefficients).sum().backward()
    gradient = parameter_of(layer).grad
    assert gradient is not None
    assert torch.equal(gradient, coefficients)
    assert not torch.equal(layer.weight, parameter_of(layer))
    assert not torch.allclose(layer(x), plain)
    assert torch.equal(layer.eval()(x), plain)


@lru_cache
def regression() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 8, generator=generator) @ torch.randn(8, 64, generator=generator)
    return x, torch.tanh(x @ torch.randn(64, 64, generator=generator) / 20)


@lru_cache
def fitted(qat: Qat | None) -> nn.Module:
    """Return a network after 80 steps of Adam, under few levels or in float32."""
    model, (x, y) = two_layers(), regression()
    prepared = qat.prepare(model) if qat else None
    if prepared:
        prepared.switch(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(80):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    if prepared:
        prepared.remove()
    return model


@pytest.mark.parametrize("qat", [Qat(levels="ternary", group_size=64), Qat(scheme="int2:group_size=32"), Qat(bits=2)])
def test_training_lowers_the_loss_of_the_stored_model(qat: Qat) -> None:
    """A network fitted under few levels loses less once it is stored than one fitted in float32."""
    x, y = regression()
    scheme = parse_spec("ternary:group_size=64" if qat.levels else qat.scheme or "int2")

    def loss_when_stored(qat: Qat | None) -> float:
        model = copy.deepcopy(fitted(qat))
        with torch.no_grad():
            for weight in (model.get_parameter("0.weight"), model.get_parameter("2.weight")):
                weight.copy_(decode(scheme.encode("w", weight)))
            return float(nn.functional.mse_loss(model(x), y))

    assert loss_when_stored(qat) < 0.8 * loss_when_stored(None)


def test_the_file_stores_what_was_trained() -> None:
    assert storage_rules(Qat(scheme="squares", tensors=("2.*",)), two_layers()) == [("2.weight", "squares")]


def test_names_and_values_of_the_state_stay() -> None:
    model = two_layers()
    originals = {name: weight.clone() for name, weight in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    prepared = Qat(bits=2).prepare(model)
    prepared.switch(True)
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(a is b for a, b in zip(model.parameters(), parameters.values(), strict=True))
    assert all(torch.equal(weight, originals[name]) for name, weight in model.state_dict().items())
    model.load_state_dict({name: weight + 1 for name, weight in originals.items()})
    assert torch.equal(parameters["0.weight"], originals["0.weight"] + 1)
    prepared.remove()
    assert type(model.get_submodule("0")) is nn.Linear
    assert model.get_parameter("0.weight") is parameters["0.weight"]
    pickle.dumps(model)


def test_only_matrices_that_match_are_quantized() -> None:
    model = small_gpt()
    assert set(Qat(bits=6, tensors=("*.mlp.*",)).prepare(model).names) == {
        f"blocks.{i}.mlp.{name}.weight" for i in range(1) for name in ("fc", "proj")
    }
    other = small_gpt()
    everything = {name for name, weight in other.named_parameters() if is_matrix(weight)}
    assert set(Qat(bits=6).prepare(other).names) == everything


def test_a_tied_matrix_is_quantized_at_both_of_its_uses() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=128, num_layers=2, model_dim=64, num_heads=4, num_kv_heads=4))
    ids = torch.randint(0, 128, (2, 8))
    prepared = Qat(bits=2, tensors=("tok_emb.weight",)).prepare(model)
    prepared.switch(True)
    seen = model(ids)
    prepared.remove()
    with torch.no_grad():
        model.tok_emb.weight.copy_(quantized(prepared.settings, model.tok_emb.weight))
    torch.testing.assert_close(seen, model(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "settings", [pytest.param({"bits": 3}, marks=pytest.mark.nightly), {"scheme": "squares"}], ids=str
)
def test_the_switch_works_under_the_compiler_without_a_new_graph(settings: dict[str, Any]) -> None:
    """The flag is read by the graph: it is not a constant of it, and flipping it costs no recompilation."""
    model, x = two_layers(), torch.randn(5, 64)
    prepared = Qat(**settings).prepare(model)
    weight = parameter_of(model.get_submodule("0"))

    def loss() -> Tensor:
        outputs: Tensor = model(x)
        return outputs.square().mean()

    plain = loss().item()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager" if "scheme" in settings else "aot_eager")
    compiled = torch.compile(loss, backend=counter, fullgraph=True)
    assert compiled().item() == pytest.approx(plain, abs=1e-6)
    prepared.switch(True)
    quantized = loss().item()
    assert abs(quantized - plain) > 1e-4
    assert compiled().item() == pytest.approx(quantized, abs=1e-6)
    (from_graph,), (from_eager,) = torch.autograd.grad(compiled(), weight), torch.autograd.grad(loss(), weight)
    torch.testing.assert_close(from_graph, from_eager, rtol=1e-4, atol=1e-6)
    prepared.switch(False)
    assert compiled().item() == pytest.approx(plain, abs=1e-6)
    assert counter.frame_count == 1


@lru_cache
def trained(qat: Qat | None) -> tuple[GPT, list[str]]:
    """A model after 40 quick steps, and the log."""
    model = small_gpt()
    lines: list[str] = []
    prepared = qat.prepare(model, lines.append) if qat else None
    settings = tiny_settings(iterations=40, warmdown_iters=20, accumulation=1)
    optimizers = OptimizerSettings(matrix_lr=0.05, newton_schulz_dtype="float32")
    for _ in tiny_training(model, TinyBatches(), settings, optimizers, hooks=[prepared] if prepared else []):
        pass
    if prepared is not None:
        prepared.remove()
    return model, lines


def losses(model: GPT, grid: Grid) -> tuple[float, float]:
    """Nats a token of the float model and of what the grid makes of it, on tokens that training has not seen."""
    batches = TinyBatches()
    batches.position = 10**6
    ids, targets = (torch.cat(parts) for parts in zip(*(batches.next() for _ in range(64)), strict=True))
    state = model.state_dict()
    other = copy.deepcopy(model)
    other.load_state_dict({n: decode(grid.encode(n, w)) if is_matrix(w) else w for n, w in state.items()})
    with torch.no_grad():
        return model.loss(ids, targets).item(), other.loss(ids, targets).item()


def test_it_narrows_the_quantization_gap() -> None:
    (model, lines), (plain, none) = trained(Qat(bits=2)), trained(None)
    (start_loss, end_loss), (plain_start, plain_end) = losses(model, Grid(bits=2)), losses(plain, Grid(bits=2))
    assert end_loss - start_loss < 0.5 * (plain_end - plain_start)
    assert end_loss < plain_end
    assert len(lines) == 1
    assert "6 tensors, 32,768 weights" in lines[0]
    assert not none


def test_it_is_off_before_its_start_to_the_last_bit() -> None:
    def curve(qat: Qat | None) -> list[float]:
        model = small_gpt()
        prepared = qat.prepare(model) if qat else None
        run = tiny_training(model, TinyBatches(), tiny_settings(iterations=6), hooks=[prepared] if prepared else [])
        return [step.loss for step in run]

    plain, late = curve(None), curve(Qat(bits=2, start=0.5))
    assert plain[:3] == late[:3]
    assert all(a != b for a, b in zip(plain[3:], late[3:], strict=True))


@pytest.mark.parametrize(
    ("qat", "on"),
    [
        (Qat(bits=4), [True] * 5),
        (Qat(bits=4, start=0.5), [False, False, True, True, True]),
        (Qat(bits=4, below=0.3), [False, False, False, True, True]),
        (Qat(bits=4, start=0.9, below=0.3), [False, False, False, False, True]),
    ],
)
def test_it_starts_by_share_or_by_rate(qat: Qat, on: list[bool]) -> None:
    prepared, seen = qat.prepare(two_layers()), []
    for step, (share, multiplier) in enumerate([(0, 1), (0.25, 1), (0.5, 0.6), (0.75, 0.29), (0.95, 0.05)]):
        prepared.before_step(step, share, multiplier)
        seen.append(prepared.on)
    assert seen == on


def test_a_resumed_run_goes_on_as_one_that_was_not_stopped() -> None:
    def start(model: GPT, **more: Any) -> Training:
        prepared = Qat(bits=3, start=0.5).prepare(model)
        return tiny_training(model, TinyBatches(), tiny_settings(iterations=6), hooks=[prepared], **more)

    sequence = list(start(small_gpt()))
    first = start(small_gpt())
    for step in first:
        if step.number == 4:
            break
    rest = list(start(small_gpt(seed=1), saved=first.checkpoint()))
    assert [step.loss for step in rest] == [step.loss for step in sequence[4:]]


def test_a_recipe_switches_it_on() -> None:
    recipe = load_recipe(flags=["--qat.bits", "6", "--qat.below", "0.15"])
    assert recipe.qat == Qat(bits=6, below=0.15)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert not Recipe().qat.enabled


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 4, "sigma": 0.4}, "bits 4 and sigma 0.4"),
        ({"bits": 1}, "qat bits 1"),
        ({"sigma": 0.0}, "qat sigma 0.0"),
        ({"bits": 4, "start": 1.0}, "qat start 1.0"),
        ({"bits": 4, "below": 0.0}, "qat below 0.0"),
        ({"bits": 4, "tensors": ()}, "qat tensors is empty"),
        ({"scheme": "int9"}, "int9"),
        ({"scheme": "int4", "bits": 4}, "bits 4 and scheme int4"),
    ],
)
def test_settings_out_of_range_are_refused_with_their_value(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Qat(**settings)


def test_what_cannot_be_prepared_is_refused() -> None:
    with pytest.raises(ConfigError, match="match no matrix"):
        Qat(bits=4, tensors=("nothing.*",)).prepare(two_layers())
    with pytest.raises(ConfigError, match="scheme"):
        Qat().prepare(two_layers())
    model = two_layers()
    Qat(bits=4).prepare(model)
    with pytest.raises(ConfigError, match="already"):
        Qat(bits=4).prepare(model)


@pytest.mark.nightly  # compiles C++
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
@pytest.mark.parametrize(("levels", "shape"), [("ternary", (96, 192)), ("binary", (192, 576))])
def test_levels_are_the_same_under_the_compiler(levels: Any, shape: tuple[int, int]) -> None:
    """Columns that are no whole number of groups: torch's compiler read beside the padding."""
    torch.manual_seed(0)
    weight, settings = 0.05 * torch.randn(shape), Qat(levels=levels)

    def product(weight: Tensor) -> Tensor:
        return torch.eye(shape[1]) @ (weight + (quantized(settings, weight) - weight)).T

    compiled = torch.compile(product, fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(weight), product(weight))
