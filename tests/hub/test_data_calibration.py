"""A text or images calibrate a Hugging Face folder, and sensitivities have the names of the tensors on disk."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import birdie
from birdie.checkpoints.checkpoint import open_checkpoint
from birdie.cli import build_app
from birdie.cli.console import run
from birdie.compress.calibration.image_files import images_in
from birdie.compress.small_tensors import is_worth_coarsening
from birdie.errors import ConfigError, DataError, WeightsError
from birdie.hub.data_calibration import calibrate_on_images, calibrate_on_text, sequences
from birdie.hub.names_on_disk import NamesOnDisk

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers

GPTQ = "gptq:bits=4,clip_sigmas=6"
MODELS = ("llama", "llama, tied", "gpt2, old names")
SMALL = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}


def prose(words: int) -> str:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 97, (words,), generator=generator) ** 2 % 31
    return " ".join(f"word{number}" for number in numbers.tolist())


def write_tokenizer(folder: Path) -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = tokenizers.pre_tokenizers.ByteLevel(), tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([prose(500)], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    fast.save_pretrained(folder)
    return fast


def build(kind: str) -> Any:
    torch.manual_seed(0)
    if kind.startswith("gpt2"):
        config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, **SMALL)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings="tied" in kind,
            **SMALL,
        )
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.ndim > 1 else 1)
    return model


def with_old_names(folder: Path) -> None:
    """Rename the tensors as the base model wrote them years ago, with its causal masks."""
    state = load_file(folder / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor.clone() for name, tensor in state.items()}
    old |= {f"h.{layer}.attn.bias": torch.ones(64, 64).tril()[None, None].clone() for layer in range(2)}
    save_file(old, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    (root / "text.txt").write_text(prose(4000))
    paths = {"text": root / "text.txt"}
    for kind in MODELS:
        paths[kind] = root / kind.replace(", ", "-").replace(" ", "-")
        model = build(kind)
        (model.to(torch.bfloat16) if "llama" in kind else model).save_pretrained(paths[kind])
        write_tokenizer(paths[kind])
    with_old_names(paths["gpt2, old names"])
    return paths


TIED, OLD = (pytest.param(kind, marks=pytest.mark.nightly) for kind in MODELS[1:])


@pytest.mark.parametrize("kind", [TIED, "gpt2, old names"])
def test_every_matrix_on_disk_is_calibrated(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    state = open_checkpoint(folders[kind]).content
    steps: list[tuple[float, float | None]] = []
    result = calibrate_on_text(
        folders[kind], state, folders["text"], tokens=2048, progress=lambda done, total: steps.append((done, total))
    )
    matrices = {name for name, tensor in state.items() if is_worth_coarsening(tensor)}
    assert {name for name in matrices if not name.endswith("attn.bias")} == result.sensitivities.keys() & matrices
    assert result.sensitivities.keys() <= state.keys()
    assert steps[-1][0] == steps[-1][1]
    assert result.held_out is not None
    assert result.held_out(state) == pytest.approx(0, abs=1e-9)
    birdie.save(state, tmp_path / "with.birdie", scheme=GPTQ, calibration=result)
    birdie.save(state, tmp_path / "without.birdie", scheme=GPTQ)
    calibrated, plain = (result.held_out(birdie.load(tmp_path / f"{name}.birdie")) for name in ("with", "without"))
    assert calibrated < 0.7 * plain


def test_tuning_uses_the_names_on_disk(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["gpt2, old names"]
    state = open_checkpoint(folder).content
    result = calibrate_on_text(folder, state, folders["text"], tokens=512)
    plain = birdie.save(state, tmp_path / "plain.birdie", scheme="int4", calibration=result)
    tuned = birdie.save(state, tmp_path / "tuned.birdie", scheme="int4", calibration=result, tune=0.3)
    assert plain.error is not None
    assert tuned.error is not None
    assert tuned.error <= plain.error * 1.001


@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_command_calibrates_on_a_text(offload: bool, folders: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "m.birdie"
    command = ["compress", str(folders["llama, tied"]), "-o", str(output), "--bits", "5", "--effort", "fast"]
    assert run(build_app, [*command, "--calibrate", str(folders["text"]), "--calibration-tokens", "512"]) == 0
    summary = birdie.inspect(output)
    assert summary.bits_per_weight <= 5
    names = {tensor.name for tensor in summary.tensors}
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    if offload:
        text = ["--calibrate", str(folders["text"]), "--calibration-tokens", "512", "--offload"]
        assert run(build_app, [*command, *text]) == 0
        assert birdie.inspect(output).bytes == pytest.approx(summary.bytes, rel=0.01)
    assert run(build_app, [*command, "--calibrate", str(tmp_path / "nothing.txt")]) == 1
    assert "nothing.txt" in capsys.readouterr().err
    weights = [*command[:1], str(folders["llama"] / "model.safetensors"), *command[2:]]
    assert run(build_app, [*weights, "--calibrate", str(folders["text"])]) == 1
    assert "config.json" in capsys.readouterr().err


def test_a_folder_without_tokenizer_is_one_sentence(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders["llama"], folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match="tokenizer"):
        calibrate_on_text(folder, open_checkpoint(folder).content, folders["text"], tokens=1024)


def test_a_parameter_that_is_not_on_disk_is_refused(folders: dict[str, Path]) -> None:
    state = open_checkpoint(folders["llama"]).content
    name = "model.layers.1.mlp.up_proj.weight"
    model = transformers.LlamaForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32)
    assert NamesOnDisk(model, state, folders["llama"]).names[name] == name
    for other in ({key: tensor for key, tensor in state.items() if key != name}, {**state, name: state[name] + 1}):
        with pytest.raises(WeightsError, match=name):
            NamesOnDisk(model, other, folders["llama"])


def test_sequences_begin_as_documents_do_and_cover_a_long_text(folders: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["llama"])
    text = tmp_path / "long.txt"
    text.write_text(" ".join(f"{number:06d}" for number in range(50_000)))
    rows = sequences(tokenizer, text, 512, 64)
    assert rows.shape == (8, 64)
    assert bool((rows[:, 0] == 0).all())
    assert torch.equal(rows, sequences(tokenizer, text, 512, 64))
    numbers = sorted(int(tokenizer.decode(row[1:].tolist()).split()[2]) for row in rows)
    assert numbers[0] < 6_250 <= numbers[1]
    assert numbers[-1] > 43_750
    text.write_text("a b c " * 30)
    short = sequences(tokenizer, text, 512, 64)
    assert len(short) >= 2


def test_a_tokenizer_of_another_model_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    config = transformers.LlamaConfig.from_pretrained(folders["llama"])
    config.vocab_size = 100
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for file in folders["llama"].glob("tokenizer*"):
        shutil.copy(file, folder)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 100
    state: dict[str, Tensor] = open_checkpoint(folder).content
    with pytest.raises(ConfigError, match="tokens"):
        calibrate_on_text(folder, state, folders["text"], tokens=1024)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pil = pytest.importorskip("PIL.Image")
    root = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for index in range(24):
        (root / f"class{index % 3}").mkdir(exist_ok=True)
        pixels = generator.integers(0, 255, (40, 50, 3), dtype=np.uint8)
        pil.fromarray(pixels).save(root / f"class{index % 3}" / f"{index}.png")
    (root / "labels.csv").write_text("nothing to see")
    return root


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", minversion="5.0")  # which names its tensors as the test says
    folder = tmp_path_factory.mktemp("models") / "vit"
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    vit = transformers.ViTForImageClassification(config)
    with torch.no_grad():
        for weight in vit.parameters():
            weight.mul_(3 if weight.ndim > 1 else 1)
    vit.save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def test_every_matrix_of_a_classifier_is_calibrated(classifier: Path, images: Path, tmp_path: Path) -> None:
    state = open_checkpoint(classifier).content
    assert "vit.encoder.layer.1.attention.attention.query.weight" in state  # in the model it has another name
    steps: list[tuple[float, float | None]] = []
    result = calibrate_on_images(
        classifier, state, images_in(images), progress=lambda done, total: steps.append((done, total))
    )
    assert steps[-1][0] == steps[-1][1] == 20
    matrices = {name for name, tensor in state.items() if is_worth_coarsening(tensor) and "position" not in name}
    assert matrices <= result.sensitivities.keys() <= state.keys()
    assert result.held_out is not None
    assert result.held_out(state) == pytest.approx(0, abs=1e-9)
    calibrated = birdie.save(state, tmp_path / "m.birdie", scheme=GPTQ, calibration=result).error
    birdie.save(state, tmp_path / "plain.birdie", scheme=GPTQ)
    assert calibrated is not None
    assert calibrated < result.held_out(birdie.load(tmp_path / "plain.birdie"))


def test_the_command_calibrates_on_a_folder_of_images(
    classifier: Path, images: Path, tmp_path: Path, capsys: Any
) -> None:
    command = ["compress", str(classifier), "-o", str(tmp_path / "m.birdie"), "--bits", "5", "--effort", "fast"]
    assert run(build_app, [*command, "--calibrate", str(images)]) == 0
    assert birdie.inspect(tmp_path / "m.birdie").bits_per_weight <= 5
    (tmp_path / "empty").mkdir()
    assert run(build_app, [*command, "--calibrate", str(tmp_path / "empty")]) == 1
    assert "empty" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["llama, tied", OLD])
def test_offload_measures_the_same(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    state = open_checkpoint(folders[kind]).content
    complete = calibrate_on_text(folders[kind], state, folders["text"], tokens=2048)
    offloaded = calibrate_on_text(folders[kind], state, folders["text"], tokens=2048, offload=tmp_path / "work")
    assert complete.sensitivities.keys() == offloaded.sensitivities.keys()
    for name, expected in complete.sensitivities.items():
        measured = offloaded.sensitivities[name]
        if expected.hessian is not None and measured.hessian is not None:
            difference = (expected.hessian - measured.hessian).norm() / expected.hessian.norm()
            assert difference < (0.05 if state[name].dtype == torch.bfloat16 else 1e-3), name


@pytest.mark.parametrize("content", [b"few words", b"\xff\xfe\x00"])
def test_a_text_that_cannot_be_used_is_one_sentence(content: bytes, folders: dict[str, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    with pytest.raises(DataError, match=r"text\.txt"):
        calibrate_on_text(folders["llama"], open_checkpoint(folders["llama"]).content, text)


def test_an_image_that_cannot_be_read_is_one_sentence(classifier: Path, images: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG but no more")
    state = open_checkpoint(classifier).content
    with pytest.raises(DataError, match=r"broken\.png"):
        calibrate_on_images(classifier, state, [*images_in(images), tmp_path / "broken.png"])
    with pytest.raises(DataError, match="too few images to calibrate on: 1"):
        calibrate_on_images(classifier, state, images_in(images)[:1])
