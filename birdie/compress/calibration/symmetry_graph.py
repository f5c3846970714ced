"""Symmetries found in the graph of a module: Linear → activation → Linear, convolutions, batch norms, sums of both.

Every feature axis of every intermediate tensor belongs to a group of axes that must be permuted alike. A layer that
mixes features opens a group with its rows (it produces it) and consumes one with its columns; an operation that works
feature by feature joins the groups of its inputs; every other use of a tensor, by the caller too, freezes its group. A
group that is not frozen, with a layer that produces it and one that consumes it, is a symmetry.

A group is frozen in every doubtful case: a weight used twice or tied, a layer with hooks or a parametrization, a
subclass with another forward, an unknown shape. The axis that BatchNorm1d normalizes depends on the shape of its input,
as does the result of flattening, so both freeze; declare such symmetries yourself.
"""

import copy
import operator
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from birdie.compress.calibration.symmetry_units import Symmetry
from birdie.compress.state import without_ties
from birdie.errors import ConfigError

_CONVOLUTIONS: dict[type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
_BATCH_NORMS: dict[type[nn.Module], int] = {nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}
_POOLS: dict[Any, int] = {
    nn.MaxPool1d: 1, nn.AvgPool1d: 1, nn.AdaptiveAvgPool1d: 1, F.avg_pool1d: 1, F.adaptive_avg_pool1d: 1,
    nn.MaxPool2d: 2, nn.AvgPool2d: 2, nn.AdaptiveAvgPool2d: 2, F.avg_pool2d: 2, F.adaptive_avg_pool2d: 2,
    nn.MaxPool3d: 3, nn.AvgPool3d: 3, nn.AdaptiveAvgPool3d: 3, F.avg_pool3d: 3, F.max_pool2d: 2,
}  # fmt: skip
_ACTIVATIONS: set[type[nn.Module]] = {
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Dropout,
}  # fmt: skip
_ELEMENTWISE: set[Any] = {
    F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.mish, F.softplus, F.softsign, F.hardtanh,
    F.hardswish, F.hardsigmoid, F.logsigmoid, F.dropout, F.tanh, F.sigmoid, torch.relu, torch.tanh, torch.sigmoid,
    torch.square, torch.abs, torch.exp, torch.neg, torch.pow, torch.clamp, torch.add, torch.sub, torch.mul, torch.div,
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow, operator.iadd,
    operator.imul,
}  # fmt: skip
_METHODS = {
    "relu", "tanh", "sigmoid", "square", "abs", "exp", "neg", "pow", "clamp", "add", "sub", "mul", "div", "to", "float",
    "half", "bfloat16", "double", "contiguous", "detach", "clone", "relu_", "add_", "mul_",
}  # fmt: skip
_FACTS = {"shape", "dtype", "device", "ndim"}  # attributes that do not depend on the order of the features
_FACT_METHODS = {"size", "dim", "numel", "ndimension", "is_floating_point"}


@dataclass(eq=False, slots=True)
class _Group:
    """Feature axes that must be permuted alike.

    Attributes:
        units: entries of each axis.
        axis: index of the feature axis in activations, counted from the end.
        members: (tensor name, axis, block size) of all weights that the permutation affects.
        produced, consumed: whether some layer has the group as its rows, as its columns.
        frozen: whether the group must keep its order.
        joined: the group that this one was merged into.
    """

    units: int
    axis: int
    members: list[tuple[str, int, int]] = field(default_factory=list)
    produced: bool = False
    consumed: bool = False
    frozen: bool = False
    joined: "_Group | None" = None

    def root(self) -> "_Group":
        """Return the group that this one was merged into, or itself."""
        group = self
        while group.joined is not None:
            group = group.joined
        return group


def symmetries_of(module: nn.Module) -> tuple[Symmetry, ...]:
    """Return the symmetries that a module or its parts declare by a method `symmetries()`, else those of its graph."""
    declared: dict[str, tuple[Symmetry, ...]] = {}
    for name, part in module.named_modules():
        inside = any(name.startswith(f"{outer}.") or not outer for outer in declared)
        if not inside and callable(getattr(part, "symmetries", None)):
            declared[name] = tuple(part.symmetries())
    if not declared:
        try:
            return find_symmetries(module)
        except ConfigError:
            return ()
    return tuple(
        tuple((f"{name}.{member[0]}" if name else member[0], *member[1:]) for member in symmetry)
        for name, symmetries in declared.items()
        for symmetry in symmetries
    )


def find_symmetries(module: nn.Module) -> tuple[Symmetry, ...]:
    """Return the permutations of units that leave `module.forward` unchanged, in training and in evaluation mode.

    The symmetries have no powers: they are about order alone. Access to weights outside of `forward` is not detected.
    """
    both = [_Analysis(module, _traced(module, training)).symmetries() for training in (False, True)]
    return tuple(symmetry for symmetry in both[0] if symmetry in both[1])


def _traced(module: nn.Module, training: bool) -> fx.GraphModule:
    """Return the graph, traced on a copy that shares the tensors: a forward may store attributes in its module."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}
    try:
        if any("forward" in vars(part) for part in module.modules()):
            raise TypeError("a forward is replaced on the instance")  # the tracer would call that of the class
        twin = copy.deepcopy(module, memo).train(training)
        return fx.GraphModule(twin, fx.Tracer().trace(twin))
    except Exception as error:  # whatever the foreign code raises
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"the graph of {type(module).__name__} cannot be traced ({reason}); declare its symmetries as tuples"
        ) from error


class _Analysis:
    """Analysis of a graph in the order of execution."""

    def __init__(self, module: nn.Module, graph: fx.GraphModule) -> None:
        self.graph = graph
        self.modules = dict(graph.named_modules(remove_duplicate=False))
        state = {
            name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)
        }
        owners, ties = without_ties({name: tensor for name, tensor in state.items() if not is_lazy(tensor)})
        memory = Counter(tensor.untyped_storage().data_ptr() for tensor in owners.values())
        self.alone = {
            name: tensor
            for name, tensor in owners.items()
            if memory[tensor.untyped_storage().data_ptr()] == 1 and name not in ties.values()
        }
        self.uses = Counter(str(node.target) for node in graph.graph.nodes if node.op in ("call_module", "get_attr"))
        self.groups: list[_Group] = []
        self.of: dict[fx.Node, _Group] = {}
        self.facts: set[fx.Node] = set()

    def symmetries(self) -> tuple[Symmetry, ...]:
        """Return one symmetry for each group that is not frozen, in the order of execution."""
        for node in self.graph.graph.nodes:
            if not self._handled(node):
                self._freeze(node.all_input_nodes)
        roots = dict.fromkeys(group.root() for group in self.groups)
        return tuple(
            tuple(group.members)
            for group in roots
            if group.produced and group.consumed and not group.frozen and group.units > 1
        )

    def _handled(self, node: fx.Node) -> bool:
        """Return whether the effect of `node` on features is known; if so, record its group."""
        if node.op in ("placeholder", "get_attr"):
            return True  # a tensor without a group freezes the groups it is combined with
        if node.op == "call_module":
            return self._layer(node)
        if node.op == "call_function":
            if node.target is getattr:
                return self._known_fact(node, node.args[1] in _FACTS)
            if node.all_input_nodes and all(source in self.facts for source in node.all_input_nodes):
                return self._known_fact(node, True)  # arithmetic on sizes
            if node.target is F.linear:
                return self._functional_linear(node)
            if node.target in _POOLS:
                return self._pool(node, _POOLS[node.target])
            return node.target in _ELEMENTWISE and self._elementwise(node)
        if node.op == "call_method":
            if node.target in _FACT_METHODS:
                return self._known_fact(node, True)
            return node.target in _METHODS and self._elementwise(node)
        return False  # the output: the caller depends on the order

    def _known_fact(self, node: fx.Node, known: bool) -> bool:
        if known:
            self.facts.add(node)
        return known

    def _layer(self, node: fx.Node) -> bool:
        name, layer = str(node.target), self.modules[str(node.target)]
        kind = type(layer)
        if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node) or _hooked(layer):
            return False
        if kind in _ACTIVATIONS:
            return self._elementwise(node)
        if kind in _POOLS:
            return not getattr(layer, "return_indices", False) and self._pool(node, _POOLS[kind])
        plain = self.uses[name] == 1 and not any(
            self.uses[f"{name}.{tensor_name}"] for tensor_name in _tensor_names(layer)
        )
        if not plain:
            return False
        if isinstance(layer, nn.Linear) and kind is nn.Linear:
            return self._mixing(
                node, node.args[0], -1, f"{name}.weight", f"{name}.bias" if layer.bias is not None else None
            )
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and kind in _CONVOLUTIONS and layer.groups == 1:
            bias = f"{name}.bias" if layer.bias is not None else None
            return self._mixing(node, node.args[0], -1 - _CONVOLUTIONS[kind], f"{name}.weight", bias)
        if kind in _BATCH_NORMS:
            return self._batch_norm(node, layer, -1 - _BATCH_NORMS[kind])
        return False

    def _functional_linear(self, node: fx.Node) -> bool:
        """Handle F.linear on weights of a module that casts them first."""
        arguments = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
        source, weight, bias = arguments["input"], self._parameter(arguments["weight"]), arguments.get("bias")
        known = weight is not None and (bias is None or self._parameter(bias) is not None)
        if not isinstance(source, fx.Node) or not known:
            return False
        names = [name for name in (weight, self._parameter(bias)) if name is not None]
        if any(self.uses[name] != 1 or self.uses[name.rpartition(".")[0]] for name in names):
            return False
        return self._mixing(node, source, -1, *names)

    def _parameter(self, value: Any) -> str | None:
        """Return the name of the (possibly cast) parameter `value`; None if it is no parameter or used elsewhere."""
        while isinstance(value, fx.Node) and value.op == "call_method" and value.target in ("to", "float", "type_as"):
            value = value.args[0] if len(value.users) == 1 else None
        return (
            str(value.target)
            if isinstance(value, fx.Node) and value.op == "get_attr" and len(value.users) == 1
            else None
        )

    def _mixing(self, node: fx.Node, source: fx.Node, axis: int, weight: str, bias: str | None = None) -> bool:
        """Handle a layer whose outputs depend on all features: it consumes one group and produces another."""
        names = [weight] if bias is None else [weight, bias]
        if any(name not in self.alone for name in names):
            return False
        rows, columns = self.alone[weight].shape[:2]
        group = self._group(source)
        if group is not None:
            if (group.axis, group.units) == (axis, columns):
                group.members.append((weight, 1, 1))
                group.consumed = True
            else:
                group.frozen = True
        self.of[node] = output = _Group(rows, axis, [(name, 0, 1) for name in names], produced=True)
        self.groups.append(output)
        return True

    def _batch_norm(self, node: fx.Node, layer: nn.Module, axis: int) -> bool:
        """Handle a batch norm: it works feature by feature, and its tensors must be permuted too."""
        source = node.args[0]
        group = self._group(source) if isinstance(source, fx.Node) else None
        tensor_names = [name for name in _tensor_names(layer) if name != "num_batches_tracked"]
        names = [f"{node.target}.{name}" for name in tensor_names if getattr(layer, name) is not None]
        if group is None:
            return True
        if group.axis != axis or group.units != layer.num_features or any(name not in self.alone for name in names):
            return False
        group.members += [(name, 0, 1) for name in names]
        self.of[node] = group
        return True

    def _pool(self, node: fx.Node, dimensions: int) -> bool:
        """Handle pooling: it works on positions, feature by feature."""
        tensors = [source for source in node.all_input_nodes if source not in self.facts]
        group = self._group(tensors[0]) if len(tensors) == 1 else None
        if group is None or group.axis != -1 - dimensions or node.kwargs.get("return_indices"):
            return False
        self.of[node] = group
        return True

    def _elementwise(self, node: fx.Node) -> bool:
        """Join the groups of all inputs; an input without a group may treat features differently, so it freezes."""
        tensors = [source for source in node.all_input_nodes if source not in self.facts]
        groups = [self._group(source) for source in tensors]
        known = [group for group in groups if group is not None]
        if not known:
            return True
        first = known[0]
        if len(known) < len(groups) or any(
            (source.axis, source.units) != (first.axis, first.units) for source in known
        ):
            return False
        for other in known[1:]:
            self._join(first, other.root())
        self.of[node] = first
        return True

    def _join(self, group: _Group, other: _Group) -> None:
        if group is other:
            return
        group.members += other.members
        group.produced |= other.produced
        group.consumed |= other.consumed
        group.frozen |= other.frozen
        other.joined = group

    def _group(self, node: fx.Node) -> _Group | None:
        return self.of[node].root() if node in self.of else None

    def _freeze(self, nodes: list[fx.Node]) -> None:
        for node in nodes:
            group = self._group(node)
            if group is not None:
                group.frozen = True


def _hooked(layer: nn.Module) -> bool:
    return any(getattr(layer, name, None) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"))


def _tensor_names(layer: nn.Module) -> list[str]:
    return [name for name, _ in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))]
