"""Made-up inputs calibrate a module alone, the better of two encodings is kept, and bad inputs are one sentence."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import birdie
from birdie.compress.calibration import synthetic
from birdie.compress.calibration.held_out import HeldOut
from birdie.compress.calibration.synthetic import HeldOutError, Inputs, synthetic_calibration
from birdie.compress.prior import mean_cost, prior
from birdie.compress.scheme import Sensitivity
from birdie.errors import ConfigError, WeightsError

VOCABULARY = 50


class Language(nn.Module):
    """Language model of one gated layer; tokens of large index have large embeddings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions = nn.Embedding(64, 32)
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.inner, self.outer = nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        with torch.no_grad():
            self.inner.weight[:, ::4] *= 8

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.tokens(ids) + 0.1 * self.positions(torch.arange(ids.shape[1]) % 64)
        return {"hidden": x, "logits": self.head(x + self.outer(self.inner(x).relu()))}


class Sum(nn.Module):
    """Module of two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)

    def forward(self, first: Tensor, second: Tensor) -> tuple[None, Tensor]:
        return None, self.layer(first) + self.layer(second)


class Images(nn.Module):
    """Image network with batch norms whose running statistics are those of inputs with a mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 16, 3, stride=2), nn.Linear(16, 10)
        with torch.no_grad():
            for _ in range(20):
                self(torch.randn(16, 3, 32, 32).cumsum(-1) * 0.3 + 1)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.second(self.norm(self.first(images)).relu()).relu()
        logits: Tensor = self.head(features.mean((2, 3)))
        return logits


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "TOKENS", 2560)
    monkeypatch.setattr(synthetic, "IMAGES", 40)


def kl(float_model: nn.Module, state: dict[str, Tensor], ids: Tensor) -> float:
    decoded = torch.func.functional_call(float_model, state, (ids,))
    ours, theirs = float_model(ids)["logits"].log_softmax(-1), decoded["logits"].log_softmax(-1)
    return float(F.kl_div(theirs, ours, log_target=True, reduction="batchmean"))


def test_random_tokens_lower_the_kl_on_other_tokens_and_the_same_bytes_come_twice(tmp_path: Path) -> None:
    model, ids = Language().eval(), torch.randint(0, VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(9))
    for name, calibration in (("one", "synthetic"), ("two", "synthetic"), ("without", None)):
        birdie.save(model, tmp_path / name, budget=3_000, calibration=calibration)  # type: ignore[arg-type]
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    with torch.no_grad():
        calibrated, plain = (kl(model, birdie.load(tmp_path / name), ids) for name in ("two", "without"))
    assert calibrated < 0.6 * plain


def test_images_are_changed_until_every_batch_norm_sees_its_running_statistics() -> None:
    model, seen = Images(), []

    def difference(images: Tensor) -> Tensor:
        inputs = model.first(images)
        variance, mean = torch.var_mean(inputs, (0, 2, 3), correction=0)
        assert model.norm.running_mean is not None
        assert model.norm.running_var is not None
        share = (mean - model.norm.running_mean) ** 2 + (variance.sqrt() - model.norm.running_var.sqrt()) ** 2
        return (share / model.norm.running_var).mean()

    noise = synthetic.noise_images(3, 20, torch.Generator().manual_seed(0))
    matched = synthetic.with_statistics(model, noise)
    with torch.no_grad():
        seen = [float(difference(images)) for images in (noise, matched)]
    assert seen[1] < 0.3 * seen[0]
    assert not any(weight.grad is not None for weight in model.parameters())
    assert not model.norm._forward_hooks


def test_networks_with_other_outputs_take_example_inputs_and_their_relative_error(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 24))
    inputs = torch.randn(200, 24) @ torch.diag(torch.linspace(0.01, 2, 24))
    result = synthetic_calibration(model, inputs)
    assert isinstance(result.held_out, HeldOutError)
    assert result.held_out(model.state_dict()) == 0
    zeros = {name: torch.zeros_like(weight) for name, weight in model.state_dict().items()}
    assert result.held_out(zeros) == pytest.approx(1, abs=0.1)
    errors = []
    for name, examples in (("with", inputs), ("without", None)):
        known = None if examples is None else birdie.calibrate(model, example_inputs=examples)
        summary = birdie.save(model, tmp_path / name, budget=1_500, calibration=known)
        held_out = None if examples is None else result.held_out(birdie.load(tmp_path / name))
        assert summary.error == held_out
        with torch.no_grad():
            decoded = torch.func.functional_call(model, birdie.load(tmp_path / name), (inputs,))
            errors.append(float((decoded - model(inputs)).square().mean()))
    assert errors[0] < 0.8 * errors[1]


class Detector(nn.Module):
    """Detector of sound, whose probability is saturated by loud inputs; takes (clips, samples)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv1d(1, 16, 32, stride=8), nn.Conv1d(16, 32, 8, stride=4)
        self.head = nn.Linear(32, 1)

    def forward(self, clips: Tensor) -> Tensor:
        features = self.second(self.first(clips[:, None]).relu()).relu()
        probability: Tensor = self.head(features.mean(-1)).sigmoid()
        return probability


def test_networks_of_sound_take_noise_and_assumed_rows() -> None:
    model = Detector()
    (first, *_, last) = synthetic._made_up(model)
    assert first.arguments[0].shape[1:] == last.arguments[0].shape[1:] == (synthetic.SAMPLES[0],)
    result = synthetic_calibration(model)
    assumed = prior({"second.weight": model.second.weight.detach()})["second.weight"].row_fisher
    rows, hessian = (getattr(result.sensitivities["second.weight"], name) for name in ("row_fisher", "hessian"))
    assert assumed is not None
    ratio = rows.double() / assumed
    assert ratio.max() < 1.001 * ratio.min()
    assert hessian.shape == (128, 128)


def test_examples_are_arguments_keywords_or_a_list_of_batches() -> None:
    model = Sum()
    one, two = torch.randn(20, 8), torch.randn(20, 8)
    for examples in ((one, two), {"first": one, "second": two}, [(one, two), (two, one)]):
        result = synthetic_calibration(model, examples)
        assert isinstance(result.held_out, HeldOut)
        assert result.held_out.batches
    assert len(synthetic._split(Inputs((one, two)))) == synthetic.BATCHES


class Towers(nn.Module):
    """Two networks with an output each, a cache beside them, and noise in one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> dict[str, Any]:
        noisy = self.second(x + torch.randn(x.shape))
        return {"first": self.first(x), "both": (noisy,), "hidden_states": self.third(x), "infinite": x * torch.inf}


def test_all_outputs_count_but_inner_states_and_random_numbers_are_those_of_each_call() -> None:
    model, x = Towers(), torch.randn(40, 16)
    generator_state = torch.get_rng_state()
    result = synthetic_calibration(model, x)
    assert torch.equal(torch.get_rng_state(), generator_state)
    assert result.sensitivities.keys() == {"first.weight", "second.weight"}
    assert result.held_out is not None
    assert result.held_out(model.state_dict()) == 0
    zeros = {name: torch.zeros_like(weight) for name, weight in model.first.state_dict(prefix="first.").items()}
    assert result.held_out(zeros) == pytest.approx(1 / 4, abs=0.1)  # of one output in four


def test_a_module_that_cannot_be_differentiated_is_calibrated_by_forward_passes() -> None:
    class Detached(Images):
        def forward(self, images: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(images)

    result = synthetic_calibration(Detached())
    assert {"first.weight", "second.weight"} <= result.sensitivities.keys()
    assert result.held_out is not None
    assert result.held_out({}) == pytest.approx(0, abs=1e-6)


def loss(module: nn.Module, inputs: Inputs) -> Tensor:
    outputs: Tensor = module(*inputs.arguments)
    return outputs.sum()


@pytest.mark.parametrize("part", ["hessian", "row_fisher"])
def test_a_weight_whose_gradients_are_not_finite_is_as_assumed(part: str, caplog: pytest.LogCaptureFixture) -> None:
    weights = {"weight": torch.ones(8, 8)}
    measured = Sensitivity(torch.eye(8), torch.ones(8))
    getattr(measured, part)[0] = torch.nan
    (assumed,) = prior(weights).values()
    with caplog.at_level("INFO", "birdie"):
        (moderated,) = synthetic._moderated({"weight": measured}, weights, gradients=True).values()
    assert assumed.row_fisher is not None
    assert moderated.row_fisher is not None
    assert torch.equal(moderated.row_fisher, assumed.row_fisher)
    assert "of weight first" in caplog.text


@pytest.mark.parametrize("share", [0.0, 1e-12, 1e-3, 1 / 4])
def test_no_matrix_takes_more_than_two_bits_less_than_what_is_assumed(share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(64, 64, generator=generator) for name in "abcd"}
    measured = {
        name: replace(item, row_fisher=item.row_fisher * 7 * (share if name == "d" else 1.0), output=torch.eye(64))
        for name, item in prior(state).items()
        if item.row_fisher is not None
    }
    moderated = synthetic._moderated(measured, state, gradients=True)
    ratios = {name: mean_cost(moderated[name]) / mean_cost(item) for name, item in prior(state).items()}
    assert ratios == pytest.approx({"a": 7, "b": 7, "c": 7, "d": 7 * max(share, 1 / 16)})


def test_what_cannot_be_calibrated_is_one_sentence(tmp_path: Path) -> None:
    model, file = nn.Linear(64, 64), tmp_path / "x.birdie"
    inputs = torch.randn(20, 64)
    broken = Images()
    assert broken.norm.running_var is not None
    broken.norm.running_var[2] = torch.nan
    cases: list[tuple[type[Exception], str, object, dict[str, object]]] = [
        (ConfigError, "example_inputs", model, {"calibration": "synthetic", "tune": 1}),
        (ConfigError, "'noise'", model, {"calibration": "noise"}),
        (ConfigError, "module", model.state_dict(), {"calibration": "synthetic"}),
        (WeightsError, r"norm\.running_var", broken, {"calibration": "synthetic"}),
    ]
    for error, message, subject, arguments in cases:
        with pytest.raises(error, match=message):
            birdie.save(subject, file, budget=3_000, **arguments)  # type: ignore[arg-type]
        assert not file.exists()
    with pytest.raises(ConfigError, match="quality"):
        birdie.save(model, file, quality=0.1, calibration="synthetic")
    calls: list[tuple[str, Any, tuple[Any, ...], dict[str, object]]] = [
        ("not a module", model.state_dict(), (), {"example_inputs": inputs}),
        (r"\(\d+, 63\)", model, (), {"example_inputs": inputs[:, 1:]}),
        ("does not accept", model, (), {"example_inputs": inputs.long()}),
        ("no tensor", model, (), {"example_inputs": "words"}),
        ("no tensor", model, (), {"example_inputs": []}),
        ("drop one", model, ([inputs], loss), {"example_inputs": inputs}),
        ("give both", model, ([inputs],), {}),
        ("batches and a loss", model, (), {"offload": True}),
    ]
    for message, subject, data, arguments in calls:
        with pytest.raises(ConfigError, match=message):
            birdie.calibrate(subject, *data, **arguments)  # type: ignore[arg-type]


class Patches(nn.Module):
    """Patches of 8 × 8 pixels with positions of their own, of 48 × 48 images."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 16, 8, stride=8), nn.Linear(16, 4)
        self.positions = nn.Parameter(torch.randn(1, 36, 16))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head((self.patches(images).flatten(2).mT + self.positions).mean(1))
        return logits


def test_images_of_patches_with_positions_have_as_many() -> None:
    assert synthetic.image_edge(Patches(), 3) == 48


def test_made_up_images_have_the_size_that_the_module_accepts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for edge in (40, 28, 8):
        model = nn.Sequential(
            nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * edge**2, 10)
        )
        assert synthetic.image_edge(model, 2) == edge
    summary = birdie.save(model, tmp_path / "x.birdie", bits=4, calibration="synthetic")
    assert summary.control is not None
    assert summary.control.errors


def test_inputs_that_cannot_be_made_up_leave_the_file_without_calibration(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    summary = birdie.save(model, tmp_path / "x.birdie", budget=3_000, calibration="synthetic")
    birdie.save(model, tmp_path / "plain.birdie", budget=3_000)
    assert (tmp_path / "x.birdie").read_bytes() == (tmp_path / "plain.birdie").read_bytes()
    assert summary.control is not None
    assert summary.control.kept == "assumed"
    assert "not calibrated: inputs of Linear" in str(summary)
    assert "not calibrated: inputs of Linear" in caplog.text


class OfBatch(nn.Module):
    """A network that takes a dict."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        result: Tensor = self.inner(batch["input"])
        return result


@pytest.mark.parametrize("kind", ["loader of inputs", "loader with labels", "dict as keywords", "dict as a whole"])
def test_example_inputs_are_given_as_the_module_takes_them(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(24, 16)
    inputs, labels = torch.randn(64, 24), torch.zeros(64)
    data: Any = {
        "loader of inputs": DataLoader(TensorDataset(inputs), batch_size=8),
        "loader with labels": DataLoader(TensorDataset(inputs, labels), batch_size=8),
        "dict as keywords": [{"input": batch} for batch in inputs.split(8)],
        "dict as a whole": [{"input": batch} for batch in inputs.split(8)],
    }[kind]
    module = OfBatch(model) if kind == "dict as a whole" else model
    known = birdie.calibrate(module, example_inputs=data)
    expected = birdie.calibrate(model, example_inputs=list(inputs.split(8)))
    name = "inner.weight" if module is not model else "weight"
    measured, alone = known.sensitivities[name].hessian, expected.sensitivities["weight"].hessian
    assert measured is not None
    assert alone is not None
    assert torch.equal(measured, alone)


def test_of_a_loader_without_an_end_some_batches_are_taken() -> None:
    model = nn.Linear(24, 16)
    generator = torch.Generator().manual_seed(0)
    endless = (torch.randn(4, 24, generator=generator) for _ in itertools.count())
    assert birdie.calibrate(model, example_inputs=endless).sensitivities["weight"].hessian is not None
