"""Uses of weights that no recorded product explains: found in the graph of the loss, whatever functions it has.

    loss ──graph──► recorded product ──► its input ──► …        (its weight is known)
      └───graph──► any other function ──► … ──► weight          ──► gradient of the weight

`x @ W`, `einsum`, products of experts, transposed convolutions, recurrent layers, weights behind parametrizations,
slices, gains and masks: all of them end at the weight itself, and so does its gradient D, (rows, columns). As the
gradients at the logits have random signs, Σ D Dᵀ and Σ Dᵀ D over batches have the means of the two Kronecker factors of
the Fisher information up to a factor (Shampoo: Gupta, Koren & Singer 2018, arXiv 1802.09568). They need more batches
than inputs and gradients of each use, which `birdie.compress.calibration.sensitivity` takes where it can.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge


def node_of(tensor: Tensor) -> Node | None:
    """Return the node of the graph at which gradients of a tensor arrive; None if there are none."""
    return get_gradient_edge(tensor).node if tensor.requires_grad else None


def reached_weights(
    loss: Tensor, products: Mapping[Node, Node | None], name_of: Callable[[Tensor], str | None]
) -> dict[str, Tensor]:
    """Return the weights by name that the loss reaches on another way than as the weight of a recorded product.

    Args:
        products: node of the output of each recorded product → node of its input.
        name_of: weight → name, or None.
    """
    reached: dict[str, Tensor] = {}
    waiting: list[Any] = [node_of(loss)]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in products:
            waiting.append(products[node])
            continue
        weight = getattr(node, "variable", None)
        if isinstance(weight, Tensor) and (name := name_of(weight)) is not None:
            reached[name] = weight
        waiting.extend(following for following, _ in node.next_functions)
    return reached


def earliest(products: Mapping[Node, Node | None]) -> set[Node]:
    """Return the products whose input depends on no other one; arguments as of `reached_weights`."""
    depends: dict[Any, bool] = {None: False} | dict.fromkeys(products, True)
    for start in products.values():
        waiting: list[Any] = [start]
        while waiting:
            node = waiting[-1]
            if node in depends:
                waiting.pop()
                continue
            following = [one for one, _ in node.next_functions]
            unknown = [one for one in following if one not in depends]
            if unknown:
                waiting.extend(unknown)
            else:
                depends[node] = any(depends[one] for one in following)
    return {node for node, start in products.items() if not depends[start]}
