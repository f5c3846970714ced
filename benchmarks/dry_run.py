"""Dry runs beside the runs they forecast: `python -m benchmarks.dry_run [--subjects NAMES] [--json]`.

Every network is compressed by each setting as well, one thread: bytes of the file, error of the decoded weights
(squares over those of the weights), seconds; without calibration, as a dry run. `forecast_s` is the time of all
forecasts of a network, divided by their number. `speech` is a detector of voice activity (silero-vad).
"""

import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import birdie
from benchmarks.command import Row, comma_separated, command_parser, errors_as_exit, log, one_of, report, shared_data
from benchmarks.subjects import CHOICES, Amounts, load_subject
from birdie.artifact.file_forecast import forecast
from birdie.checkpoints.checkpoint import Checkpoint
from birdie.checkpoints.checkpoints import read_state_dict
from birdie.compress.rate.target import Target
from birdie.system.provenance import __version__

FILES = {
    "resnet20": "resnet_cifar10/resnet20-12fca82f.th",
    "resnet32": "resnet_cifar10/resnet32-d509ac18.th",
    "speech": "silero_vad/silero_vad_16k.safetensors",
}
NETWORKS = ("g128", "bench", "samtruss", "crepe", "pronouncer", *FILES)
BITS = (8.0, 6.0, 5.0, 4.0, 3.0)
SCHEMES = (None, "int6", "ternary")


def state_of(name: str, runs: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a network."""
    if name in FILES:
        return read_state_dict(shared_data() / "weights" / FILES[name])
    return load_subject(name, runs, Amounts(tokens=1024, calibration_tokens=1024)).state


def error(state: Mapping[str, Tensor], decoded: Mapping[str, Tensor]) -> float:
    """Return Σ ‖decoded − weights‖² / Σ ‖weights‖² of the tensors that changed."""
    changed = [name for name, weight in state.items() if not torch.equal(weight, decoded[name])]
    errors = sum(float((state[name].double() - decoded[name].double()).square().sum()) for name in changed)
    return errors / max(sum(float(state[name].double().square().sum()) for name in changed), 1e-300)


def rows(name: str, state: Mapping[str, Tensor]) -> Iterator[Row]:
    """Yield a row for each setting of a network."""
    start = time.perf_counter()
    source = Checkpoint(Path(name), dict(state), [], [])
    forecasts = {}
    for scheme in SCHEMES:
        meant, others = forecast(source, Target(), scheme=scheme, bits=() if scheme else BITS, workers=1)
        forecasts[scheme or "default"] = meant
        if scheme is None:
            forecasts |= {"lossless" if t.lossless else f"{t.bits:g} bits": one for t, one in others.items()}
    forecast_s = (time.perf_counter() - start) / len(forecasts)
    for setting, expected in forecasts.items():
        options: dict[str, Any] = {"lossless": True} if setting == "lossless" else {"scheme": setting}
        if setting == "default" or setting.endswith("bits"):
            options = {} if setting == "default" else {"bits": float(setting.split()[0])}
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            summary = birdie.save(state, Path(folder) / "model.birdie", workers=1, **options)
            seconds = time.perf_counter() - start
            measured = error(state, birdie.load(summary.path))
        log(f"{name}, {setting}: {expected.bytes:,} expected, {summary.bytes:,} bytes")
        yield {
            "network": name,
            "setting": setting,
            "bytes": summary.bytes,
            "off_%": 100 * (expected.bytes / summary.bytes - 1),
            "error": measured,
            "error_ratio": expected.error / measured if measured else 1.0,
            "seconds": seconds,
            "expected_s": expected.seconds,
            "forecast_s": forecast_s,
        }


def main(arguments: list[str] | None = None) -> None:
    """Print the figures of all runs."""
    parser = command_parser(__doc__)
    names = one_of(sorted({*CHOICES, *FILES}), "network")
    parser.add_argument("--subjects", type=comma_separated(names), default=[*NETWORKS], help="networks")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of trained models")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with errors_as_exit():
        log(f"birdie {__version__}, torch {torch.__version__}")
        report(
            [row for name in options.subjects for row in rows(name, state_of(name, options.runs))],
            as_json=options.json,
        )


if __name__ == "__main__":
    main()
