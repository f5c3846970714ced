"""Fine-tunes stored as lossy differences to their base: `python -m benchmarks.lossy_deltas [--json]`.

The shared GPT is fine-tuned on another text (tiny Shakespeare, AdamW at 1e-4), and its fine-tune stored given the base.
Quality is the mean KL from the fine-tuned model on the end of that text; the row `base` is the base itself. Every row
of birdie is a decoded file. Of rivals, own implementations, the entropy of the symbols counts and 16 bits for each
scale, which is less than they would take in a file:

    BitDelta      signs and a scale for each matrix (arXiv 2402.10193): by least squares, or distilled as in the paper
    low rank      singular vectors in 8 bits
    Delta-CoMe    singular vectors in 8, 3 and 2 bits (arXiv 2406.08903), several mixes

Rounding is to the nearest, at the scale of least error for each vector. Other tensors are differences in 16 bits.
"""

import argparse
import copy
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import birdie
from benchmarks.bench_model import Sources
from benchmarks.command import Row, comma_separated, command_parser, errors_as_exit, log, report, shared_data
from benchmarks.subjects import Amounts, Batch, Subject, load_subject, windows
from birdie.compress.calibration.result import CalibrationResult
from birdie.gpt.data.tokenizer import load_tokenizer
from birdie.system.provenance import __version__

State = Mapping[str, Tensor]
RATE, BATCH, WINDOW = 1e-4, 4, 512
HELD_OUT, CALIBRATION = 32, 64  # windows
RANKS = (2, 8, 32)
MIXES = ((1, 4, 8), (2, 8, 16), (2, 16, 32), (4, 16, 64), (4, 32, 0), (8, 32, 64))  # vectors in 8, 3 and 2 bits
BUDGETS = (30_000, 60_000, 120_000, 240_000, 475_000)
DISTILLED = 60  # steps
_FACTORS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # scales that are tried, in that of the largest number


def fine_tuned(subject: Subject, steps: int) -> Subject:
    """Return the subject's network trained on, with held-out and calibration data of the other text."""
    if subject.name == "tiny":
        ids = torch.randint(0, 32, (40_000,), generator=torch.Generator().manual_seed(1))
    else:
        data = shared_data()
        text = (data / "text" / "tinyshakespeare" / "input.txt").read_text()
        ids = torch.tensor(np.asarray(load_tokenizer(Sources.under(data).tokenizer).encode(text), np.int64))
    end = len(ids) * 9 // 10
    module, generator = copy.deepcopy(subject.module).float().train(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=0.1)
    for _ in range(steps):
        starts = torch.randint(0, end - WINDOW - 1, (BATCH,), generator=generator)
        some = torch.stack([ids[start : start + WINDOW + 1] for start in starts])
        loss = F.cross_entropy(module(some[:, :-1]).flatten(0, 1).float(), some[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    module.eval()
    state = {name: weight.detach().clone() for name, weight in module.state_dict().items()}
    held_out = windows(ids[end : end + min(HELD_OUT * WINDOW, (len(ids) - end - 1) // WINDOW * WINDOW) + 1].numpy())
    calibration = windows(ids[: min(CALIBRATION * WINDOW, end // WINDOW * WINDOW - WINDOW) + 1].numpy())
    return replace(
        subject, module=module, state=state, held_out=held_out, calibration=calibration, bits=None, logits={}
    )


def symbols(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return (integers, decoded) of each row of a matrix at the scale of least squared error."""
    top = 2 ** (bits - 1) - 1
    best = (torch.zeros_like(values), torch.zeros_like(values))
    error = torch.full((len(values), 1), torch.inf)
    for factor in _FACTORS:
        scale = (values.abs().amax(1, keepdim=True) * factor / top).clamp_min(1e-30).half().float().clamp_min(1e-7)
        numbers = (values / scale).round().clamp(-top, top)
        decoded = numbers * scale
        now = (decoded - values).square().sum(1, keepdim=True)
        best = tuple(torch.where(now < error, new, old) for new, old in zip((numbers, decoded), best, strict=True))  # type: ignore[assignment]
        error = torch.minimum(error, now)
    return best


def entropy_bytes(numbers: Tensor) -> float:
    """Return the order-0 entropy of all numbers, in bytes."""
    counts = torch.unique(numbers, return_counts=True)[1].double()
    return float((counts * (counts.sum().log2() - counts.log2())).sum()) / 8


def is_matrix(weight: Tensor) -> bool:
    return weight.ndim == 2 and min(weight.shape) >= 8


def others(state: State, base: State) -> tuple[float, dict[str, Tensor]]:
    """Return (bytes, tensors) of what is no matrix: differences in 16 bits."""
    rest = {name: weight for name, weight in state.items() if not is_matrix(weight)}
    tensors = {name: base[name] + (weight - base[name]).half().float() for name, weight in rest.items()}
    return 2.0 * sum(weight.numel() for weight in rest.values()), tensors


def low_rank(state: State, base: State, mix: Sequence[tuple[int, int]]) -> tuple[float, dict[str, Tensor]]:
    """Return (bytes, tensors): singular vectors of each difference, some in so many bits, the largest first."""
    size, tensors = others(state, base)
    for name, weight in state.items():
        if not is_matrix(weight):
            continue
        u, values, v = torch.linalg.svd(weight - base[name], full_matrices=False)
        sides, start, total = (u.T * values.sqrt()[:, None], v * values.sqrt()[:, None]), 0, torch.zeros_like(weight)
        for rank, bits in mix:
            part = slice(start, min(start + rank, len(values)))
            if part.start < part.stop:
                coded = [symbols(side[part].contiguous(), bits) for side in sides]
                total += coded[0][1].T @ coded[1][1]
                size += sum(entropy_bytes(numbers) + 2 * len(numbers) for numbers, _ in coded)
            start = part.stop
        tensors[name] = base[name] + total
    return size, tensors


def bit_delta(subject: Subject, base: State, steps: int) -> tuple[float, dict[str, Tensor]]:
    """Return (bytes, tensors): signs, and scales that are trained for so many steps towards the logits."""
    size, tensors = others(subject.state, base)
    signs = {name: (w - base[name]).sign() for name, w in subject.state.items() if is_matrix(w)}
    scales = {name: (subject.state[name] - base[name]).abs().mean() for name in signs}
    size += sum(sign.numel() / 8 + 2 for sign in signs.values())
    trained = {name: nn.Parameter(torch.ones(())) for name in signs}

    def weights() -> dict[str, Tensor]:
        return {name: base[name] + sign * scales[name] * trained[name] for name, sign in signs.items()}

    optimizer = torch.optim.Adam(trained.values(), lr=0.02)
    for step in range(steps):
        inputs = subject.calibration[step % len(subject.calibration)][0][:BATCH]
        with torch.no_grad():
            expected = subject.module(inputs).float().log_softmax(-1)
        logits: Any = functional_call(subject.module, {**tensors, **weights()}, (inputs,))
        loss = F.kl_div(logits.float().log_softmax(-1), expected, reduction="batchmean", log_target=True)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return size, {**tensors, **{name: weight.detach() for name, weight in weights().items()}}


def rivals(subject: Subject, base: State) -> Iterator[tuple[str, float, State]]:
    """Yield (name, bytes, tensors) of rivals."""
    yield "base", 0, base
    yield "BitDelta", *bit_delta(subject, base, 0)
    yield "BitDelta, distilled", *bit_delta(subject, base, DISTILLED)
    for rank in RANKS:
        yield f"low rank {rank}, 8 bits", *low_rank(subject.state, base, [(rank, 8)])
    for mix in MIXES:
        name = f"Delta-CoMe {'+'.join(map(str, mix))}"
        yield name, *low_rank(subject.state, base, list(zip(mix, (8, 3, 2), strict=True)))


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield all rows."""
    first = load_subject(options.subject, options.runs, Amounts())
    base = {name: weight.float() for name, weight in first.state.items()}
    subject = fine_tuned(first, options.steps)
    for name, size, state in rivals(subject, base):
        yield row(name, round(size), subject, state, 0.0)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return subject.loss(module, batch)

    known = CalibrationResult.of(subject.state, (subject.module, subject.calibration, loss))
    for name, calibration, other in (
        ("birdie, base", known, base),
        ("birdie, base, no data", None, base),
        ("birdie alone", known, None),
    ):
        for budget in options.budgets:
            with tempfile.TemporaryDirectory() as folder:
                path, start = Path(folder) / "x.birdie", time.perf_counter()
                size = birdie.save(subject.state, path, base=other, budget=budget, calibration=calibration).bytes
                seconds = time.perf_counter() - start
                yield row(name, size, subject, birdie.load(path, base=other), seconds)


def row(way: str, size: int, subject: Subject, state: State, seconds: float) -> Row:
    """Return one row, which is logged."""
    quality = subject.measure(state)
    log(f"{way}: {size:,} bytes, KL {quality.kl:.5f}, {seconds:.0f} s")
    return {"way": way, "bytes": size, "kl": quality.kl, "agreement": quality.agreement, "encode_s": seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--subject", default="bench", help="network that is fine-tuned (default: the shared GPT)")
    parser.add_argument("--steps", type=int, default=100, help="of the fine-tune (default: 100)")
    parser.add_argument("--budgets", type=comma_separated(int), default=list(BUDGETS), help="bytes of birdie's files")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of trained models")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with errors_as_exit():
        log(f"birdie {__version__}, torch {torch.__version__}")
        lines = [*rows(options)]
        shown = lines if options.json else [{**line, "kl": f"{line['kl']:.5f}"} for line in lines]
        report(shown, as_json=options.json)


if __name__ == "__main__":
    main()
