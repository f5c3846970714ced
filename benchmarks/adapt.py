"""What learning while scoring saves, and what it takes: `python -m benchmarks.adapt`.

    python -m benchmarks.adapt [--json] [--weights FILE] [--tokens 65536] [--context 512] [--stride 0] [--texts a,b]
                               [--sgd lr=0.03,epochs=1,chunk_tokens=2048,batch_seqs=1]…

A challenge export of the shared data (BIRDIE_DATA) scores the head of each text, once as it is and once for each
`--sgd`, learning from every chunk after it was scored; windows are end to end, or sliding with a stride. Settings were
chosen on the texts in CHOOSING, which are no part of those in REPORTED. Cost is the time of scoring and learning over
that of scoring in the same run.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.overrides import parse_overrides
from benchmarks.report import report
from benchmarks.tilt import exported, stream
from birdie.data.tokenizer import Tokenizer, load_tokenizer
from birdie.model.gpt import GPT
from birdie.score.accumulator import Accumulator
from birdie.score.mode import Scoring
from birdie.score.ttt.sgd import SGDSettings, score_chunks
from birdie.score.windows import non_overlapping, score_windows, sliding

CHOOSING = {
    "train": "text/fineweb/fineweb_train_000000_smoke_sp1024.bin",
    "walden": "text/books/Henry_David_Thoreau_Walden.md",
}
REPORTED = {
    "fineweb": "text/fineweb/fineweb_val_head_sp1024.bin",
    "book": "text/books/Jane_Austen_Emma.md",
    "shakespeare": "text/tinyshakespeare/input.txt",
}
CHOSEN = (
    "lr=0.003,epochs=1,chunk_tokens=2048,batch_seqs=1",  # gained on texts of many hands
    "lr=0.03,epochs=1,chunk_tokens=2048,batch_seqs=1",  # gained more on a book, and lost on those
)
_AT_ONCE = 4096  # tokens


def main() -> None:
    """Score without and with adaptation, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--weights", type=Path, help="a challenge export (default: the shared data's)")
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--stride", type=int, default=0, help="0: windows end to end")
    parser.add_argument("--texts", default=",".join(REPORTED))
    parser.add_argument("--sgd", action="append", help="settings as NAME=VALUE,…")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = Path(os.environ["BIRDIE_DATA"])
    export = options.weights or data / "weights/parameter_golf/samtruss_7L384_valbpb1.99.int8.ptz"
    tokenizer = load_tokenizer(data / "tokenizers" / "fineweb_1024_bpe.model")
    model, places = exported(export), CHOOSING | REPORTED
    rows: list[dict[str, Any]] = []
    for text in options.texts.split(","):
        tokens = stream(data / places[text], tokenizer, options.tokens)
        ways = options.sgd or CHOSEN
        rows.extend(rows_of(text, model, tokens, tokenizer, options.context, options.stride, ways))
    report(rows, as_json=options.json)


def rows_of(
    text: str,
    model: GPT,
    tokens: NDArray[np.uint16],
    tokenizer: Tokenizer,
    context: int,
    stride: int,
    ways: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """A row for the model alone, and one for each way to adapt."""
    targets = len(tokens) - 1
    windows = sliding(targets, context, stride) if stride else non_overlapping(targets, context)
    table, cpu = tokenizer.byte_table(model.config.vocab_size), torch.device("cpu")

    def row(way: str, accumulator: Accumulator, score_s: float, adapt_s: float) -> dict[str, Any]:
        score = accumulator.score(windows.scored, score_s + adapt_s)
        return {
            "text": text,
            "stride": stride or context,
            "sgd": way,
            "tokens": score.tokens,
            "bpb": score.bpb,
            "saved": plain_bpb - score.bpb if way else 0.0,
            "score_s": score_s,
            "adapt_s": adapt_s,
            "cost": score.seconds / score_s,
        }

    plain = Accumulator(tokens, table, tokenizer.bos_id)
    scoring = Scoring(model, tokens, plain, context, tokenizer.bos_id, cpu, batch_tokens=_AT_ONCE)
    plain_s = score_windows(scoring, windows)
    plain_bpb = plain.score(windows.scored, plain_s).bpb
    yield row("", plain, plain_s, 0.0)
    for way in ways:
        accumulator = Accumulator(tokens, table, tokenizer.bos_id)
        scoring = Scoring(model, tokens, accumulator, context, tokenizer.bos_id, cpu, batch_tokens=_AT_ONCE)
        report = score_chunks(scoring, windows, parse_overrides(way, SGDSettings()))
        yield row(way, accumulator, report.score_seconds, report.train_seconds)


if __name__ == "__main__":
    main()
