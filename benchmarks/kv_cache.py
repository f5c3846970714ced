"""Bits per byte lost and memory saved by a quantized KV cache: `python -m benchmarks.kv_cache`.

    python -m benchmarks.kv_cache [--json] [--weights FILE] [--texts fineweb] [--tokens 32768] [--context 512]
                                  [--chunk 64] [--segments 8] [--bits 0,8,4,3,2]

A challenge export of the shared data (BIRDIE_DATA) scores the head of a text by streaming evaluation, in float32, once
for each number of bits (0: not quantized). Bytes are those of one token's keys and values in all layers, and of the
entire cache of one stream. Error bars of differences are over blocks of 512 tokens.
"""

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.command import comma_separated, command_parser, errors_as_exit, report
from benchmarks.shared_data import TEXTS, Tokens, add_scoring_flags, scored_texts
from birdie.data.tokenizer import Tokenizer
from birdie.model.cache import Cache
from birdie.model.gpt import GPT
from birdie.score.accumulator import LN2, Accumulator
from birdie.score.mode import Scoring
from birdie.score.modes import StreamingMode
from birdie.score.streaming import segments_of

_BLOCK = 512
_CPU = torch.device("cpu")


def main() -> None:
    """Score with each number of bits, and print the table."""
    parser = command_parser(__doc__)
    add_scoring_flags(parser, tokens=32_768, texts={"fineweb": TEXTS["fineweb"]})
    parser.add_argument("--chunk", type=int, default=64, help="tokens per forward pass (default: 64)")
    parser.add_argument("--segments", type=int, default=8, help="streams that the text is divided into (default: 8)")
    parser.add_argument("--bits", type=comma_separated(int), default="0,8,4,3,2", help="(default: 0,8,4,3,2)")
    options = parser.parse_args()
    with errors_as_exit():
        model, tokenizer, texts = scored_texts(options)
        rows: list[dict[str, Any]] = []
        for _, tokens in texts:
            rows += measure(model, tokens, tokenizer, options.bits, options.context, options.chunk, options.segments)
    report(rows, as_json=options.json)


def measure(
    model: GPT, tokens: Tokens, tokenizer: Tokenizer, bits: list[int], context: int, chunk: int, streams: int
) -> list[dict[str, Any]]:
    """Return a row for each number of bits; differences are to the first."""
    table = tokenizer.byte_table(model.config.vocab_size)
    bytes_ = int(table.count(tokens[:-1], tokens[1:]).sum())
    targets, rows = len(tokens) - 1, list[dict[str, Any]]()
    reference: NDArray[np.float64] | None = None
    for kv_bits in bits:
        accumulator = Accumulator(tokens, table, tokenizer.bos_id, keep_losses=True)
        mode = StreamingMode(chunk=chunk, segments=streams, kv_bits=kv_bits)
        scoring = Scoring(model, tokens, accumulator, context, tokenizer.bos_id, _CPU)
        start = time.perf_counter()
        mode.score(scoring)
        seconds = time.perf_counter() - start
        nats = accumulator.losses
        assert nats is not None
        reference = nats if reference is None else reference
        difference = (nats - reference) / LN2
        blocks = np.add.reduceat(difference, np.arange(0, targets, _BLOCK))
        cache = Cache(model, 1, context, chunk=chunk, kv_bits=kv_bits)
        rows.append(
            {
                "bits": kv_bits or "all",
                "bytes a token": cache.token_bytes,
                "bytes of the cache": cache.nbytes,
                "bpb": float(nats.sum() / LN2 / bytes_),
                "milli-bpb lost": 1000 * float(difference.sum()) / bytes_,
                "±": 1000 * 1.96 * float(blocks.std()) * len(blocks) ** 0.5 / bytes_,
                "tokens/s": segments_of(scoring, mode).inputs / seconds,
            }
        )
    return rows


if __name__ == "__main__":
    main()
