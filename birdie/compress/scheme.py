"""The contract between quantizers and everything after them.

    weight ──scheme.encode──► Encoded = integer streams + a few small parameters ──entropy, container──► bytes
    tensor ◄──decode(encoded)── Encoded ◄──────────────────────────────────────────────────────────────── bytes

Int8, trellis, ternary and spectral are siblings: all yield integer streams, so the entropy coder, the container and the
budget never learn which scheme it was. A scheme has two halves: a small frozen dataclass of settings with `encode`, and
a `Decoder` (a pure function of what is stored, in a module without encoder imports).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from birdie.entropy.hints import Hints

Integers = NDArray[np.integer]
INT32 = np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class StreamLayout:
    """What a decoder expects of one stream: its shape (rows, columns), its hints, and the integers it is decoded to."""

    rows: int
    columns: int
    hints: Hints
    dtype: np.dtype[np.integer] = INT32


@dataclass(frozen=True, slots=True)
class Encoded:
    """One tensor as a scheme left it, ready for entropy coding.

    Attributes:
        scheme: name of the decoder that turns it back into a tensor; a key of `DECODERS`.
        shape: shape of the decoded tensor.
        dtype: dtype of the decoded tensor.
        params: small signed integers the decoder needs besides the streams (an exponent, a bit width).
        streams: 2-D integer arrays (rows, columns) in the order the decoder's layout names them.
    """

    scheme: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    params: tuple[int, ...]
    streams: tuple[Integers, ...]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """How much the loss minds a change of one weight matrix; filled by calibration.

    Attributes:
        hessian: mean of x xᵀ over the inputs, (columns, columns), or None.
        row_fisher: sum of squared gradients at each output row per unit of loss (token, image), (rows,), or None.
        output: sum of g gᵀ per unit of loss, (rows, rows), whose diagonal is `row_fisher`; None where it is not kept.
    """

    hessian: Tensor | None = None
    row_fisher: Tensor | None = None
    output: Tensor | None = None


class Prepared(Protocol):
    """A module made ready to be trained under a scheme (quantization-aware training, a learned rate)."""

    module: nn.Module

    def rate(self) -> Tensor:
        """Differentiable size of the weights in bits (0-d)."""
        ...


class Scheme(Protocol):
    """Settings of one way to turn a weight tensor into integers."""

    def encode(self, name: str, weight: Tensor, *, sensitivity: Sensitivity | None = None, lam: float = 0.0) -> Encoded:
        """Quantize `weight` (any shape; never changed). `lam` weighs bits against distortion; 0 ignores bits."""
        ...


class Trainable(Scheme, Protocol):
    """A scheme that weights can be trained under; most are applied only afterwards."""

    def prepare(self, module: nn.Module) -> Prepared:
        """Make `module` ready for training under this scheme."""
        ...


@dataclass(frozen=True, slots=True)
class Decoder:
    """The decoding half of a scheme: small, and without encoder imports.

    Attributes:
        layout: (shape, dtype, params) → what each stream must look like; raises ArtifactError on impossible params.
        decode: `Encoded` whose streams match the layout → the tensor.
    """

    layout: Callable[[tuple[int, ...], torch.dtype, tuple[int, ...]], tuple[StreamLayout, ...]]
    decode: Callable[[Encoded], Tensor]
