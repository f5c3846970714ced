"""Where the time goes when a challenge-size model is quantized and packed: `python -m benchmarks.compress_time`.

The model has the shape of the challenge's record of 27 April 2026: 11 layers of 512, MLP × 4, 8 heads over 4, 8,192
pieces, 36 M weights. Its weights are random with unequal rows; the Hessian of each matrix is Σ x xᵀ of random inputs of
unequal, correlated features. Timing only: what the file is worth is not asked. Stages run on several threads at once,
so their seconds add up to more than the clock's.
"""

import argparse
import functools
import importlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.report import report
from birdie.artifact.load import load
from birdie.artifact.save import save
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.calibration.sensitivity import MAX_OUTPUTS
from birdie.compress.scheme import Sensitivity
from birdie.compress.small_tensors import is_matrix
from birdie.errors import BirdieError
from birdie.model.gpt import GPT, GPTConfig

CHALLENGE = GPTConfig(vocab_size=8192, num_layers=11, model_dim=512, num_heads=8, num_kv_heads=4, mlp_mult=4)
SMALL = GPTConfig(vocab_size=256, num_layers=2, model_dim=64, num_heads=4, num_kv_heads=2, mlp_mult=2)
SAMPLES = 4  # inputs per feature in a Hessian
Row = dict[str, Any]

# (stage, module, name): functions whose time is taken where that module calls them. A name that is not there is left
# out, so that stages may come and go.
STAGES = (
    ("save, in all", "birdie.artifact.save", "save"),
    ("factors of Hessians", "birdie.compress.rate.allocation", "feedback"),
    ("trellis and feedback", "birdie.compress.schemes.trellis", "quantize"),
    ("budget search", "birdie.compress.rate.plan", "fit_budget"),
    ("quantizing", "birdie.artifact.save", "encode_all"),
    ("entropy coding", "birdie.entropy.coder", "encode"),
    ("container", "birdie.artifact.container", "to_bytes"),
    ("load, in all", "birdie.artifact.save", "load"),
)


@dataclass
class Stopwatch:
    """Seconds and calls of each stage, over all threads."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose calls count for `stage`."""

        @functools.wraps(function)
        def call(*positional: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*positional, **named)
            finally:
                taken = time.perf_counter() - start
                with self.lock:
                    self.seconds[stage] = self.seconds.get(stage, 0.0) + taken
                    self.calls[stage] = self.calls.get(stage, 0) + 1

        return call

    @contextmanager
    def on(self, stages: tuple[tuple[str, str, str], ...] = STAGES) -> Iterator[None]:
        """Take the time of `stages` inside the block."""
        with ExitStack() as stack:
            for stage, module, name in stages:
                try:
                    owner = importlib.import_module(module)
                    function = getattr(owner, name)
                except (ImportError, AttributeError):
                    continue
                stack.enter_context(mock.patch.object(owner, name, self.timed(stage, function)))
            yield


def random_state(config: GPTConfig, seed: int = 0) -> dict[str, Tensor]:
    """Tensors of a GPT's names and shapes: matrices normal under log-normal scales of rows, vectors near one."""
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, Tensor] = {}
    for name, weight in GPT(config).state_dict().items():
        if weight.ndim < 2:
            out[name] = 1 + 0.1 * torch.randn(weight.shape, generator=generator)
            continue
        scales = torch.exp(0.4 * torch.randn(weight.shape[0], 1, generator=generator))
        out[name] = 0.03 * scales * torch.randn(weight.shape, generator=generator)
    return out


def sensitivities(state: Mapping[str, Tensor], seed: int = 0) -> dict[str, Sensitivity]:
    """A synthetic `Sensitivity` of each matrix: Hessians of mixed, unequal features, log-normal row Fishers."""
    generator = torch.Generator().manual_seed(seed + 1)
    found = {}
    for name, weight in state.items():
        if not is_matrix(weight):
            continue
        rows, columns = weight.shape
        scales = torch.exp(0.7 * torch.randn(columns, generator=generator))
        mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
        x = torch.randn(SAMPLES * columns, columns, generator=generator)
        x = (x + x @ mixing) * scales
        root = torch.randn(rows, min(rows, 512), generator=generator) * torch.exp(
            0.5 * torch.randn(rows, 1, generator=generator)
        )
        output = root @ root.T / root.shape[1] + torch.diag(0.1 * root.square().mean(1))
        kept = output if rows <= MAX_OUTPUTS else None
        found[name] = Sensitivity(x.T @ x / len(x), output.diagonal().clone(), kept)
    return found


def rows(state: Mapping[str, Tensor], known: Mapping[str, Sensitivity], **arguments: Any) -> list[Row]:
    """One row a stage of saving and loading `state`, `known` from calibration; `arguments` go to birdie.save."""
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder, watch.on():
        path = Path(folder) / "model.birdie"
        summary = save(state, path, calibration=CalibrationResult(dict(state), dict(known)), **arguments)
        load(path)
    weights = summary.weights
    return [
        {
            "stage": stage,
            "seconds": watch.seconds[stage],
            "calls": watch.calls[stage],
            "weights_per_s": weights / watch.seconds[stage] if watch.seconds[stage] else None,
            "bytes": summary.bytes if stage.startswith("save") else None,
        }
        for stage, _, _ in STAGES
        if stage in watch.calls
    ]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scheme", help="a spec for every matrix instead of a budget")
    parser.add_argument("--budget", type=int, help="bytes (default: 3.5 bits a weight)")
    parser.add_argument("--coder", choices=("max", "fast"), default="max")
    parser.add_argument("--workers", type=int, help="threads (default: every core)")
    parser.add_argument("--small", action="store_true", help="a small model, to see that all stages run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    state = random_state(SMALL if options.small else CHALLENGE, options.seed)
    known = sensitivities(state, options.seed)
    chosen = {"scheme": options.scheme} if options.scheme else {"budget": options.budget}
    if not options.scheme and options.budget is None:
        chosen = {"bits": 3.5}
    try:
        found = rows(state, known, coder=options.coder, workers=options.workers, **chosen)
    except BirdieError as error:
        raise SystemExit(str(error)) from error
    report(found, as_json=options.json)


if __name__ == "__main__":
    main()
