"""Whether a byte budget is met: `python -m benchmarks.budgets` asks for fifty sizes and weighs the files.

Budgets are drawn evenly between 2 and 8 bits a weight, seeded. A file must never be over its budget, and under it by no
more than a thousandth or 64 bytes, whichever is more, without padding: a byte more at the end of the file makes it
invalid, and every byte belongs to the header or to a tensor.

    --small    a model of 0.1 M weights made on the spot (continuous integration); default: the benchmark model
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_model import bench_model
from benchmarks.report import report
from birdie.artifact import container
from birdie.artifact.checkpoints import read_state_dict
from birdie.artifact.container import Reader
from birdie.artifact.save import save
from birdie.errors import BirdieError, BudgetError

COUNT, LOWEST, HIGHEST = 50, 2.0, 8.0
SHARE, TINY = 1000, 64
Row = dict[str, Any]


def slack_allowed(budget: int) -> int:
    """Bytes a file may stay under its budget."""
    return max(budget // SHARE, TINY)


def draw(weights: int, count: int = COUNT, seed: int = 0) -> list[int]:
    """`count` budgets in bytes for a model of so many weights, ascending."""
    chance = random.Random(seed)
    return sorted(int(chance.uniform(LOWEST, HIGHEST) * weights / 8) for _ in range(count))


def small_state(seed: int = 0) -> dict[str, Tensor]:
    """A made-up transformer of 0.1 M weights: row scales differ, gains are small vectors, one matrix is tied."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        scales = torch.exp(0.4 * torch.randn(rows, 1, generator=generator))
        return 0.05 * scales * torch.randn(rows, columns, generator=generator)

    state = {"tok_emb.weight": matrix(256, 64)}
    for layer in range(2):
        state[f"blocks.{layer}.attn.qkv.weight"] = matrix(192, 64)
        state[f"blocks.{layer}.attn.proj.weight"] = matrix(64, 64)
        state[f"blocks.{layer}.mlp.up.weight"] = matrix(192, 64)
        state[f"blocks.{layer}.mlp.down.weight"] = matrix(64, 192)
        state[f"blocks.{layer}.scale"] = 1 + 0.1 * torch.randn(64, generator=generator)
    state["lm_head.weight"] = state["tok_emb.weight"]
    return state


def padding(path: Path) -> int:
    """Bytes of the file that belong to nothing: what is left when header and payloads are rebuilt from what is read."""
    with Reader(path) as reader:
        entries = [reader.read(name) for name in reader.names]
        rebuilt = container.to_bytes(entries, bytes(reader.metadata))
    return path.stat().st_size - len(rebuilt)


def rows(state: Mapping[str, Tensor], budgets: list[int], **arguments: Any) -> Iterator[Row]:
    """One row a budget: what the file weighs, and whether that is allowed.

    Args:
        state: name → tensor.
        budgets: in bytes.
        arguments: further ones of birdie.save.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.birdie"
        for budget in budgets:
            start = time.perf_counter()
            try:
                summary = save(state, path, budget=budget, **arguments)
            except BudgetError as error:
                yield _row(budget, None, None, time.perf_counter() - start, str(error))
                continue
            yield _row(budget, summary.bytes, padding(path), time.perf_counter() - start, "")


def _row(budget: int, size: int | None, padded: int | None, seconds: float, reason: str) -> Row:
    slack = None if size is None else budget - size
    return {
        "budget": budget,
        "bytes": size,
        "slack": slack,
        "slack_share": None if slack is None else slack / budget,
        "padding": padded,
        "met": slack is not None and 0 <= slack <= slack_allowed(budget) and padded == 0,
        "encode_s": seconds,
        "reason": reason,
    }


def main() -> None:
    """Parse, measure, print; exit code 1 where a budget was not met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", type=Path, help="a checkpoint (default: the shared benchmark model)")
    parser.add_argument("--small", action="store_true", help="a small made-up model instead")
    parser.add_argument("--count", type=int, default=COUNT, help="budgets (default: 50)")
    parser.add_argument("--coder", choices=("max", "fast"), default="max")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the shared model is kept")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        state = small_state() if options.small else read_state_dict(options.weights or bench_model(options.runs))
        tensors = {id(weight): weight.numel() for weight in state.values()}
        budgets = draw(sum(tensors.values()), options.count, options.seed)
        found = []
        for row in rows(state, budgets, coder=options.coder):
            found.append(row)
            said = row["reason"] or f"{row['bytes']:,} of {row['budget']:,} bytes in {row['encode_s']:.0f} s"
            print(f"{len(found)} of {len(budgets)}: {said}", file=sys.stderr, flush=True)
    except BirdieError as error:
        raise SystemExit(str(error)) from error
    report(found, as_json=options.json)
    raise SystemExit(0 if all(row["met"] for row in found) else 1)


if __name__ == "__main__":
    main()
