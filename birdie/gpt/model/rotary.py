"""Rotary position embeddings (RoPE, Su et al. 2021), on all or on the first dimensions of a head.

- rope_dims (openai/parameter-golf #315): only the first dimensions of a head are rotated. *Experimental*: +0.020 ±
  0.004 bits per byte for a GPT of 4 layers × 96 (docs/techniques.md).
- rope_train_seq_len (#315): NTK-aware scaling (bloc97 2023), a larger base for sequences longer than in training.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from birdie.gpt.model.technique import Technique

if TYPE_CHECKING:
    from birdie.gpt.model.gpt import GPT


class Rotary(nn.Module):
    """Tables of cosines and sines by position, built at first use and cached for each device and dtype.

    Sequences longer than `train_seq_len` (0: any) use a base larger by (length / train_seq_len)^(d / (d − 2)). In
    scoring, `length` is that of full windows (`base_for_length`): a window may be shorter because its document ends
    there, and a base of its own would reveal that end to the model.
    """

    def __init__(self, dims: int, base: float, train_seq_len: int = 0) -> None:
        super().__init__()
        self.dims, self.base, self.train_seq_len = dims, base, train_seq_len
        self._length = 0  # that decides the base; 0: the length of each sequence itself
        self._tables: dict[tuple[torch.device, torch.dtype, float], tuple[Tensor, Tensor]] = {}

    def forward(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (cos, ±sin) as `rotate` expects them, each (length, 1, dims) to broadcast over heads."""
        base = self.base_at(length)
        tables = self._tables.get((device, dtype, base))
        if tables is None or len(tables[0]) < length:
            # sampling asks for one position more at each token: rounding up to a power of two keeps the tables
            tables = self._build(1 << (length - 1).bit_length(), base, device, dtype)
            if base != self.base:  # keep one scaled base at a time: each length has its own, and they would pile up
                self._tables = {key: value for key, value in self._tables.items() if key[2] == self.base}
            self._tables[device, dtype, base] = tables
        return tables[0][:length], tables[1][:length]

    @contextmanager
    def base_for_length(self, length: int) -> Iterator[None]:
        """Use the base of sequences of `length` for sequences of any length, until the end of the block."""
        previous = self._length
        if 0 < self.train_seq_len < length:  # otherwise the base does not change, and compiled graphs stay valid
            self._length = length
        try:
            yield
        finally:
            self._length = previous

    def tables_at(
        self, positions: Tensor, length: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return (cos, ±sin) of arbitrary positions (n,) with the base of sequences of `length`.

        Angles are computed in float64: a stream has millions of positions, beyond the precision of float32.
        """
        exponents = torch.arange(0, self.dims, 2, dtype=torch.float32, device="cpu") / self.dims
        frequencies = (self.base_at(length) ** -exponents).double()
        angles = torch.outer(positions.cpu().double(), frequencies)
        cos, sin = (table.to(device, dtype) for table in (angles.cos(), angles.sin()))
        return torch.cat((cos, cos), dim=1)[:, None], torch.cat((sin, -sin), dim=1)[:, None]

    def base_at(self, length: int) -> float:
        """Return the base of the frequencies for sequences of `length`, or for the length of `base_for_length`."""
        length = self._length or length
        if self.train_seq_len and length > self.train_seq_len:
            scaled: float = self.base * (length / self.train_seq_len) ** (self.dims / (self.dims - 2))
            return scaled
        return self.base

    def _build(self, length: int, base: float, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # tensors that were created in inference mode could not be used in training later
        with torch.inference_mode(False), torch.no_grad():
            exponents = torch.arange(0, self.dims, 2, dtype=torch.float32, device=device) / self.dims
            angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), base**-exponents)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            return torch.cat((cos, cos), dim=1)[:, None], torch.cat((sin, -sin), dim=1)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (a, b) = (x[i], x[i + d/2]) by its position's angle to (a cos + b sin, b cos − a sin).

    Args:
        x: (batch, length, heads, head_dim); dimensions beyond the first d are left unchanged.
        cos: (length, 1, d), both halves equal.
        sin: (length, 1, d), the second half negated.
    """
    d = cos.shape[-1]
    if d < x.shape[-1]:
        return torch.cat((rotate(x[..., :d], cos, sin), x[..., d:]), dim=-1)
    return torch.addcmul(x * cos, x.roll(d // 2, dims=-1), sin)  # rolling by half swaps a and b


def _diagnostics(model: "GPT") -> Iterator[str]:
    config = model.config
    if config.rotary_dims < config.head_dim:
        yield f"partial RoPE: {config.rotary_dims} of {config.head_dim} dimensions of a head"


PARTIAL_ROPE = Technique(diagnostics=_diagnostics)
