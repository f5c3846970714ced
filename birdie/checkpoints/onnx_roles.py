"""Facts that the graph of an ONNX file tells about its tensors, and a state dict cannot.

    MatMul(x, W), Gemm, ConvTranspose ──► which axis of W is that of the outputs: rows of a .birdie file are outputs
    QuantizeLinear, BatchNormalization, Resize, … ──► scales, statistics and sizes, which keep every bit
    Gather ──► tables that are looked up          everything else ──► what the content tells (birdie.compress.exact)

A tensor is followed through nodes that only pass it on (Identity, Cast, Transpose, …) and into functions, to the nodes
that compute with it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from birdie.checkpoints.onnx_graph import OnnxGraph, OnnxNode
from birdie.compress.exact import Roles
from birdie.compress.tensors import REAL_DTYPES
from birdie.errors import WeightsError

AS_IT_LIES, LAST_TWO, FIRST_TWO = "as it lies", "last two", "first two"
"""Axes of a weight that are swapped so that its first one is that of the outputs."""
_PASSED_ON = {  # the first input
    *("Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Dropout"),
    *("QuantizeLinear", "DequantizeLinear"),
}
_MOST_STEPS = 1 << 22  # nodes through which all tensors together are followed
_GATES = ("LSTM", "GRU", "RNN")
_WEIGHTS: dict[str, tuple[int, ...]] = {  # operator → inputs that are weights of a product
    **dict.fromkeys(("Conv", "FusedConv", "ConvTranspose", "DeformConv"), (1,)),
    **dict.fromkeys(("MatMul", "FusedMatMul"), (0, 1)),
    **dict.fromkeys(("Gemm", "FusedGemm"), (0, 1)),
    **dict.fromkeys(_GATES, (1, 2)),
    **dict.fromkeys(("Gather", "EmbedLayerNormalization"), (0,)),
    "Attention": (1,),
    "Einsum": (0, 1),
}
_OF_LAYERS: dict[str, tuple[int, ...]] = {  # operator → inputs that are biases and gains
    **dict.fromkeys(("Conv", "FusedConv", "ConvTranspose", "Gemm", "FusedGemm", "Attention"), (2,)),
    **dict.fromkeys(("BatchNormalization", "InstanceNormalization"), (1, 2)),
    **dict.fromkeys(("LayerNormalization", "GroupNormalization"), (1, 2)),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), (2, 3, 4)),
    **dict.fromkeys(("RMSNormalization", "SimplifiedLayerNormalization", "PRelu", "DeformConv"), (1, 3)),
    **dict.fromkeys(_GATES, (3, 7)),
}
_ELEMENTWISE = {"Add", "Sub", "Mul", "Div"}  # a vector as long as a side of a weight is a bias or a gain there
_ANYTHING = {"Concat", "Sum", "Where", "Expand", "Split", "Slice", "Tile", "Pow", "If", "Loop", "Scan"}
"""Operators that do not tell what a tensor is; its content does."""
_KNOWN_DOMAINS = ("", "ai.onnx", "com.microsoft")


@dataclass(slots=True)
class Uses:
    """Uses of a tensor.

    Attributes:
        weights: (operator, swapped axes) of each product of which it is a weight.
        is_layer: it is a bias or gain.
        is_elementwise: it is added or multiplied, element by element.
        is_exact: it goes to nodes for which it is no weight: a scale, a statistic, a size.
    """

    weights: list[tuple[str, str]] = field(default_factory=list)
    is_layer: bool = False
    is_elementwise: bool = False
    is_exact: bool = False

    @property
    def swapped(self) -> str:
        """The axes that are swapped; a table that is looked up counts only if no product uses it."""
        products = [axes for operator, axes in self.weights if operator != "Gather"]
        return next(iter([*products, AS_IT_LIES]))

    @property
    def is_table(self) -> bool:
        """The tensor is looked up, and no weight of a product."""
        return {operator for operator, _ in self.weights} == {"Gather"}

    @property
    def is_recurrent(self) -> bool:
        """The tensor has a matrix for each direction of a recurrent layer."""
        return any(operator in _GATES for operator, _ in self.weights)


class GraphUses:
    """Uses of the tensors of a graph; `where` names it in errors."""

    def __init__(self, graph: OnnxGraph, where: str) -> None:
        self.where = where
        self.functions, self.left = graph.functions, _MOST_STEPS
        self.users: dict[tuple[int, str], list[tuple[OnnxNode, int]]] = defaultdict(list)
        for node in graph.nodes:
            for index, name in enumerate(node.inputs):
                self.users[node.scope, name].append((node, index))

    def of(self, names: Iterable[tuple[int, str]]) -> Uses:
        """Return the uses of a tensor, by its names in the graph and their scopes.

        Raises:
            WeightsError: tensors go through too many nodes.
        """
        uses = Uses()
        for node, index, is_turned in self._reached(names):
            operator = node.operator
            if operator in _WEIGHTS and index in _WEIGHTS[operator]:
                uses.weights.append((operator, _swapped(node, index, is_turned)))
            elif index in _OF_LAYERS.get(operator, ()):
                uses.is_layer = True
            elif operator in _ELEMENTWISE:
                uses.is_elementwise = True
            elif operator not in _ANYTHING and node.domain in _KNOWN_DOMAINS:
                uses.is_exact = True
        return uses

    def _reached(self, names: Iterable[tuple[int, str]]) -> Iterator[tuple[OnnxNode, int, bool]]:
        """Yield (node, index of the input, whether the last two axes were swapped on the way)."""
        waiting, seen = [(scope, name, False) for scope, name in names], set()
        while waiting:
            scope, name, is_turned = state = waiting.pop()
            if state in seen:
                continue
            seen.add(state)
            self.left -= 1 + len(self.users.get((scope, name), ()))
            if self.left < 0:
                raise WeightsError(
                    f"{self.where} lets its tensors through more than {_MOST_STEPS:,} nodes; do not trust this model"
                )
            for node, index in self.users.get((scope, name), ()):
                inner = self.functions.get((node.domain, node.operator))
                if inner is not None:
                    waiting += [(inner[0], argument, is_turned) for argument in inner[1][index : index + 1]]
                elif index == 0 and node.outputs and node.operator in _PASSED_ON:
                    turned = is_turned != (node.operator == "Transpose" and _turns(node))
                    waiting.append((scope, node.outputs[0], turned))
                else:
                    yield node, index, is_turned


def roles_of(tensors: Mapping[str, Tensor], uses: Mapping[str, Uses]) -> Roles:
    """Return what is known of the tensors of a model.

    Args:
        tensors: of the model, by name.
        uses: of each of them.
    """
    floats = {name: tensor for name, tensor in tensors.items() if tensor.dtype in REAL_DTYPES}
    weights = {name for name in floats if uses[name].weights}
    sides = {size for name in weights for size in tensors[name].shape[:2]}
    plain = {name for name in floats if name not in weights and not uses[name].is_exact}
    layers = {
        name for name in plain if uses[name].is_layer or (uses[name].is_elementwise and floats[name].numel() in sides)
    }
    return Roles(
        buffers=frozenset(name for name in floats if name not in weights and uses[name].is_exact),
        factors=frozenset(plain - layers),
        # A matrix of a product is a weight, even if it is that of a Fourier transform: its errors cost what others do.
        # A vector may be frequencies, and a table that is looked up one of positions.
        trained=frozenset(name for name in weights if _is_matrix(floats[name]) and not uses[name].is_table),
        layers=frozenset(layers),
        embeddings=frozenset(name for name in weights if uses[name].is_table),
    )


def _is_matrix(weight: Tensor) -> bool:
    return sum(size > 1 for size in weight.shape) > 1


def _swapped(node: OnnxNode, index: int, is_turned: bool) -> str:
    """Return the axes of a weight that are swapped so that its first one is that of the outputs."""
    if node.operator == "ConvTranspose":
        return FIRST_TWO
    if node.operator in ("MatMul", "FusedMatMul", "Gemm", "FusedGemm", "Attention"):
        attribute = "transB" if index else "transA"
        is_turned ^= bool(next(iter(node.integers.get(attribute, [0]))))
        return LAST_TWO if is_turned != (index == 1) else AS_IT_LIES
    return AS_IT_LIES


def _turns(node: OnnxNode) -> bool:
    """Return whether a Transpose swaps the last two axes and no others; without an order it reverses all."""
    order = node.integers.get("perm", [1, 0])
    return order == [*range(len(order) - 2), len(order) - 1, len(order) - 2]
