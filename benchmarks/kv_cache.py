"""Bits per byte lost and memory saved by a quantized KV cache: `python -m benchmarks.kv_cache`.

    python -m benchmarks.kv_cache [--json] [--weights FILE] [--texts fineweb] [--tokens 32768] [--context 512]
                                  [--chunk 64] [--segments 8] [--bits 0,8,4,3,2]

A challenge export of the shared data (BIRDIE_DATA) scores the head of a text by streaming evaluation, in float32, once
for each number of bits (0: not quantized). Bytes are those of one token's keys and values in all layers, and of the
entire cache of one stream. Error bars of differences are over blocks of 512 tokens.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.command import comma_separated, command_parser, errors_as_exit, report
from benchmarks.shared_data import TEXTS, Tokens, add_scoring_flags, scored_texts
from birdie.data.tokenizer import Tokenizer
from birdie.model.cache import Cache
from birdie.model.gpt import GPT
from birdie.score.accumulator import LN2, Text
from birdie.score.evaluator import score
from birdie.score.modes.streaming import StreamingMode
from birdie.score.settings import EvaluationSettings
from birdie.score.windows import segments

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
    text = Text(tokens, tokenizer.byte_table(model.config.vocab_size), tokenizer.bos_id)
    rows: list[dict[str, Any]] = []
    reference: NDArray[np.float64] | None = None
    for kv_bits in bits:
        streaming = StreamingMode(chunk=chunk, segments=streams, kv_bits=kv_bits)
        settings = EvaluationSettings(mode=streaming.name, streaming=streaming)
        scored = score(model, text, settings, train_seq_len=context, device=_CPU, keep_losses=True)
        nats = scored.losses
        assert nats is not None
        reference = nats if reference is None else reference
        difference = (nats - reference) / LN2
        blocks = np.add.reduceat(difference, np.arange(0, len(nats), _BLOCK))
        cache = Cache(model, 1, context, chunk=chunk, kv_bits=kv_bits)
        rows.append(
            {
                "bits": kv_bits or "all",
                "bytes a token": cache.token_bytes,
                "bytes of the cache": cache.nbytes,
                "bpb": scored.score.bpb,
                "milli-bpb lost": 1000 * float(difference.sum()) / scored.score.bytes,
                "±": 1000 * 1.96 * float(blocks.std()) * len(blocks) ** 0.5 / scored.score.bytes,
                "tokens/s": segments(len(nats), streams, context).inputs / scored.score.seconds,
            }
        )
    return rows


if __name__ == "__main__":
    main()
