"""Bits per byte saved by the n-gram logit bias, with fixed and with learned strength: `python -m
benchmarks.ngram_bias`.

    python -m benchmarks.ngram_bias [--json] [--weights FILE] [--tokens 131072] [--context 512] [--stride 256]
                                    [--texts fineweb,book]

A challenge export of the shared data (BIRDIE_DATA) scores the head of the validation split, a book and Shakespeare in
sliding windows. Then each of `SETTINGS` adds its bias to the logits. The last row of a text is a control without an
n-gram memory: its hint is the model's own likeliest token, so it shows the effect of a learned strength on calibration
alone.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.command import command_parser, errors_as_exit, report
from benchmarks.shared_data import TEXTS, Tokens, add_scoring_flags, scored_texts
from birdie.data.tokenizer import Tokenizer
from birdie.model.gpt import GPT
from birdie.score.accumulator import LN2
from birdie.score.mode import NgramSettings
from birdie.score.ngram import Hints, apply_bias, hints
from birdie.score.windows import sliding

SETTINGS: Mapping[str, NgramSettings] = {
    "fixed 2": NgramSettings(beta=2.0),
    "fixed 2.625, hits above 0.8 (#2018)": NgramSettings(beta=2.625, threshold=0.8),
    "fixed 2.625, 16 tokens": NgramSettings(beta=2.625, orders=(16,)),
    "learned": NgramSettings(),
    "learned, 16 to 8 tokens": NgramSettings(orders=(16, 12, 8)),
    "learned, 16 to 2 tokens": NgramSettings(orders=(16, 8, 6, 5, 4, 3, 2)),
    "learned, 2^16 buckets": NgramSettings(table_bits=16),
}
_BATCH_TOKENS = 4096


def main() -> None:
    """Score with the model alone and with each bias, and print the table."""
    parser = command_parser(__doc__)
    add_scoring_flags(parser, tokens=131_072, texts=TEXTS)
    parser.add_argument("--stride", type=int, default=256, help="tokens between windows (default: 256)")
    options = parser.parse_args()
    with errors_as_exit():
        model, tokenizer, texts = scored_texts(options)
        hints(np.arange(100) % 3, NgramSettings(table_bits=8))  # compiles the kernel, outside the timing
        rows: list[dict[str, Any]] = []
        for text, tokens in texts:
            logp = log_probabilities(model, tokens, options.context, options.stride)
            rows.extend(rows_of(text, tokens, logp, tokenizer))
    report(rows, as_json=options.json)


@torch.inference_mode()
def log_probabilities(model: GPT, tokens: Tokens, context: int, stride: int) -> NDArray[np.float16]:
    """Return log p of every vocabulary entry at each position, (targets, vocabulary).

    float16 has three digits, enough for the differences that are reported.
    """
    targets = len(tokens) - 1
    logp = np.empty((targets, model.config.vocab_size), np.float16)
    for batch in sliding(targets, context, stride).batches(_BATCH_TOKENS):
        ids = np.stack([tokens[a:b] for a, b in zip(batch.begins, batch.stops, strict=True)]).astype(np.int64)
        scored = int(batch.stops[0] - batch.firsts[0])
        predicted = torch.log_softmax(model(torch.from_numpy(ids), last_n=scored).float(), dim=-1)
        for row, first in enumerate(batch.firsts):
            logp[first : first + scored] = predicted[row].numpy()
    return logp


def rows_of(text: str, tokens: Tokens, logp: NDArray[np.float16], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield a row for the model alone, one for each of `SETTINGS`, and the control."""
    inputs, targets = tokens[:-1], tokens[1:].astype(np.int64)
    positions = np.arange(len(targets))
    nats = -logp[positions, targets].astype(np.float64)
    bytes_ = int(tokenizer.byte_table(logp.shape[1]).count(inputs, targets).sum())

    def row(way: str, losses: NDArray[np.float64], hint: NDArray[np.integer], rate: float | None) -> dict[str, Any]:
        bpb, hinted = losses.sum() / LN2 / bytes_, hint >= 0
        p = np.exp(logp[positions, hint].astype(np.float64))[hinted]
        return {
            "text": text,
            "way": way,
            "tokens": len(targets),
            "bpb": bpb,
            "milli-bpb saved": 1000 * (nats.sum() / LN2 / bytes_ - bpb),
            "hinted": float(hinted.mean()),
            "right": float((hint == targets)[hinted].mean()) if hinted.any() else None,
            "p(hint)": float(p.mean()) if hinted.any() else None,
            "million hints/s": rate,
        }

    yield row("no hints", nats, np.full(len(targets), -1), None)
    for name, settings in SETTINGS.items():
        start = time.perf_counter()
        hinted = hints(inputs, settings)
        rate = len(inputs) / (time.perf_counter() - start) / 1e6
        losses = apply_bias(nats, logp[positions, hinted.tokens], hinted, targets, settings)
        yield row(name, losses, hinted.tokens, rate)
    likeliest = Hints(logp.argmax(1).astype(np.int32), np.zeros(len(targets), np.int32))
    losses = apply_bias(nats, logp[positions, likeliest.tokens], likeliest, targets, NgramSettings())
    yield row("control: the model's own likeliest", losses, likeliest.tokens, None)


if __name__ == "__main__":
    main()
