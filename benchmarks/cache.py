"""What keys and values in few bits cost and save: `python -m benchmarks.cache`.

    python -m benchmarks.cache [--json] [--weights FILE] [--text fineweb] [--tokens 32768] [--context 512] [--chunk 64]
                               [--segments 8] [--bits 0,8,4,3,2]

A challenge export of the shared data (BIRDIE_DATA) scores the head of a text as a stream, in float32, once for each
number of bits. Bytes are those of one token's keys and values in all layers, and of the whole cache of one stream;
error bars of differences are over the stream's blocks of 512 tokens.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.report import report
from benchmarks.tilt import TEXTS, exported, stream
from birdie.data.tokenizer import Tokenizer, load_tokenizer
from birdie.model.cache import Cache
from birdie.model.gpt import GPT
from birdie.score.accumulator import LN2, Accumulator
from birdie.score.mode import Scoring
from birdie.score.streaming import StreamingMode

_BLOCK = 512
CPU = torch.device("cpu")


def main() -> None:
    """Score, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--weights", type=Path, help="a challenge export (default: the shared data's)")
    parser.add_argument("--text", default="fineweb", choices=list(TEXTS))
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--bits", default="0,8,4,3,2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = Path(os.environ["BIRDIE_DATA"])
    tokenizer = load_tokenizer(data / "tokenizers" / "fineweb_1024_bpe.model")
    model = exported(options.weights or data / "weights/parameter_golf/samtruss_7L384_valbpb1.99.int8.ptz")
    tokens = stream(data / TEXTS[options.text], tokenizer, options.tokens)
    bits = [int(each) for each in options.bits.split(",")]
    found = measure(model, tokens, tokenizer, bits, options.context, options.chunk, options.segments)
    report(found, as_json=options.json)


def measure(
    model: GPT, tokens: NDArray[np.uint16], tokenizer: Tokenizer, bits: list[int], context: int, chunk: int, parts: int
) -> list[dict[str, Any]]:
    """A row for each number of bits, the first what others are compared with."""
    table = tokenizer.byte_table(model.config.vocab_size)
    bytes_ = int(table.count(tokens[:-1], tokens[1:]).sum())
    targets, rows = len(tokens) - 1, list[dict[str, Any]]()
    first: NDArray[np.float64] | None = None
    for each in bits:
        accumulator = Accumulator(tokens, table, tokenizer.bos_id, keep_losses=True)
        mode = StreamingMode(chunk=chunk, segments=parts, kv_bits=each)
        scoring = Scoring(model, tokens, accumulator, context, tokenizer.bos_id, CPU)
        began = time.perf_counter()
        mode.score(scoring)
        seconds = time.perf_counter() - began
        nats = accumulator.losses
        assert nats is not None
        first = nats if first is None else first
        apart = (nats - first) / LN2
        blocks = np.add.reduceat(apart, np.arange(0, targets, _BLOCK))
        cache = Cache(model, 1, context, chunk=chunk, kv_bits=each)
        rows.append(
            {
                "bits": each or "all",
                "bytes a token": cache.token_bytes,
                "bytes of the cache": cache.nbytes,
                "bpb": float(nats.sum() / LN2 / bytes_),
                "milli-bpb lost": 1000 * float(apart.sum()) / bytes_,
                "±": 1000 * 1.96 * float(blocks.std()) * len(blocks) ** 0.5 / bytes_,
                "tokens/s": mode.segments_of(scoring).inputs / seconds,
            }
        )
    return rows


if __name__ == "__main__":
    main()
