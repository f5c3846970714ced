"""Accuracy of byte budgets: `python -m benchmarks.budgets` saves a model under fifty budgets and checks the files.

Budgets are uniform between 2 and 8 bits per weight, with a fixed seed. A file must never exceed its budget, and stay
below it by at most 0.1 % or 64 bytes, whichever is more. Padding does not count: a further byte at the end of a file
makes it invalid, and every byte belongs to the header or to a tensor.

    --small    a synthetic model of 0.1 M weights (continuous integration); default: the shared benchmark model
"""

import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench_model import bench_model
from benchmarks.command import command_parser, errors_as_exit, log, report
from birdie.artifact import container
from birdie.artifact.checkpoints import read_state_dict
from birdie.artifact.container import Reader
from birdie.artifact.save import save
from birdie.errors import BudgetError

COUNT, LOWEST, HIGHEST = 50, 2.0, 8.0
SLACK_DIVISOR, MIN_SLACK = 1000, 64
Row = dict[str, Any]


def slack_allowed(budget: int) -> int:
    """Return the bytes by which a file may be smaller than its budget."""
    return max(budget // SLACK_DIVISOR, MIN_SLACK)


def draw(weights: int, count: int = COUNT, seed: int = 0) -> list[int]:
    """Return `count` random budgets in bytes for a model of `weights` weights, ascending."""
    rng = random.Random(seed)
    return sorted(int(rng.uniform(LOWEST, HIGHEST) * weights / 8) for _ in range(count))


def small_state(seed: int = 0) -> dict[str, Tensor]:
    """Return a synthetic transformer of 0.1 M weights: unequal row scales, small gain vectors, one tied matrix."""
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
    """Return the bytes of the file beyond a file that is rebuilt from the header and payloads it was read as."""
    with Reader(path) as reader:
        entries = [reader.read(name) for name in reader.names]
        rebuilt = container.to_bytes(entries, bytes(reader.metadata))
    return path.stat().st_size - len(rebuilt)


def rows(state: Mapping[str, Tensor], budgets: list[int], **arguments: Any) -> Iterator[Row]:
    """Yield a row for each budget: the size of the file, and whether it is allowed.

    Args:
        state: name → tensor.
        budgets: in bytes.
        arguments: further arguments of birdie.save.
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
    """Measure and print the table; exit code 1 if a budget was missed."""
    parser = command_parser(__doc__)
    parser.add_argument("--weights", type=Path, help="a checkpoint (default: the shared benchmark model)")
    parser.add_argument("--small", action="store_true", help="a small synthetic model instead")
    parser.add_argument("--count", type=int, default=COUNT, help="budgets (default: 50)")
    parser.add_argument("--coder", choices=("max", "fast"), default="max", help="(default: max)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs (default: runs)")
    parser.add_argument("--seed", type=int, default=0, help="of the budgets (default: 0)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with errors_as_exit():
        state = small_state() if options.small else read_state_dict(options.weights or bench_model(options.runs))
        tensors = {id(weight): weight.numel() for weight in state.values()}
        budgets = draw(sum(tensors.values()), options.count, options.seed)
        results = []
        for row in rows(state, budgets, coder=options.coder):
            results.append(row)
            outcome = row["reason"] or f"{row['bytes']:,} of {row['budget']:,} bytes in {row['encode_s']:.0f} s"
            log(f"{len(results)} of {len(budgets)}: {outcome}")
    report(results, as_json=options.json)
    raise SystemExit(0 if all(row["met"] for row in results) else 1)


if __name__ == "__main__":
    main()
