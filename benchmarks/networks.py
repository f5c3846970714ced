"""Networks of the shared data: the CIFAR ResNets, with their images, and Silero's voice detector, with speech.

ResNets are those of He et al. 2016, §4.2, in the form of akamaster/pytorch_resnet_cifar10: conv 3×3 → 3 stages of n
blocks at 16, 32, 64 channels, the image halved between stages → mean over the image → linear. At the start of a stage,
the shortcut takes every second pixel and pads the new channels with zeros ("option A", without weights). Images are PNG
and JPEG files, which torch cannot read, so Pillow in the rivals' environment reads them.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.rivals import HERE, run_in_environment
from birdie.checkpoints.checkpoints import read_state_dict
from birdie.errors import WeightsError
from birdie.system.files import atomic_path

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # used to train these networks
WIDTHS = (16, 32, 64)
OLD, NEW, HOP, BINS, HIDDEN = 64, 512, 128, 129, 128
STRIDES = (1, 2, 2, 1)


class Block(nn.Module):
    """Residual block: relu(x + bn(conv(relu(bn(conv(x))))))."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.added = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output: (batch, inputs, side, side) → (batch, outputs, side / stride, side / stride)."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        half = self.added // 2
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, self.added - half))
        return F.relu(y + shortcut)


class ResNet(nn.Module):
    """ResNet of 6n + 2 layers; n = 3 is ResNet-20, n = 5 ResNet-32."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.blocks = n
        self.conv1 = nn.Conv2d(3, WIDTHS[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        inputs = WIDTHS[0]
        for stage, width in enumerate(WIDTHS, start=1):
            blocks = [Block(inputs if index == 0 else width, width, 1 + (index == 0 < stage - 1)) for index in range(n)]
            setattr(self, f"layer{stage}", nn.Sequential(*blocks))
            inputs = width
        self.linear = nn.Linear(inputs, len(CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, 10) of normalized images (batch, 3, side, side)."""
        x = F.relu(self.bn1(self.conv1(images)))
        for stage in range(1, len(WIDTHS) + 1):
            x = getattr(self, f"layer{stage}")(x)
        out: Tensor = self.linear(x.mean((2, 3)))
        return out


def load_resnet(path: Path) -> tuple[ResNet, dict[str, Tensor]]:
    """Return the network of a .th file in evaluation mode, loaded strictly, and its state dict.

    Raises:
        WeightsError: the file is no CIFAR ResNet.
    """
    state = read_state_dict(path)
    blocks = {name.split(".")[1] for name in state if name.startswith("layer1.")}
    model = ResNet(max(1, len(blocks)))
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise WeightsError(f"{path} is no CIFAR ResNet ({str(error).splitlines()[-1].strip()})") from error
    return model.eval(), state


def normalized(pixels: Tensor) -> Tensor:
    """Return pixels (images, 32, 32, 3) uint8 as normalized images (images, 3, 32, 32) float32."""
    scaled = pixels.permute(0, 3, 1, 2).float() / 255
    mean, deviation = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, DEVIATION))
    return ((scaled - mean) / deviation).contiguous()


def augmented(batches: Sequence[tuple[Tensor, Tensor]], times: int = 2, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return `batches` of (inputs, labels) `times` over, with random flips and shifts of up to 4 pixels.

    The networks were trained with this augmentation, and they have memorized the unmodified training images. Variants
    of a batch follow each other: those at the end, which a calibration holds out, are of other images.
    """
    generator = torch.Generator().manual_seed(seed)
    augmented_batches = []
    for inputs, labels in [batch for batch in batches for _ in range(times)]:
        flips = torch.rand(len(inputs), generator=generator) < 0.5
        padded = F.pad(torch.where(flips[:, None, None, None], inputs.flip(3), inputs), (4, 4, 4, 4))
        across, down = torch.randint(0, 9, (2, len(inputs)), generator=generator).tolist()
        side = inputs.shape[-1]
        cut = [padded[i, :, y : y + side, x : x + side] for i, (x, y) in enumerate(zip(across, down, strict=True))]
        augmented_batches.append((torch.stack(cut), labels))
    return augmented_batches


def images(data: Path, cache: Path) -> dict[str, Tensor]:
    """Return `test` (10,000, 32, 32, 3) uint8, `test_labels`, `train` (2,000, …) and `train_labels`; cached in `cache`.

    Raises:
        NotInstalledError: the rivals' environment is not installed.
    """
    folder = data / "images" / "cifar10"
    if not cache.is_file():
        cache.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(cache) as path:
            run_in_environment([str(HERE / "rival_worker.py"), "images", str(folder), str(path)], "Pillow")
    with np.load(cache) as archive:
        arrays = {name: torch.from_numpy(archive[name]) for name in archive.files}
    with (folder / "cifar10_trainLabels_kaggle.csv").open() as file:
        rows = list(csv.DictReader(file))[: len(arrays["train"])]
    arrays["train_labels"] = torch.tensor([CLASSES.index(row["label"]) for row in rows])
    return arrays


class Silero(nn.Module):
    """Silero's voice activity detector (github.com/snakers4/silero-vad, 16 kHz), with the published names.

    64 old + 512 new samples ─► short-time Fourier transform ─► four convolutions ─► LSTM cell ─► probability of speech
    """

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 2 * BINS, 256, stride=HOP, bias=False)
        channels = (BINS, 128, 64, 64, 128)
        self.conv1, self.conv2, self.conv3, self.conv4 = (
            nn.Conv1d(channels[i], channels[i + 1], 3, stride=STRIDES[i], padding=1) for i in range(4)
        )
        self.lstm_cell = nn.LSTMCell(HIDDEN, HIDDEN)
        self.final_conv = nn.Conv1d(HIDDEN, 1, 1)

    def forward(self, clips: Tensor) -> Tensor:
        """Return the probability of speech of each window, (clips, windows), of (clips, samples)."""
        count, windows = len(clips), clips.shape[1] // NEW
        samples = F.pad(clips[:, : windows * NEW], (OLD, 0)).unfold(1, OLD + NEW, NEW).reshape(-1, 1, OLD + NEW)
        spectrum = self.stft_conv(F.pad(samples, (0, OLD), mode="reflect"))
        features = (spectrum[:, :BINS] ** 2 + spectrum[:, BINS:] ** 2).sqrt()
        for convolution in (self.conv1, self.conv2, self.conv3, self.conv4):
            features = convolution(features).relu()
        steps = features.squeeze(-1).view(count, windows, HIDDEN)
        hidden, cell = steps.new_zeros(count, HIDDEN), steps.new_zeros(count, HIDDEN)
        outputs = []
        for step in steps.unbind(1):
            hidden, cell = self._advance(step, hidden, cell)
            outputs.append(self.final_conv(hidden.relu()[..., None]).sigmoid()[:, 0, 0])
        return torch.stack(outputs, 1)

    def _advance(self, step: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next state of the LSTM, by `F.linear`, which calibration can follow."""
        lstm = self.lstm_cell
        gates = F.linear(step, lstm.weight_ih, lstm.bias_ih) + F.linear(hidden, lstm.weight_hh, lstm.bias_hh)
        enter, forget, change, leave = gates.chunk(4, 1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * change.tanh()
        return leave.sigmoid() * cell.tanh(), cell


def load_silero(data: Path) -> tuple[Silero, dict[str, Tensor], Tensor]:
    """Return the network, its state dict as stored, and speech (clips, samples)."""
    state = read_state_dict(data / "weights" / "silero_vad" / "silero_vad_16k.safetensors")
    module = Silero().eval()
    module.load_state_dict(state)
    return module, state, load_speech(data)


def load_speech(data: Path) -> Tensor:
    """Return sentences in noise, (clips, samples), at 16 kHz."""
    stored: Any = np.load(data / "audio" / "speech_16k_int16.npy")
    return torch.from_numpy(stored.astype(np.float32) / 32767)
