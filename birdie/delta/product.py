"""Difference to a base that is stored by a quantizer: as it is, or as the product of two thin matrices.

    tensor − base ──► encoded as a weight is ───────────────────────────┐
                 └──► singular values ──► left, right: each encoded ────┴──► the one that costs less

Training moves a layer by sums of few products (gradient ⊗ input), so a difference that is weighted by the sensitivity
of the loss has few large singular values. With D the squared error at which a bit is worth its price (λ = D ln 2 nats),
a component of weighted size s costs (rows + columns) · b bits and leaves the loss s² 2^(−2b), one half of it from each
factor; the best b is ½ log2(2 s² / (D (rows + columns))). Components are kept while they save more than they cost, as
in reverse water-filling (Cover & Thomas, section 10.3.3). Each factor is a matrix like others: an error of the right
one costs what the inputs say, times the size of the component, so a trellis codes both at the same λ, errors fed back.

Which of the two forms costs less is measured on what they decode to. Differences as low ranks: LoRA (Hu et al. 2021,
arXiv 2106.09685), Delta-CoMe (Ping et al. 2024, arXiv 2406.08903); as signs: BitDelta (Liu et al. 2024, arXiv
2402.10193).
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from birdie.compress import registry
from birdie.compress.coding import estimate
from birdie.compress.scheme import BlockDiagonal, Encoded, Sensitivity
from birdie.compress.schemes.trellis import Trellis
from birdie.compress.tensors import rows_columns
from birdie.compress.trellis.feedback import FLOOR, INPUT_DAMPING, feedback
from birdie.delta.delta_coding import near

MOST_RANK = 256
_EXACT = 1024  # rows or columns up to which all singular values are computed
_ROUNDS, _MORE = 4, 16  # of subspace iteration, and further components that make it exact
_OVERHEAD = 0.2  # bits of an element of a factor beyond the rate of a Gaussian
_SURELY = 0.7  # share of the cost of Gaussian rows below which a product is taken
_DIAGONAL = 64  # most columns of a block of a diagonal matrix

_Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the squared error of a matrix: ½ Σ rows(i) ‖E(i, ·) root‖²."""

    rows: _Matrix  # (rows,), positive
    root: _Matrix | None  # lower triangular root of the inputs' covariance, or of its diagonal; None for the identity
    sensitivity: Sensitivity  # as it was known

    @classmethod
    def of(cls, sensitivity: Sensitivity | None, row_weight: _Matrix) -> "Weights":
        """Return the weights by a sensitivity, or those of rows alone."""
        known = sensitivity or Sensitivity()
        fisher = row_weight if known.row_fisher is None else known.row_fisher.double().numpy()
        rows = np.maximum(fisher, FLOOR * float(fisher.mean()))
        power = known.input_power()
        root: _Matrix | None = None
        if known.hessian is not None:
            hessian = known.hessian.double().numpy()
            with suppress(np.linalg.LinAlgError):
                root = np.linalg.cholesky(hessian + INPUT_DAMPING * hessian.diagonal().mean() * np.eye(len(hessian)))
        if root is None and power is not None:
            root = np.sqrt(np.maximum(power.double().numpy(), FLOOR * float(power.double().mean())))
        return cls(rows if rows.all() else np.ones(len(rows)), root, known)

    def weighted(self, matrix: _Matrix) -> _Matrix:
        """Return √rows · matrix · root."""
        scaled = np.sqrt(self.rows)[:, None] * matrix
        return scaled if self.root is None else scaled @ self.root if self.root.ndim == 2 else scaled * self.root

    def unweighted(self, right: _Matrix) -> _Matrix:
        """Return right · root⁻¹."""
        if self.root is None or self.root.ndim == 1:
            return right if self.root is None else right / self.root
        return np.asarray(np.linalg.solve(self.root.T, right.T).T)

    def loss(self, error: _Matrix) -> float:
        """Return the expected loss of an error in nats."""
        return 0.5 * float((self.weighted(error) ** 2).sum())


@dataclass(frozen=True, slots=True)
class Components:
    """Components of a difference, the largest first: difference ≈ Σ left(k) ⊗ right(k)."""

    # left, right: (components, rows), (components, columns)
    left: _Matrix
    right: _Matrix
    sizes: _Matrix  # of each, weighted; falling
    weights: Weights  # by which they were found

    @classmethod
    def of(cls, difference: NDArray[np.float32], weights: Weights) -> "Components":
        """Return the components of a difference (rows, columns)."""
        u, sizes, v = _singular(weights.weighted(difference.astype(np.float64)))
        root = np.sqrt(sizes)[:, None]
        return cls(root * u.T / np.sqrt(weights.rows), weights.unweighted(root * v), sizes, weights)

    def rank(self, distortion: float) -> int:
        """Return how many components are worth their bits.

        Args:
            distortion: squared error of a weight of Fisher information 1 at the price of a bit.
        """
        count = self.left.shape[1] + self.right.shape[1]
        squares = self.sizes**2
        with np.errstate(divide="ignore"):
            bits = np.maximum(0.5 * np.log2(2 * squares / (distortion * count)), 0)
        saved = 0.5 * squares * (1 - np.minimum(1, 2 * 4.0**-bits))
        worth = saved > distortion * math.log(2) * count * (bits + _OVERHEAD)
        return len(worth) if worth.all() else int(np.argmin(worth))

    def encode(self, name: str, rank: int, trellis: Trellis, scale: float) -> tuple[Encoded, Encoded]:
        """Encode the first components: (rank, rows) and (rank, columns), float32."""
        fisher = torch.from_numpy(self.sizes[:rank].copy())
        known, rows = self.weights.sensitivity, torch.from_numpy(self.weights.rows)
        sides = (
            (self.left, Sensitivity(row_fisher=fisher, blocks=_diagonal(rows))),
            (self.right, Sensitivity(known.hessian, fisher, taps=known.taps, blocks=known.blocks)),
        )
        left, right = (
            trellis.encode_with(
                name,
                torch.from_numpy(side[:rank].astype(np.float32)),
                feedback(sensitivity, *side[:rank].shape),
                scale,
            )
            for side, sensitivity in sides
        )
        return left, right


def cheaper(
    name: str,
    weight: Tensor,
    base: Tensor,
    difference: Tensor,
    direct: Callable[[], Encoded],
    components: Components,
    trellis: Trellis,
    scale: float,
) -> Encoded:
    """Return the form of a difference that costs less, in nats of loss and bits at the same price.

    Args:
        name: for error messages.
        base: of its shape and dtype.
        difference: of the two, float32.
        direct: returns the encoded difference, at `scale`, which takes most of the time.
        trellis: for the factors.
        scale: of a weight whose row and column have Fisher information 1.
    """
    distortion = trellis.distortion * scale**2
    rank = components.rank(distortion)
    if not rank:
        return near(weight, base, direct())
    left, right = components.encode(name, rank, trellis, scale)
    matrix = difference.reshape(rows_columns(tuple(weight.shape))).numpy()

    def price(*parts: Encoded) -> float:
        return 8 * distortion * math.log(2) * sum(sum(estimate(part)) for part in parts)

    def loss(values: NDArray[np.float32]) -> float:
        return components.weights.loss((matrix - values.reshape(matrix.shape)).astype(np.float64))

    thin = loss(registry.decode(left).numpy().T @ registry.decode(right).numpy()) + price(left, right)
    if thin < _SURELY * _least(matrix, components.weights, distortion):
        return near(weight, base, left, right)
    plain = direct()
    if thin < loss(registry.decode(plain).numpy()) + price(plain):
        return near(weight, base, left, right)
    return near(weight, base, plain)


def _least(difference: NDArray[np.float32], weights: Weights, distortion: float) -> float:
    """Return the cost of rows of independent Gaussians: of what they carry at this error, and of the error."""
    scaled = difference if weights.root is None or weights.root.ndim == 2 else difference * weights.root
    power: _Matrix = weights.rows * np.square(scaled).mean(1, dtype=np.float64) / distortion
    if weights.root is not None and weights.root.ndim == 2:  # what remains of each input given the others
        power *= math.exp(2 * float(np.log(np.diagonal(weights.root)).mean()))
    above = np.maximum(power, 1)
    carried = float((np.log(above) + np.minimum(power, 1)).sum())
    return float(0.5 * distortion * difference.shape[1] * carried)


def _singular(matrix: _Matrix) -> tuple[_Matrix, _Matrix, _Matrix]:
    """Return (u, sizes, v) of the largest components: by subspace iteration if there are many rows and columns.

    By NumPy, whose threads are limited to one while a file is written: bytes do not depend on how many there are.
    """
    if min(matrix.shape) > _EXACT:
        start = np.random.default_rng(0).standard_normal((matrix.shape[1], MOST_RANK + _MORE))
        basis = np.linalg.qr(matrix @ start)[0]
        for _ in range(_ROUNDS):
            basis = np.linalg.qr(matrix @ (matrix.T @ basis))[0]
        u, sizes, v = np.linalg.svd(basis.T @ matrix, full_matrices=False)
        u = basis @ u
    else:
        u, sizes, v = np.linalg.svd(matrix, full_matrices=False)
    count = min(MOST_RANK, int((sizes > 0).sum()))
    return u[:, :count], sizes[:count], v[:count]


def _diagonal(values: Tensor) -> BlockDiagonal:
    """Return a diagonal matrix, in blocks of one size."""
    count = len(values)
    size = next(size for size in range(min(_DIAGONAL, count), 0, -1) if count % size == 0)
    columns = torch.arange(count, device="cpu").reshape(-1, size)
    return BlockDiagonal(columns, torch.diag_embed(values.reshape(-1, size)))
