"""Silero's voice activity detector (github.com/snakers4/silero-vad, 16 kHz) as a module, and speech to measure it on.

64 old + 512 new samples ─► short-time Fourier transform ─► four convolutions ─► LSTM cell ─► probability of speech
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.artifact.checkpoints import read_state_dict

OLD, NEW, HOP, BINS, HIDDEN = 64, 512, 128, 129, 128
STRIDES = (1, 2, 2, 1)


class Silero(nn.Module):
    """The network; weights have the names of the published file."""

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
    stored: Any = np.load(data / "audio" / "speech_16k_int16.npy")
    return module, state, torch.from_numpy(stored.astype(np.float32) / 32767)
