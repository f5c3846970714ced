"""Bits per byte saved by test-time training with SGD, and its cost: `python -m benchmarks.ttt_sgd`.

    python -m benchmarks.ttt_sgd [--json] [--weights FILE] [--tokens 65536] [--context 512] [--stride 0] [--texts book]
                                 [--sgd lr=0.03,epochs=1,chunk_tokens=2048,batch_seqs=1]…

A challenge export of the shared data (BIRDIE_DATA) scores the head of each text without training, and once for each
`--sgd`, where it trains on every chunk after the chunk was scored. Windows do not overlap, unless --stride is set.
Settings were chosen on other texts (`benchmarks.shared_data.TUNING_TEXTS`). Cost is the time of scoring and training
over the time of scoring alone in the same run.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.command import command_parser, errors_as_exit, report
from benchmarks.overrides import parse_overrides
from benchmarks.shared_data import TEXTS, Tokens, add_scoring_flags, scored_texts
from birdie.data.tokenizer import Tokenizer
from birdie.model.gpt import GPT
from birdie.score.accumulator import Text
from birdie.score.evaluator import score
from birdie.score.modes.ttt_sgd import SGDMode
from birdie.score.settings import EvaluationSettings

DEFAULT_SETTINGS = (
    "lr=0.003,epochs=1,chunk_tokens=2048,batch_seqs=1",  # gains on texts by many authors
    "lr=0.03,epochs=1,chunk_tokens=2048,batch_seqs=1",  # gains more on a book, loses on texts by many authors
)
_BATCH_TOKENS = 4096


def main() -> None:
    """Score without and with test-time training, and print the table."""
    parser = command_parser(__doc__)
    add_scoring_flags(parser, tokens=65_536, texts=TEXTS)
    parser.add_argument("--stride", type=int, default=0, help="tokens between windows; 0: non-overlapping (default)")
    parser.add_argument("--sgd", action="append", help="settings as NAME=VALUE,…; may be repeated")
    options = parser.parse_args()
    with errors_as_exit():
        model, tokenizer, texts = scored_texts(options)
        rows: list[dict[str, Any]] = []
        for text, tokens in texts:
            settings = options.sgd or DEFAULT_SETTINGS
            rows.extend(rows_of(text, model, tokens, tokenizer, options.context, options.stride, settings))
    report(rows, as_json=options.json)


def rows_of(
    name: str,
    model: GPT,
    tokens: Tokens,
    tokenizer: Tokenizer,
    context: int,
    stride: int,
    settings: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Yield a row for the model alone, and one for each of `settings`."""
    text = Text(tokens, tokenizer.byte_table(model.config.vocab_size), tokenizer.bos_id)
    chosen: dict[str, Any] = {"train_seq_len": context, "device": torch.device("cpu"), "batch_tokens": _BATCH_TOKENS}
    plain = score(model, text, EvaluationSettings(stride=stride), **chosen).score
    for sgd in ("", *settings):
        result, adapt_s = plain, 0.0
        if sgd:
            mode = parse_overrides(sgd, SGDMode())
            trained = score(model, text, EvaluationSettings(mode=mode.name, stride=stride, ttt_sgd=mode), **chosen)
            assert trained.report is not None
            result, adapt_s = trained.score, trained.report.train_seconds
        yield {
            "text": name,
            "stride": stride or context,
            "sgd": sgd,
            "tokens": result.tokens,
            "bpb": result.bpb,
            "saved": plain.bpb - result.bpb,
            "score_s": result.seconds - adapt_s,
            "adapt_s": adapt_s,
            "cost": result.seconds / plain.seconds,
        }


if __name__ == "__main__":
    main()
