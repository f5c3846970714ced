"""Scoring: seconds and bits per byte of every way, against the plain loop over sliding windows.

    python -m benchmarks.evaluate --json [--targets 8192] [--stride 64] [--length 1024] [--weights FILE.birdie]
                                         [--chunks 64,256] [--turns 2] [--seed 0]

All score the same targets of one text with the same model, eager, in turns within one process. The plain loop is what
the records' scripts do with a batch of one: a window, all its logits, the losses of its last places. Without weights
the model is the challenge's 9 × 512 with random ones, whose speed is that of any; differences of bits per byte then say
little. With an artifact (a trained model) they are those of the arithmetic. The text is FineWeb's validation head, of
BIRDIE_DATA; without it, the standard library's sources as bytes. Rows: the median of the turns and its ratio to the
plain loop's, bits per byte, and the largest difference of a target's nats to the plain loop's.
"""

import argparse
import os
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.report import report
from birdie.data.dataset import open_dataset
from birdie.data.tokenizer import load_tokenizer
from birdie.model.gpt import GPT, GPTConfig
from birdie.run.evaluation import load_gpt
from birdie.runtime.device import dtype_name
from birdie.score.accumulator import Accumulator
from birdie.score.mode import Scoring
from birdie.score.streaming import StreamingMode
from birdie.score.windows import score_windows, sliding

CPU = torch.device("cpu")
Tokens = NDArray[np.uint16]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--targets", type=int, default=8192)
    parser.add_argument("--stride", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--chunks", default="64,256")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    chunks = [int(each) for each in asked.chunks.split(",")]
    model = model_of(asked.weights, asked.seed)
    tokens, table, bos_id, text = text_of(asked.targets)
    rows = measure(model, tokens, table, bos_id, asked.length, asked.stride, chunks, asked.turns)
    if not asked.json:  # a terminal has less room
        rows = [{name: value for name, value in row.items() if not name.startswith("mean")} for row in rows]
    report([{**row, "text": text} if asked.json else row for row in rows], as_json=asked.json)


def model_of(weights: Path | None, seed: int) -> GPT:
    """The model of an artifact, or the challenge's shape with random weights that use their context."""
    if weights is not None:
        return load_gpt(weights, CPU)[0]
    torch.manual_seed(seed)
    model = GPT(GPTConfig()).eval()
    for p in model.parameters():
        if p.ndim == 2 and not p.any():  # what training moves off zero
            torch.nn.init.normal_(p, std=0.02)
    return model


def text_of(targets: int) -> tuple[Tokens, Any, int, str]:
    """Tokens, byte table, BOS and the name of the text."""
    root = os.environ.get("BIRDIE_DATA")
    if root:
        pieces = load_tokenizer(str(Path(root) / "tokenizers" / "fineweb_1024_bpe.model"))
        shard = Path(root) / "text" / "fineweb" / "fineweb_val_head_sp1024.bin"
        tokens = np.asarray(open_dataset(val=str(shard)).validation_tokens()[: targets + 1])
        return tokens, pieces.byte_table(1024), pieces.bos_id, shard.name
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[: targets + 1]
    tokens = np.frombuffer(text, dtype=np.uint8).astype(np.uint16) + 2
    return tokens, np.ones(len(tokens), dtype=np.uint16), 1, "standard library, bytes"


def measure(
    model: GPT, tokens: Tokens, table: Any, bos_id: int, length: int, stride: int, chunks: list[int], turns: int
) -> list[dict[str, Any]]:
    """Rows of all ways."""
    cover = sliding(len(tokens) - 1, length, stride)

    def tally() -> Accumulator:
        return Accumulator(tokens, table, bos_id, keep_losses=True)

    def scoring(found: Accumulator) -> Scoring:
        return Scoring(model, tokens, found, length, bos_id, CPU, batch_tokens=len(tokens))

    def naive(found: Accumulator) -> None:
        with torch.inference_mode():
            for begin, first, stop in zip(cover.begins, cover.firsts, cover.stops, strict=True):
                ids = torch.from_numpy(tokens[begin : stop + 1].astype(np.int64))[None]
                nats = model.loss(ids[:, :-1], ids[:, 1:], reduction="none")
                found.add(np.array([first]), nats[:, first - begin :].float().numpy())

    def windows(found: Accumulator) -> None:
        score_windows(scoring(found), cover)

    def stream(chunk: int) -> Callable[[Accumulator], None]:
        def way(found: Accumulator) -> None:
            StreamingMode(chunk=chunk).score(scoring(found))

        return way

    float32, bfloat16 = torch.float32, torch.bfloat16
    ways: dict[str, tuple[torch.dtype, Callable[[Accumulator], None]]] = {
        f"plain loop, stride {stride}": (float32, naive),
        "windows": (float32, windows),
        "windows, bfloat16": (bfloat16, windows),
        **{f"stream, chunks of {chunk}": (float32, stream(chunk)) for chunk in chunks},
        **{f"stream, chunks of {chunk}, bfloat16": (bfloat16, stream(chunk)) for chunk in chunks},
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    kept: dict[str, Accumulator] = {}
    for _ in range(turns):
        for name, (dtype, way) in ways.items():
            model.compute_dtype = dtype
            kept[name] = tally()
            began = time.perf_counter()
            way(kept[name])
            seconds[name].append(time.perf_counter() - began)
    plain = next(iter(ways))
    reference = kept[plain].losses
    rows = []
    for name, (dtype, _) in ways.items():
        nats, score = kept[name].losses, kept[name].score(len(tokens) - 1, 0.0)
        assert nats is not None
        assert reference is not None
        median = statistics.median(seconds[name])
        rows.append(
            {
                "way": name,
                "dtype": dtype_name(dtype),
                "seconds": median,
                "faster": statistics.median(seconds[plain]) / median,
                "bpb": score.bpb,
                "bpb_off": score.bpb - kept[plain].score(len(tokens) - 1, 0.0).bpb,
                "nats_off": float(np.abs(nats - reference).max()),
                "mean_nats_off": float(np.abs(nats - reference).mean()),
            }
        )
    return rows


if __name__ == "__main__":
    main()
