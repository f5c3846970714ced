"""Training in fp8 compared with bfloat16: the loss on any machine, time and memory on a GPU.

    python -m benchmarks.fp8 [--json] [--steps 200] [--gpu-steps 30] [--seed 0]

Loss: a GPT of 4 layers × 96 is trained on the standard library's sources as bytes, from the same weights on the same
batches: with activations in bfloat16; with the matrix products of the blocks in emulated fp8 as well; and in float32,
to show the size of such differences. `loss` is the mean over the last twenty steps, `held_out` the loss on held-out
text, scored in float32. `over_bfloat16` and `held_out_over` are ratios to the row of bfloat16.

GPU: the challenge's baseline model in both, compiled; milliseconds per step and peak memory. Without CUDA, the row says
so.
"""

import dataclasses
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import command_parser, report
from benchmarks.loaders import RepeatedTokens
from birdie.data.batches import Batches
from birdie.data.corpus import stdlib_corpus
from birdie.data.dataset import Dataset, open_dataset
from birdie.data.prepare import prepare
from birdie.model.gpt import GPT, GPTConfig
from birdie.train.settings import Fp8, OptimizerSettings, TrainSettings
from birdie.train.training import Training

SMALL = GPTConfig(vocab_size=260, num_layers=4, model_dim=96, num_heads=4, num_kv_heads=2)
SETTINGS = TrainSettings(
    train_batch_tokens=1024,
    train_seq_len=256,
    accumulation=1,
    warmup_steps=0,
    warmdown_fraction=0.5,
    max_wallclock_seconds=0,
)
ARITHMETIC: dict[str, tuple[str, Fp8]] = {
    "bfloat16": ("bfloat16", "off"),
    "fp8, emulated": ("bfloat16", "emulate"),
    "float32": ("float32", "off"),
}
BASELINE = dataclasses.replace(SETTINGS, train_batch_tokens=65_536, train_seq_len=1024, warmup_steps=5, compile=True)
LAST_STEPS = 20  # whose losses are averaged


def stdlib_dataset(root: Path) -> Dataset:
    """Return the standard library's sources as bytes, prepared below `root`."""
    list(prepare(stdlib_corpus(), tokenizer="bytes", root=root))
    return open_dataset(next((root / "datasets").iterdir()))


def loader(data: Dataset, settings: TrainSettings) -> Batches:
    """Return the training batches."""
    return Batches(
        data.train,
        batch_tokens=settings.train_batch_tokens,
        seq_len=settings.train_seq_len,
        accumulation=settings.accumulation,
        order="shuffled",
        seed=settings.seed,
    )


def trained(data: Dataset, arithmetic: str, steps: int, seed: int) -> dict[str, Any]:
    """Train the small model, score it, and return its row."""
    dtype, fp8 = ARITHMETIC[arithmetic]
    settings = dataclasses.replace(SETTINGS, iterations=steps, seed=seed, compute_dtype=dtype, fp8=fp8)  # type: ignore[arg-type]
    torch.manual_seed(seed)
    model, batches, messages = GPT(SMALL), loader(data, settings), list[str]()
    try:
        run = Training(model, batches, settings, OptimizerSettings(), notify=messages.append)
        losses = [step.loss for step in run]
        if run.float8 is not None:
            ids, targets = batches.next()
            messages = [run.float8.diagnostics(lambda: model.loss(ids, targets))]
    finally:
        batches.close()
    return {
        "arithmetic": arithmetic,
        "steps": steps,
        "loss": statistics.fmean(losses[-LAST_STEPS:]),
        "held_out": held_out(model, data),
        "said": "; ".join(messages),
    }


@torch.no_grad()
def held_out(model: GPT, data: Dataset, tokens: int = 65_536) -> float:
    """Return the mean loss in float32 over the first `tokens` of the validation text."""
    length = SETTINGS.train_seq_len
    model.eval()
    model.compute_dtype = torch.float32
    text = torch.from_numpy(data.validation_tokens()[: tokens + 1].astype("int64"))
    rows = len(text[1:]) // length
    ids, targets = (part[: rows * length].view(rows, length) for part in (text[:-1], text[1:]))
    pairs = zip(torch.split(ids, 16), torch.split(targets, 16), strict=True)
    return statistics.fmean(model.loss(x, y).item() for x, y in pairs)


def on_gpu(fp8: Fp8, steps: int) -> dict[str, Any]:
    """Train the baseline model on the GPU, and return the row of its speed and memory."""
    settings = dataclasses.replace(BASELINE, iterations=steps, compute_dtype="bfloat16", fp8=fp8)
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    run = Training(
        GPT(GPTConfig()), RepeatedTokens(settings), settings, OptimizerSettings(), device=torch.device("cuda")
    )
    clock = [step.train_ms for step in run]
    milliseconds = [end - start for start, end in pairwise(clock)]
    return {
        "arithmetic": "fp8" if run.float8 else "bfloat16" if fp8 == "off" else "fp8: not supported by this GPU",
        "device": torch.cuda.get_device_name(),
        "ms_per_step": round(statistics.median(milliseconds), 2),
        "tokens_per_s": round(settings.train_batch_tokens / statistics.median(milliseconds) * 1000),
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20),
    }


def measure(steps: int, gpu_steps: int, seed: int) -> list[dict[str, Any]]:
    """Return all rows."""
    with tempfile.TemporaryDirectory() as folder:
        data = stdlib_dataset(Path(folder))
        rows = [trained(data, arithmetic, steps, seed) for arithmetic in ARITHMETIC]
    for row in rows:
        row["over_bfloat16"] = row["loss"] / rows[0]["loss"]
        row["held_out_over"] = row["held_out"] / rows[0]["held_out"]
    if not torch.cuda.is_available():
        return [*rows, {"arithmetic": "on a GPU", "skipped": "no CUDA"}]
    modes: tuple[Fp8, Fp8] = ("off", "on")
    return rows + [on_gpu(fp8, gpu_steps) for fp8 in modes]


def main() -> None:
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--steps", type=int, default=200, help="steps of the small model (default: 200)")
    parser.add_argument("--gpu-steps", type=int, default=30, help="steps of the baseline model (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    options = parser.parse_args()
    rows = measure(options.steps, options.gpu_steps, options.seed)
    keys = dict.fromkeys(key for row in rows for key in row)
    report(rows if options.json else [{key: row.get(key) for key in keys} for row in rows], as_json=options.json)


if __name__ == "__main__":
    main()
