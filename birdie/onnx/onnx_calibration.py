"""Calibration of an ONNX model by onnxruntime: inputs of its products, and errors of its outputs.

    inputs ──copy of the graph with more outputs──► second moments of the inputs of every product ─┐
    one matrix rounded at a time ──► error of the outputs ──► what its errors cost ────────────────┼─► CalibrationResult
    inputs kept apart ──► error of the outputs of any file, by which a file has to be better ──────┘

The graph is run forward alone, so rows of a matrix differ by the prior, not by gradients. The error is the squared one
of the outputs over their variance.
"""

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from birdie.checkpoints.onnx_file import OnnxModel, read_onnx
from birdie.compress.calibration.probe import probe
from birdie.compress.calibration.result import CalibrationResult, held_out_batches, settled
from birdie.errors import ConfigError, DataError
from birdie.onnx.made_up_inputs import made_up
from birdie.onnx.packages import imported
from birdie.onnx.products import Products, products_of
from birdie.system.callbacks import Progress
from birdie.system.outputs import Source

Array = NDArray[Any]
Feeds = Mapping[str, Array]
_PROBED = 3  # batches on which the cost of one rounded matrix is measured
_SAMPLES = 20  # inputs that are made up
_LARGEST = 1 << 30  # bytes of a model that is written for each measurement


def calibrate(
    model: Source, inputs: "Source | Mapping[str, Array] | None" = None, *, progress: Progress | None = None
) -> CalibrationResult:
    """Calibrate an ONNX model: pass the result to `birdie.onnx.save` as its `calibration`, for one file or several.

    Args:
        model: path of the ONNX file.
        inputs: name of each input → array of samples, or an .npz file of these: one more axis first than the input has,
            or the input's own first axis, if samples lie along that. A fifth of the samples is held out. None: inputs
            are made up by their types and sizes, and count half: the other half is what is assumed without inputs.
        progress: called with (done, total), in samples.

    Raises:
        ConfigError: onnx or onnxruntime is not installed, or inputs cannot be made up.
        DataError: the inputs are not those of the model, or its outputs are not finite.
        WeightsError: the file cannot be read.
    """
    path = Path(model)
    parts = read_onnx(path)
    if sum(tensor.nbytes for tensor in parts.tensors.values()) > _LARGEST:
        raise ConfigError(f"{path} has more than {_LARGEST:,} bytes of weights, too many to calibrate; leave that out")
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(path)
        samples = made_up(session, _SAMPLES) if inputs is None else samples_of(session, inputs)
        count = held_out_batches(len(samples))
        used, apart = (samples[:-count], samples[-count:]) if count else (samples, samples)
        runs = _ProductRuns(path, parts, Path(folder))
        measured = OutputDifference(parts, apart)
        names = runs.products.names

        def report(done: int) -> None:
            if progress is not None:
                progress(done, len(used))

        probed = _Probe(runs.products, names, replace(measured, batches=used[:_PROBED]))
        by_number = probe(probed, used, runs, progress=report)
    sensitivities = {names[int(key.rpartition(".")[2])]: item for key, item in by_number.items()}
    embeddings = parts.roles.embeddings
    unreached = [name for name, use in parts.uses.items() if use.weights and name not in sensitivities]
    result = CalibrationResult(
        dict(parts.tensors),
        settled(sensitivities, parts.tensors, embeddings),
        measured,
        used,
        synthetic=inputs is None,
        unreached=unreached,
    )
    if inputs is not None:
        return result
    # Noise alone misleads as often as it helps, and no inputs that are made up tell which: the mean with the prior.
    mixed = result.mixed(embeddings)
    assert mixed is not None
    return mixed


def open_session(path: Path) -> Any:
    """Return a session of onnxruntime on the CPU, without the lines that it logs."""
    runtime = imported("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, os.cpu_count() or 1
    # weights change between sessions: what is not folded and laid out anew opens faster
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # classes of the runtime's errors are its own
        raise ConfigError(f"onnxruntime does not run {path.name}: {_first_line(error)}") from error


def run(session: Any, outputs: Sequence[str] | None, feeds: Feeds) -> list[Any]:
    """Return outputs of a session."""
    try:
        return list(session.run(outputs, dict(feeds)))
    except Exception as error:
        raise DataError(f"onnxruntime does not take these inputs: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def samples_of(session: Any, inputs: "Source | Mapping[str, Array]") -> list[Feeds]:
    """Return the inputs of each sample, checked against those of the model."""
    arrays = _arrays(inputs)
    wanted = {one.name: one for one in session.get_inputs()}
    if arrays.keys() != wanted.keys():
        raise DataError(f"the inputs are {_listed(arrays)}, and the model takes {_listed(wanted)}; give these")
    split = {name: _split(name, array, wanted[name].shape) for name, array in arrays.items()}
    counts = {name: len(parts) for name, parts in split.items()}
    if len({*counts.values()}) != 1 or not min(counts.values()):
        raise DataError(f"the inputs have different numbers of samples, {counts}; give as many of each, one at least")
    return [{name: parts[index] for name, parts in split.items()} for index in range(next(iter(counts.values())))]


def _arrays(inputs: "Source | Mapping[str, Array]") -> dict[str, Array]:
    if isinstance(inputs, Mapping):
        return dict(inputs)
    try:
        with np.load(inputs, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{inputs} is not an .npz file of arrays ({error}); write it with numpy.savez") from error


def _split(name: str, array: Array, shape: Sequence[Any]) -> list[Array]:
    if array.ndim == len(shape) + 1:
        return [*array]
    if array.ndim != len(shape) or not shape:
        raise DataError(f"input {name!r} has {array.ndim} dimensions, and the model's {len(shape)}; put samples before")
    size = shape[0] if isinstance(shape[0], int) else 1
    return [array[start : start + size] for start in range(0, len(array) - size + 1, size)]


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names)) or "none"


@dataclass(slots=True)
class OutputDifference:
    """Squared error of the outputs of a model with other weights, over their variance.

    Attributes:
        model: in parts.
        batches: inputs on which it is measured.
    """

    model: OnnxModel
    batches: Sequence[Feeds]
    _expected: "list[Array] | None" = field(default=None, init=False, repr=False)

    def __call__(self, state: Mapping[str, Tensor]) -> float:
        """Return the error with these weights; others are those of the model."""
        if self._expected is None:
            self._expected = self._outputs({})
            if not all(np.isfinite(part).all() for part in self._expected):
                raise DataError("the model's outputs are not finite on these inputs; give others")
        changed = {name: tensor for name, tensor in state.items() if tensor is not self.model.tensors.get(name)}
        errors = []
        for ours, theirs in zip(self._expected, self._outputs(changed), strict=True):
            variance = float(np.square(ours - ours.mean(dtype=np.float64)).sum(dtype=np.float64))
            change = float(np.square(ours - theirs, dtype=np.float64).sum()) if ours.shape == theirs.shape else math.inf
            errors.append(change / variance if variance else change)
        error = sum(errors) / len(errors)
        return math.inf if math.isnan(error) else error

    def _outputs(self, changed: Mapping[str, Tensor]) -> "list[Array]":
        """Return each output of floats, of all batches."""
        with tempfile.TemporaryDirectory() as folder:
            session = open_session(self.model.write(Path(folder), changed))
            rows = [run(session, None, feeds) for feeds in self.batches]
        parts = [
            np.concatenate([np.asarray(part, np.float32).ravel() for part in column])
            for column in zip(*rows, strict=True)
            if isinstance(column[0], np.ndarray) and column[0].dtype.kind == "f"
        ]
        if not parts:
            raise DataError("the model has no outputs of floats, so no error can be measured; leave calibration out")
        return parts


class _ProductRuns:
    """Loss of a calibration: runs the graph on a sample, and multiplies the weights with what came to them."""

    def __init__(self, path: Path, model: OnnxModel, folder: Path) -> None:
        package = imported("onnx")
        graph = package.load(str(path))
        products = products_of(graph.graph, model)
        self.inputs = {one.name for one in graph.graph.input}
        known = {one.name for one in graph.graph.output}
        results = {name for node in graph.graph.node for name in node.output}
        self.products = Products(model, [one for one in products if one.source in results or one.source in self.inputs])
        if not self.products.products:
            raise ConfigError(f"{path.name} has no products of weights outside of subgraphs; leave calibration out")
        self.names = [name for name in self.products.sources if name in results]
        graph.graph.output.extend(package.ValueInfoProto(name=name) for name in self.names if name not in known)
        target = folder / "products.onnx"
        package.save(graph, str(target), save_as_external_data=True, location="products.weights")
        self.session = open_session(target)

    def __call__(self, module: nn.Module, feeds: Feeds) -> Tensor:
        values = dict(zip(self.names, run(self.session, self.names, feeds), strict=True))
        module({**feeds, **values})
        return torch.zeros(())


@dataclass(slots=True)
class _Probe:
    """Distance of the model with one matrix changed, by the names that the module of products has for it."""

    module: nn.Module
    names: Sequence[str]
    error: OutputDifference

    def __call__(self, state: Mapping[str, Tensor]) -> float:
        weights = {self.names[int(key.rpartition(".")[2])]: tensor for key, tensor in state.items()}
        originals = self.error.model.tensors
        changed = {
            name: tensor.to(originals[name].dtype)
            for name, tensor in weights.items()
            if not torch.equal(tensor.to(originals[name].dtype), originals[name])
        }
        return self.error(changed) if changed else 0.0
