"""Tuning of the record stack's two step factors for a target KL, and files on both sides of the target.

    sweep of a alone, sweep of b alone ─► KL(a, b) ≈ KL(a) + KL(b) ─► for each ratio of the two the least-entropy pair
        ─► measured KL of the pairs around it ─► the best pair ─► slightly finer and coarser files, decoded and measured

Sweeps and pairs are compared by entropy and by the quality of the dequantized symbols on a quarter of the data that the
result is measured on, which favors the record stack. The search is deterministic: its grids are fixed.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from benchmarks import record_stack as stack
from benchmarks.quality import Quality, Subject
from benchmarks.record_stack import Quantized

MATRIX_STEPS = (0.15, 0.22, 0.32, 0.46, 0.65, 0.95)
EMBEDDING_STEPS = (0.015, 0.025, 0.04, 0.065, 0.1, 0.16)
NEIGHBORS = (0.8, 1.0, 1.25)  # factors of the best embedding step; the matrix step is computed for each
SAMPLE = 4  # the search uses the first quarter of the held-out batches
SPREAD = 1.06  # files are written with steps finer and coarser by this factor, to interpolate between them


@dataclass(frozen=True, slots=True)
class Sweep:
    """Sweep of one factor alone: steps, with the KL in nats and the entropy in bytes of each."""

    steps: Sequence[float]
    kl: Sequence[float]
    bytes: Sequence[float]

    def kl_at(self, step: float) -> float:
        """Return the KL at `step`, linear in logarithms, extrapolated beyond the ends."""
        return math.exp(_line(math.log(step), np.log(self.steps), np.log(self.kl)))

    def bytes_at(self, step: float) -> float:
        """Return the bytes at `step`, linear in its logarithm."""
        return _line(math.log(step), np.log(self.steps), np.asarray(self.bytes))

    def step_for(self, kl: float) -> float:
        """Return the step whose KL is `kl`."""
        return math.exp(_line(math.log(kl), np.log(self.kl), np.log(self.steps)))


def _line(x: float, xs: NDArray[np.float64], ys: NDArray[np.float64]) -> float:
    index = int(np.clip(np.searchsorted(xs, x) - 1, 0, len(xs) - 2))
    slope = (ys[index + 1] - ys[index]) / (xs[index + 1] - xs[index])
    return float(ys[index] + slope * (x - xs[index]))


class Tuner:
    """Search over pairs of step factors for one subject, with the Hessians of its calibration data."""

    def __init__(self, subject: Subject, hessians: Mapping[str, Tensor], notify: Callable[[str], None]) -> None:
        self.subject, self.notify = subject, notify
        self.sample = replace(
            subject, held_out=subject.held_out[: -(-len(subject.held_out) // SAMPLE)], logits={}, bits=None
        )
        # a parameter that multiplies no input of its own, such as gains of skips, stays fp16
        self.names = [name for name in stack.quantized_names(subject.state) if name in hessians]
        self.factored = {name: stack.factor(hessians[name]) for name in self.names}
        self.chosen: stack.Layout | None = None
        self.cache: dict[tuple[str, float], Quantized] = {}

    @property
    def has_embeddings(self) -> bool:
        """True if the subject has embeddings, to which the second factor applies."""
        return any(map(stack.is_embedding, self.names))

    def parts(self, a: float | None, b: float | None) -> dict[str, Quantized]:
        """Return the matrices quantized with factor `a` and the embeddings with `b`; None leaves that kind out."""
        steps = {name: b if stack.is_embedding(name) else a for name in self.names}
        parts = {}
        for name, step in steps.items():
            if step is not None:
                if (name, step) not in self.cache:
                    self.cache[name, step] = stack.gptq(self.subject.state[name], step, self.factored[name])
                parts[name] = self.cache[name, step]
        return parts

    def judge(self, a: float | None, b: float | None) -> tuple[float, float]:
        """Return (KL, entropy in bytes); a kind that is left out stays float and has no entropy."""
        parts = self.parts(a, b)
        state = {**self.subject.state, **{name: part.dequantized() for name, part in parts.items()}}
        return self.sample.measure(state).kl, stack.entropy_bytes(parts.values())

    def layout(self, parts: Mapping[str, Quantized]) -> stack.Layout:
        """Return the layout of the files, chosen for the first one: it codes everything four times."""
        if self.chosen is None:
            self.chosen = stack.layout_of(parts)
        return self.chosen

    @cached_property
    def matrices(self) -> Sweep:
        """Sweep of the matrix factor `a`."""
        return self._sweep(MATRIX_STEPS, lambda step: self.judge(step, None))

    @cached_property
    def embeddings(self) -> Sweep:
        """Sweep of the embedding factor `b`."""
        return self._sweep(EMBEDDING_STEPS, lambda step: self.judge(None, step))

    def _sweep(self, steps: Sequence[float], judge: Callable[[float], tuple[float, float]]) -> Sweep:
        points = []
        for step in steps:
            points.append(judge(step))
            self.notify(f"record stack: step {step} σ, KL {points[-1][0]:.5f}, entropy {points[-1][1]:,.0f} bytes")
        return Sweep(steps, [kl for kl, _ in points], [size for _, size in points])

    def tune(self, target: float) -> tuple[float, float | None]:
        """Return the pair of factors with the fewest bytes at KL `target`."""
        if not self.has_embeddings:
            return self.matrices.step_for(target), None
        shares = np.linspace(0.02, 0.98, 97)  # of the KL that embeddings cause
        pairs = [
            (self.matrices.step_for((1 - share) * target), self.embeddings.step_for(share * target)) for share in shares
        ]
        _, middle = min(pairs, key=lambda pair: self.matrices.bytes_at(pair[0]) + self.embeddings.bytes_at(pair[1]))
        tried = []
        for factor in NEIGHBORS:
            b = round(middle * factor, 4)
            left = target - self.embeddings.kl_at(b)
            if left <= 0:
                continue
            a = round(self.matrices.step_for(left), 4)
            kl, size = self.judge(a, b)
            # Doubling the KL saves half a bit per weight: correct the size to the target KL.
            size += math.log2(kl / target) / 2 / 8 * sum(self.subject.state[name].numel() for name in self.names)
            tried.append((size, a, b))
            self.notify(f"record stack: {a} σ, embedding {b} σ: KL {kl:.5f}, {size:,.0f} bytes of entropy at {target}")
        _, a, b = min(tried)
        kl, _ = self.judge(a, b)
        scale = (target / kl) ** 0.5
        return round(a * scale, 4), round(b * scale, 4)


@dataclass(frozen=True, slots=True)
class Measured:
    """A file of the record stack: its factors, its bytes, the quality of its decoded tensors, and the encoding time."""

    a: float
    b: float | None
    bytes: int
    quality: Quality
    encode_s: float


def measure_files(tuner: Tuner, target: float) -> Iterator[Measured]:
    """Yield files around the best pair of factors for `target`, decoded and measured."""
    a, b = tuner.tune(target)
    rest = {name: weight for name, weight in tuner.subject.state.items() if name not in tuner.names}
    for spread in (1 / SPREAD, SPREAD):
        start = time.perf_counter()
        factors = round(a * spread, 4), None if b is None else round(b * spread, 4)
        parts = tuner.parts(*factors)
        data = stack.pack(parts, rest, tuner.layout(parts))
        seconds = time.perf_counter() - start
        file = Measured(*factors, len(data), tuner.subject.measure(stack.unpack(data)), seconds)
        tuner.notify(f"record stack: {factors} σ: {file.bytes:,} bytes, KL {file.quality.kl:.5f}")
        yield file
