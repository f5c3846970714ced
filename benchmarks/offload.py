"""Memory and time of calibration, in memory and with files in place of it: `python -m benchmarks.offload`.

    python -m benchmarks.offload                           8, 16 and 32 blocks of width 512
    python -m benchmarks.offload --depths 8,32 --width 1024
    python -m benchmarks.offload --save                    calibrate, search for a budget and write the file

A GPT whose random weights are mapped from a file is calibrated on random tokens, or goes through all of `birdie.save`.
Every row is a process of its own on one thread: processor seconds, and the most memory above that of the process after
it has done the same for a small model. Pages of the mapped weights count as long as they are resident. `fisher` is the
mean of all row Fishers times 10^9, the same both ways.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import birdie
from benchmarks.command import Row, comma_separated, command_parser, errors_as_exit, log, one_of, report
from benchmarks.processes import apart, can_measure, reset_peak, resident
from birdie.compress.scheme import Sensitivity
from birdie.gpt.model.gpt import GPT, GPTConfig
from birdie.gpt.run.gpt_calibration import loss
from birdie.system.mapped import releasing

METHODS = ("memory", "files")
VOCABULARY, LENGTH, BITS = 1024, 256, 4.0
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Job:
    """Work that one process measures.

    Attributes:
        method: one of `METHODS`.
        depth, width: of the model.
        tokens: of a batch.
        batches: how many.
        save: whether the model is compressed as well, to `BITS` bits a weight.
    """

    method: str
    depth: int
    width: int
    tokens: int
    batches: int
    save: bool


def measured(values: Mapping[str, object], folder: str) -> dict[str, float]:
    """Return what a job takes in this process: seconds, and memory in 10^6 bytes."""
    job = Job(**values)  # type: ignore[arg-type]
    small = replace(job, depth=2, width=min(64, job.width), tokens=LENGTH, batches=2)
    done(small, Path(folder))  # loads libraries and kernels
    weights = model_file(job, Path(folder)).stat().st_size / 1e6
    reset_peak()
    idle, start = resident("VmRSS"), time.process_time()
    result = done(job, Path(folder))
    seconds = time.process_time() - start
    return {"weights_mb": weights, "cpu_s": seconds, "peak_mb": resident("VmHWM") - idle} | result


def done(job: Job, folder: Path) -> dict[str, float]:
    """Do a job and return what tells whether it was done right."""
    path = model_file(job, folder)
    state = load_file(path)
    with releasing([path]):
        model, batches = mapped_model(job, state), random_batches(job)
        known = birdie.calibrate(model, batches, loss, offload=folder if job.method == "files" else False)
        if not job.save:
            return {"fisher": mean_fisher(known.sensitivities)}
        summary = birdie.save(model, folder / "model.birdie", bits=BITS, effort="fast", calibration=known, workers=1)
        return {"bytes": summary.bytes, "kl": summary.error or 0.0}


def mean_fisher(sensitivities: Mapping[str, Sensitivity]) -> float:
    """Return the mean over all rows of all matrices, times 10^9."""
    total, count = 0.0, 0
    for name in sensitivities:
        rows = sensitivities[name].row_fisher
        if rows is not None:
            total, count = total + float(rows.double().sum()), count + len(rows)
    return 1e9 * total / max(count, 1)


def config(job: Job) -> GPTConfig:
    """Return the settings of the model."""
    heads = max(1, job.width // 64)
    return GPTConfig(
        vocab_size=VOCABULARY,
        num_layers=job.depth,
        model_dim=job.width,
        num_heads=heads,
        num_kv_heads=heads,
        mlp_mult=4,
    )


def model_file(job: Job, folder: Path) -> Path:
    """Write the weights of the model into `folder` unless they are there, and return their file."""
    path = folder / f"{job.depth}x{job.width}.safetensors"
    if not path.exists():
        generator = torch.Generator().manual_seed(0)
        with torch.device("meta"):
            shapes = {name: weight.shape for name, weight in GPT(config(job)).state_dict().items()}
        scale = 0.5 * job.width**-0.5
        state = {name: torch.randn(shape, generator=generator) * scale for name, shape in shapes.items()}
        save_file(state, path)
    return path


def mapped_model(job: Job, state: Mapping[str, Tensor]) -> GPT:
    """Return the model with these very tensors as its weights."""
    with torch.device("meta"):
        model = GPT(config(job))
    model.load_state_dict(state, assign=True)
    return model.eval()


def random_batches(job: Job) -> list[Batch]:
    """Return batches of random tokens."""
    generator = torch.Generator().manual_seed(1)
    shape = job.batches, max(1, job.tokens // LENGTH), min(job.tokens, LENGTH) + 1
    rows = torch.randint(0, VOCABULARY, shape, generator=generator)
    return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each depth and method."""
    parser = command_parser(__doc__)
    parser.add_argument("--depths", type=comma_separated(int), default=[8, 16, 32], help="numbers of blocks")
    parser.add_argument("--width", type=int, default=512, help="of the model (default: 512)")
    parser.add_argument("--tokens", type=int, default=2048, help="of a batch (default: 2048)")
    parser.add_argument("--batches", type=int, default=4, help="how many (default: 4)")
    parser.add_argument("--methods", type=comma_separated(one_of(METHODS, "method")), default=list(METHODS))
    parser.add_argument("--save", action="store_true", help=f"compress to {BITS:g} bits a weight as well")
    options = parser.parse_args(arguments)
    if not can_measure():
        raise SystemExit("the peak of memory is read from /proc, which this system does not have")
    rows: list[Row] = []
    with errors_as_exit(RuntimeError), tempfile.TemporaryDirectory() as folder:
        for depth in options.depths:
            for method in options.methods:
                log(f"{depth} blocks, {method}")
                job = Job(method, depth, options.width, options.tokens, options.batches, options.save)
                rows.append({"blocks": depth, "method": method} | apart(measured, asdict(job), folder))
    report(rows, as_json=options.json)


if __name__ == "__main__":
    main()
