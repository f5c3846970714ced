"""Contract of quantization schemes: from tensors to integer streams (`Scheme`), and back (`Decoder`).

    weight ──Scheme.encode──► Encoded = integer streams + a few small parameters ──entropy coder, container──► bytes
    tensor ◄──Decoder.decode── Encoded ◄────────────────────────────────────────────────────────────────────── bytes

Grids, trellises, ternary and spectral weights all become integer streams, so the entropy coder, the container and the
budget search do not depend on the scheme. A scheme has two halves in one module: a frozen dataclass of options with
`encode`, and a `Decoder`, which is all that a reader of files needs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.entropy.factors import Factors
from birdie.entropy.hints import Hints

Integers = NDArray[np.integer]
Shape = tuple[int, ...]
Parameters = tuple[int, ...]
BLOCK = 1 << 16  # elements that decoders compute at a time
_ELEMENT_BYTES = 40  # of temporaries for each of those
INT32 = np.dtype(np.int32)
INT16 = np.dtype(np.int16)  # holds every scale index
DELTA = "delta"  # name of the form of a tensor for which nobody asks by a spec (birdie.delta)
SYMBOLS, SCALES = Hints(role="symbols"), Hints(role="scales")  # hints of the two streams that most schemes have


@dataclass(frozen=True, slots=True)
class StreamLayout:
    """Layout of one stream: its shape (rows, columns), coder hints and integer type."""

    rows: int
    columns: int
    hints: Hints
    dtype: np.dtype[np.integer] = INT32


@dataclass(frozen=True, slots=True)
class Encoded:
    """One encoded tensor: integer streams and parameters, ready for entropy coding.

    Attributes:
        scheme: name of the decoder that turns it back into a tensor.
        shape: shape of the decoded tensor.
        dtype: dtype of the decoded tensor.
        params: small signed integers that the decoder needs besides the streams (an exponent, a bit width).
        streams: 2-D integer arrays (rows, columns) in the order in which the decoder's layout names them.
        base: tensor of this shape and dtype to which the streams are a difference; no file holds it.
    """

    scheme: str
    shape: Shape
    dtype: torch.dtype
    params: Parameters
    streams: tuple[Integers, ...]
    base: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Blocks(Encoded):
    """A tensor that is encoded in parts of rows, because all of it would take much memory, or in another shape.

    Attributes:
        parts: in order, of the tensor's last dimensions behind one that takes up all before; scheme "blocks" has
            neither parameters nor streams of its own. Those of a complex tensor may be real: its planes.
    """

    parts: tuple[Encoded, ...] = ()

    @classmethod
    def of(cls, shape: Shape, dtype: torch.dtype, parts: Sequence[Encoded]) -> Encoded:
        """Return the tensor of `shape` that these parts make up; the only one as it is if it is that tensor."""
        one = len(parts) == 1 and (parts[0].shape, parts[0].dtype) == (shape, dtype)
        return parts[0] if one else cls("blocks", shape, dtype, (), (), parts=tuple(parts))


@dataclass(frozen=True, slots=True)
class TapCovariance:
    """Assumed mean of x xᵀ: D (I ⊗ taps + shared · 1 1ᵀ) D, for columns that are channels of as many taps each.

    Attributes:
        taps: (taps, taps), of one channel; positive definite.
        shared: not negative; above 0, all inputs have a mean in common, so the sum of a row's errors costs as well.
        power: (columns,), the square of the diagonal of D, for columns that are not of one scale; None: all are.
    """

    taps: NDArray[np.float64]
    shared: float = 0.0
    power: NDArray[np.float64] | None = None

    @property
    def correlates(self) -> bool:
        """Return whether an error can be made up for by another column."""
        return len(self.taps) > 1 or self.shared > 0

    @property
    def mean(self) -> float:
        """Mean of the diagonal."""
        return (1 + self.shared) * (1.0 if self.power is None else float(self.power.mean()))

    def diagonal(self, columns: int) -> NDArray[np.float64]:
        """Return the diagonal of the matrix, (columns,)."""
        same = np.tile(self.taps.diagonal() + self.shared, columns // len(self.taps))
        return same if self.power is None else same * self.power

    def dense(self, columns: int) -> NDArray[np.float64]:
        """Return the matrix, (columns, columns)."""
        same = np.asarray(np.kron(np.eye(columns // len(self.taps)), self.taps) + self.shared)
        return same if self.power is None else same * np.sqrt(np.outer(self.power, self.power))


@dataclass(frozen=True, slots=True)
class BlockDiagonal:
    """Mean of x xᵀ of very many columns: between columns of different blocks nothing is known.

    Attributes:
        columns: (blocks, size), the columns of each block; each column is in one block.
        blocks: (blocks, size, size).
    """

    columns: Tensor
    blocks: Tensor

    def diagonal(self) -> Tensor:
        """Return the mean square of each column, (columns,)."""
        power = self.blocks.new_empty(self.columns.numel())
        power[self.columns.reshape(-1)] = self.blocks.diagonal(dim1=1, dim2=2).reshape(-1)
        return power

    def product(self, matrix: Tensor) -> Tensor:
        """Return `matrix` times this matrix, (rows, columns)."""
        out = torch.empty_like(matrix)
        for columns, block in zip(self.columns, self.blocks, strict=True):
            out[:, columns] = matrix[:, columns] @ block.to(matrix)
        return out


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Sensitivity of the loss to changes of one weight matrix, measured by calibration or assumed.

    Attributes:
        hessian: mean of x xᵀ over the inputs, (columns, columns), or None.
        row_fisher: sum of squared gradients at each output row per unit of loss (token, image), (rows,), or None.
        output: sum of g gᵀ per unit of loss, (rows, rows), whose diagonal is `row_fisher`; None if it is not kept.
        taps: assumed in place of a Hessian that was not measured.
        blocks: measured in place of a Hessian that has too many columns.
        samples, gradients: how many independent inputs `hessian` and output gradients `row_fisher` are the means of; 0
            if that is unknown.
        rows_have_inputs: whether inputs of the matrix may lie along its rows, so that `output` is as sure as `hessian`.
        at_large: whether it holds for errors as large as the weights, which what is assumed does; what is measured at
            small changes alone tells too little of these.
        rows_are_inputs: whether the matrix is stored (inputs, outputs): `output` is of inputs, `hessian` of gradients.
    """

    hessian: Tensor | None = None
    row_fisher: Tensor | None = None
    output: Tensor | None = None
    taps: TapCovariance | None = None
    blocks: BlockDiagonal | None = None
    samples: float = 0.0
    gradients: float = 0.0
    rows_have_inputs: bool = False
    at_large: bool = False
    rows_are_inputs: bool = False

    @property
    def is_measured(self) -> bool:
        """Return whether it comes from data, at least in part."""
        return any(part is not None for part in (self.hessian, self.blocks, self.output)) or self.gradients > 0

    def of_rows(self, rows: slice) -> "Sensitivity":
        """Return the sensitivity of some rows; their errors are not fed to other rows."""
        if rows == slice(None):
            return self
        return replace(self, row_fisher=None if self.row_fisher is None else self.row_fisher[rows], output=None)

    def input_power(self) -> Tensor | None:
        """Return the mean square of each measured input, (columns,), or None."""
        measured = self.blocks if self.hessian is None else self.hessian
        return None if measured is None else measured.diagonal()


@dataclass(frozen=True, slots=True)
class Cost:
    """Most that decoding one tensor from its streams takes, known from its shape and parameters alone.

    Attributes:
        operations: multiply–adds, or as many nanoseconds.
        bytes: peak memory: the decoded tensor and all temporaries, without the streams.
    """

    operations: int
    bytes: int


def elementwise(shape: Shape, dtype: torch.dtype, params: Parameters) -> Cost:  # noqa: ARG001 (a decoder's signature)
    """Return the cost of a decoder that computes elements independently, straight into the output."""
    count = prod(shape)
    return Cost(count, count * dtype.itemsize)


def in_blocks(shape: Shape, dtype: torch.dtype, operations: int, width: int = 1) -> Cost:
    """Return the cost of a decoder that computes blocks of elements, each with so many operations, into the output.

    Args:
        shape, dtype: of the tensor.
        operations: for each element.
        width: elements that cannot be computed apart, such as those of a row.
    """
    count = prod(shape)
    return Cost(operations * count, count * dtype.itemsize + _ELEMENT_BYTES * min(count, max(BLOCK, width)))


@dataclass(frozen=True, slots=True)
class Decoder:
    """The decoding half of a scheme: pure functions in a fixed order, the same bits on every machine.

    Attributes:
        name: name of the scheme in summaries and `Encoded.scheme`; of a scheme of birdie, that of its file.
        number: number of the scheme in files, never changed: 1 to 63 for birdie's own, 64 to 255 for those of other
            packages; 0: it is no scheme.
        layout: (shape, dtype, params) → layout of each stream; raises ArtifactError on impossible params.
        decode: `Encoded` whose streams match the layout → the tensor.
        cost: (shape, dtype, params) → cost of decoding; called with params that `layout` accepted.
        factors: where the tensor is its first stream times factors: `Encoded`, of whose first stream only the shape
            counts, → the factors.
        inner: where a scheme may hold tensors of this one (inner_tensors.py), if this one is birdie's and holds
            none itself. "tensor": where they are decoded completely; "rows": also where some rows are, each of which
            follows from its own rows of the streams and from the streams of another height.
    """

    name: str
    number: int
    layout: Callable[[Shape, torch.dtype, Parameters], tuple[StreamLayout, ...]]
    decode: Callable[[Encoded], Tensor]
    cost: Callable[[Shape, torch.dtype, Parameters], Cost] = elementwise
    factors: Callable[[Encoded], Factors] | None = None
    inner: Literal["no", "tensor", "rows"] = "no"


@dataclass(frozen=True, slots=True)
class Spec:
    """One word that begins the text of a scheme, such as `int4` in `int4:group_size=64`.

    The options that may follow the colon are the parameters of `make`, by name, type and default; the first of them
    may be written without its name (`sigma:0.3`).

    Attributes:
        word: the word.
        help: description in one line.
        make: options → scheme; None: the scheme's class itself.
        example: a complete spec for help texts and "did you mean"; default: the word.
        listed: whether help texts and tables name it; False where another word says all but a number.
    """

    word: str
    help: str
    make: "Callable[..., Scheme] | None" = None
    example: str = ""
    listed: bool = True


class Scheme(ABC):
    """Base class of schemes: the options and the encoder. Subclass it as a frozen dataclass.

    Attributes:
        decoder: the decoding half.
        specs: the words that begin its specs.
        quantizes: whether precision is traded for size. Such schemes are for matrices; tensors too small to gain
            (norms, biases) are kept in 16 bits or losslessly instead.
        by_axes: whether every dimension counts. Other schemes encode a stack of matrices (compress/row_blocks.py) as
            one matrix.
    """

    __slots__ = ()
    decoder: ClassVar[Decoder]
    specs: ClassVar[tuple[Spec, ...]] = ()
    quantizes: ClassVar[bool] = True
    by_axes: ClassVar[bool] = False

    @property
    def by_rows(self) -> bool:
        """Return whether rows are encoded without regard to others; large tensors are then encoded in blocks."""
        return False

    @abstractmethod
    def encode(self, name: str, weight: Tensor, *, sensitivity: Sensitivity | None = None) -> Encoded:
        """Quantize one tensor.

        An encoder works through blocks of rows (the first dimension), so that its temporaries stay small beside the
        weight.

        Args:
            name: for error messages.
            weight: any shape; never changed.
            sensitivity: of this weight, if it was calibrated.
        """

    def at_scale(self, sigma: float) -> Self | None:  # noqa: ARG002 (for those that override it)
        """Return the same scheme with a scale of `sigma` standard deviations, or None if its precision is fixed.

        The search for a byte budget varies `sigma`, so only schemes that override this can meet one.
        """
        return None

    def encode_part(self, name: str, part: Tensor, deviation: float) -> Encoded | None:  # noqa: ARG002
        """Encode a part of a decomposed tensor (float32), so that errors have the same size in all parts.

        Schemes whose scale is in standard deviations override this and use `deviation`, that of the complete tensor,
        as the unit for every row. They return None if float32 has no such scale.
        """
        return self.encode(name, part)
