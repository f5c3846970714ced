"""The record stack's two step factors, tuned for a target KL; then real files, decoded, on both sides of the target.

    sweep of a alone, sweep of b alone ─► KL(a, b) ≈ KL(a) + KL(b) ─► for each ratio of the two the least-entropy pair
        ─► measured KL of the pairs around it ─► the best pair ─► files at it, finer and coarser, decoded and measured

The sweeps and pairs are judged by entropy and by the quality of the dequantized symbols on a quarter of the very data
the result is measured on, which is in the record stack's favour. Deterministic: the grids are fixed.
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
NEIGHBOURS = (0.8, 1.0, 1.25)  # of the best embedding step, whose partners are found anew
SAMPLE = 4  # the search looks at one held-out batch in so many
SPREAD = 1.06  # files are written with steps this much finer and coarser, to interpolate between


@dataclass(frozen=True, slots=True)
class Sweep:
    """One factor alone: steps, KL in nats and entropy in bytes at each."""

    steps: Sequence[float]
    kl: Sequence[float]
    bytes: Sequence[float]

    def kl_at(self, step: float) -> float:
        """KL at `step`, linear in logarithms, continued beyond the ends."""
        return math.exp(_line(math.log(step), np.log(self.steps), np.log(self.kl)))

    def bytes_at(self, step: float) -> float:
        """Bytes at `step`, linear in its logarithm."""
        return _line(math.log(step), np.log(self.steps), np.asarray(self.bytes))

    def step_for(self, kl: float) -> float:
        """The step whose KL is `kl`."""
        return math.exp(_line(math.log(kl), np.log(self.kl), np.log(self.steps)))


def _line(x: float, xs: NDArray[np.float64], ys: NDArray[np.float64]) -> float:
    index = int(np.clip(np.searchsorted(xs, x) - 1, 0, len(xs) - 2))
    slope = (ys[index + 1] - ys[index]) / (xs[index + 1] - xs[index])
    return float(ys[index] + slope * (x - xs[index]))


class Tuner:
    """Quantizes a subject at any pair of step factors; the Hessians are those of its calibration data."""

    def __init__(self, subject: Subject, hessians: Mapping[str, Tensor], say: Callable[[str], None]) -> None:
        self.subject, self.say = subject, say
        self.sample = replace(
            subject, held_out=subject.held_out[: -(-len(subject.held_out) // SAMPLE)], logits={}, bits=None
        )
        self.names = stack.quantized_names(subject.state)
        self.factored = {name: stack.factor(hessians[name]) for name in self.names}
        self.chosen: stack.Layout | None = None
        self.known: dict[tuple[str, float], Quantized] = {}

    @property
    def has_embeddings(self) -> bool:
        """Whether the second factor does anything."""
        return any(map(stack.is_embedding, self.names))

    def parts(self, a: float | None, b: float | None) -> dict[str, Quantized]:
        """The matrices at step factor `a`, embeddings at `b`; None leaves that kind out."""
        wanted = {name: b if stack.is_embedding(name) else a for name in self.names}
        found = {}
        for name, step in wanted.items():
            if step is not None:
                if (name, step) not in self.known:
                    self.known[name, step] = stack.gptq(self.subject.state[name], step, self.factored[name])
                found[name] = self.known[name, step]
        return found

    def judge(self, a: float | None, b: float | None) -> tuple[float, float]:
        """(KL, entropy in bytes); what is left out stays float and costs nothing."""
        parts = self.parts(a, b)
        state = {**self.subject.state, **{name: part.dequantized() for name, part in parts.items()}}
        return self.sample.measure(state).kl, stack.entropy_bytes(parts.values())

    def layout(self, parts: Mapping[str, Quantized]) -> stack.Layout:
        """The streams of the files, chosen on the first one written: four codings of everything."""
        if self.chosen is None:
            self.chosen = stack.layout_of(parts)
        return self.chosen

    @cached_property
    def matrices(self) -> Sweep:
        """The sweep of `a`."""
        return self._sweep(MATRIX_STEPS, lambda step: self.judge(step, None))

    @cached_property
    def embeddings(self) -> Sweep:
        """The sweep of `b`."""
        return self._sweep(EMBEDDING_STEPS, lambda step: self.judge(None, step))

    def _sweep(self, steps: Sequence[float], judge: Callable[[float], tuple[float, float]]) -> Sweep:
        found = []
        for step in steps:
            found.append(judge(step))
            self.say(f"record stack: step {step} σ, KL {found[-1][0]:.5f}, entropy {found[-1][1]:,.0f} bytes")
        return Sweep(steps, [kl for kl, _ in found], [size for _, size in found])

    def tune(self, target: float) -> tuple[float, float | None]:
        """The pair of factors of fewest bytes at KL `target`."""
        if not self.has_embeddings:
            return self.matrices.step_for(target), None
        shares = np.linspace(0.02, 0.98, 97)  # of the KL, spent on embeddings
        pairs = [
            (self.matrices.step_for((1 - share) * target), self.embeddings.step_for(share * target)) for share in shares
        ]
        _, middle = min(pairs, key=lambda pair: self.matrices.bytes_at(pair[0]) + self.embeddings.bytes_at(pair[1]))
        tried = []
        for factor in NEIGHBOURS:
            b = round(middle * factor, 4)
            left = target - self.embeddings.kl_at(b)
            if left <= 0:
                continue
            a = round(self.matrices.step_for(left), 4)
            kl, size = self.judge(a, b)
            # one octave of KL is half a bit of every weight that pays
            size += math.log2(kl / target) / 2 / 8 * sum(self.subject.state[name].numel() for name in self.names)
            tried.append((size, a, b))
            self.say(f"record stack: {a} σ, embedding {b} σ: KL {kl:.5f}, {size:,.0f} bytes of entropy at {target}")
        _, a, b = min(tried)
        kl, _ = self.judge(a, b)
        scale = (target / kl) ** 0.5
        return round(a * scale, 4), round(b * scale, 4)


@dataclass(frozen=True, slots=True)
class Measured:
    """A file of the record stack: its factors, its bytes, what it decodes to, and the seconds it took."""

    a: float
    b: float | None
    bytes: int
    quality: Quality
    encode_s: float


def measured(tuner: Tuner, target: float) -> Iterator[Measured]:
    """Files around the best pair of factors for `target`, each decoded before it is measured."""
    a, b = tuner.tune(target)
    rest = {name: weight for name, weight in tuner.subject.state.items() if name not in tuner.names}
    for spread in (1 / SPREAD, SPREAD):
        start = time.perf_counter()
        finer = round(a * spread, 4), None if b is None else round(b * spread, 4)
        parts = tuner.parts(*finer)
        data = stack.pack(parts, rest, tuner.layout(parts))
        seconds = time.perf_counter() - start
        found = Measured(*finer, len(data), tuner.subject.measure(stack.unpack(data)), seconds)
        tuner.say(f"record stack: {finer} σ: {found.bytes:,} bytes, KL {found.quality.kl:.5f}")
        yield found
