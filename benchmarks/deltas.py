"""Checkpoints stored as differences to another: `python -m benchmarks.deltas [--subject bench] [--steps 1,10,100]`.

A GPT is trained on by AdamW at 1e-4, and each later checkpoint is stored given an earlier one, losslessly: the weights
in bfloat16 and float32, the optimizer's moments, an average of the weights beside them, and a trained adapter merged
into its base. Rows: birdie alone and with the base; the XOR of the words, coded by birdie; zstd -19 --patch-from;
xdelta3 -9; ZipNN's delta. Every row is decoded and compared; one that is not installed says so.
"""

import argparse
import copy
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import birdie
from benchmarks.command import Row, comma_separated, command_parser, errors_as_exit, log, report
from benchmarks.rivals import RIVALS
from benchmarks.spectral_tune import Text, target_loss
from benchmarks.subjects import CHOICES, Amounts, load_subject
from birdie.compress.tensors import FORMATS, from_bits, to_bits
from birdie.errors import ConfigError
from birdie.system.provenance import __version__

LATER = 10  # steps after the last checkpoint, for a pair later in training
DECAY = 0.99  # of the average
RANK = 8  # of the adapter
_ZIPNN = """
import json, sys, time
from pathlib import Path
import zipnn
words, base = (bytearray(Path(path).read_bytes()) for path in sys.argv[1:3])
start = time.perf_counter()
coded = zipnn.ZipNN(bytearray_dtype=sys.argv[3], delta_compressed_type="byte").compress(words, delta_second_data=base)
middle = time.perf_counter()
back = zipnn.ZipNN(bytearray_dtype=sys.argv[3], delta_compressed_type="byte").decompress(coded, delta_second_data=base)
row = {"bytes": len(coded), "encode_s": middle - start, "decode_s": time.perf_counter() - middle}
print(json.dumps(row | {"exact": bytes(back) == bytes(words)}))
"""
State = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two sets of tensors: what is stored, and what is there already."""

    name: str
    state: State
    base: State


def trained(
    module: nn.Module, batches: Iterator[Any], steps: Sequence[int]
) -> Iterator[tuple[int, State, State, State]]:
    """Yield (step, weights, moments, average of the weights) at step 0 and after each of so many."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.1)
    average = {name: weight.detach().clone() for name, weight in module.state_dict().items()}
    for step in range(max(steps) + 1):
        if step in (0, *steps):
            state = {name: weight.detach().clone() for name, weight in module.state_dict().items()}
            inner = optimizer.state_dict()["state"].items()
            moments = {f"{index}.{key}": value.clone() for index, part in inner for key, value in part.items()}
            yield step, state, moments, {name: weight.clone() for name, weight in average.items()}
        optimizer.zero_grad()
        target_loss(module, next(batches)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for name, weight in module.state_dict().items():
            average[name].lerp_(weight.detach(), 1 - DECAY)


def pairs(options: argparse.Namespace) -> Iterator[Pair]:
    """Train, and yield the pairs as soon as they are there."""
    subject = load_subject(options.subject, options.runs, Amounts())
    batches, module = Text(subject, 4, 0), copy.deepcopy(subject.module).float().train()

    def endless() -> Iterator[Any]:
        while True:
            yield from batches

    start: State = {}
    last: tuple[State, State] = ({}, {})
    steps = sorted(options.steps)
    for step, state, moments, average in trained(module, endless(), [*steps, steps[-1] + LATER]):
        log(f"step {step}")
        if step == 0:
            start = state
            merged = adapted(copy.deepcopy(module), endless(), steps[-1])
            name = f"adapter of rank {RANK}, {steps[-1]} steps"
            for dtype in (torch.bfloat16, torch.float32):
                yield Pair(f"{dtype_name(dtype)}, {name}", as_dtype(merged, dtype), as_dtype(state, dtype))
            continue
        late = step > steps[-1]
        what = f"{LATER} steps, {step} in all" if late else f"{step} steps"
        base, earlier = last if late else (start, last[1])
        for dtype in (torch.bfloat16, torch.float32):
            yield Pair(f"{dtype_name(dtype)}, {what}", as_dtype(state, dtype), as_dtype(base, dtype))
        if late:
            yield Pair(f"moments, {what}", moments, earlier)
            yield Pair(
                f"bfloat16, average beside weights, step {step}",
                as_dtype(average, torch.bfloat16),
                as_dtype(state, torch.bfloat16),
            )
        last = state, moments


class Adapter(nn.Module):
    """Adapter of a frozen matrix: a product of rank `RANK` is added to it (arXiv 2106.09685)."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.left = nn.Parameter(torch.zeros(rows, RANK))
        self.right = nn.Parameter(torch.randn(RANK, columns) / columns**0.5)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight with the product."""
        return weight + self.left @ self.right


def adapted(module: nn.Module, batches: Iterator[Any], steps: int) -> State:
    """Return the weights of a module into which adapters of its matrices are merged, trained for so many steps."""
    torch.manual_seed(0)
    names = [name for name, weight in module.state_dict().items() if weight.ndim == 2]
    module.requires_grad_(False)
    for name in names:
        owner, _, last = name.rpartition(".")
        part = module.get_submodule(owner)
        parametrize.register_parametrization(part, last, Adapter(getattr(part, last)))
    optimizer = torch.optim.AdamW([weight for weight in module.parameters() if weight.requires_grad], lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        target_loss(module, next(batches)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for name in names:
        owner, _, last = name.rpartition(".")
        parametrize.remove_parametrizations(module.get_submodule(owner), last)  # which merges it
    return {name: weight.detach().clone() for name, weight in module.state_dict().items()}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_dtype(state: State, dtype: torch.dtype) -> State:
    """Return the state with its floats in a dtype."""
    return {name: weight.to(dtype) if weight.is_floating_point() else weight for name, weight in state.items()}


def joined(state: State) -> bytes:
    """Return the bytes of all tensors."""
    return b"".join(to_bits(weight).tobytes() for weight in state.values())


def of_birdie(pair: Pair, folder: Path, base: State | None) -> Row:
    """Return the row of a file, with the base or without."""
    path, start = folder / "x.birdie", time.perf_counter()
    size = birdie.save(pair.state, path, lossless=True, base=base).bytes
    middle = time.perf_counter()
    back = birdie.load(path, base=base)
    seconds = time.perf_counter() - middle
    return {
        "bytes": size,
        "encode_s": middle - start,
        "decode_s": seconds,
        "exact": joined(back) == joined(in_order(pair.state, back)),
    }


def in_order(state: State, other: Mapping[str, Tensor]) -> State:
    return {name: state[name] for name in other}


def of_xor(pair: Pair, folder: Path) -> Row:
    """Return the row of the XOR of the words as a file of birdie."""
    changed = {
        name: from_bits(to_bits(weight) ^ to_bits(pair.base[name]), tuple(weight.shape), weight.dtype)
        for name, weight in pair.state.items()
        if FORMATS[weight.dtype][1] == 1
    }
    return of_birdie(Pair(pair.name, changed, {}), folder, None)


def of_command(encode: Sequence[str], decode: Sequence[str]) -> Callable[[Pair, Path], Row]:
    """Return a function that runs two commands; {new}, {base}, {out} and {back} in them are paths."""

    def measure(pair: Pair, folder: Path) -> Row:
        paths = {name: folder / name for name in ("new", "base", "out", "back")}
        paths["new"].write_bytes(joined(pair.state))
        paths["base"].write_bytes(joined(in_order(pair.base, pair.state)))
        seconds = []
        for command in (encode, decode):
            start = time.perf_counter()
            subprocess.run([part.format(**paths) for part in command], check=True, capture_output=True)
            seconds.append(time.perf_counter() - start)
        exact = paths["back"].read_bytes() == paths["new"].read_bytes()
        return {"bytes": paths["out"].stat().st_size, "encode_s": seconds[0], "decode_s": seconds[1], "exact": exact}

    return measure


def of_zipnn(pair: Pair, folder: Path) -> Row:
    """Return the row of ZipNN, in the environment of the rivals."""
    (folder / "new").write_bytes(joined(pair.state))
    (folder / "base").write_bytes(joined(in_order(pair.base, pair.state)))
    floats = {weight.dtype for weight in pair.state.values() if weight.is_floating_point()}
    command = [str(RIVALS), "-c", _ZIPNN, str(folder / "new"), str(folder / "base"), dtype_name(floats.pop())]
    row: Row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    return row


WAYS: dict[str, Callable[[Pair, Path], Row]] = {
    "birdie, alone": lambda pair, folder: of_birdie(pair, folder, None),
    "birdie, base": lambda pair, folder: of_birdie(pair, folder, pair.base),
    "XOR, birdie": of_xor,
    "zstd -19 --patch-from": of_command(
        ["zstd", "-q", "-f", "-19", "--long=27", "--patch-from={base}", "{new}", "-o", "{out}"],
        ["zstd", "-q", "-f", "-d", "--long=27", "--patch-from={base}", "{out}", "-o", "{back}"],
    ),
    "xdelta3 -9": of_command(
        ["xdelta3", "-e", "-f", "-9", "-B", "67108864", "-s", "{base}", "{new}", "{out}"],
        ["xdelta3", "-d", "-f", "-B", "67108864", "-s", "{base}", "{out}", "{back}"],
    ),
    "ZipNN delta": of_zipnn,
}


def versions() -> dict[str, str]:
    """Return the versions of all that is measured."""
    texts = {"birdie": __version__, "torch": torch.__version__, "numpy": np.__version__}
    commands = {
        "zstd": ["zstd", "--version"],
        "xdelta3": ["xdelta3", "-V"],
        "zipnn": [str(RIVALS), "-c", "from importlib.metadata import version; print(version('zipnn'))"],
    }
    for name, command in commands.items():
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            texts[name] = (done.stdout + done.stderr).strip().splitlines()[0]
        except OSError:
            texts[name] = "not installed"
    return texts


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of all pairs."""
    for pair in pairs(options):
        for way, measure in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                try:
                    row = measure(pair, Path(folder))
                except (OSError, subprocess.CalledProcessError) as error:
                    row = {
                        "bytes": None,
                        "encode_s": None,
                        "decode_s": None,
                        "exact": f"not run: {type(error).__name__}",
                    }
            row = {"pair": pair.name, "way": way, **row}
            log(json.dumps(row))
            yield row


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--subject", choices=CHOICES, default="bench", help="network (default: the shared GPT)")
    parser.add_argument(
        "--steps", type=comma_separated(int), default=[1, 10, 100], help="of training (default: 1,10,100)"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of trained models")
    options = parser.parse_args(arguments)
    with errors_as_exit():
        if min(options.steps) < 1:
            raise ConfigError(f"--steps {min(options.steps)} is no number of steps; give 1 or more")
        log(json.dumps(versions()))
        report([*rows(options)], as_json=options.json)


if __name__ == "__main__":
    main()
