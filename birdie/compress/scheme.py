"""The contract between quantization schemes and everything after them.

    weight ──Scheme.encode──► Encoded = integer streams + a few small parameters ──entropy coder, container──► bytes
    tensor ◄──Decoder.decode── Encoded ◄────────────────────────────────────────────────────────────────────── bytes

Grids, trellises, ternary and spectral weights are siblings: all of them yield integer streams, so the entropy coder,
the container and the budget never know which scheme it was. A scheme has two halves in one module: a frozen dataclass
of options with `encode`, and a `Decoder`, which is all that a reader of files needs. The halves share no code that is
only for encoding, so that the decoder can be cut out and shipped alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.entropy.hints import Hints

Integers = NDArray[np.integer]
Shape = tuple[int, ...]
Parameters = tuple[int, ...]
INT32 = np.dtype(np.int32)
SYMBOLS, SCALES = Hints(role="symbols"), Hints(role="scales")  # of the two streams that most schemes have


@dataclass(frozen=True, slots=True)
class StreamLayout:
    """What a decoder expects of one stream: its shape (rows, columns), its coder hints, and its integer type."""

    rows: int
    columns: int
    hints: Hints
    dtype: np.dtype[np.integer] = INT32


@dataclass(frozen=True, slots=True)
class Encoded:
    """One tensor as a scheme encoded it, ready for entropy coding.

    Attributes:
        scheme: name of the decoder that turns it back into a tensor.
        shape: shape of the decoded tensor.
        dtype: dtype of the decoded tensor.
        params: small signed integers that the decoder needs besides the streams (an exponent, a bit width).
        streams: 2-D integer arrays (rows, columns) in the order in which the decoder's layout names them.
    """

    scheme: str
    shape: Shape
    dtype: torch.dtype
    params: Parameters
    streams: tuple[Integers, ...]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """How the loss responds to a change of one weight matrix; measured by calibration.

    Attributes:
        hessian: mean of x xᵀ over the inputs, (columns, columns), or None.
        row_fisher: sum of squared gradients at each output row per unit of loss (token, image), (rows,), or None.
        output: sum of g gᵀ per unit of loss, (rows, rows), whose diagonal is `row_fisher`; None where it is not kept.
    """

    hessian: Tensor | None = None
    row_fisher: Tensor | None = None
    output: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """What decoding one tensor takes, known from its shape and parameters before anything is allocated.

    Attributes:
        operations: multiply–adds.
        bytes: of the decoded tensor and everything held beside it at the peak.
    """

    operations: int
    bytes: int


def elementwise(shape: Shape, dtype: torch.dtype, params: Parameters) -> Cost:  # noqa: ARG001 (a decoder's signature)
    """Cost of a decoder that computes each element by itself, straight into the output."""
    count = prod(shape)
    return Cost(count, count * dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Decoder:
    """The decoding half of a scheme: pure functions in a fixed order, the same bits on every machine.

    Attributes:
        name: what files, summaries and `Encoded.scheme` call it.
        code: its number in the file, 1 to 127; None for a scheme from outside birdie, which the file names in full.
        layout: (shape, dtype, params) → what each stream must look like; raises ArtifactError on impossible params.
        decode: `Encoded` whose streams match the layout → the tensor.
        cost: (shape, dtype, params) → what decoding takes; called with params that `layout` accepted.
    """

    name: str
    code: int | None
    layout: Callable[[Shape, torch.dtype, Parameters], tuple[StreamLayout, ...]]
    decode: Callable[[Encoded], Tensor]
    cost: Callable[[Shape, torch.dtype, Parameters], Cost] = elementwise


@dataclass(frozen=True, slots=True)
class Spec:
    """One word that people write for a scheme, such as `int4` in `int4:group_size=64`.

    The options that may follow the colon are the parameters of `make`, by name, type and default; the first of them
    may be given without its name (`sigma:0.3`).

    Attributes:
        word: the word.
        help: what it is, in one line.
        make: options → scheme; None: the scheme's class itself.
        example: a whole spec for help texts and "did you mean"; default: the word.
    """

    word: str
    help: str
    make: "Callable[..., Scheme] | None" = None
    example: str = ""


class Scheme(ABC):
    """Options of one way to turn a weight tensor into integers. Subclass it as a frozen dataclass.

    Attributes:
        decoder: the decoding half.
        specs: the words by which people name it.
        quantizes: whether precision is lost for the sake of size. Such schemes are for matrices; tensors that are too
            small to gain (norms, biases) are kept in 16 bits or losslessly instead.
    """

    __slots__ = ()
    decoder: ClassVar[Decoder]
    specs: ClassVar[tuple[Spec, ...]] = ()
    quantizes: ClassVar[bool] = True

    @abstractmethod
    def encode(self, name: str, weight: Tensor, *, sensitivity: Sensitivity | None = None, lam: float = 0.0) -> Encoded:
        """Quantize one tensor.

        Rows (the first dimension) are the unit that large tensors are cut into: an encoder works through blocks of
        them, so that its temporaries stay small beside the weight.

        Args:
            name: for error messages.
            weight: any shape; never changed.
            sensitivity: what calibration measured of this weight, if it was.
            lam: price of a bit in units of the (weighted) squared error; 0 ignores bits.
        """

    def at_scale(self, sigma: float) -> Self | None:  # noqa: ARG002 (for those that override it)
        """Return the same scheme with a scale of `sigma` standard deviations; None: its precision is fixed.

        A byte budget is met by searching over `sigma`, so only schemes that override this can be steered by one.
        """
        return None

    def encode_part(self, name: str, part: Tensor, deviation: float, lam: float) -> Encoded | None:  # noqa: ARG002
        """Encode a part of a decomposed tensor (float32), so that errors are of one size in all parts.

        Schemes whose scale is in standard deviations override this and take `deviation`, that of the whole tensor, as
        the unit for every row. None: float32 has no such scale.
        """
        return self.encode(name, part, lam=lam)
