"""Calibration of ONNX models: second moments are those of torch, and files are better at the same bytes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

import onnx

import birdie
from birdie.checkpoints.onnx_file import read_onnx
from birdie.errors import ConfigError, DataError
from birdie.onnx.made_up_inputs import made_up
from birdie.onnx.onnx_calibration import OutputDifference, calibrate, open_session, samples_of
from birdie.onnx.products import Products, products_of
from tests.onnx import zoo


def products(name: str, folder: Path) -> Products:
    path = zoo.write(name, folder)
    model = read_onnx(path)
    return Products(model, products_of(onnx.load(path).graph, model))


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("opset 17", {("w", "x"), ("v", "j")}),
        ("recurrent", {("W", "x"), ("R", "y")}),
        ("tied", {("table", "ids"), ("table", "h")}),
        ("convolutions", {("w", "x"), ("v", "j")}),
    ],
)
def test_products_have_their_inputs(name: str, pairs: set[tuple[str, str]], tmp_path: Path) -> None:
    assert {(product.weight, product.source) for product in products(name, tmp_path).products} == pairs


def close_to_the_runtime(node: onnx.NodeProto, weight: Any, folder: Path) -> None:
    """The values of the products do not matter to a calibration, but equal ones have equal inputs."""
    model = zoo.model([node], [zoo.stored("w", weight)], (4, 9, 8))
    onnx.save(model, folder / "net.onnx")
    parts = read_onnx(folder / "net.onnx")
    (product,) = products_of(model.graph, parts)
    x = np.random.default_rng(0).normal(size=(2, 4, 9, 8)).astype(np.float32)
    expected = open_session(folder / "net.onnx").run(None, {"x": x})[0]
    ours = product.multiply(torch.from_numpy(x), parts.tensors["w"])
    np.testing.assert_allclose(ours.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"pads": [1, 0, 2, 1], "dilations": [1, 2]}, {"auto_pad": "SAME_UPPER"}, {"auto_pad": "SAME_LOWER"}],
)
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_see_what_those_of_onnxruntime_see(options: dict[str, Any], groups: int, tmp_path: Path) -> None:
    node = zoo.node("Conv", "x w", strides=[2, 1], group=groups, **options)
    close_to_the_runtime(node, zoo.weights(8, 4 // groups, 3, 3), tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pads": [1, 0, 2, 1], "dilations": [1, 2]},
        {"output_padding": [1, 0]},
        {"auto_pad": "SAME_UPPER"},
        {"auto_pad": "SAME_LOWER", "dilations": [2, 1]},
    ],
)
def test_so_do_transposed_ones(options: dict[str, Any], tmp_path: Path) -> None:
    close_to_the_runtime(zoo.node("ConvTranspose", "x w", strides=[2, 1], **options), zoo.weights(4, 6, 3, 3), tmp_path)


def data(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return inputs of `opset 17`, a few of which are far larger than others."""
    scales = np.where(np.arange(zoo.WIDTH) % 8, 0.1, 4.0)
    return (np.random.default_rng(seed).normal(size=(count, 1, zoo.WIDTH)) * scales).astype(np.float32)


def test_a_calibrated_file_is_better(tmp_path: Path) -> None:
    path = zoo.write("opset 17", tmp_path)
    np.savez(tmp_path / "inputs.npz", x=data(60))
    result = calibrate(path, tmp_path / "inputs.npz")
    measured = OutputDifference(read_onnx(path), [{"x": one} for one in data(20, seed=1)])
    errors = []
    for calibration in (None, result):
        summary = birdie.onnx.save(path, tmp_path / "a.birdie", budget=3500, calibration=calibration, effort="fast")
        errors.append(measured(birdie.load(tmp_path / "a.birdie")))
    assert errors[1] < 0.7 * errors[0]
    assert summary.control is not None
    assert summary.control.errors["calibrated"] <= min(summary.control.errors.values())


def test_hessians_are_second_moments(tmp_path: Path) -> None:
    result = calibrate(zoo.write("opset 17", tmp_path), {"x": data(600)[:, 0]})
    hessian = result.sensitivities["w"].hessian
    assert hessian is not None
    power = hessian.diagonal() / hessian.diagonal().max()
    assert power.numpy() == pytest.approx(np.where(np.arange(zoo.WIDTH) % 8, 0.000625, 1.0), rel=0.25, abs=0.02)


def test_the_error_is_that_of_the_outputs(tmp_path: Path) -> None:
    path = zoo.write("opset 17", tmp_path)
    parts = read_onnx(path)
    measured = OutputDifference(parts, [{"x": one} for one in data(8)])
    assert measured(parts.tensors) == measured({}) == 0
    assert measured({"c": parts.tensors["c"] * float("nan")}) == float("inf")
    small, large = (measured({"v": parts.tensors["v"] * factor}) for factor in (1.01, 2.0))
    assert 0 < small < 1e-3 < large


def test_inputs_are_made_up_until_the_model_runs(tmp_path: Path) -> None:
    for name in ("opset 17", "convolutions", "tied", "integers"):
        samples = made_up(open_session(zoo.write(name, tmp_path)), 3)
        assert len(samples) == 3
        assert not np.array_equal(samples[0]["x"], samples[1]["x"])


@pytest.mark.parametrize(
    "inputs",
    [
        {},
        {"y": data(4)},
        {"x": data(0)},
        {"x": np.zeros(5, np.float32)},
        {"x": np.zeros((4, 1, 7), np.float32)},
        {"x": data(4), "z": data(4)},
    ],
)
def test_other_inputs_are_refused(inputs: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError):
        calibrate(zoo.write("opset 17", tmp_path), inputs)
    (tmp_path / "text.npz").write_text("no arrays")
    with pytest.raises(DataError):
        calibrate(tmp_path / "net.onnx", tmp_path / "text.npz")


def test_samples_lie_along_an_axis_of_their_own_or_the_first(tmp_path: Path) -> None:
    session = open_session(zoo.write("opset 17", tmp_path))
    for array in (data(5), data(5)[:, 0]):
        samples = samples_of(session, {"x": array})
        assert [sample["x"].shape for sample in samples] == [(1, zoo.WIDTH)] * 5


def test_what_cannot_be_calibrated_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="products"):
        calibrate(zoo.write("branches", tmp_path), {"x": data(4)})
    unknown = zoo.model([onnx.helper.make_node("Own", ["x", "w"], ["y"], domain="own")], [], (zoo.WIDTH,))
    (tmp_path / "net.onnx").write_bytes(unknown.SerializeToString())
    with pytest.raises(ConfigError, match="onnxruntime"):
        calibrate(tmp_path / "net.onnx", {"x": data(4)})
