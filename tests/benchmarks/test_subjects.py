"""Subjects: quality counts every tensor and is that of the scorer; networks are strict; models are known by content."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import bench_model, packages, subjects
from benchmarks.networks import ResNet, load_resnet, normalized
from benchmarks.rivals import NotInstalledError
from benchmarks.subjects import Subject, tiny_subject
from birdie.errors import ConfigError, WeightsError
from birdie.gpt.data.tokenizer import load_tokenizer
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.score.accumulator import Text
from birdie.gpt.score.evaluator import score


def test_a_model_has_no_kl_to_itself_and_every_tensor_counts() -> None:
    model = tiny_subject()
    same = model.measure(model.state)
    assert (same.kl, same.agreement) == (0, 1)
    changed = {**model.state, "skip_weights": model.state["skip_weights"] + 1}
    assert model.measure(changed).kl > 0
    assert model.on(torch.device("cpu")).measure(changed) == model.measure(changed)
    moved = model.on(torch.device("meta"))
    parts = (*moved.held_out[0], *moved.calibration[0], *moved.state.values(), *moved.build().parameters())
    assert all(tensor.is_meta for tensor in parts)
    assert not any(tensor.is_meta for tensor in model.module.parameters())
    with pytest.raises(RuntimeError, match="skip_weights"):
        model.measure({name: weight for name, weight in model.state.items() if name != "skip_weights"})


@pytest.mark.parametrize(
    "count", [3, pytest.param(32, marks=pytest.mark.nightly)]
)  # windows: less than a batch of this module, more than one of the scorer
def test_bits_per_byte_equal_those_of_the_scorer(count: int) -> None:
    torch.manual_seed(0)
    tokenizer, cpu = load_tokenizer("bytes"), torch.device("cpu")
    model = GPT(GPTConfig(vocab_size=tokenizer.vocab_size, num_layers=1, model_dim=16, num_heads=2, num_kv_heads=1))
    tokens = np.random.default_rng(0).integers(4, 200, count * subjects.SEQ_LEN + 1).astype(np.uint16)
    table, bos = tokenizer.byte_table(), tokenizer.bos_id
    state, batches = model.state_dict(), subjects.windows(tokens)
    one_layer = Subject(
        *("one", model.eval(), state, batches, [], "", lambda: GPT(model.config)),
        bits=lambda nats: subjects._bits(nats, tokens, table, bos),
    )
    expected = score(
        model, Text(tokens, table, bos), train_seq_len=subjects.SEQ_LEN, batch_tokens=8192, device=cpu
    ).score
    assert one_layer.measure(state).bpb == pytest.approx(expected.bpb, rel=1e-6)


def test_resnets_are_loaded_strictly_and_pixels_are_normalized_by_channel(tmp_path: Path) -> None:
    model = ResNet(2)
    state = {f"module.{name}": weight for name, weight in model.state_dict().items() if "tracked" not in name}
    torch.save({"state_dict": state, "best_prec1": 1.0}, tmp_path / "a.th")
    loaded, loaded_state = load_resnet(tmp_path / "a.th")
    assert loaded.blocks == 2
    assert torch.equal(loaded_state["linear.weight"], model.linear.weight)
    torch.save({"state_dict": state | {"module.linear.extra": torch.ones(1)}}, tmp_path / "b.th")
    with pytest.raises(WeightsError, match=r"b\.th"):
        load_resnet(tmp_path / "b.th")
    black = normalized(torch.zeros(1, 32, 32, 3, dtype=torch.uint8))
    assert black[0, :, 0, 0].tolist() == pytest.approx([-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225])


@pytest.mark.nightly  # decodes ten thousand images
def test_the_accuracy_of_a_real_resnet_is_the_published_one(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIRDIE_DATA", str(shared_data))
    try:
        subject = subjects.load_subject("resnet20", tmp_path, subjects.Amounts(images=500))
    except NotInstalledError as error:
        pytest.skip(str(error))
    measured = subject.measure(subject.state)
    assert measured.kl == 0
    assert measured.accuracy is not None
    assert 0.7 < measured.accuracy < 0.95
    inputs, targets = subject.calibration[0]
    assert (subject.module(inputs).argmax(-1) == targets).double().mean() > 0.97  # its training images


@pytest.mark.parametrize("name", subjects.KEPT_OUT)
def test_a_package_that_is_missing_is_named(name: str, shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda _: None)
    monkeypatch.setenv("BIRDIE_DATA", str(shared_data))
    with pytest.raises(NotInstalledError, match="pip install --no-deps"):
        subjects.load_subject(name, Path(), subjects.Amounts())


def test_the_sources_of_the_shared_model_exist(shared_data: Path, tmp_path: Path) -> None:
    assert len(bench_model.Sources.under(shared_data).books) == 15
    with pytest.raises(ConfigError, match="no trained model"):
        bench_model.bench_model(tmp_path, shared_data, train=False)
    with pytest.raises(ConfigError, match=r"fineweb_1024_bpe\.model"):
        bench_model.bench_model(tmp_path, tmp_path)
