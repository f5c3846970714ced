"""Scoring modes with different settings on one text: bits per byte, time and memory: `python -m benchmarks.scoring`.

    python -m benchmarks.scoring                                  speed and exactness of each mode
    python -m benchmarks.scoring --question ngram|kv|sgd|lora     what a setting saves, with the rows of docs/scoring.md
    python -m benchmarks.scoring "windows stride=64" "ttt-sgd stride=64 lr=0.01 ngram.enabled=true" --texts book

A challenge export of the shared data (BIRDIE_DATA) scores the beginning of each text once for each row, on one thread.
A row is a mode and its settings, as `birdie evaluate` has them; `dtype=bfloat16` changes the arithmetic, and "plain" is
windows that go through the model one by one, as in the scripts of the records. Differences are to the first row:
`saved` in bits per byte, with a 95 % interval over blocks of 512 tokens, the largest difference of one target, and the
processor time. Learning rates were chosen on `TUNING_TEXTS`, and on the 6,144 first tokens of FineWeb's head, which
`--skip` leaves out.
"""

import dataclasses
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.command import Row, command_parser, errors_as_exit, log, report, shared_data
from benchmarks.processes import CPU
from birdie.checkpoints.checkpoints import read_state_dict
from birdie.compress.filling import fill
from birdie.errors import ConfigError
from birdie.gpt.data.shards import read_shard
from birdie.gpt.data.tokenizer import Tokenizer, load_tokenizer
from birdie.gpt.model.cache import Cache
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.model.infer_config import infer_config
from birdie.gpt.run.values import parsed
from birdie.gpt.score import evaluator
from birdie.gpt.score.accumulator import LN2, Text
from birdie.gpt.score.mode import Losses, Scoring, ScoringMode, TrainingReport
from birdie.gpt.score.modes.streaming import StreamingMode
from birdie.gpt.score.modes.windows import WindowMode
from birdie.gpt.score.settings import EvaluationSettings, replaced
from birdie.gpt.score.window_losses import windows_of

TEXTS = {
    "fineweb": "text/fineweb/fineweb_val_head_sp1024.bin",
    "book": "text/books/Jane_Austen_Emma.md",
    "shakespeare": "text/tinyshakespeare/input.txt",
}
TUNING_TEXTS = {
    "train": "text/fineweb/fineweb_train_000000_smoke_sp1024.bin",
    "walden": "text/books/Henry_David_Thoreau_Walden.md",
}
"""Texts on which settings were chosen; none of them is in `TEXTS`."""
EXPORT = "weights/parameter_golf/samtruss_7L384_valbpb1.99.int8.ptz"
_BLOCK = 512
_NGRAM = "windows stride=256 ngram.enabled=true"
_SGD = "ttt-sgd epochs=1 chunk_tokens=2048 batch_seqs=1"
_STREAM = "streaming chunk=64 segments=8"
QUESTIONS: dict[str, tuple[int, str, tuple[str, ...]]] = {  # tokens, texts, rows
    "speed": (
        8_192,
        "fineweb",
        (
            *("plain stride=64", "windows stride=64", "windows stride=64 dtype=bfloat16"),
            *("streaming chunk=64", "streaming chunk=256", "streaming chunk=64 dtype=bfloat16"),
        ),
    ),
    "ngram": (
        131_072,
        "fineweb,book,shakespeare",
        (
            "windows stride=256",
            *(f"{_NGRAM} ngram.beta=2.625 ngram.orders=16", f"{_NGRAM} ngram.beta=2.625 ngram.threshold=0.8"),
            *(f"{_NGRAM} ngram.beta=2", f"{_NGRAM} ngram.orders=16,12,8", f"{_NGRAM} ngram.orders=16,8,6,5,4,3,2"),
            *(_NGRAM, f"{_NGRAM} ngram.table_bits=16"),
        ),
    ),
    "kv": (32_768, "fineweb", (_STREAM, *(f"{_STREAM} kv_bits={bits}" for bits in (8, 4, 3, 2)))),
    "sgd": (32_768, "fineweb,book,shakespeare", ("windows", f"{_SGD} lr=0.003", f"{_SGD} lr=0.03")),
    "lora": (
        16_384,
        "fineweb",
        (
            "windows documents=true stride=64",
            "ttt-lora rank=96 lr=0.001 chunk=64 batch_docs=8",
            "ttt-lora rank=8 lr=0.003 chunk=128 batch_docs=8",
        ),
    ),
}
"""Tokens, texts and rows of each --question; the first row is the one that others are compared with."""
Tokens = NDArray[np.uint16]


class PlainLoop(WindowMode):
    """Windows one by one, each with all of its logits: what the scripts of the records do with a batch of one."""

    def score(self, scoring: Scoring) -> Generator[Losses, None, TrainingReport | None]:
        cover = windows_of(scoring)
        with torch.inference_mode():
            for begin, first, stop in zip(cover.begins, cover.firsts, cover.stops, strict=True):
                ids = torch.from_numpy(scoring.tokens[begin : stop + 1].astype(np.int64)).to(scoring.device)[None]
                nats = scoring.model.loss(ids[:, :-1], ids[:, 1:], reduction="none")
                yield Losses(np.array([first]), nats[:, first - begin :].float().cpu().numpy())
        return None


def parse_row(text: str) -> tuple[EvaluationSettings, ScoringMode, torch.dtype]:
    """Return settings, mode and arithmetic of a row such as "ttt-sgd lr=0.003 stride=64 dtype=bfloat16".

    Raises:
        ConfigError: there is no such mode or setting, or a value has the wrong type.
    """
    name, *assignments = text.split()
    settings = dataclasses.replace(EvaluationSettings(), mode="windows" if name == "plain" else name)
    dtype, table = torch.float32, settings.scoring_mode.table_name()
    for assignment in assignments:
        key, _, value = assignment.partition("=")
        if key == "dtype":
            dtype = getattr(torch, value)
            continue
        of_mode = key in settings.scoring_mode.values()
        *path, last = (table, key) if of_mode else key.split(".")
        owner: Any = getattr(settings, path[0], None) if path else settings
        if last not in (hints := get_type_hints(type(owner))):
            raise ConfigError(f"{text!r}: {name} has no setting {key!r}")
        typed = parsed(value, hints[last])
        settings = replaced(settings, {path[0]: {last: typed}} if path else {last: typed}, "row")
    return settings, PlainLoop() if name == "plain" else settings.scoring_mode, dtype


def measure(
    model: GPT,
    scored_text: Text,
    rows: Sequence[str],
    *,
    context: int,
    device: torch.device = CPU,
) -> Iterator[Row]:
    """Yield a row for each of `rows`, with its differences to the first; the model is on `device`."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    base: tuple[NDArray[np.float64], float] | None = None
    for text in rows:
        settings, mode, model.compute_dtype = parse_row(text)
        start = clock()
        scored = evaluator.score(
            model, scored_text, settings, mode, train_seq_len=context, device=device, keep_losses=True
        )
        seconds, nats, score = clock() - start, scored.losses, scored.score
        assert nats is not None
        base = base or (nats, seconds)
        saved = (base[0] - nats) / LN2
        blocks = np.add.reduceat(saved, np.arange(0, len(saved), _BLOCK))
        cache = None
        if isinstance(mode, StreamingMode):
            cache = Cache(model, 1, context, chunk=min(mode.chunk, context), kv_bits=mode.kv_bits)
        yield {
            "row": text,
            "tokens": score.tokens,
            "bpb": score.bpb,
            "saved": float(saved.sum()) / score.bytes,
            "±": 1.96 * float(blocks.std()) * len(blocks) ** 0.5 / score.bytes,
            "nats off": float(np.abs(nats - base[0]).max()),
            "tokens/s": score.tokens / seconds,
            "cost": seconds / base[1],
            "cache bytes a token": cache and cache.token_bytes,
            "cache bytes": cache and cache.nbytes,
        }
        log(f"{text}: {score.bpb:.4f}")


def load_export(path: Path) -> GPT:
    """Return the GPT of a challenge export, in evaluation mode."""
    state = read_state_dict(path)
    model = GPT(infer_config(state))
    fill(model, state, str(path))
    return model.eval()


def text_tokens(path: Path, tokenizer: Tokenizer, count: int) -> Tokens:
    """Return the first `count` + 1 tokens of a shard, or of a text file as one document."""
    if path.suffix == ".bin":
        return np.asarray(read_shard(path)[: count + 1])
    text = path.read_text(encoding="utf-8")
    return np.concatenate(([tokenizer.bos_id], tokenizer.encode(text)))[: count + 1].astype(np.uint16)


def random_gpt(device: torch.device = CPU, config: GPTConfig | None = None, seed: int = 0) -> GPT:
    """Return a GPT with random weights, by default of the challenge's shape, whose outputs depend on the context."""
    torch.manual_seed(seed)
    model = GPT(config or GPTConfig()).eval().to(device)
    for weight in model.parameters():
        if weight.ndim == 2 and not weight.any():  # initially zero; training changes them
            torch.nn.init.normal_(weight, std=0.02)
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    """Score each text with each row, and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("rows", nargs="*", help="modes with their settings (default: those of --question)")
    parser.add_argument("--question", choices=QUESTIONS, default="speed", help="(default: speed)")
    parser.add_argument("--weights", type=Path, help="a challenge export (default: the shared data's)")
    parser.add_argument("--texts", help=f"of {','.join(TEXTS | TUNING_TEXTS)} (default: those of the question)")
    parser.add_argument("--tokens", type=int, help="tokens of each text (default: those of the question)")
    parser.add_argument("--skip", type=int, default=0, help="tokens that are left out at the beginning (default: 0)")
    parser.add_argument("--context", type=int, default=512, help="tokens of context (default: 512)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tokens, texts, rows = QUESTIONS[options.question]
    tokens, texts, rows = options.tokens or tokens, options.texts or texts, options.rows or rows
    lines: list[Row] = []
    with errors_as_exit():
        data = shared_data()
        tokenizer = load_tokenizer(data / "tokenizers" / "fineweb_1024_bpe.model")
        model = load_export(options.weights or data / EXPORT)
        table = tokenizer.byte_table(model.config.vocab_size)
        for name in texts.split(","):
            ids = text_tokens(data / (TUNING_TEXTS | TEXTS)[name], tokenizer, options.skip + tokens)[options.skip :]
            measured = measure(model, Text(ids, table, tokenizer.bos_id), rows, context=options.context)
            lines += [{"text": name, **line} for line in measured]
    keys = [key for key in lines[0] if any(line[key] is not None for line in lines)]
    report([{key: line[key] for key in keys} for line in lines], as_json=options.json)


if __name__ == "__main__":
    main()
