"""ONNX models of every form in which tensors can lie in a file, made in memory; small, and all of random weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[Any]
WIDTH = 48


def weights(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(0, 0.1, shape).astype(np.float32)


def stored(name: str, values: Any) -> Any:
    return numpy_helper.from_array(np.asarray(values, order="C"), name)


def value(name: str, rank: int = 2, kind: int = TensorProto.FLOAT) -> Any:
    """Return what a graph says of an input or output of any size."""
    return helper.make_tensor_value_info(name, kind, [None] * rank)


def model(
    nodes: list[Any],
    initializers: list[Any],
    shape: tuple[Any, ...],
    *,
    opset: int = 17,
    rank: int | None = None,
    **options: Any,
) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *shape])]
    outputs = [value("y", 1 + len(shape) if rank is None else rank)]
    graph = helper.make_graph(nodes, "net", inputs, outputs, initializers, **options)
    result = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], producer_name="zoo")
    result.ir_version = min(result.ir_version, 10)
    return result


def node(operator: str, inputs: str, outputs: str = "y", **attributes: Any) -> Any:
    return helper.make_node(operator, inputs.split(), outputs.split(), **attributes)


def layers(opset: int = 17) -> onnx.ModelProto:
    """Return two layers, MatMul and Gemm."""
    nodes = [
        node("MatMul", "x w", "h"),
        node("Add", "h b", "i"),
        node("Relu", "i", "j"),
        node("Gemm", "j v c", transB=1),
    ]
    parts = [stored("w", weights(WIDTH, 64)), stored("b", weights(64, seed=1))]
    parts += [stored("v", weights(32, 64, seed=2)), stored("c", weights(32, seed=3))]
    return model(nodes, parts, (WIDTH,), opset=opset)


def convolutions() -> onnx.ModelProto:
    nodes = [
        node("Conv", "x w b", "h", pads=[1, 1, 1, 1]),
        node("BatchNormalization", "h gain shift mean variance", "i"),
        node("PRelu", "i slope", "j"),
        node("ConvTranspose", "j v", strides=[2, 2]),
    ]
    parts = [stored("w", weights(32, 3, 3, 3)), stored("b", weights(32)), stored("v", weights(32, 16, 2, 2))]
    parts += [stored("gain", 1 + weights(32)), stored("shift", weights(32, seed=4)), stored("slope", weights(32, 1, 1))]
    parts += [stored("mean", weights(32, seed=5)), stored("variance", 1 + weights(32, seed=6) ** 2)]
    return model(nodes, parts, (3, 8, 8))


def recurrent() -> onnx.ModelProto:
    nodes = [node("LSTM", "x W R B", hidden_size=16, direction="bidirectional")]
    parts = [stored("W", weights(2, 64, WIDTH)), stored("R", weights(2, 64, 16)), stored("B", weights(2, 128))]
    return model(nodes, parts, (1, WIDTH), rank=4)


def tied() -> onnx.ModelProto:
    """Return an embedding that is the head as well, its table turned for the head."""
    nodes = [
        node("Cast", "x", "ids", to=TensorProto.INT64),
        node("Gather", "table ids", "h"),
        node("Transpose", "table", "head", perm=[1, 0]),
        node("MatMul", "h head"),
    ]
    return model(nodes, [stored("table", weights(100, 32))], (5,), rank=3)


def branches() -> onnx.ModelProto:
    """Return an If whose branches have weights, as initializers and as constants, and a Loop."""
    output = [value("t")]
    first = helper.make_graph([node("MatMul", "x w", "t")], "then", [], output, [stored("w", weights(WIDTH, WIDTH))])
    constant = node("Constant", "", "u", value=stored("", weights(WIDTH, WIDTH, seed=7)))
    output = [value("s")]
    second = helper.make_graph([constant, node("MatMul", "x u", "s")], "else", [], output)
    body = helper.make_graph(
        [node("MatMul", "state z", "next"), node("Identity", "go", "on")],
        "body",
        [value("i", 0, TensorProto.INT64), value("go", 0, TensorProto.BOOL), value("state")],
        [value("on", 0, TensorProto.BOOL), value("next")],
        [stored("z", weights(WIDTH, WIDTH, seed=8))],
    )
    nodes = [
        node("ReduceSum", "x", "sum", keepdims=0),
        node("Greater", "sum zero", "is_positive"),
        node("If", "is_positive", "h", then_branch=first, else_branch=second),
        node("Loop", "two yes h", "y", body=body),
    ]
    parts = [stored("zero", np.float32(0)), stored("two", np.int64(2)), stored("yes", np.array(True))]
    return model(nodes, parts, (WIDTH,))


def functions() -> onnx.ModelProto:
    """Return a model with a function that holds a weight and is given one."""
    constant = node("Constant", "", "w", value=stored("", weights(WIDTH, WIDTH, seed=9)))
    inner = [constant, node("MatMul", "a w", "h"), node("MatMul", "h m", "b")]
    function = helper.make_function("own", "Layer", ["a", "m"], ["b"], inner, [helper.make_opsetid("", 17)])
    result = model(
        [helper.make_node("Layer", ["x", "w"], ["y"], domain="own")], [stored("w", weights(WIDTH, 40))], (WIDTH,)
    )
    result.functions.append(function)
    result.opset_import.append(helper.make_opsetid("own", 1))
    return result


def sparse() -> onnx.ModelProto:
    values = helper.make_tensor("w", TensorProto.FLOAT, [300], weights(300).tobytes(), raw=True)
    indices = np.sort(np.random.default_rng(0).choice(WIDTH * WIDTH, 300, replace=False)).astype(np.int64)
    part = helper.make_sparse_tensor(values, stored("", indices), [WIDTH, WIDTH])
    return model([node("MatMul", "x w")], [], (WIDTH,), sparse_initializer=[part])


def integers() -> onnx.ModelProto:
    """Return a model that is quantized: int8 by channel with QDQ, and int4 in blocks."""
    rng = np.random.default_rng(0)
    nodes = [
        node("QuantizeLinear", "x s z", "q"),
        node("DequantizeLinear", "q s z", "a"),
        node("DequantizeLinear", "w ws wz", "d", axis=1),
        node("MatMul", "a d", "h"),
        node("DequantizeLinear", "v vs", "e", axis=0, block_size=16),
        node("MatMul", "h e", "y"),
    ]
    parts = [stored("s", np.float32(0.05)), stored("z", np.int8(0))]
    parts += [stored("w", rng.integers(-127, 128, (WIDTH, 64), np.int8)), stored("wz", np.zeros(64, np.int8))]
    parts += [stored("ws", rng.uniform(0.001, 0.01, 64).astype(np.float32))]
    packed = rng.integers(0, 256, 64 * 40 // 2, np.uint8).tobytes()
    parts += [helper.make_tensor("v", TensorProto.INT4, [64, 40], packed, raw=True)]
    parts += [stored("vs", rng.uniform(0.001, 0.01, (4, 40)).astype(np.float32))]
    return model(nodes, parts, (WIDTH,), opset=21)


def narrow(kind: int) -> onnx.ModelProto:
    """Return a model with weights in 16 bits."""
    bits = weights(WIDTH, 64).astype(np.float16).tobytes()
    if kind == TensorProto.BFLOAT16:
        bits = (weights(WIDTH, 64).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    part = helper.make_tensor("w", kind, [WIDTH, 64], bits, raw=True)
    return model([node("Cast", "w", "f", to=TensorProto.FLOAT), node("MatMul", "x f")], [part], (WIDTH,))


def plain_fields() -> onnx.ModelProto:
    """Return a model whose tensors are numbers of fields instead of raw bytes."""
    floats = helper.make_tensor("w", TensorProto.FLOAT, [WIDTH, 64], weights(WIDTH, 64).ravel())
    doubles = helper.make_tensor("d", TensorProto.DOUBLE, [64, 32], weights(64, 32).ravel().astype(float))
    halves = helper.make_tensor("h", TensorProto.FLOAT16, [32], weights(32).astype(np.float16))
    nodes = [node("MatMul", "x w", "a"), node("Cast", "d", "e", to=1), node("MatMul", "a e", "b")]
    nodes += [node("Cast", "h", "f", to=1), node("Add", "b f")]
    return model(nodes, [floats, doubles, halves], (WIDTH,))


def named_alike() -> onnx.ModelProto:
    """Return functions whose tensors have one name, and none; and a name that is no text."""
    result = model([helper.make_node("Layer1", ["x"], ["h"], domain="own"), node("Identity", "h")], [], (WIDTH,))
    for number in (1, 2):
        constant = node("Constant", "", "w", value=stored("", weights(WIDTH, WIDTH, seed=number)))
        inner = [constant, node("MatMul", "a w", "b")]
        result.functions.append(
            helper.make_function("own", f"Layer{number}", ["a"], ["b"], inner, [helper.make_opsetid("", 17)])
        )
    result.opset_import.append(helper.make_opsetid("own", 1))
    return result


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    **{f"opset {opset}": partial(layers, opset) for opset in (11, 13, 15, 17, 19, 21, 23)},
    "convolutions": convolutions,
    "recurrent": recurrent,
    "tied": tied,
    "branches": branches,
    "functions": functions,
    "sparse": sparse,
    "integers": integers,
    "float16": lambda: narrow(TensorProto.FLOAT16),
    "bfloat16": lambda: narrow(TensorProto.BFLOAT16),
    "plain fields": plain_fields,
    "named alike": named_alike,
}
NOT_FOR_ONNXRUNTIME = {"sparse", "bfloat16"}
"""It reads no sparse weights of MatMul, and casts no bfloat16."""


def write(name: str, folder: Path, *, external: bool = False) -> Path:
    """Write a model to a folder, with weights in another file or without, and return its path."""
    path = folder / "net.onnx"
    folder.mkdir(parents=True, exist_ok=True)
    options = {"save_as_external_data": True, "location": "net.weights", "size_threshold": 256} if external else {}
    onnx.save(MODELS[name](), path, **options)
    return path


def feeds(name: str) -> dict[str, Array]:
    """Return inputs of a model."""
    result = MODELS[name]()
    sizes = [dim.dim_value or 2 for dim in result.graph.input[0].type.tensor_type.shape.dim]
    values = np.random.default_rng(3).normal(size=sizes).astype(np.float32)
    return {"x": np.abs(values).round() if name == "tied" else values}
