"""What leaning on n-gram hints saves, fixed and learned: `python -m benchmarks.tilt`.

    python -m benchmarks.tilt [--json] [--weights FILE] [--tokens 131072] [--context 512] [--stride 256] [--texts a,b]

A challenge export of the shared data (BIRDIE_DATA) scores the head of the validation split, a book and Shakespeare in
sliding windows; the losses are then tilted by each of `WAYS`. The last row of a text is no memory at all: its hint is
the token that the model itself finds likeliest, so it shows what learned strengths make of the model's calibration.
"""

import argparse
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.report import report
from birdie.artifact.checkpoints import read_state_dict
from birdie.compress.state import fill
from birdie.data.shards import read_shard
from birdie.data.tokenizer import Tokenizer, load_tokenizer
from birdie.model.gpt import GPT
from birdie.model.shape import config_of
from birdie.score.accumulator import LN2
from birdie.score.ngram import Hints, NgramSettings, apply_bias, hints
from birdie.score.windows import sliding

WAYS: Mapping[str, NgramSettings] = {
    "fixed 2": NgramSettings(beta=2.0),
    "fixed 2.625, hits above 0.8 (#2018)": NgramSettings(beta=2.625, threshold=0.8),
    "fixed 2.625, 16 tokens": NgramSettings(beta=2.625, orders=(16,)),
    "learned": NgramSettings(),
    "learned, 16 to 8 tokens": NgramSettings(orders=(16, 12, 8)),
    "learned, 16 to 2 tokens": NgramSettings(orders=(16, 8, 6, 5, 4, 3, 2)),
    "learned, 2^16 places": NgramSettings(table_bits=16),
}
TEXTS = {
    "fineweb": "text/fineweb/fineweb_val_head_sp1024.bin",
    "book": "text/books/Jane_Austen_Emma.md",
    "shakespeare": "text/tinyshakespeare/input.txt",
}
_AT_ONCE = 4096  # tokens

Stream = NDArray[np.uint16]


def main() -> None:
    """Score, tilt, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--weights", type=Path, help="a challenge export (default: the shared data's)")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--stride", type=int, default=256)
    parser.add_argument("--texts", default=",".join(TEXTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = Path(os.environ["BIRDIE_DATA"])
    export = options.weights or data / "weights/parameter_golf/samtruss_7L384_valbpb1.99.int8.ptz"
    tokenizer = load_tokenizer(data / "tokenizers" / "fineweb_1024_bpe.model")
    model = exported(export)
    hints(np.arange(100) % 3, NgramSettings(table_bits=8))  # compiled
    rows: list[dict[str, Any]] = []
    for text in options.texts.split(","):
        tokens = stream(data / TEXTS[text], tokenizer, options.tokens)
        found = log_probabilities(model, tokens, options.context, options.stride)
        rows.extend(rows_of(text, tokens, found, tokenizer))
    report(rows, as_json=options.json)


def exported(path: Path) -> GPT:
    """The GPT in a challenge export, in float32."""
    state = read_state_dict(path)
    model = GPT(config_of(state))
    fill(model, state, str(path))
    model.compute_dtype = torch.float32
    return model.eval()


def stream(path: Path, tokenizer: Tokenizer, tokens: int) -> Stream:
    """The first tokens + 1 of a shard, or of a text as one document."""
    if path.suffix == ".bin":
        return np.asarray(read_shard(path)[: tokens + 1])
    text = path.read_text(encoding="utf-8")
    return np.concatenate(([tokenizer.bos_id], tokenizer.encode(text)))[: tokens + 1].astype(np.uint16)


@torch.inference_mode()
def log_probabilities(model: GPT, tokens: Stream, context: int, stride: int) -> NDArray[np.float16]:
    """Of every token after each, (targets, vocabulary); float16 keeps three digits of what is added and subtracted."""
    targets = len(tokens) - 1
    found = np.empty((targets, model.config.vocab_size), np.float16)
    for batch in sliding(targets, context, stride).batches(_AT_ONCE):
        ids = np.stack([tokens[a:b] for a, b in zip(batch.begins, batch.stops, strict=True)]).astype(np.int64)
        scored = int(batch.stops[0] - batch.firsts[0])
        logp = torch.log_softmax(model(torch.from_numpy(ids), tail=scored).float(), dim=-1)
        for row, first in enumerate(batch.firsts):
            found[first : first + scored] = logp[row].numpy()
    return found


def rows_of(text: str, tokens: Stream, logp: NDArray[np.float16], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """A row for the model alone, one for each way, and the control."""
    inputs, targets = tokens[:-1], tokens[1:].astype(np.int64)
    places = np.arange(len(targets))
    nats = -logp[places, targets].astype(np.float64)
    bytes_ = int(tokenizer.byte_table(logp.shape[1]).count(inputs, targets).sum())

    def row(way: str, losses: NDArray[np.float64], hint: NDArray[np.integer], rate: float | None) -> dict[str, Any]:
        bpb, hinted = losses.sum() / LN2 / bytes_, hint >= 0
        p = np.exp(logp[places, hint].astype(np.float64))[hinted]
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
    for way, settings in WAYS.items():
        began = time.perf_counter()
        found = hints(inputs, settings)
        rate = len(inputs) / (time.perf_counter() - began) / 1e6
        yield row(way, apply_bias(nats, logp[places, found.tokens], found, targets, settings), found.tokens, rate)
    own = Hints(logp.argmax(1).astype(np.int32), np.zeros(len(targets), np.int32))
    losses = apply_bias(nats, logp[places, own.tokens], own, targets, NgramSettings())
    yield row("control: the model's own likeliest", losses, own.tokens, None)


if __name__ == "__main__":
    main()
