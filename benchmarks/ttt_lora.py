"""Bits per byte saved by test-time training of LoRA adapters per document, and its cost: `python -m
benchmarks.ttt_lora`.

    python -m benchmarks.ttt_lora [--json] [--weights FILE] [--tokens 16384] [--skip 32768] [--context 512]
                                  [--texts fineweb] [--lora rank=96,lr=0.001,chunk=64]…
                                  [--phased prefix_docs=16,phases=2]

A challenge export of the shared data (BIRDIE_DATA) scores a part of each text: for each `--lora` once without adapters,
in the windows of its chunks, and once with adapters; with `--phased` (multi-phase) the model itself is trained between
documents as well. Settings were chosen on the first 6,144 tokens of FineWeb's head, which `--skip` leaves out. Cost is
the CPU time over that of the windows without adapters in the same run, on one thread.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.command import command_parser, errors_as_exit, report
from benchmarks.overrides import parse_overrides
from benchmarks.shared_data import TEXTS, Tokens, add_scoring_flags, scored_texts
from birdie.data.tokenizer import Tokenizer
from birdie.model.gpt import GPT
from birdie.score.accumulator import Accumulator, Text
from birdie.score.documents import DocumentQueue, document_queue
from birdie.score.mode import Losses, Scoring
from birdie.score.modes.ttt_lora import LoRAMode
from birdie.score.modes.ttt_multi_phase import MultiPhaseMode
from birdie.score.settings import EvaluationSettings
from birdie.score.windows import Windows, score_windows

DEFAULT_SETTINGS = ("rank=96,lr=0.001,chunk=64,batch_docs=8", "rank=8,lr=0.003,chunk=128,batch_docs=8")
_BATCH_TOKENS = 4096
_CPU = torch.device("cpu")


def main() -> None:
    """Score without and with adapters, and print the table."""
    parser = command_parser(__doc__)
    add_scoring_flags(parser, tokens=16_384, texts={"fineweb": TEXTS["fineweb"]})
    parser.add_argument("--skip", type=int, default=32_768, help="tokens that are left out at the beginning")
    parser.add_argument("--lora", action="append", help="settings as NAME=VALUE,…; may be repeated")
    parser.add_argument("--phased", help="settings as NAME=VALUE,…; default: no phases")
    options = parser.parse_args()
    with errors_as_exit():
        model, tokenizer, texts = scored_texts(options, options.skip)
        phased = parse_overrides(options.phased, MultiPhaseMode()) if options.phased else None
        rows: list[dict[str, Any]] = []
        for text, tokens in texts:
            settings = options.lora or DEFAULT_SETTINGS
            rows.extend(rows_of(text, model, tokens, tokenizer, options.context, settings, phased))
    report(rows, as_json=options.json)


def chunk_windows(queue: DocumentQueue, chunk: int, context: int) -> Windows:
    """Return the windows in which documents are scored chunk by chunk."""
    parts = []
    for begin, stop in zip(queue.begins, queue.stops, strict=True):
        firsts = np.arange(begin, stop, chunk)
        parts.append((np.maximum(begin, firsts + chunk - context), firsts, np.minimum(firsts + chunk, stop)))
    begins, firsts, stops = (np.concatenate(positions) for positions in zip(*parts, strict=True))
    return Windows(begins, firsts, stops, context)


def rows_of(
    text: str,
    model: GPT,
    tokens: Tokens,
    tokenizer: Tokenizer,
    context: int,
    settings: Sequence[str],
    phased: MultiPhaseMode | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield, for each of `settings`, a row of the model alone in the same windows, of adapters, and of phases."""
    scored_text = Text(tokens, tokenizer.byte_table(model.config.vocab_size), tokenizer.bos_id)
    for lora in settings:
        adapters = parse_overrides(lora, LoRAMode())
        windows = chunk_windows(document_queue(tokens, tokenizer.bos_id, 1), adapters.chunk, context)
        shared = EvaluationSettings(ttt_lora=adapters)
        runs: dict[str, Callable[[Scoring], Iterator[Losses]]] = {
            "": partial(score_windows, windows=windows),
            "lora": adapters.score,
        }
        if phased is not None:
            runs["phased"] = phased.score
        baseline: tuple[float, float] | None = None  # bits per byte and CPU seconds without adapters
        for adapt, run in runs.items():
            accumulator = Accumulator(scored_text)
            scoring = Scoring(model, scored_text, accumulator.ledger, context, _CPU, shared, _BATCH_TOKENS)
            start = time.process_time()
            for part in run(scoring):
                accumulator.add(part.firsts, part.nats)
            seconds = time.process_time() - start
            score = accumulator.score(len(tokens) - 1, seconds)
            baseline = baseline or (score.bpb, seconds)
            yield {
                "text": text,
                "lora": lora,
                "adapt": adapt,
                "tokens": score.tokens,
                "documents": score.documents,
                "bpb": score.bpb,
                "ci95": score.ci95,
                "saved": baseline[0] - score.bpb,
                "cpu_s": seconds,
                "cost": seconds / baseline[1],
            }


if __name__ == "__main__":
    main()
