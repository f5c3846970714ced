"""Subjects: float models of the shared data (folder BIRDIE_DATA), with the data that their quality is measured on.

    weights, decoded from bytes ──► module ──► KL(float ‖ decoded), agreement, and bits per byte or accuracy

The language models are scored on the first tokens of FineWeb's validation split and calibrated on training tokens. The
ResNets are scored on the (lossy) JPEG test images and calibrated on the 2,000 lossless training images. Decoded tensors
are loaded strictly. The logits of the float model are computed once and cached. Nothing in birdie was chosen on the
networks of `KEPT_OUT`, which come with packages: a pitch detector on half of the clips, calibrated on the others, and
a pronouncer of words of the books, calibrated on other words. Their targets are the float model's own choices. `tiny`
is a GPT with random weights and random text that needs no data: with it a benchmark shows in seconds that it works.
"""

import copy
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.bench_model import Sources, bench_model
from benchmarks.command import shared_data
from benchmarks.divergence import divergence
from benchmarks.networks import images, load_resnet, load_speech, normalized
from benchmarks.packages import Crepe, Pronouncer, frames, letters_of, load_crepe, load_pronouncer
from birdie.checkpoints.checkpoints import read_state_dict
from birdie.gpt.data.byte_accounting import ByteTable
from birdie.gpt.data.shards import read_shard
from birdie.gpt.data.tokenizer import load_tokenizer
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.model.infer_config import infer_config
from birdie.gpt.score.accumulator import Accumulator, Text

SEQ_LEN = 512  # what the benchmark model was trained with
WINDOWS, IMAGES = 16, 250  # per batch
HELD_OUT_TOKENS, CALIBRATION_TOKENS, TEST_IMAGES = 65_536, 131_072, 10_000
SUBJECTS = ("bench", "bench4", "g128", "samtruss", "resnet20", "resnet32")
KEPT_OUT = ("crepe", "pronouncer")
CHOICES = (*SUBJECTS, *KEPT_OUT, "tiny")
FRAMES, LETTERS, PHONEMES, WORDS = 64, 8, 6, 4096  # frames of a batch; of words, whose end is no letter; held-out words
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality of a decoded model.

    Attributes:
        kl: mean KL(float ‖ decoded) per target token or image, nats.
        stderr: standard error of `kl`.
        agreement: share of predictions whose top choice is that of the float model.
        bpb: bits per byte of text; None for images.
        accuracy: share of correctly classified images; None for text.
    """

    kl: float
    stderr: float
    agreement: float
    bpb: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True)
class Subject:
    """A float model, with held-out data to measure its compressed forms and calibration data to compress it.

    Attributes:
        name: for titles.
        module: the float model in evaluation mode; never modified.
        state: its tensors as stored; the input of every coder.
        held_out: batches of (inputs, targets) that quality is measured on.
        calibration: batches that may be used to compress.
        key: hash of weights and data; cached results depend on it.
        logits: cached logits of the float model, by batch.
        build: returns an empty module of the same shape.
        bits: held-out nats in order → bits per byte; None for images.
    """

    name: str
    module: nn.Module
    state: Mapping[str, Tensor]
    held_out: Sequence[Batch]
    calibration: Sequence[Batch]
    key: str
    build: Callable[[], nn.Module]
    bits: Callable[[list[Tensor]], float] | None = None
    logits: dict[int, Tensor] = field(default_factory=dict)

    @property
    def has_images(self) -> bool:
        """Return whether inputs are images, of which variants can be made."""
        return self.held_out[0][0].ndim == 4

    def on(self, device: torch.device) -> "Subject":
        """Return the same model and data on a device, without cached logits."""
        module, build = copy.deepcopy(self.module).to(device), self.build
        held_out, calibration = (
            [(inputs.to(device), targets.to(device)) for inputs, targets in batches]
            for batches in (self.held_out, self.calibration)
        )
        return replace(
            self,
            module=module,
            state={name: weight.to(device) for name, weight in self.state.items()},
            held_out=held_out,
            calibration=calibration,
            build=lambda: build().to(device),
            logits={},
        )

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the summed nats of a batch (0-d), which calibration differentiates."""
        logits = module(batch[0])
        return F.cross_entropy(logits.flatten(0, -2).float(), batch[1].flatten(), reduction="sum")

    def measure(self, state: Mapping[str, Tensor]) -> Quality:
        """Return the quality of decoded tensors, which are loaded strictly."""
        candidate = self.build()
        candidate.load_state_dict({name: weight.float() for name, weight in state.items()}, strict=True)
        candidate.eval()
        nats: list[Tensor] = []
        right = 0

        def predict(index: int) -> Tensor:
            nonlocal right
            inputs, targets = self.held_out[index]
            logits: Tensor = candidate(inputs)
            flat, labels = logits.flatten(0, -2), targets.flatten()
            nats.append(F.cross_entropy(flat.float(), labels, reduction="none").view_as(targets))
            right += int((flat.argmax(-1) == labels).sum())
            return logits

        result = divergence(self._reference, predict, range(len(self.held_out)))
        if self.bits is None:
            return Quality(result.kl, result.stderr, result.agreement, accuracy=right / result.count)
        return Quality(result.kl, result.stderr, result.agreement, bpb=self.bits(nats))

    def _reference(self, index: int) -> Tensor:
        if index not in self.logits:
            self.logits[index] = self.module(self.held_out[index][0])
        return self.logits[index]


@dataclass(frozen=True, slots=True)
class Amounts:
    """Amounts of data to measure and calibrate on.

    Attributes:
        tokens, images: held out; tokens are rounded down to complete windows.
        calibration_tokens: rounded down likewise.
    """

    tokens: int = HELD_OUT_TOKENS
    images: int = TEST_IMAGES
    calibration_tokens: int = CALIBRATION_TOKENS


def load_subject(name: str, runs: Path, amounts: Amounts) -> Subject:
    """Return one of `CHOICES`; `runs` is the folder of trained models and cached pixels.

    `bench` is the shared benchmark model and `bench4` the same trained four times as long; either is trained first if
    necessary.
    """
    if name == "tiny":
        return tiny_subject()
    data = shared_data()
    golf = data / "weights" / "parameter_golf"
    match name:
        case "bench":
            weights = bench_model(runs)
        case "bench4":
            weights = bench_model(runs, longer=4)
        case "g128":
            weights = golf / "nolanvild_128d_fp32.pt"
        case "samtruss":
            weights = golf / "samtruss_7L384_valbpb1.99.int8.ptz"
        case "crepe":
            return crepe_subject(load_speech(data))
        case "pronouncer":
            return pronouncer_subject(Sources.under(data).books)
        case _:
            (weights,) = (data / "weights" / "resnet_cifar10").glob(f"{name}-*.th")
            return resnet_subject(name, weights, runs, amounts)
    return gpt_subject(name, weights, data, amounts)


def gpt_subject(name: str, weights: Path, data: Path, amounts: Amounts) -> Subject:
    """Return a GPT of the challenge's baseline architecture with a vocabulary of 1,024 pieces."""
    sources = Sources.under(data)
    state = read_state_dict(weights)
    config = infer_config(state)
    module = GPT(config)
    module.load_state_dict(state, strict=True)
    tokenizer = load_tokenizer(sources.tokenizer)
    held_out = np.asarray(read_shard(sources.val)[: amounts.tokens // SEQ_LEN * SEQ_LEN + 1])
    training = np.asarray(read_shard(sources.train)[: amounts.calibration_tokens // SEQ_LEN * SEQ_LEN + 1])
    table = tokenizer.byte_table(config.vocab_size)
    return Subject(
        name,
        module.eval(),
        state,
        windows(held_out),
        windows(training),
        digest(state, held_out, training),
        lambda: GPT(config),
        lambda nats: _bits(nats, held_out, table, tokenizer.bos_id),
    )


def tiny_subject(sequences: int = 12) -> Subject:
    """Return a GPT of two layers with random weights and bytes; its "bits per byte" are nats per token."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=256, num_layers=2, model_dim=64, num_heads=4, num_kv_heads=2, mlp_mult=2)
    model = GPT(config).eval()
    for weight in model.parameters():
        if weight.ndim == 2 and min(weight.shape) > 4:
            nn.init.normal_(weight, std=0.3)
    tokens = torch.randint(0, 256, (sequences, 17), generator=torch.Generator().manual_seed(0))
    batches = [(part[:, :-1], part[:, 1:]) for part in torch.split(tokens, 4)]
    state = {name: weight.detach().clone() for name, weight in model.state_dict().items()}

    def bits(nats: list[Tensor]) -> float:
        return float(torch.cat([batch.flatten() for batch in nats]).mean())

    return Subject("tiny", model, state, batches, batches, digest(state, tokens.numpy()), lambda: GPT(config), bits)


def resnet_subject(name: str, weights: Path, runs: Path, amounts: Amounts) -> Subject:
    """Return a CIFAR ResNet on the first test images, which alternate between the classes."""
    module, state = load_resnet(weights)
    pixels = images(shared_data(), runs / "rd-cache" / "cifar10.npz")
    test, labels = pixels["test"][: amounts.images], pixels["test_labels"][: amounts.images]
    batches = _image_batches(normalized(test), labels)
    calibration = _image_batches(normalized(pixels["train"]), pixels["train_labels"])
    blocks = module.blocks
    key = digest(state, test.numpy(), pixels["train"].numpy())
    return Subject(name, module, state, batches, calibration, key, lambda: type(module)(blocks))


def crepe_subject(clips: Tensor) -> Subject:
    """Return the pitch detector; every second clip is held out."""
    module = load_crepe()

    @torch.no_grad()
    def batches(some: Tensor) -> list[Batch]:
        return [(inputs, module(inputs).argmax(-1)) for inputs in torch.split(frames(some), FRAMES)]

    state = {name: weight.detach().clone() for name, weight in module.state_dict().items()}
    key = digest(state, clips.numpy())
    return Subject("crepe", module, state, batches(clips[1::2]), batches(clips[::2]), key, Crepe)


def pronouncer_subject(books: Sequence[Path]) -> Subject:
    """Return the pronouncer, on words of one length: the first half of a random order is held out."""
    module = load_pronouncer(LETTERS + 1)
    text = " ".join(path.read_text(errors="replace").lower() for path in books)
    words = sorted(set(re.findall(rf"\b[a-z]{{{LETTERS}}}\b", text)))
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(0)).tolist()
    letters = letters_of([words[index] for index in order[: 2 * WORDS]])
    with torch.no_grad():
        pairs = [module.spoken(some, PHONEMES) for some in torch.split(letters, IMAGES)]
    half = len(pairs) // 2
    state = {name: weight.detach().clone() for name, weight in module.state_dict().items()}
    key = digest(state, letters.numpy())
    return Subject("pronouncer", module, state, pairs[:half], pairs[half:], key, lambda: Pronouncer(LETTERS + 1))


def windows(tokens: NDArray[np.integer]) -> list[Batch]:
    """Return k · SEQ_LEN + 1 tokens as batches of (ids, targets), each (windows, SEQ_LEN)."""
    sequence = torch.from_numpy(tokens.astype(np.int64))
    ids, targets = sequence[:-1].view(-1, SEQ_LEN), sequence[1:].view(-1, SEQ_LEN)
    return list(zip(torch.split(ids, WINDOWS), torch.split(targets, WINDOWS), strict=True))


def _image_batches(inputs: Tensor, labels: Tensor) -> list[Batch]:
    return list(zip(torch.split(inputs, IMAGES), torch.split(labels, IMAGES), strict=True))


def _bits(nats: list[Tensor], tokens: NDArray[np.uint16], table: ByteTable, bos_id: int) -> float:
    """Return the bits per byte of known losses."""
    losses, accumulator = torch.cat([batch.flatten() for batch in nats]), Accumulator(Text(tokens, table, bos_id))
    accumulator.add(np.zeros(1, int), losses[None].float().cpu().numpy())
    return accumulator.score(len(losses), 0.0).bpb


def digest(state: Mapping[str, Tensor], *arrays: NDArray[np.generic]) -> str:
    """Return twelve hex digits that depend on all tensors (with their names) and arrays."""
    sha256 = hashlib.sha256()
    for name, weight in sorted(state.items()):
        sha256.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        sha256.update(weight.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for array in arrays:
        sha256.update(f"{array.shape} {array.dtype}".encode())
        sha256.update(np.ascontiguousarray(array).tobytes())
    return sha256.hexdigest()[:12]
