"""Bytes of ONNX files at an error not above that of int8, beside other tools: `python -m benchmarks.onnx_sizes`.

`make crowd` fetches the networks, and an environment with onnxruntime and `onnx_shrink_ray`, whose Python is meant:
`.venv-crowd/bin/python`.

    python -m benchmarks.onnx_sizes                              every network in an ONNX file
    python -m benchmarks.onnx_sizes --networks magika,detector   some of them

Every row is a complete file: graph, weights, and all else. `int8` has the matrices of products as integers, a float16
scale for each output, and all other bytes of the file, under zstd -22; birdie must not exceed its error.
birdie's file is the smallest whose error does not, by bisection on its bytes; no data are given to it. Of the others,
each has the bytes and the error that it has. The error is that of `benchmarks.crowd`: squared error of the outputs over
their variance.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

import birdie
from benchmarks.command import comma_separated, command_parser, errors_as_exit, log, one_of, report
from benchmarks.crowd import LEAST, MODELS, ONNX, Outputs, Row, error
from benchmarks.rivals import COMPRESSORS
from birdie.checkpoints.onnx_file import OnnxModel, read_onnx
from birdie.errors import BudgetError

_ROUNDS = 6  # of the bisection: to a seventieth of the bytes
_FROM, _TO = 0.5, 1.2  # budgets, in bytes of int8's file


class Subject:
    """An ONNX file and its outputs on inputs that look real."""

    def __init__(self, name: str) -> None:
        known, rng = ONNX[name], np.random.default_rng(1)
        self.name, self.path = name, MODELS / known.path
        self.inputs = [known.make(rng) for _ in range(known.count)]
        self.expected = self.outputs(self.path)

    def outputs(self, path: Path) -> Outputs:
        """Return the outputs of a file, each of all inputs, as float32."""
        import onnxruntime

        options: Any = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        rows = [[part for part in session.run(None, one) if part.dtype.kind == "f"] for one in self.inputs]
        return [
            np.concatenate([part.astype(np.float32).ravel() for part in parts]) for parts in zip(*rows, strict=True)
        ]

    def error(self, path: Path) -> float:
        """Return the error of another file."""
        return error(self.expected, self.outputs(path))


def int8(model: OnnxModel, folder: Path) -> tuple[int, Path]:
    """Return the bytes of int8 with zstd -22, and the file of its values."""
    rest, decoded = bytearray(b"".join(model.other.values())), dict[str, torch.Tensor]()
    for name, weight in model.tensors.items():
        values = weight.numpy()
        if not (model.uses[name].weights and values.ndim > 1 and values.size >= LEAST and values.dtype == np.float32):
            rest += values.tobytes()
            continue
        rows = values.reshape(len(values), -1)
        scale = (np.abs(rows).max(axis=1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
        scale[scale == 0] = 1
        integers = np.clip(np.round(rows / scale), -127, 127).astype(np.int8)
        decoded[name] = torch.from_numpy((integers * scale).reshape(values.shape))
        rest += integers.tobytes() + scale.astype(np.float16).tobytes()
    (folder / "int8").mkdir(exist_ok=True)
    return len(COMPRESSORS["zstd"].compress(bytes(rest))), model.write(folder / "int8", decoded)


def brotli(path: Path) -> int:
    """Return the bytes of a file under brotli -11."""
    import brotli as package

    return len(package.compress(path.read_bytes(), quality=11, lgwin=24))


def float16(source: Path, target: Path) -> None:
    """Write a model in float16, with the inputs and outputs that it had."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), target)


def dynamic(source: Path, target: Path) -> None:
    """Write a model with weights in int8, and activations as it runs, as onnxruntime's tools do."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(source, target, weight_type=QuantType.QInt8, per_channel=True)


def shrunk(source: Path, target: Path, **options: Any) -> None:
    """Write a model by onnx_shrink_ray."""
    import onnx
    from onnx_shrink_ray.shrink import quantize_weights

    onnx.save(quantize_weights(onnx.load(source), **options), target)


RIVALS: dict[str, Callable[[Path, Path], None]] = {
    "shrink_ray integers": shrunk,
    "shrink_ray floats": lambda source, target: shrunk(source, target, float_quantization=True),
    "quantize_dynamic": dynamic,
    "float16": float16,
}


def smallest(subject: Subject, limit: float, near: int, folder: Path) -> tuple[int, float]:
    """Return bytes and error of the smallest file of birdie whose error is at most a limit, by bisection."""
    low, high, best = _FROM * near, _TO * near, (0, float("inf"))
    for _ in range(_ROUNDS):
        budget = int((low * high) ** 0.5)
        path, back = folder / "model.birdie", folder / "model.onnx"
        try:
            size = birdie.onnx.save(subject.path, path, budget=budget).bytes
        except BudgetError:
            low = budget
            continue
        back.write_bytes(birdie.onnx.load(path).SerializeToString())
        measured = subject.error(back)
        if measured <= limit:
            high, best = size, (size, measured)
        else:
            low = budget
    return best


def rows_of(name: str) -> Iterator[Row]:
    """Yield a row for each way to store a network."""
    with tempfile.TemporaryDirectory() as temporary, _quiet():
        folder, subject = Path(temporary), Subject(name)
        original = subject.path.stat().st_size

        def row(way: str, size: int | None, measured: float | None) -> Row:
            shown = None if measured is None else f"{measured:.2g}"
            log(f"{name} {way}: {size} {shown}")
            return {"network": name, "file": original, "way": way, "bytes": size, "error": shown}

        size, values = int8(read_onnx(subject.path), folder)
        limit = subject.error(values)
        yield row("birdie", *smallest(subject, limit, size, folder))
        yield row("int8 + zstd", size, limit)
        for way, convert in RIVALS.items():
            target = folder / "rival.onnx"
            try:
                convert(subject.path, target)
                yield row(way, brotli(target), subject.error(target))
            except Exception as problem:  # whatever tools of others raise on a network that they do not take
                log(f"{name} {way}: {type(problem).__name__}: {str(problem)[:200]}")
                yield row(way, None, None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the notes of the tools off the log."""
    import logging

    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--networks", type=comma_separated(one_of([*ONNX], "network")), default=[*ONNX], help="some of them"
    )
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    with errors_as_exit():
        for name in options.networks:
            rows += rows_of(name)
    versions = ("onnxruntime", "onnx", "onnx_shrink_ray", "zstandard", "brotli", "torch")
    log(", ".join(f"{name} {metadata.version(name)}" for name in versions))
    report(rows, as_json=options.json)


if __name__ == "__main__":
    main()
