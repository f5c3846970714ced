"""The graph of an ONNX file: its tensors with the positions of their bytes, and its nodes, without the onnx package.

    bytes ──protobuf──► ModelProto ─► graph, subgraphs, functions ─► nodes: operators, names in and out
                                                                   └► tensors: name, shape, where their bytes lie

The onnx package reads a model into objects and writes others bytes for it; positions are what lets a file come back as
it was. Numbers of fields and of kinds of elements are those of onnx.proto. Graphs within graphs are walked with a list
of what is left to do, not by calls, so that no file is too deep.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod

import torch

from birdie.checkpoints.protobuf import Field, fields, integers, text

DTYPES: dict[int, torch.dtype] = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16, 6: torch.int32, 7: torch.int64,
    9: torch.uint8, 10: torch.float16, 11: torch.float64, 12: torch.uint32, 13: torch.uint64, 14: torch.complex64,
    15: torch.complex128, 16: torch.bfloat16, 17: torch.float8_e4m3fn, 18: torch.float8_e4m3fnuz,
    19: torch.float8_e5m2, 20: torch.float8_e5m2fnuz, 24: torch.float8_e8m0fnu,
}  # fmt: skip
"""Kinds of elements; a boolean of a file may be another byte than 0 and 1."""
PACKED = {21: 2, 22: 2, 23: 2, 25: 4, 26: 4}
"""Kinds of elements of which a byte has several: how many."""
_MOST_FIELDS = 1 << 24  # of a file; each takes about a microsecond
_MOST_ELEMENTS = 1 << 48

# numbers of fields
_IR, _PRODUCER, _PRODUCER_VERSION, _GRAPH, _OPSET, _TRAINING, _FUNCTION = 1, 2, 3, 7, 8, 20, 25  # ModelProto
_NODE, _INITIALIZER, _INPUT, _OUTPUT, _SPARSE = 1, 5, 11, 12, 15  # GraphProto
_NODE_INPUT, _NODE_OUTPUT, _OPERATOR, _ATTRIBUTE, _DOMAIN = 1, 2, 4, 5, 7  # NodeProto
_ATTRIBUTE_NAME, _ATTRIBUTE_INTEGER, _ATTRIBUTE_INTEGERS = 1, 3, 8  # AttributeProto
_ATTRIBUTE_TENSORS, _ATTRIBUTE_GRAPHS, _ATTRIBUTE_SPARSE = (5, 10), (6, 11), (22, 23)
_DIMS, _KIND, _FLOATS, _NAME, _RAW, _DOUBLES, _EXTERNAL, _LOCATION = 1, 2, 4, 8, 9, 10, 13, 14  # TensorProto
_FUNCTION_NAME, _FUNCTION_INPUT, _FUNCTION_NODE, _FUNCTION_DOMAIN = 1, 4, 7, 10  # FunctionProto


@dataclass(slots=True)
class OnnxTensor:
    """A tensor in an ONNX file.

    Attributes:
        scope: 0 in the graph and its subgraphs, where names are unique; another number in each function.
        name: of an initializer; of the attribute of a node, the node's first output.
        shape: of the tensor.
        kind: number of its kind of elements.
        start, end: of its bytes in the model's file, if it has them in one run there.
        external: location, offset, length of its bytes in another file.
    """

    scope: int
    name: str = ""
    shape: tuple[int, ...] = ()
    kind: int = 0
    start: int = 0
    end: int = 0
    external: dict[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int | None:
        """Bytes of its elements; None for texts and kinds that are not known, or if there are too many."""
        count = prod(self.shape)
        if any(size < 0 for size in self.shape) or count > _MOST_ELEMENTS:
            return None
        if self.kind in PACKED:
            return -(-count // PACKED[self.kind])
        return count * DTYPES[self.kind].itemsize if self.kind in DTYPES else None


@dataclass(slots=True)
class OnnxNode:
    """A node of a graph or a function.

    Attributes:
        scope: as of a tensor.
        operator, domain: what it computes; a domain is "" for the operators of ONNX.
        inputs, outputs: names; "" for those that are left out.
        integers: name of an attribute → its integers.
    """

    scope: int
    operator: str = ""
    domain: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    integers: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class OnnxGraph:
    """Nodes and tensors of an ONNX file.

    Attributes:
        tensors, nodes: of the graph, its subgraphs, and functions, in no order.
        functions: (domain, name) → scope and names of the inputs.
        inputs, outputs: names of the main graph.
        opsets: domain → version of its operators.
        ir_version: version of the format.
        producer: program that wrote the file, and its version.
    """

    tensors: list[OnnxTensor] = field(default_factory=list)
    nodes: list[OnnxNode] = field(default_factory=list)
    functions: dict[tuple[str, str], tuple[int, list[str]]] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    opsets: dict[str, int] = field(default_factory=dict)
    ir_version: int = 0
    producer: str = ""


def read_graph(data: memoryview) -> OnnxGraph:
    """Return the graph of an ONNX file.

    Raises:
        ValueError: the bytes are no such file, or have too many fields.
    """
    return _GraphReader(data).read()


class _GraphReader:
    def __init__(self, data: memoryview) -> None:
        self.data, self.graph, self.left = data, OnnxGraph(), _MOST_FIELDS
        self.graphs: list[tuple[int, Field]] = []  # subgraphs to read: scope and range

    def read(self) -> OnnxGraph:
        has_graph, producer = False, ["", ""]
        for one in self._fields(Field(0, None, 0, len(self.data))):
            if one.number == _IR and one.value is not None:
                self.graph.ir_version = one.value
            elif one.number in (_PRODUCER, _PRODUCER_VERSION):
                producer[one.number - _PRODUCER] = text(self.data, one)
            elif one.number == _GRAPH:
                has_graph = True
                self._graph(0, one, is_main=True)
            elif one.number == _OPSET:
                self._opset(one)
            elif one.number == _TRAINING:
                self.graphs += [(0, inner) for inner in self._fields(one) if inner.number in (1, 2)]
            elif one.number == _FUNCTION:
                self._function(one)
        if not has_graph:
            raise ValueError("it has no graph")
        self.graph.producer = " ".join(filter(None, producer))
        while self.graphs:
            self._graph(*self.graphs.pop())
        return self.graph

    def _fields(self, message: Field) -> Iterator[Field]:
        if message.value is not None:
            raise ValueError(f"a number stands at byte {message.start:,} in place of a message")
        for one in fields(self.data, message.start, message.end):
            self.left -= 1
            if self.left < 0:
                raise ValueError(f"it has more than {_MOST_FIELDS:,} fields")
            yield one

    def _opset(self, message: Field) -> None:
        domain, version = "", 0
        for one in self._fields(message):
            domain = text(self.data, one) if one.number == 1 else domain
            version = one.value or 0 if one.number == 2 else version
        self.graph.opsets[domain] = version

    def _graph(self, scope: int, message: Field, *, is_main: bool = False) -> None:
        for one in self._fields(message):
            if one.number == _NODE:
                self._node(scope, one)
            elif one.number == _INITIALIZER:
                self._tensor(scope, one)
            elif one.number == _SPARSE:
                self._sparse(scope, one)
            elif is_main and one.number in (_INPUT, _OUTPUT):
                names = self.graph.inputs if one.number == _INPUT else self.graph.outputs
                names += [text(self.data, inner) for inner in self._fields(one) if inner.number == 1]

    def _function(self, message: Field) -> None:
        scope, name, domain = 1 + len(self.graph.functions), "", ""
        inputs: list[str] = []
        nodes: list[Field] = []
        for one in self._fields(message):
            if one.number == _FUNCTION_NAME:
                name = text(self.data, one)
            elif one.number == _FUNCTION_DOMAIN:
                domain = text(self.data, one)
            elif one.number == _FUNCTION_INPUT:
                inputs.append(text(self.data, one))
            elif one.number == _FUNCTION_NODE:
                nodes.append(one)
        self.graph.functions[domain, name] = scope, inputs
        for node in nodes:
            self._node(scope, node)

    def _node(self, scope: int, message: Field) -> None:
        node, attributes = OnnxNode(scope), []
        for one in self._fields(message):
            if one.number == _OPERATOR:
                node.operator = text(self.data, one)
            elif one.number == _DOMAIN:
                node.domain = text(self.data, one)
            elif one.number in (_NODE_INPUT, _NODE_OUTPUT):
                (node.inputs if one.number == _NODE_INPUT else node.outputs).append(text(self.data, one))
            elif one.number == _ATTRIBUTE:
                attributes.append(one)
        self.graph.nodes.append(node)
        for one in attributes:
            self._attribute(node, one)

    def _attribute(self, node: OnnxNode, message: Field) -> None:
        name, numbers = "", list[int]()
        for one in self._fields(message):
            if one.number == _ATTRIBUTE_NAME:
                name = text(self.data, one)
            elif one.number in (_ATTRIBUTE_INTEGER, _ATTRIBUTE_INTEGERS):
                numbers += integers(self.data, one)
            elif one.number in _ATTRIBUTE_TENSORS:
                self._tensor(node.scope, one, node)
            elif one.number in _ATTRIBUTE_SPARSE:
                self._sparse(node.scope, one, node)
            elif one.number in _ATTRIBUTE_GRAPHS:
                self.graphs.append((node.scope, one))
        if numbers:
            node.integers[name] = numbers

    def _sparse(self, scope: int, message: Field, node: OnnxNode | None = None) -> None:
        """Read the values and indices of a sparse tensor; the values have its name."""
        first = len(self.graph.tensors)
        for one in self._fields(message):
            if one.number in (1, 2):
                self._tensor(scope, one, node)
        for part in self.graph.tensors[first + 1 :]:
            part.name = part.name or f"{self.graph.tensors[first].name}.indices"

    def _tensor(self, scope: int, message: Field, node: OnnxNode | None = None) -> None:
        tensor, shape, is_external = OnnxTensor(scope), list[int](), False
        for one in self._fields(message):
            if one.number == _DIMS:
                shape += integers(self.data, one)
            elif one.number == _KIND and one.value is not None:
                tensor.kind = one.value
            elif one.number == _NAME:
                tensor.name = text(self.data, one)
            elif one.number in (_FLOATS, _RAW, _DOUBLES) and one.value is None:
                tensor.start, tensor.end = one.start, one.end
            elif one.number == _EXTERNAL:
                entry = {part.number: text(self.data, part) for part in self._fields(one)}
                tensor.external[entry.get(1, "")] = entry.get(2, "")
            elif one.number == _LOCATION:
                is_external = one.value == 1
        tensor.shape = tuple(shape)
        tensor.external = tensor.external if is_external else {}
        if node is not None and node.outputs and node.outputs[0]:
            tensor.name = node.outputs[0]
        self.graph.tensors.append(tensor)


def shown(graph: OnnxGraph) -> str:
    """Return the facts of a graph in one line: versions, program, nodes, inputs and outputs."""
    opset = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in sorted(graph.opsets.items()))
    program = f", by {graph.producer}" if graph.producer else ""
    names = f"{_listed(graph.inputs)} → {_listed(graph.outputs)}"
    return f"ONNX, IR {graph.ir_version}, opset {opset}{program}: {len(graph.nodes):,} nodes, {names}"


def _listed(names: Iterable[str], most: int = 4) -> str:
    names = [*names]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
