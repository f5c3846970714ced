"""Time of each stage of quantizing and packing a model of the challenge's size: `python -m benchmarks.compress_time`.

The model has the shape of the challenge's record of 27 April 2026: 11 layers of 512, MLP × 4, 8 heads and 4 KV heads,
8,192 pieces, 36 M weights. Its weights are random with unequal row scales. The Hessian of each matrix is Σ x xᵀ of
random inputs with unequal, correlated features. Only time is measured, not quality. Stages run on several threads, so
their seconds can add up to more than the wall-clock time.
"""

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

from benchmarks.command import command_parser, errors_as_exit, report
from birdie.artifact import load as loading
from birdie.artifact import save as saving
from birdie.compress.calibration.result import CalibrationResult
from birdie.compress.calibration.sensitivity import MAX_OUTPUTS
from birdie.compress.scheme import Sensitivity
from birdie.compress.small_tensors import is_matrix
from birdie.model.gpt import GPT, GPTConfig

CHALLENGE = GPTConfig(vocab_size=8192, num_layers=11, model_dim=512, num_heads=8, num_kv_heads=4, mlp_mult=4)
SMALL = GPTConfig(vocab_size=256, num_layers=2, model_dim=64, num_heads=4, num_kv_heads=2, mlp_mult=2)
SAMPLES = 4  # inputs per feature of a Hessian
Row = dict[str, Any]

# (stage, module, function): functions that are timed where that module calls them. A function that does not exist is
# skipped, so the list may have stages that come and go.
STAGES = (
    ("save, in all", "birdie.artifact.save", "save"),
    ("factors of Hessians", "birdie.compress.rate.jobs", "feedback"),
    ("trellis and feedback", "birdie.compress.schemes.trellis", "quantize"),
    ("budget search", "birdie.compress.rate.fit", "fit_budget"),
    ("quantization and search", "birdie.artifact.save", "fit"),
    ("entropy coding", "birdie.entropy.coder", "encode"),
    ("container", "birdie.artifact.container", "to_bytes"),
    ("load, in all", "birdie.artifact.load", "load"),
)


@dataclass
class Stopwatch:
    """Seconds and calls of each stage, summed over all threads."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with its calls counted for `stage`."""

        @functools.wraps(function)
        def call(*positional: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*positional, **named)
            finally:
                seconds = time.perf_counter() - start
                with self.lock:
                    self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
                    self.calls[stage] = self.calls.get(stage, 0) + 1

        return call

    @contextmanager
    def on(self, stages: tuple[tuple[str, str, str], ...] = STAGES) -> Iterator[None]:
        """Time `stages` inside the block."""
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
    """Return random tensors with a GPT's names and shapes: matrices with log-normal row scales, vectors near 1."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for name, weight in GPT(config).state_dict().items():
        if weight.ndim < 2:
            state[name] = 1 + 0.1 * torch.randn(weight.shape, generator=generator)
            continue
        scales = torch.exp(0.4 * torch.randn(weight.shape[0], 1, generator=generator))
        state[name] = 0.03 * scales * torch.randn(weight.shape, generator=generator)
    return state


def sensitivities(state: Mapping[str, Tensor], seed: int = 0) -> dict[str, Sensitivity]:
    """Return a synthetic `Sensitivity` of each matrix: Hessians of correlated features, log-normal row Fishers."""
    generator = torch.Generator().manual_seed(seed + 1)
    by_name = {}
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
        output_fisher = output if rows <= MAX_OUTPUTS else None
        by_name[name] = Sensitivity(x.T @ x / len(x), output.diagonal().clone(), output_fisher)
    return by_name


def rows(state: Mapping[str, Tensor], known: Mapping[str, Sensitivity], **arguments: Any) -> list[Row]:
    """Return a row for each stage of saving and loading `state` with the sensitivities `known`.

    Args:
        state: name → tensor.
        known: sensitivities by name.
        arguments: further arguments of birdie.save.
    """
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder, watch.on():
        path = Path(folder) / "model.birdie"
        summary = saving.save(state, path, calibration=CalibrationResult(dict(state), dict(known)), **arguments)
        loading.load(path)
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
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--scheme", help="a spec for every matrix instead of a budget")
    parser.add_argument("--budget", type=int, help="bytes (default: 3.5 bits per weight)")
    parser.add_argument("--coder", choices=("max", "fast"), default="max", help="(default: max)")
    parser.add_argument("--workers", type=int, help="threads (default: every core)")
    parser.add_argument("--small", action="store_true", help="a small model, to check that all stages run")
    parser.add_argument("--seed", type=int, default=0, help="of weights and Hessians (default: 0)")
    options = parser.parse_args()
    state = random_state(SMALL if options.small else CHALLENGE, options.seed)
    known = sensitivities(state, options.seed)
    target = {"scheme": options.scheme} if options.scheme else {"budget": options.budget}
    if not options.scheme and options.budget is None:
        target = {"bits": 3.5}
    with errors_as_exit():
        stages = rows(state, known, coder=options.coder, workers=options.workers, **target)
    report(stages, as_json=options.json)


if __name__ == "__main__":
    main()
