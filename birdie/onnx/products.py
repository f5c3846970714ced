"""Products of an ONNX graph as products of torch, whose inputs come from a run of the graph.

    MatMul(x, W) in the graph ──► x, an output of a copy of the graph ──► F.linear(x, W), which calibration records

So second moments of inputs, of convolutions in groups and with any padding as well, are those that birdie measures of a
module (birdie.compress.calibration.sensitivity). Nodes inside of If, Loop and functions are not seen.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from birdie.checkpoints.onnx_file import OnnxModel

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
_MOST_SPREAD = 16  # product of the strides of a transposed convolution: zeros between inputs cost as much as inputs
_PASSED_ON = ("Identity", "Cast", "Transpose")
Values = Mapping[str, Any]
"""Name in the graph → array."""


class GraphProduct(NamedTuple):
    """A product of a weight.

    Attributes:
        weight: name of the tensor.
        source: name of the product's other input, or of the states that a recurrent weight is multiplied with.
        multiply: (other input, weight) → product; its values do not matter.
    """

    weight: str
    source: str
    multiply: Callable[[Tensor, Tensor], Tensor]


class Products(nn.Module):
    """Products of the weights of a model.

    Args:
        model: the model.
        products: of its weights.

    Attributes:
        names: of the weights, in the order of the module's parameters, which are called 0, 1, ….
    """

    def __init__(self, model: OnnxModel, products: list[GraphProduct]) -> None:
        super().__init__()
        self.products = products
        self.names = list(dict.fromkeys(product.weight for product in products))
        self.weights = nn.ParameterList(
            nn.Parameter(model.tensors[name].float().contiguous(), requires_grad=False) for name in self.names
        )
        self.number = {name: index for index, name in enumerate(self.names)}

    def forward(self, values: Values) -> None:
        """Multiply each weight with its input."""
        for product in self.products:
            inputs = torch.from_numpy(np.ascontiguousarray(values[product.source]))
            product.multiply(inputs, self.weights[self.number[product.weight]])

    @property
    def sources(self) -> list[str]:
        """Names of what a run of the graph has to give."""
        return list(dict.fromkeys(product.source for product in self.products))


def products_of(graph: Any, model: OnnxModel) -> list[GraphProduct]:
    """Return the products of the main graph; outputs of recurrent nodes that have no name get one.

    Args:
        graph: an `onnx.GraphProto`.
        model: the same.
    """
    makers = {name: node for node in graph.node for name in node.output if name}

    def weight(name: str) -> str | None:
        """Return the tensor that a name stands for, which may be cast and turned on the way."""
        for _ in range(len(makers) + 1):
            if name not in makers or makers[name].op_type not in _PASSED_ON:
                break
            name = makers[name].input[0]
        tensor = model.names.get(name)
        return tensor if tensor is not None and model.uses[tensor].weights and model.tensors[tensor].ndim > 1 else None

    return [product for number, node in enumerate(graph.node) for product in _of_node(node, weight, number)]


def _of_node(node: Any, weight: Callable[[str], str | None], number: int) -> Iterator[GraphProduct]:
    names = [weight(name) for name in node.input]
    options = {one.name: one for one in node.attribute}
    if node.op_type in ("MatMul", "Gemm", "FusedMatMul"):
        for index, other in ((1, 0), (0, 1)):
            name = names[index]
            if name is not None and names[other] is None:
                flag = options.get("transB" if other else "transA")
                is_turned = (other == 1) != bool(flag is not None and flag.i)
                yield GraphProduct(name, node.input[other], _turned_product if is_turned else _product)
    elif node.op_type == "Conv" and names[1] is not None:
        yield GraphProduct(names[1], node.input[0], lambda x, w: _convolution(x, w, options))
    elif (
        node.op_type == "ConvTranspose"
        and names[1] is not None
        and _integers(options, "group", [1]) == [1]
        and math.prod(_integers(options, "strides", [1])) <= _MOST_SPREAD
    ):
        yield GraphProduct(names[1], node.input[0], lambda x, w: _transposed_convolution(x, w, options))
    elif node.op_type == "Gather" and names[0] is not None and not (options.get("axis") and options["axis"].i):
        yield GraphProduct(names[0], node.input[1], lambda ids, w: F.embedding(ids.long() % len(w), w))
    elif node.op_type in ("LSTM", "GRU", "RNN"):
        if names[1] is not None:
            yield GraphProduct(names[1], node.input[0], _product)
        if names[2] is not None:
            if not node.output or not node.output[0]:
                rest = list(node.output)[1:]
                del node.output[:]
                node.output.extend([f"birdie/states/{number}", *rest])
            yield GraphProduct(names[2], node.output[0], _product)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.float(), weight) if x.shape[-1] == weight.shape[-1] else x


def _turned_product(x: Tensor, weight: Tensor) -> Tensor:
    return _product(x.mT if x.ndim > 1 else x, weight)


def _convolution(x: Tensor, weight: Tensor, options: Mapping[str, Any]) -> Tensor:
    dims = weight.ndim - 2
    if not 0 < dims <= len(_CONVOLUTIONS):
        return x
    stride, dilation = _integers(options, "strides", [1] * dims), _integers(options, "dilations", [1] * dims)
    totals = [
        max((-(-size // step) - 1) * step + reach - size, 0)
        for size, step, reach in zip(x.shape[2:], stride, _reaches(weight, dilation), strict=True)
    ]
    low, high = _pads(options, totals)
    (groups,) = _integers(options, "group", [1])
    return _CONVOLUTIONS[dims - 1](_padded(x.float(), low, high), weight, None, stride, 0, dilation, groups)


def _transposed_convolution(x: Tensor, weight: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return it as the convolution of inputs with zeros between them, both read from their ends."""
    dims = weight.ndim - 2
    if not 0 < dims <= len(_CONVOLUTIONS):
        return x
    stride, dilation = _integers(options, "strides", [1] * dims), _integers(options, "dilations", [1] * dims)
    spread = x.new_zeros(*x.shape[:2], *((size - 1) * step + 1 for size, step in zip(x.shape[2:], stride, strict=True)))
    taken = slice(None), slice(None), *(slice(None, None, step) for step in stride)
    spread[taken] = x
    reaches = _reaches(weight, dilation)
    low, high = _pads(options, [max(reach - step, 0) for reach, step in zip(reaches, stride, strict=True)])
    low = [reach - 1 - side for reach, side in zip(reaches, low, strict=True)]
    more = _integers(options, "output_padding", [0] * dims)
    high = [reach - 1 - side + extra for reach, side, extra in zip(reaches, high, more, strict=True)]
    axes = [*range(2, 2 + dims)]
    backwards = _padded(spread.float(), low, high).flip(axes)
    return _CONVOLUTIONS[dims - 1](backwards, weight, None, 1, 0, dilation).flip(axes)


def _integers(options: Mapping[str, Any], name: str, default: list[int]) -> list[int]:
    if name not in options:
        return default
    return list(options[name].ints) or [options[name].i]


def _reaches(weight: Tensor, dilation: list[int]) -> list[int]:
    return [(size - 1) * step + 1 for size, step in zip(weight.shape[2:], dilation, strict=True)]


def _pads(options: Mapping[str, Any], totals: list[int]) -> tuple[list[int], list[int]]:
    """Return the padding before and after each axis; `totals` are those of `auto_pad`."""
    dims = len(totals)
    automatic = options["auto_pad"].s if "auto_pad" in options else b"NOTSET"
    if not automatic.startswith(b"SAME"):
        pads = _integers(options, "pads", [0] * 2 * dims)
        return pads[:dims], pads[dims:]
    low = [total // 2 if automatic == b"SAME_UPPER" else total - total // 2 for total in totals]
    return low, [total - one for total, one in zip(totals, low, strict=True)]


def _padded(x: Tensor, low: list[int], high: list[int]) -> Tensor:
    return F.pad(x, [side for pair in reversed([*zip(low, high, strict=True)]) for side in pair])
