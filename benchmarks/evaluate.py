"""Speed and exactness of the evaluation modes compared with a plain loop over sliding windows.

    python -m benchmarks.evaluate --json [--targets 8192] [--stride 64] [--length 1024] [--weights FILE.birdie]
                                         [--chunks 64,256] [--turns 2] [--seed 0]

All modes score the same targets of one text with the same model in eager mode, and take turns in one process. The plain
loop does what the record scripts do with a batch of one: per window it computes all logits and takes the losses of the
last positions. Without --weights the model is the challenge's 9 × 512 with random weights. Its speed is that of a
trained model, but its bits per byte differ little between modes; with an artifact (a trained model) they show the
effect of the arithmetic. The text is FineWeb's validation head of the shared data (BIRDIE_DATA), else the standard
library's sources as bytes. Rows: median of the turns and its ratio to the plain loop's, bits per byte, and the largest
difference from the plain loop of one target, in nats.
"""

import os
import statistics
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.command import comma_separated, command_parser, report
from benchmarks.timing import take_turns
from birdie.data.dataset import open_dataset
from birdie.data.tokenizer import load_tokenizer
from birdie.model.gpt import GPT, GPTConfig
from birdie.run.evaluation import load_gpt
from birdie.runtime.device import dtype_name
from birdie.score.accumulator import Accumulator, Text
from birdie.score.mode import Scoring
from birdie.score.modes.streaming import StreamingMode
from birdie.score.windows import score_windows, sliding

CPU = torch.device("cpu")
Tokens = NDArray[np.uint16]


def main() -> None:
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--targets", type=int, default=8192, help="scored tokens (default: 8192)")
    parser.add_argument("--stride", type=int, default=64, help="tokens between windows (default: 64)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of context (default: 1024)")
    parser.add_argument("--weights", type=Path, help="an artifact (default: random weights)")
    parser.add_argument("--chunks", type=comma_separated(int), default="64,256", help="tokens per forward pass")
    parser.add_argument("--turns", type=int, default=2, help="(default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of random weights (default: 0)")
    options = parser.parse_args()
    model = model_of(options.weights, options.seed)
    tokens, table, bos_id, text = text_of(options.targets)
    rows = measure(model, tokens, table, bos_id, options.length, options.stride, options.chunks, options.turns)
    if not options.json:  # a terminal has less room
        rows = [{name: value for name, value in row.items() if not name.startswith("mean")} for row in rows]
    report([{**row, "text": text} if options.json else row for row in rows], as_json=options.json)


def model_of(weights: Path | None, seed: int) -> GPT:
    """Return the model of an artifact, or the challenge's shape with random weights that depend on the context."""
    if weights is not None:
        return load_gpt(weights, CPU)[0]
    torch.manual_seed(seed)
    model = GPT(GPTConfig()).eval()
    for p in model.parameters():
        if p.ndim == 2 and not p.any():  # initially zero; training changes them
            torch.nn.init.normal_(p, std=0.02)
    return model


def text_of(targets: int) -> tuple[Tokens, Any, int, str]:
    """Return tokens, byte table (or bytes of each token), BOS id and the name of the text."""
    root = os.environ.get("BIRDIE_DATA")
    if root:
        tokenizer = load_tokenizer(str(Path(root) / "tokenizers" / "fineweb_1024_bpe.model"))
        shard = Path(root) / "text" / "fineweb" / "fineweb_val_head_sp1024.bin"
        tokens = np.asarray(open_dataset(val=str(shard)).validation_tokens()[: targets + 1])
        return tokens, tokenizer.byte_table(1024), tokenizer.bos_id, shard.name
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[: targets + 1]
    tokens = np.frombuffer(text, dtype=np.uint8).astype(np.uint16) + 2
    return tokens, np.ones(len(tokens), dtype=np.uint16), 1, "standard library, bytes"


def measure(
    model: GPT,
    tokens: Tokens,
    table: Any,
    bos_id: int,
    length: int,
    stride: int,
    chunks: list[int],
    turns: int,
    device: torch.device = CPU,
) -> list[dict[str, Any]]:
    """Return a row for each mode; the model is on `device`."""
    cover = sliding(len(tokens) - 1, length, stride)

    text = Text(tokens, table, bos_id)

    def scoring(accumulator: Accumulator) -> Scoring:
        return Scoring(model, text, accumulator.ledger, length, device, batch_tokens=len(tokens))

    def plain_loop(accumulator: Accumulator) -> None:
        with torch.inference_mode():
            for begin, first, stop in zip(cover.begins, cover.firsts, cover.stops, strict=True):
                ids = torch.from_numpy(tokens[begin : stop + 1].astype(np.int64)).to(device)[None]
                nats = model.loss(ids[:, :-1], ids[:, 1:], reduction="none")
                accumulator.add(np.array([first]), nats[:, first - begin :].float().cpu().numpy())

    def windows(accumulator: Accumulator) -> None:
        for part in score_windows(scoring(accumulator), cover):
            accumulator.add(part.firsts, part.nats)

    def stream(chunk: int, accumulator: Accumulator) -> None:
        for part in StreamingMode(chunk=chunk).score(scoring(accumulator)):
            accumulator.add(part.firsts, part.nats)

    float32, bfloat16 = torch.float32, torch.bfloat16
    modes: dict[str, tuple[torch.dtype, Callable[[Accumulator], None]]] = {
        f"plain loop, stride {stride}": (float32, plain_loop),
        "windows": (float32, windows),
        "windows, bfloat16": (bfloat16, windows),
        **{f"stream, chunks of {chunk}": (float32, partial(stream, chunk)) for chunk in chunks},
        **{f"stream, chunks of {chunk}, bfloat16": (bfloat16, partial(stream, chunk)) for chunk in chunks},
    }
    accumulators: dict[str, Accumulator] = {}

    def score(name: str) -> None:
        model.compute_dtype, mode = modes[name]
        accumulators[name] = Accumulator(text, keep_losses=True)
        mode(accumulators[name])

    seconds = take_turns(
        {name: partial(score, name) for name in modes}, turns=turns, warm_up=device.type == "cuda", device=device
    )
    plain = next(iter(modes))
    reference = accumulators[plain].losses
    rows = []
    for name, (dtype, _) in modes.items():
        nats, total = accumulators[name].losses, accumulators[name].score(len(tokens) - 1, 0.0)
        assert nats is not None
        assert reference is not None
        median = statistics.median(seconds[name])
        rows.append(
            {
                "way": name,
                "dtype": dtype_name(dtype),
                "seconds": median,
                "faster": statistics.median(seconds[plain]) / median,
                "bpb": total.bpb,
                "bpb_off": total.bpb - accumulators[plain].score(len(tokens) - 1, 0.0).bpb,
                "nats_off": float(np.abs(nats - reference).max()),
                "mean_nats_off": float(np.abs(nats - reference).mean()),
            }
        )
    return rows


if __name__ == "__main__":
    main()
