"""What adapters that learn each document save, and what they take: `python -m benchmarks.lora`.

    python -m benchmarks.lora [--json] [--weights FILE] [--tokens 16384] [--skip 32768] [--context 512] [--texts a,b]
                              [--lora rank=96,lr=0.001,chunk=64]… [--phased prefix_docs=16,phases=2]

A challenge export of the shared data (BIRDIE_DATA) scores a part of each text, for each `--lora` once as it is, in the
windows of these chunks, and once with adapters; with `--phased` the model learns between documents, too. Settings were
chosen on the first 6,144 tokens of FineWeb's head, which `--skip` leaves out. Cost is the processor's time over that of
the plain windows in the same run, on one thread.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.adapt import REPORTED
from benchmarks.overrides import parse_overrides
from benchmarks.report import report
from benchmarks.tilt import exported, stream
from birdie.data.tokenizer import Tokenizer, load_tokenizer
from birdie.model.gpt import GPT
from birdie.score.accumulator import Accumulator
from birdie.score.mode import Scoring
from birdie.score.ttt.lora import DocumentQueue, LoRAMode, document_queue, score_documents
from birdie.score.ttt.multi_phase import MultiPhaseMode, SGDPhases
from birdie.score.windows import Windows, score_windows

CHOSEN = ("rank=96,lr=0.001,chunk=64,batch_docs=8", "rank=8,lr=0.003,chunk=128,batch_docs=8")
_AT_ONCE = 4096  # tokens
_CPU = torch.device("cpu")


def main() -> None:
    """Score without and with adapters, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--weights", type=Path, help="a challenge export (default: the shared data's)")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--skip", type=int, default=32_768, help="tokens before those that are scored")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--texts", default="fineweb")
    parser.add_argument("--lora", action="append", help="settings as NAME=VALUE,…")
    parser.add_argument("--phased", help="settings as NAME=VALUE,…; none: no phases")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = Path(os.environ["BIRDIE_DATA"])
    export = options.weights or data / "weights/parameter_golf/samtruss_7L384_valbpb1.99.int8.ptz"
    tokenizer = load_tokenizer(data / "tokenizers" / "fineweb_1024_bpe.model")
    model = exported(export)
    rows: list[dict[str, Any]] = []
    phased = parse_overrides(options.phased, MultiPhaseMode()) if options.phased else None
    for text in options.texts.split(","):
        tokens = stream(data / REPORTED[text], tokenizer, options.skip + options.tokens)[options.skip :]
        rows.extend(rows_of(text, model, tokens, tokenizer, options.context, options.lora or CHOSEN, phased))
    report(rows, as_json=options.json)


def chunk_windows(queue: DocumentQueue, chunk: int, context: int) -> Windows:
    """The windows in which documents are scored chunk by chunk."""
    parts = []
    for begin, stop in zip(queue.begins, queue.stops, strict=True):
        firsts = np.arange(begin, stop, chunk)
        parts.append((np.maximum(begin, firsts + chunk - context), firsts, np.minimum(firsts + chunk, stop)))
    begins, firsts, stops = (np.concatenate(places) for places in zip(*parts, strict=True))
    return Windows(begins, firsts, stops, context)


def rows_of(
    text: str,
    model: GPT,
    tokens: NDArray[np.uint16],
    tokenizer: Tokenizer,
    context: int,
    ways: Sequence[str],
    phased: MultiPhaseMode | None = None,
) -> Iterator[dict[str, Any]]:
    """For each way the plain model in the same windows, the adapters, and the adapters in phases."""
    table, targets = tokenizer.byte_table(model.config.vocab_size), len(tokens) - 1
    bos_id = tokenizer.bos_id

    def scoring(accumulator: Accumulator) -> Scoring:
        return Scoring(model, tokens, accumulator, context, bos_id, _CPU, batch_tokens=_AT_ONCE)

    def adapted(accumulator: Accumulator, settings: LoRAMode, phases: SGDPhases | None = None) -> None:
        score_documents(scoring(accumulator), settings, context=context, phases=phases)

    def plainly(accumulator: Accumulator, windows: Windows) -> None:
        score_windows(scoring(accumulator), windows)

    for way in ways:
        settings = parse_overrides(way, LoRAMode())
        windows = chunk_windows(document_queue(tokens, bos_id, 1), settings.chunk, context)
        runs: dict[str, Callable[[Accumulator], object]] = {
            "": partial(plainly, windows=windows),
            "lora": partial(adapted, settings=settings),
        }
        if phased is not None:
            runs["phased"] = partial(adapted, settings=settings, phases=SGDPhases(phased))
        plain: tuple[float, float] | None = None
        for adapt, run in runs.items():
            accumulator = Accumulator(tokens, table, bos_id)
            began = time.process_time()
            run(accumulator)
            seconds = time.process_time() - began
            score = accumulator.score(targets, seconds)
            plain = plain or (score.bpb, seconds)
            yield {
                "text": text,
                "lora": way,
                "adapt": adapt,
                "tokens": score.tokens,
                "documents": score.documents,
                "bpb": score.bpb,
                "ci95": score.ci95,
                "saved": plain[0] - score.bpb,
                "cpu_s": seconds,
                "cost": seconds / plain[1],
            }


if __name__ == "__main__":
    main()
